"""T13, donation. ``donate=True`` gives the same bits, in the buffers that were donated."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

import purestep as ps
from purestep import tree
from support.purity import storages_in
from support.ranks import stack_if_alike
from support.strategies import (
    Batch,
    Case,
    StepCase,
    assert_same,
    builds,
    copy_state,
    get_weights,
    make_case,
    steps,
    try_call,
)
from support.theorem import System, as_tests, theorem

SECOND_GROUPS: list[Callable[[Batch], Batch]] = [
    lambda part: part,
    lambda part: {**part, "w": torch.zeros_like(part["w"])},
    lambda part: {**part, "y": part["y"] * float("inf")},
]
"""Changes to the microbatches of the second step: none, no tokens, a loss that is not finite."""


def with_plain_update_(case: Case) -> ps.optim.Optimizer:
    """Returns the optimizer with an in-place step as others write it."""

    def update_(grads: Any, opt_state: Any, params: Any, applied: Any) -> Any:
        if applied is not None and not applied:
            return params, opt_state
        new_state = case.optimizer.update(grads, opt_state, params)
        return tree.map(torch.Tensor.copy_, (params, opt_state), new_state)

    return case.optimizer._replace(update_=update_)


def make_delayed_optimizer(case: Case) -> ps.optim.Optimizer:
    """Makes an optimizer that moves params by the gradients of two steps before.

    Its new state holds views of the old one. A step in place must read them before it writes.
    """

    def update(grads: Any, opt_state: Any, params: Any) -> Any:
        older, newer = opt_state
        moved = tree.map(lambda p, grad: (p - grad).to(p.dtype), params, older)
        newest = tree.map(lambda grad, old: grad.detach().to(old.dtype), grads, newer)
        return moved, (tree.map(torch.detach, newer), newest)

    def init(params: Any) -> Any:
        wide = tree.map(lambda p: p.to(tree.accumulation_dtype(p.dtype)), params)
        return tree.zeros_like(wide), tree.zeros_like(wide)

    return ps.optim.Optimizer(init=init, update=update)


OPTIMIZERS: list[Callable[[Case], ps.optim.Optimizer]] = [
    lambda case: case.optimizer,
    lambda case: case.optimizer._replace(update_=None),
    with_plain_update_,
    make_delayed_optimizer,
]
"""The case's optimizer, the same with another way to update in place, and a foreign one."""


ONE_RANK = steps(ranks=[1], axes=["one"])


@theorem(
    "T13",
    st.tuples(
        ONE_RANK,
        st.sampled_from(OPTIMIZERS),
        st.sampled_from(SECOND_GROUPS),
    ),
)
def donation(system: System, drawn: tuple[StepCase, Any, Any]) -> None:
    """Three steps, one of them perhaps without tokens or not finite: the same state and metrics."""
    (case, setup, (group,)), make_optimizer, change = drawn
    optimizer = make_optimizer(case)
    second_group = [change(part) for part in group]
    if setup.stacks:
        group = stack_if_alike(group)
        second_group = stack_if_alike(second_group)

    def train(donate: bool) -> Any:
        step = system.make_update_step(
            case.loss_fn,
            optimizer,
            weight_fn=get_weights,
            **setup.with_settings(donate=donate).settings,
        )
        state = copy_state((case.params, optimizer.init(case.params)))
        storages_before = storages_in(state)
        all_metrics = []
        for microbatches in (group, second_group, group):
            *state, metrics = step(*state, microbatches)
            all_metrics.append(metrics)
        in_place = storages_in(state) == storages_before
        assert in_place is donate, "the buffers do not hold the new state"
        return tree.map(torch.nan_to_num, (state, all_metrics))

    expected = train(donate=False)
    assert_same(train(donate=True), expected)


OverlapCase = tuple[Case, int, int, str]
SHARING = st.sampled_from(["leaf", "batch"])


@theorem(
    "T13", st.tuples(builds(make_case), st.integers(1, 12), st.integers(0, 12), SHARING)
)
def overlaps(system: System, drawn: OverlapCase) -> None:
    """Leaves of one buffer, with each other or with the data: the same bits, or refused."""
    case, length, offset, shares_with = drawn
    device = case.batch["x"].device
    buffer = torch.arange(24.0, dtype=torch.float64, device=device)
    data = {key: value.clone() for key, value in case.batch.items()}
    params = {"a": buffer[:length], "b": buffer[offset : offset + 4]}
    if shares_with == "batch":
        params["a"] = data["x"].view(-1)[offset : offset + 3]
    optimizer = ps.optim.sgd(0.5)

    def loss_fn(params: Any, batch: Batch) -> torch.Tensor:
        total = params["a"].sum() * 2 + params["b"].sum() * 4
        return total * batch["x"].sum(-1) + batch["y"]

    def run(donate: bool) -> Any:
        step = system.make_update_step(
            loss_fn, optimizer, weight_fn=get_weights, donate=donate
        )
        return step(params, optimizer.init(params), [data])

    expected = tree.map(torch.clone, run(donate=False))
    result, message = try_call(lambda: run(donate=True))
    if result is None:
        assert "donate=True" in message
    else:
        assert_same(result, expected)
    assert_same(data, case.batch, "the data")


globals().update(as_tests(globals()))
