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
from tests.square_loss import weigh_by_one

W = torch.tensor([3.0])
GROUP = [{"x": torch.ones(1)}] * 3


@pytest.mark.parametrize("behind_data", [False, True])
def test_a_reentrant_checkpoint_is_refused(behind_data: bool) -> None:
    """It runs a backward pass of its own, which autograd skips where no param leads to it."""

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        x = m["x"].requires_grad_() if behind_data else m["x"] + 0 * w
        product: Tensor = checkpoint(lambda y: y * w, x, use_reentrant=True)
        return product + w

    with pytest.raises(ValueError, match="use_reentrant=False"):
        ps.accumulate(loss_fn, W, GROUP, weight_fn=weigh_by_one)


class Reversible(torch.autograd.Function):
    """Computes x w, with a backward pass inside its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.x = x
        ctx.w = w
        return x * w.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            torch.autograd.backward(x * ctx.w, grad)
        return x.grad, None


def reversible_loss(w: Tensor, m: dict[str, Tensor]) -> Tensor:
    """Computes x w²; its leaf gets gradients several times in one backward pass."""
    once = Reversible.apply(m["x"] + 0 * w, w)
    return Reversible.apply(once, w)


def test_a_function_with_a_backward_pass_of_its_own_adds_up() -> None:
    sums = ps.accumulate(reversible_loss, W, GROUP, weight_fn=weigh_by_one)
    assert sums[0] == 18


def test_a_leaf_with_two_gradients_in_one_pass_is_refused_over_ranks() -> None:
    """The first may leave for other ranks before the second is added."""
    axis = ps.testing.ThreadAxis(1)

    def program(_: Any) -> None:
        buckets = GradBuckets(axis, {0: W}, [W.dtype])
        accumulate_group(
            make_backends(reversible_loss, ps.grad_and_value),
            *ps.tree.flatten(W),
            with_weights(GROUP, weigh_by_one),
            weight_fn=weigh_by_one,
            divisors=None,
            on_grad_ready=buckets.ready,
        )

    message = "given a gradient twice in one backward pass"
    with pytest.raises(RuntimeError, match=message):
        axis.map(program)([0])
