"""``remat`` inside of steps: where ranks meet in a block, and where all of it is compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.strategies import assert_same
from purestep import tree
from tests.blocks import PARAMS, Function, block, integers

SGD = ps.optim.sgd(0.5)


def group(rank: int) -> list[dict[str, Tensor]]:
    """Two microbatches."""
    return [{"x": integers(4, 3, seed=10 * rank + m)} for m in range(2)]


def step(block: Function, **how: Any) -> Any:
    """Two blocks."""

    def loss_fn(params: Any, m: Any) -> Tensor:
        return block(params[1], block(params[0], m["x"])).sum(-1)

    return ps.make_update_step(
        loss_fn, SGD, weight_fn=lambda m: torch.ones(len(m["x"])).double(), **how
    )


def meeting(axis: Any, p: Any, x: Tensor) -> Tensor:
    """Collectives in a block, and another number on each rank."""
    y = x @ ps.pvary(p["w"], axis) + ps.pvary(p["b"], axis)
    total = ps.psum(y.sum(0), axis)
    return y * total - x * (1 + axis.index) - ps.all_gather(y, axis).sum(0)


def apart(axis: Any, p: Any, x: Tensor) -> Tensor:
    """None: gradients leave while blocks are computed again."""
    return (x @ p["w"] + p["b"]) ** 2


@pytest.mark.parametrize("of", [meeting, apart])
@pytest.mark.parametrize("donate", [False, True])
def test_ranks_call_collectives_again_in_one_order(donate: bool, of: Function) -> None:
    """And do not take gradients that travel meanwhile for them."""

    def run(remat: Any) -> Any:
        axis = ps.testing.ThreadAxis(3, bucket_bytes=8)
        update = step(remat(partial(of, axis)), axis=axis, donate=donate)

        def rank(group: Any) -> Any:
            return update(tree.map(torch.clone, PARAMS), SGD.init(PARAMS), group)

        return axis.map(rank)([group(rank) for rank in range(3)])

    assert_same(run(ps.remat), run(lambda fn: fn))


@pytest.mark.parametrize(
    "compiled",
    [
        lambda step: ps.compile(step(), backend="aot_eager", fullgraph=True),
        lambda step: step(compile=partial(torch.compile, backend="aot_eager")),
    ],
)
def test_a_compiled_step_is_the_step(compiled: Any) -> None:
    """Nested, closing over params, with views among the results, and random numbers."""

    def of(remat: Any) -> Function:
        def inner(p: Any, x: Tensor) -> Any:
            inside = remat(lambda x: block(p, x, power=1)["y"])(x)
            dropped = torch.nn.functional.dropout(inside)
            return {**remat(block)(p, dropped), "x": x, "view": x.T}

        def outer(p: Any, x: Tensor) -> Tensor:
            out = remat(inner)(p, x)
            return out["y"] + out["positive"][:, None] + out["x"] * out["scale"] + out["view"].sum()

        return outer

    def run(step: Any) -> Any:
        torch.compiler.reset()
        torch.manual_seed(0)
        return step(PARAMS, SGD.init(PARAMS), group(0))

    assert_same(run(compiled(partial(step, of(ps.remat)))), run(step(of(lambda fn: fn))))
    torch.compiler.reset()


def test_a_compiled_function_inside_remat_in_the_first_step() -> None:
    """The step watches what its first backward pass recomputes; a compiler does not see that."""

    def losses_of(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).tanh()

    def run(function: Any) -> Any:
        torch.compiler.reset()
        update = ps.make_update_step(
            lambda w, m: ps.remat(function)(w, m["x"]), SGD, weight_fn=lambda m: torch.ones(4)
        )
        return update(torch.ones(3).double(), SGD.init(torch.ones(3)), group(0))

    assert_same(run(torch.compile(losses_of, backend="eager")), run(losses_of))
    torch.compiler.reset()
