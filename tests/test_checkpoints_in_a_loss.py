"""Losses that run a backward pass of their own: right or refused. T1 has checkpoints, those in modules too."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import purestep as ps
from purestep.counts import with_weights
from purestep.grads.accumulate import accumulate_group
from purestep.grads.backends import make_backends
from purestep.sharding.buckets import GradBuckets
from tests.squares import x_ones

W, GROUP = torch.tensor([3.0]), [{"x": torch.ones(1)}] * 3


@pytest.mark.parametrize("behind_data", [False, True])
def test_a_reentrant_checkpoint_is_refused(behind_data: bool) -> None:
    """It runs a backward pass of its own, which autograd passes over where no param leads to it."""

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        x = m["x"].requires_grad_() if behind_data else m["x"] + 0 * w
        again: Tensor = checkpoint(lambda y: y * w, x, use_reentrant=True)
        return again + w

    with pytest.raises(ValueError, match="use_reentrant=False"):
        ps.accumulate(loss_fn, W, GROUP, weight_fn=x_ones)


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
        buckets = GradBuckets(axis, {0: W}, [W.dtype])
        accumulate_group(
            make_backends(loss_fn, ps.grad_and_value),
            W,
            with_weights(GROUP, x_ones),
            weight_fn=x_ones,
            total=None,
            on_grad_ready=buckets.ready,
        )

    axis = ps.testing.ThreadAxis(1)
    with pytest.raises(
        RuntimeError, match="given a gradient twice in one backward pass"
    ):
        axis.map(rank)([0])
