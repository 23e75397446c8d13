"""Losses that run a backward pass of their own: ``torch.utils.checkpoint`` and functions alike are right or refused."""

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
    """A layer that is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, again: bool) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return torch.tanh(x * self.w)

        return checkpoint(run, x, use_reentrant=False) if again else run(x)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_checkpoint_with_a_modules_own_parameters(frozen: bool) -> None:
    """Refused, since none can tell whether the forward pass had them too; a checkpoint around the call is right."""
    block, group = Block().requires_grad_(not frozen), [torch.ones(2, 3)] * 2

    def layer(w: Tensor, x: Tensor, again: bool) -> Tensor:
        return functional_call(block, {"w": w}, (x, again)).sum(1)

    def around(w: Tensor, x: Tensor) -> Tensor:
        return checkpoint(layer, w, x, False, use_reentrant=False)

    def grads(loss_fn: Any) -> Tensor:
        w = torch.rand(3, generator=torch.Generator().manual_seed(0))
        return ps.accumulate(loss_fn, w, group, weight_fn=lambda x: torch.ones(2)).grads

    with pytest.raises(ValueError, match=r"own parameter, of shape \(3,\).*ps\.from_module\(mod"):
        grads(lambda w, x: layer(w, x, True))
    assert block.w.grad is None
    assert torch.equal(grads(around), grads(lambda w, x: layer(w, x, False)))
