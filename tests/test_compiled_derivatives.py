"""Derivatives of compiled steps: what is recorded, what is a constant, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import purestep as ps
from proofs.strategies import assert_same
from purestep import tree
from tests.counted_graphs import GROUPS, PLAIN, assert_close, loss_fn, make, start, weight_fn

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("settings", [{}, {"donate": True}])
@pytest.mark.parametrize("name", ["lion", "chain", "masters"])
def test_a_rate_that_requires_grad(name: str, settings: dict[str, Any]) -> None:
    """What is recorded is not written over, compiled or not: the derivative is right, and the caller's params stay."""
    make_optimizer: dict[str, Any] = {
        "lion": ps.optim.lion,
        "chain": lambda rate: ps.optim.chain(ps.optim.scale_by_adam(), ps.optim.descend(rate)),
        "masters": lambda rate: ps.optim.master_weights(ps.optim.lion(rate)),
    }
    slopes = []
    for compile in (False, partial(torch.compile, backend="eager")):
        rate, params = torch.tensor(0.5, dtype=torch.float64, requires_grad=True), start()
        optimizer = make_optimizer[name](rate)
        new, *_ = make(optimizer, compile=compile, **settings)(
            params, optimizer.init(params), GROUPS[1]
        )
        (new["w"].flatten() @ torch.arange(6).double()).backward()
        assert rate.grad is not None
        slopes.append(rate.grad)
        assert_same(params, start())
    assert slopes[0].abs() > 0
    assert_close(*slopes)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_one_gradient_for_two_leaves(microbatches: int) -> None:
    """A graph may give both of them one tensor; their sums are each its own, and clipped once."""
    optimizer = ps.optim.chain(ps.optim.clip_by_global_norm(0.125), ps.optim.sgd(0.125, 0.5))
    params = {"a": torch.tensor([1.0, 2.0, 3.0]).double(), "b": torch.ones(3).double()}
    group = [{"x": torch.ones(2, 3).double()} for _ in range(microbatches)]
    moved = []
    for compile in (True, False):
        step = ps.make_update_step(
            lambda p, m: (m["x"] @ (p["a"] + p["b"])).square(),
            optimizer,
            weight_fn=lambda m: m["x"][:, 0] > 0,
            compile=compile,
            donate=True,
        )
        own = tree.map(torch.clone, params)
        moved.append(step(own, optimizer.init(own), group)[0])
    assert_close(*moved)


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_compiled_loss_closes_over_is_a_constant(whole: bool) -> None:
    """Nothing is recorded of it, and its ``.grad`` is not written."""
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def scaled(params: Any, m: Any) -> ps.LossTerms:
        losses = loss_fn(params, m) * scale
        return ps.LossTerms(losses, aux={"loss": losses.sum()})

    step = ps.make_update_step(scaled, PLAIN, weight_fn=weight_fn, compile=not whole)
    step = ps.compile(step, backend="eager", fullgraph=True) if whole else step
    new = step(start(), PLAIN.init(start()), GROUPS[1])
    assert not tree.requires_grad(new)
    assert scale.grad is None
    if whole:
        recorded = tree.map(lambda leaf: leaf.requires_grad_(), start())
        assert step(recorded, PLAIN.init(recorded), GROUPS[1])[0]["w"].requires_grad


@pytest.mark.filterwarnings("ignore:compile=True", "ignore:The .grad attribute of a Tensor")
def test_a_derivative_inside_the_loss() -> None:
    """The compiler breaks its graph there, and graphs in pieces would lose the second derivative."""

    def penalised(params: Any, m: Any) -> Tensor:
        x = m["x"].clone().requires_grad_()
        energy = (x @ params["w"]).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        losses: Tensor = loss_fn(params, m) + force.square().mean()
        return losses

    compiler = partial(torch.compile, backend="aot_eager")
    theirs, *ours = (
        ps.make_update_step(penalised, PLAIN, weight_fn=weight_fn, compile=compile)(
            start(), PLAIN.init(start()), GROUPS[1]
        )
        for compile in (False, True, compiler)
    )
    for one in ours:
        assert_same(one[:2], theirs[:2])


def test_a_loss_with_a_checkpoint_runs_eagerly_and_says_so() -> None:
    """No graph holds both, and what the compiler forbade when it failed is allowed again."""

    def checkpointed(params: Any, m: Any) -> Tensor:
        kept: Tensor = checkpoint(loss_fn, params, m, use_reentrant=False)
        return kept

    with pytest.warns(UserWarning, match="make one graph of .*checkpointed"):
        ours, theirs = (
            ps.make_update_step(checkpointed, PLAIN, weight_fn=weight_fn, compile=compile)(
                start(), PLAIN.init(start()), GROUPS[1]
            )
            for compile in (True, False)
        )
    assert_same(ours[:2], theirs[:2])
    w = torch.ones(2, requires_grad=True)
    checkpoint(torch.sin, w, use_reentrant=False).sum().backward()
    assert w.grad is not None


def test_hooks_around_a_compiled_step_are_refused() -> None:
    """One graph of both passes saves nothing that they could see; and they are allowed as before."""
    step = make(PLAIN, compile=True)
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
    compiler = partial(ps.compile, backend="aot_eager")
    optimizer, params = ps.optim.sgd(1.0), {"w": torch.tensor([2.0, -3.0])}
    step = ps.make_update_step(
        lambda p, m: Sign.apply(p["w"]) * m["x"],
        optimizer,
        weight_fn=lambda m: torch.ones_like(m["x"]),
        grad_and_value=reverse,
        compile=False if whole else compiler,
    )
    step = compiler(step) if whole else step
    new, _, metrics = step(params, optimizer.init(params), [{"x": torch.tensor([4.0, 8.0])}])
    assert metrics.loss == -2
    assert new["w"].tolist() == [2 - 6, -3 - 12]


@pytest.mark.filterwarnings(
    "ignore:.*grad attribute of a Tensor that is not a leaf"
)  # so does this
@pytest.mark.filterwarnings("ignore:compile=True")  # its loss runs eagerly
def test_ranks_in_threads_meet_in_what_is_compiled() -> None:
    """Each rank's gradient is its own, from the first step on."""
    axis, optimizer = ps.testing.ThreadAxis(2), ps.optim.sgd(1.0)
    step = ps.make_update_step(
        lambda w, m: (w * m["x"]) / ps.psum((w * m["x"]).exp().sum(), axis),
        optimizer,
        weight_fn=lambda m: torch.ones_like(m["x"]),
        axis=axis,
        compile=True,
    )
    w = torch.tensor(0.25, dtype=torch.float64)

    def moved(rank: int) -> list[Tensor]:
        group = [{"x": torch.arange(1.0, 4.0).double() + rank}]
        return [step(w, optimizer.init(w), group)[0] for _ in range(2)]

    first, second = axis.map(moved)([0, 1])
    assert first == second
    assert first[0] == first[1]
