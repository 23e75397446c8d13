"""Losses that run a backward pass of their own: ``torch.utils.checkpoint`` and functions alike are right or refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import purestep as ps
from purestep.axis.buckets import Buckets
from tests.squares import x_ones


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("announced", [True, False])
def test_a_checkpoint_of_a_function_that_closes_over_params(
    reentrant: bool, announced: bool
) -> None:
    """Right, or refused: a reentrant one runs a backward pass of its own."""

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        x = m["x"] + 0 * w
        for _ in range(2):
            x = checkpoint(lambda y: y * w, x, use_reentrant=reentrant)
        return x

    w, group = torch.tensor([3.0]), [{"x": torch.ones(1)}] * 3
    ready = (lambda index, total: total) if announced else None
    refused = pytest.raises(RuntimeError, match="use_reentrant=False")
    with refused if reentrant else contextlib.nullcontext():
        grads, *_ = ps.accumulate(loss_fn, w, group, weight_fn=x_ones, ready=ready)
        assert grads == 18


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

    w, group = torch.tensor([3.0]), [{"x": torch.ones(1)}] * 3
    assert ps.accumulate(loss_fn, w, group, weight_fn=x_ones)[0] == 18

    def rank(axis: ps.testing.ThreadAxis) -> None:
        buckets = Buckets(axis, {0: w}, [w.dtype])
        ps.accumulate(loss_fn, w, group, weight_fn=x_ones, ready=buckets.ready)

    axis = ps.testing.ThreadAxis(1)
    with pytest.raises(RuntimeError, match="given a gradient twice in one backward pass"):
        axis.map(lambda _: rank(axis))([0])


class Block(torch.nn.Module):
    """A layer that is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            return torch.tanh(x * self.w)

        out: Tensor = checkpoint(body, x, use_reentrant=False)
        return out


def layers(block: Block, p: Any, x: Tensor) -> Tensor:
    for w in p["layers"]:
        x = torch.func.functional_call(block, {"w": w}, (x,))
    return x


def adapted(block: Block, p: Any, x: Tensor) -> Tensor:
    adapted_w = block.w + p["up"] @ p["down"]
    out: Tensor = torch.func.functional_call(block, {"w": adapted_w}, (x,))
    return out


def closed_over(block: Block, p: Any, x: Tensor) -> Tensor:
    out: Tensor = block(x * p["up"].sum())
    return out


@pytest.mark.parametrize("program", [layers, adapted, closed_over])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_checkpoint_with_a_modules_own_parameters(program: Any, frozen: bool) -> None:
    """Refused, since nobody can tell whether the forward pass had them too; the way out is right."""
    block, weights = Block().requires_grad_(not frozen), lambda m: torch.ones(2)
    generator = torch.Generator().manual_seed(0)
    params = {
        "layers": torch.rand(2, 3, generator=generator),
        "up": torch.rand(3, 2, generator=generator),
        "down": torch.rand(2, generator=generator),
    }
    group = [{"x": torch.ones(2, 3)}] * 2
    with pytest.raises(
        ValueError, match=r"own parameter, of shape \(3,\).*ps\.from_module\(module\)"
    ):
        ps.accumulate(
            lambda p, m: program(block, p, m["x"]).sum(1), params, group, weight_fn=weights
        )
    assert block.w.grad is None


def test_the_way_out_of_a_checkpoint_with_a_modules_own_parameters() -> None:
    block = torch.nn.Linear(3, 3)
    x, weights = torch.rand(2, 3), lambda m: torch.ones(2)
    params = {"weight": torch.rand(3, 3)}
    frozen = {"bias": block.bias.detach()}

    def called(p: Any, x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(block, {**frozen, **p}, (x,)).tanh()
        return out

    grads = [
        ps.accumulate(loss_fn, params, [{"x": x}] * 2, weight_fn=weights)[0]["weight"]
        for loss_fn in (
            lambda p, m: called(p, m["x"]).sum(1),
            lambda p, m: checkpoint(called, p, m["x"], use_reentrant=False).sum(1),
        )
    ]
    assert torch.equal(grads[0], grads[1])
