"""Defines a network of dense layers as two plain functions: ``init`` and ``apply``."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

Params: TypeAlias = list[dict[str, Tensor]]


def init(
    widths: Sequence[int],
    generator: torch.Generator,
    gain: float = 1.0,
    dtype: Any = torch.float64,
) -> Params:
    """Draws a ``weight`` and a zero ``bias`` for each pair of neighbouring widths, input first.

    A layer's outputs, before tanh, are ``gain`` times as large as its inputs, on average.
    """
    params = []
    for fan_in, fan_out in pairwise(widths):
        noise = torch.randn(fan_in, fan_out, generator=generator, dtype=dtype)
        params.append(
            {
                "weight": gain * noise / fan_in**0.5,
                "bias": torch.zeros(fan_out, dtype=dtype),
            }
        )
    return params


def apply(params: Params, x: Tensor) -> Tensor:
    """Maps rows of the first width to rows of the last, with tanh after all layers but the last."""
    *hidden, last = params
    for layer in hidden:
        x = torch.tanh(x @ layer["weight"] + layer["bias"])
    return x @ last["weight"] + last["bias"]
