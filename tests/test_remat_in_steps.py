"""``remat`` inside of steps: where ranks meet in a block, where a loss differentiates it, and where all of it is compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

import purestep as ps
from proofs.strategies import assert_same
from purestep import tree
from tests.blocks import MANY, ONE, PARAMS, Function, X, block, both, integers, pulled


def group(ranks: int, microbatches: int = 2) -> list[list[dict[str, Tensor]]]:
    """A group for each rank."""
    return [
        [{"x": integers(4, 3, seed=10 * rank + m)} for m in range(microbatches)]
        for rank in range(ranks)
    ]


def weight_fn(m: Any) -> Tensor:
    """Every row is a token."""
    return torch.ones(m["x"].shape[0], dtype=torch.float64)


def step(block: Function, axis: Any, rate: Any = 0.5, **how: Any) -> Any:
    """Two blocks, in whose middle ranks meet."""

    def loss_fn(params: Any, m: Any) -> Tensor:
        x = m["x"]
        for p in params:
            x = block(p, x, axis)
        return x.sum(-1)

    return ps.make_update_step(loss_fn, ps.optim.sgd(rate), axis=axis, weight_fn=weight_fn, **how)


def meeting(p: Any, x: Tensor, axis: Any) -> Tensor:
    """A block with collectives inside, and another number on each rank."""
    y = x @ ps.pvary(p["w"], axis) + ps.pvary(p["b"], axis)
    total = ps.psum(y.sum(0), axis)
    return y * total - x * (1 + axis.index) - ps.all_gather(y, axis).sum(0)


def start() -> Any:
    return tree.map(torch.clone, PARAMS)


@pytest.mark.parametrize("donate", [False, True])
def test_collectives_on_threads(donate: bool) -> None:
    """Each rank calls them again, in one order; gradients that travel meanwhile are not taken for them."""

    def run(block: Function) -> Any:
        axis = ps.testing.ThreadAxis(2, bucket_bytes=8)
        update_step = step(block, axis, donate=donate)
        state = ps.optim.sgd(0.5).init(PARAMS)
        return axis.map(lambda group: update_step(start(), state, group))(group(2))

    both(run, meeting)


def test_ranks_in_threads_draw_nothing_from_each_other() -> None:
    """Without collectives in the block, gradients leave while blocks are computed again."""

    def local(p: Any, x: Tensor, axis: Any) -> Tensor:
        return (x @ p["w"] + p["b"]) ** 2

    def run(block: Function) -> Any:
        axis = ps.testing.ThreadAxis(3, bucket_bytes=8)
        update_step = step(block, axis)
        state = ps.optim.sgd(0.5).init(PARAMS)
        return axis.map(lambda group: update_step(PARAMS, state, group))(group(3))

    both(run, local)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f(PARAMS, ONE / 2),
        lambda f: grad(lambda p, rate: f(p, rate)[0]["w"].sum(), argnums=(0, 1))(PARAMS, ONE / 2),
        lambda f: pulled(lambda p: f(p, ONE / 2)[0]["w"].sum(), PARAMS),
        lambda f: vmap(lambda p: f(p, ONE / 2))(MANY),
        lambda f: jvp(lambda p: f(p, ONE / 2), (PARAMS,), (PARAMS,)),
    ],
)
def test_collectives_under_vmap(transform: Callable[[Function], Any]) -> None:
    """Also where a derivative is taken when the axis does not map any more."""
    stacked = [
        {"x": torch.stack(each)}
        for each in zip(*[[m["x"] for m in rank] for rank in group(2)], strict=True)
    ]

    def run(block: Function) -> Any:
        axis = ps.VmapAxis(2)

        def trained(params: Any, rate: Any) -> Any:
            update_step = step(block, axis, rate)
            state = ps.optim.sgd(0.5).init(PARAMS)
            mapped = axis.map(lambda p, group: update_step(p, state, group)[0], (None, 0), None)
            return mapped(params, stacked)

        return transform(trained)

    both(run, meeting)


def test_penalties_in_a_step() -> None:
    """A loss that differentiates its blocks by the input, with a graph."""

    def run(block: Function) -> Any:
        def penalised(params: Any, m: Any) -> Tensor:
            x = m["x"].clone().requires_grad_()
            energy = block(params[1], block(params[0], x)["y"])["y"].sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return force.square().sum(-1)

        def transformed(params: Any, m: Any) -> Tensor:
            force = grad(lambda x: block(params[1], block(params[0], x)["y"])["y"].sum())(m["x"])
            return force.square().sum(-1)

        return [
            ps.make_update_step(
                loss, ps.optim.sgd(0.5), weight_fn=weight_fn, grad_and_value=transform
            )(PARAMS, ps.optim.sgd(0.5).init(PARAMS), group(1)[0])
            for loss, transform in (
                (penalised, ps.grad_and_value),
                (transformed, ps.grad_and_value),
                (transformed, torch.func.grad_and_value),
            )
        ]

    both(run)


def test_a_compiled_function() -> None:
    """``torch.compile`` inside of remat, without a word in either pass."""

    def run(remat: Any) -> Any:
        torch.compiler.reset()
        compiled = remat(torch.compile(lambda p, x: block(p, x)["y"], backend="aot_eager"))
        own = tree.map(lambda leaf: leaf.clone().requires_grad_(), PARAMS[0])
        return torch.autograd.grad(compiled(own, X).sum(), tree.leaves_of(own))

    assert_same(run(ps.remat), run(lambda fn: fn))
    torch.compiler.reset()


@pytest.mark.parametrize(
    "compiled",
    [
        lambda step: ps.compile(step(), backend="aot_eager", fullgraph=True),
        lambda step: step(compile=partial(torch.compile, backend="aot_eager")),
        lambda step: step(compile=partial(torch.compile, backend="eager")),
    ],
)
@pytest.mark.parametrize("name", ["block", "closure", "kept", "drawn", "nested"])
def test_compiled(name: str, compiled: Any) -> None:
    """A compiled step is the step: also where a function closes over what is differentiated, or draws random numbers."""

    def made(remat: Any) -> Any:
        functions: dict[str, Function] = {
            "block": remat(block),
            "closure": (lambda p, x: remat(lambda x: block(p, x))(x)),
            "kept": remat(lambda p, x: {**block(p, x), "x": x, "view": x.T}),
            "drawn": remat(lambda p, x: {**block(p, x), "x": torch.nn.functional.dropout(x)}),
            "nested": remat(lambda p, x: remat(block)(p, remat(block)(p, x, power=1)["y"])),
        }

        def loss_fn(params: Any, m: Any) -> Tensor:
            x = m["x"]
            for p in params:
                out = functions[name](p, x)
                x = out["y"] + out["positive"][:, None] + out.get("x", 0) * out["scale"]
            return x.sum(-1)

        def step(**how: Any) -> Any:
            return ps.make_update_step(loss_fn, ps.optim.sgd(0.5), weight_fn=weight_fn, **how)

        return step

    torch.compiler.reset()
    state, groups = ps.optim.sgd(0.5).init(PARAMS), group(1)[0]
    torch.manual_seed(0)
    ours = compiled(made(ps.remat))(PARAMS, state, groups)
    torch.manual_seed(0)
    assert_same(ours, made(lambda fn: fn)()(PARAMS, state, groups))
    torch.compiler.reset()


def test_a_compiled_function_inside_remat_in_the_first_step() -> None:
    """The step watches what its first backward pass recomputes; a compiler does not see that."""

    def losses_of(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).tanh()

    def step(function: Any) -> Any:
        sgd = ps.optim.sgd(0.5)
        update = ps.make_update_step(
            lambda w, m: ps.remat(function)(w, m["x"]), sgd, weight_fn=weight_fn
        )
        return update(torch.ones(3).double(), sgd.init(torch.ones(3)), group(1)[0])

    torch.compiler.reset()
    assert_same(step(torch.compile(losses_of, backend="eager")), step(losses_of))
    torch.compiler.reset()
