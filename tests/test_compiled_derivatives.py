"""Derivatives of and in compiled steps: what is recorded, and what memory gradients are in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import purestep as ps
from proofs.strategies import assert_same
from purestep import tree
from tests.counted_graphs import AOT, GROUPS, PLAIN, assert_close, loss_fn, make, start
from tests.squares import x_ones

RATED: dict[str, Any] = {
    "lion": ps.optim.lion,
    "chain": lambda rate: ps.optim.chain(ps.optim.scale_by_adam(), ps.optim.descend(rate)),
    "masters": lambda rate: ps.optim.master_weights(ps.optim.lion(rate)),
}


@pytest.mark.parametrize(("name", "donate"), [*((name, True) for name in RATED), ("lion", False)])
def test_a_rate_that_requires_grad(name: str, donate: bool) -> None:
    """What is recorded is not written over: the derivative is right, and the params stay."""
    slopes = []
    for compile in (False, partial(torch.compile, backend="eager")):
        rate, params = torch.tensor(0.5, dtype=torch.float64, requires_grad=True), start()
        optimizer = RATED[name](rate)
        step = make(optimizer, compile=compile, donate=donate)
        new, *_ = step(params, optimizer.init(params), GROUPS[1])
        slopes += torch.autograd.grad(new["w"].flatten() @ torch.arange(6).double(), rate)
        assert_same(params, start())
    assert slopes[0].abs() > 0
    assert_close(*slopes)


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_compiled_loss_closes_over_is_a_constant(whole: bool) -> None:
    """Nothing is recorded of it, and its ``.grad`` is not written."""
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def scaled(params: Any, m: Any) -> ps.LossTerms:
        losses = loss_fn(params, m) * scale
        return ps.LossTerms(losses, aux={"loss": losses.sum()})

    step = make(PLAIN, scaled, compile=False if whole else AOT)
    step = ps.compile(step, backend="eager", fullgraph=True) if whole else step
    group = GROUPS[0]
    assert not tree.requires_grad(step(start(), PLAIN.init(start()), group))
    assert scale.grad is None
    if whole:
        recorded = tree.map(lambda leaf: leaf.requires_grad_(), start())
        assert step(recorded, PLAIN.init(recorded), group)[0]["w"].requires_grad


def test_hooks_around_a_compiled_step_are_refused() -> None:
    """One graph of both passes saves nothing that they could see; they are allowed as before."""
    step = make(PLAIN, compile=AOT)
    given = start(), PLAIN.init(start()), GROUPS[1]
    with torch.autograd.graph.save_on_cpu():
        with pytest.raises(RuntimeError, match="compile=True takes no saved_tensors_hooks"):
            step(*given)
        make(PLAIN)(*given)
    assert_close(step(*given)[:2], make(PLAIN)(*given)[:2])


class Sign(torch.autograd.Function):
    """A straight-through estimator, whose own derivative would be zero."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sign()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return 3 * grad


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # what torch's compiler does
@pytest.mark.parametrize("reverse", [ps.grad_and_value, torch.func.grad_and_value])
@pytest.mark.parametrize("whole", [False, True])
def test_a_function_of_a_leaf_itself_has_its_own_backward(whole: bool, reverse: Any) -> None:
    sgd, params = ps.optim.sgd(1.0), {"w": torch.tensor([2.0, -3.0])}
    step = ps.make_update_step(
        lambda p, m: Sign.apply(p["w"]) * m["x"],
        sgd,
        weight_fn=x_ones,
        grad_and_value=reverse,
        compile=False if whole else AOT,
    )
    step = AOT(step) if whole else step
    new, _, metrics = step(params, sgd.init(params), [{"x": torch.tensor([4.0, 8.0])}])
    assert metrics.loss == -2
    assert new["w"].tolist() == [2 - 6, -3 - 12]


@pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf")  # so does it
@pytest.mark.filterwarnings("ignore:compile=True")  # its loss runs eagerly
def test_ranks_in_threads_meet_in_a_compiled_loss() -> None:
    """Each rank's gradient is its own, from the first step on."""
    axis, sgd = ps.testing.ThreadAxis(2), ps.optim.sgd(1.0)
    step = ps.make_update_step(
        lambda w, m: (w * m["x"]) / ps.psum((w * m["x"]).exp().sum(), axis),
        sgd,
        weight_fn=x_ones,
        axis=axis,
        compile=True,
    )
    w = torch.tensor(0.25, dtype=torch.float64)

    def moved(rank: int) -> list[Tensor]:
        group = [{"x": torch.arange(1.0, 4.0).double() + rank}]
        return [step(w, sgd.init(w), group)[0] for _ in range(2)]

    first, second = axis.map(moved)([0, 1])
    assert first == second
    assert first[0] == first[1]


Loss = Callable[[list[Tensor], dict[str, Tensor]], Tensor]
SHARED: dict[str, Loss] = {
    "one tensor for both": lambda p, m: (p[0] + p[1]) @ torch.ones(2) * m["x"],
    "views of one tensor": lambda p, m: torch.stack(p).sum(0) @ torch.ones(2) * m["x"],
    "one number for all elements": lambda p, m: (p[0].sum() - p[1].sum()) * m["x"],
    "one number for all elements of both": lambda p, m: torch.stack(p).sum() * m["x"],
    "the microbatch": lambda p, m: torch.dot(p[0], m["x"])[None] + p[1].sum() * m["x"],
}
"""Of two leaves with two elements, what their gradients may share, or be a view of."""


@pytest.mark.parametrize("shared", SHARED)
def test_gradients_that_share_memory_are_sums_of_their_own(shared: str) -> None:
    """Every sum has its memory, each element its place, and clipping scales each once."""
    optimizer = ps.optim.chain(ps.optim.clip_by_global_norm(0.125), ps.optim.sgd(1.0, momentum=0.5))
    group = [{"x": torch.arange(1.0, 3.0) * 2**m} for m in range(3)]
    before = tree.map(torch.clone, group)
    found: list[Any] = []
    for how in ({}, {"compile": AOT, "donate": True}):
        step = ps.make_update_step(SHARED[shared], optimizer, weight_fn=x_ones, **how)
        params = [torch.zeros(2), torch.zeros(2)]
        state: Any = params, optimizer.init(params)
        for number in (1, 3):
            state = step(*state, group[:number])[:2]
        found.append(state)
    assert_same(*found)
    assert_same(group, before)


def test_sparse_gradients_arrive_dense_with_a_warning() -> None:
    """No graph holds an operation that makes such gradients."""

    def loss(p: dict[str, Tensor], m: dict[str, Tensor]) -> Tensor:
        rows = functional.embedding(m["x"], p["table"], sparse=True).sum(-1)
        bag = functional.embedding_bag(m["x"][:, None], p["bag"], sparse=True).sum(-1)
        return rows * p["w"] + bag

    sgd = ps.optim.sgd(1.0)
    params = {"table": torch.ones(4, 2), "bag": torch.ones(4, 2), "w": torch.tensor(2.0)}
    group = [{"x": torch.tensor([1, 1])}, {"x": torch.tensor([3, 0])}]
    with pytest.warns(UserWarning, match="make one graph of .*loss"):
        ours, theirs = (
            ps.make_update_step(loss, sgd, weight_fn=x_ones, compile=compile)(
                params, sgd.init(params), group
            )[0]
            for compile in (True, False)
        )
    assert_same(ours, theirs)


def test_the_first_update_calls_the_loss_once_eagerly() -> None:
    """Not once for each microbatch, and never again."""
    calls: list[int] = []

    def loss(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        if not torch.compiler.is_compiling():
            calls.append(1)
        return w * m["x"]

    sgd, w = ps.optim.sgd(1.0), torch.ones(2)
    step = ps.make_update_step(loss, sgd, weight_fn=x_ones, compile=AOT)
    for _ in range(2):
        step(w, sgd.init(w), [{"x": torch.ones(2)}] * 3)
    assert calls == [1]
