"""T13, donation. ``donate=True`` gives the same bits, in the buffers that were given away."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

import purestep as ps
from proofs import models
from proofs.strategies import Batch, Case, assert_same, cases, cut, outcome, weights_of
from proofs.test_t06_purity import storages
from proofs.theorem import System, theorem
from purestep import tree
from purestep.testing.strategies import cuts

SETTINGS: list[dict[str, Any]] = [{}, {"normalize": "grads"}, {"on_nonfinite": "skip"}]


@st.composite
def donation_cases(draw: st.DrawFn) -> tuple[Case, list[Batch], dict[str, Any], int]:
    """A case, a cut, settings, and which kind of group comes second."""
    case = draw(cases())
    group = cut(case.batch, draw(cuts(case.rows)))
    return case, group, draw(st.sampled_from(SETTINGS)), draw(st.integers(0, 2))


@theorem("T13", donation_cases())
def donation(system: System, drawn: tuple[Case, list[Batch], dict[str, Any], int]) -> None:
    """Three steps, one of them perhaps without tokens or not finite: the same state and metrics."""
    case, group, settings, kind = drawn
    second = [
        group,
        [{**part, "w": torch.zeros_like(part["w"])} for part in group],
        [{**part, "y": part["y"] * float("inf")} for part in group],
    ][kind]
    for optimizer in (case.optimizer, case.optimizer._replace(update_=None), plain_update_(case)):
        results = []
        for donate in (False, True):
            step = system.make_update_step(
                models.integer_loss, optimizer, weight_fn=weights_of, donate=donate, **settings
            )
            state = tree.map(torch.clone, (case.params, case.opt_state))
            given = storages(state)
            reported = []
            for one in (group, second, group):
                *state, metrics = step(*state, one)
                reported.append(metrics)
            assert (storages(state) == given) is donate, (
                "the buffers that were given away hold the state"
            )
            results.append(tree.map(torch.nan_to_num, (tuple(state), reported)))
        assert_same(results[1], results[0])


@theorem(
    "T13",
    st.tuples(cases(), st.integers(1, 12), st.integers(0, 12), st.sampled_from(["leaf", "batch"])),
)
def overlaps(system: System, drawn: tuple[Case, int, int, str]) -> None:
    """Leaves of one buffer, with each other or with the data: the same bits, or refused; the data stay as they were."""
    case, length, offset, shares = drawn
    pieces = torch.arange(24.0, dtype=torch.float64, device=case.batch["x"].device)
    data = {key: value.clone() for key, value in case.batch.items()}
    flat = data["x"].view(-1)
    own = {"a": pieces[:length], "b": pieces[offset : offset + 4]}
    params = own if shares == "leaf" else {**own, "a": flat[offset : offset + 3]}

    def loss_fn(params: Any, batch: Batch) -> torch.Tensor:
        total = params["a"].sum() * 2 + params["b"].sum() * 4
        return total * batch["x"].sum(-1) + batch["y"]

    optimizer = ps.optim.sgd(0.5)

    def run(donate: bool) -> Any:
        step = system.make_update_step(loss_fn, optimizer, weight_fn=weights_of, donate=donate)
        return step(params, optimizer.init(params), [data])

    expected = tree.map(torch.clone, run(donate=False))
    result, refused = outcome(lambda: run(donate=True))
    if result is None:
        assert "donate=True" in refused
    else:
        assert_same(result, expected)
    assert_same(data, case.batch, "the data")


def plain_update_(case: Case) -> ps.optim.Optimizer:
    """The optimizer with an in-place step as others write it."""

    def update_(grads: Any, opt_state: Any, params: Any, applied: Any) -> Any:
        if applied is not None and not applied:
            return params, opt_state
        new = case.optimizer.update(grads, opt_state, params)
        return tree.map(torch.Tensor.copy_, (params, opt_state), new)

    return case.optimizer._replace(update_=update_)


test_donation = donation.test()
test_overlaps = overlaps.test()
