"""What ``remat`` keeps: the input of each layer and one layer's activations, and not those of all."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

import purestep as ps
from tests.blocks import Function, deep
from tests.memory import LiveBytes

LAYERS, ROWS, WIDTH = 12, 256, 16
ACTIVATION = ROWS * WIDTH * 4


def by_vjp(loss: Function, weights: list[Tensor], x: Tensor) -> Any:
    """Which frees as it goes."""
    transform: Any = torch.func.vjp
    value, pull = transform(lambda weights: loss(weights, x), weights)
    return pull(torch.ones_like(value), retain_graph=False)


@pytest.mark.parametrize(
    "reverse",
    [
        lambda loss, weights, x: ps.grad_and_value(loss)(weights, x),
        by_vjp,
        lambda loss, weights, x: vmap(lambda x: by_vjp(loss, weights, x))(x.view(2, -1, WIDTH)),
    ],
)
def test_what_is_kept(reverse: Any) -> None:
    """The input of each layer, and all of one layer's; without remat, all of all layers."""
    weights = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(LAYERS)]
    x = torch.randn(ROWS, WIDTH)

    def peak(remat: Any) -> int:
        with LiveBytes() as live:
            reverse(lambda weights, x: deep(weights, x, remat), weights, x)
        return live.peak

    gc.collect()
    grads = 2 * LAYERS * WIDTH * WIDTH * 4  # of at most two examples
    # tanh keeps what it returns. Beside that are alive a cotangent, what is made of it, and a product before tanh takes it.
    assert peak(lambda fn: fn) >= 5 * LAYERS * ACTIVATION
    assert peak(ps.remat) <= (LAYERS + 5 + 3) * ACTIVATION + grads


def test_arguments_are_freed_as_the_backward_pass_goes() -> None:
    """Even while its result is alive."""
    held = []

    def loss(x: Tensor) -> Tensor:
        argument = 2 * x
        held.append(weakref.ref(argument))
        return ps.remat(torch.square)(argument).sum()

    transform: Any = torch.func.vjp
    value, pull = transform(loss, torch.ones(3))
    assert held[0]() is not None
    pull(torch.ones(()), retain_graph=False)
    assert held[0]() is None
    assert value == 12
