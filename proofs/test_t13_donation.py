"""T13, donation. ``donate=True`` gives the same bits, in the buffers that were given away."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

import purestep as ps
from proofs.strategies import (
    Batch,
    Case,
    Drawn,
    assert_same,
    case_of,
    copied,
    drawn,
    outcome,
    steps,
    weights_of,
)
from proofs.test_t06_purity import storages
from proofs.theorem import System, as_tests, theorem
from purestep import tree

SECOND: list[Any] = [
    lambda part: part,
    lambda part: {**part, "w": torch.zeros_like(part["w"])},
    lambda part: {**part, "y": part["y"] * float("inf")},
]


def with_plain_update_(case: Case) -> ps.optim.Optimizer:
    """The optimizer with an in-place step as others write it."""

    def update_(grads: Any, opt_state: Any, params: Any, applied: Any) -> Any:
        if applied is not None and not applied:
            return params, opt_state
        new = case.optimizer.update(grads, opt_state, params)
        return tree.map(torch.Tensor.copy_, (params, opt_state), new)

    return case.optimizer._replace(update_=update_)


def handing_on(case: Case) -> ps.optim.Optimizer:
    """One whose new state is made of views of the old: they are read before they are written."""

    def update(grads: Any, opt_state: Any, params: Any) -> Any:
        first, second = opt_state
        moved = tree.map(lambda p, older: (p - older).to(p.dtype), params, first)
        newest = tree.map(
            lambda grad, kept: grad.detach().to(kept.dtype), grads, second
        )
        return moved, (tree.map(torch.detach, second), newest)

    def init(params: Any) -> Any:
        wide = tree.map(lambda p: p.to(tree.accumulation_dtype(p.dtype)), params)
        return tree.zeros_like(wide), tree.zeros_like(wide)

    return ps.optim.Optimizer(init=init, update=update)


KINDS: list[Callable[[Case], ps.optim.Optimizer]] = [
    lambda case: case.optimizer,
    lambda case: case.optimizer._replace(update_=None),
    with_plain_update_,
    handing_on,
]
"""The case's optimizer, with another way to update in place, or one of other people's."""


ONE = steps(ranks=[1], axes=["one"])


@theorem("T13", st.tuples(ONE, st.sampled_from(KINDS), st.sampled_from(SECOND)))
def donation(system: System, drawn: tuple[Drawn, Any, Any]) -> None:
    """Three steps, one of them perhaps without tokens or not finite: the same state and metrics."""
    (case, how, (group,)), optimizer_of, change = drawn
    optimizer = optimizer_of(case)
    results = []
    for donate in (False, True):
        settings = {**how.settings, "donate": donate}
        step = system.make_update_step(
            case.loss_fn, optimizer, weight_fn=weights_of, **settings
        )
        state = copied((case.params, optimizer.init(case.params)))
        given = storages(state)
        reported = []
        for one in (group, [change(part) for part in group], group):
            *state, metrics = step(*state, one)
            reported.append(metrics)
        assert (storages(state) == given) is donate, (
            "the buffers do not hold the new state"
        )
        results.append(tree.map(torch.nan_to_num, (tuple(state), reported)))
    assert_same(results[1], results[0])


Overlap = tuple[Case, int, int, str]
SHARING = st.sampled_from(["leaf", "batch"])


@theorem(
    "T13", st.tuples(drawn(case_of), st.integers(1, 12), st.integers(0, 12), SHARING)
)
def overlaps(system: System, drawn: Overlap) -> None:
    """Leaves of one buffer, with each other or with the data: the same bits, or refused."""
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
        step = system.make_update_step(
            loss_fn, optimizer, weight_fn=weights_of, donate=donate
        )
        return step(params, optimizer.init(params), [data])

    expected = tree.map(torch.clone, run(donate=False))
    result, refused = outcome(lambda: run(donate=True))
    if result is None:
        assert "donate=True" in refused
    else:
        assert_same(result, expected)
    assert_same(data, case.batch, "the data")


globals().update(as_tests(globals()))
