"""Losses that run a backward pass of their own: ``torch.utils.checkpoint`` and functions alike are right or refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import purestep as ps
from purestep.axis.buckets import Buckets
from tests.squares import x_ones

W, GROUP = torch.tensor([3.0]), [{"x": torch.ones(1)}] * 3


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("ready", [None, lambda index, total: total])
def test_a_checkpoint_of_a_function_that_closes_over_params(reentrant: bool, ready: Any) -> None:
    """Right, or refused: a reentrant one runs a backward pass of its own."""

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        x = m["x"] + 0 * w
        for _ in range(2):
            x = checkpoint(lambda y: y * w, x, use_reentrant=reentrant)
        return x

    refused = pytest.raises(RuntimeError, match="use_reentrant=False")
    with refused if reentrant else nullcontext():
        assert ps.accumulate(loss_fn, W, GROUP, weight_fn=x_ones, ready=ready)[0] == 18


class Reversible(torch.autograd.Function):
    """x w, with a backward pass of its own inside its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.x, ctx.w = x, w
        return x * w.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            torch.autograd.backward(x * ctx.w, grad)
        return x.grad, None


def test_a_function_with_a_backward_pass_of_its_own() -> None:
    """Its leaf is given gradients several times in one pass: refused where the first may leave."""

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        return Reversible.apply(Reversible.apply(m["x"] + 0 * w, w), w)

    assert ps.accumulate(loss_fn, W, GROUP, weight_fn=x_ones)[0] == 18

    def rank(_: Any) -> None:
        buckets = Buckets(axis, {0: W}, [W.dtype])
        ps.accumulate(loss_fn, W, GROUP, weight_fn=x_ones, ready=buckets.ready)

    axis = ps.testing.ThreadAxis(1)
    with pytest.raises(RuntimeError, match="given a gradient twice in one backward pass"):
        axis.map(rank)([0])


class Block(torch.nn.Module):
    """A layer that may be computed again in the backward pass."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.w, self.run = torch.nn.Parameter(torch.ones(3)), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(lambda x: torch.tanh(x * self.w), x)


def again(run: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(run, *args, use_reentrant=False)


def layers(block: Block, p: Any, x: Tensor) -> Tensor:
    for w in p["layers"]:
        x = functional_call(block, {"w": w}, (x,))
    return x


def adapted(block: Block, p: Any, x: Tensor) -> Tensor:
    return functional_call(block, {"w": block.w + p["up"] @ p["down"]}, (x,))


def closed_over(block: Block, p: Any, x: Tensor) -> Tensor:
    return block(x * p["up"].sum())


@pytest.mark.parametrize("program", [layers, adapted, closed_over])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_checkpoint_with_a_modules_own_parameters(program: Any, frozen: bool) -> None:
    """Refused, since nobody can tell whether the forward pass had them too; the way out is right."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"layers": (2, 3), "up": (3, 2), "down": (2,)}
    params = {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}

    def grads(block: Block, run: Callable[..., Any]) -> Any:
        def loss_fn(p: Any, x: Tensor) -> Tensor:
            return run(lambda p, x: program(block, p, x).sum(1), p, x)

        group = [torch.ones(2, 3)] * 2
        found = ps.accumulate(loss_fn, params, group, weight_fn=lambda x: torch.ones(2))
        assert block.w.grad is None
        return found.grads

    with pytest.raises(
        ValueError, match=r"own parameter, of shape \(3,\).*ps\.from_module\(module\)"
    ):
        grads(Block(again).requires_grad_(not frozen), lambda run, *args: run(*args))
    plain = Block(lambda run, *args: run(*args)).requires_grad_(not frozen)
    plain_grads = grads(plain, lambda run, *args: run(*args))
    if program is layers:
        around = grads(plain, again)
        assert all(torch.equal(around[name], plain_grads[name]) for name in params)
