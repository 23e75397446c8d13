"""A network of dense layers as two plain functions: ``init`` and ``apply``."""

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
    """Weights by which outputs are ``gain`` times as large as inputs; biases of zero."""
    return [
        {
            "weight": gain
            * torch.randn(n, m, generator=generator, dtype=dtype)
            / n**0.5,
            "bias": torch.zeros(m, dtype=dtype),
        }
        for n, m in pairwise(widths)
    ]


def apply(params: Params, x: Tensor) -> Tensor:
    """Rows of the last width, from rows of the first; tanh between the layers."""
    *hidden, last = params
    for layer in hidden:
        x = torch.tanh(x @ layer["weight"] + layer["bias"])
    return x @ last["weight"] + last["bias"]
