"""A loss whose gradient anyone can see, weights that count every token, and the ways to differentiate."""

from typing import Any

import torch
from torch import Tensor


def squares(w: Tensor, m: dict[str, Tensor]) -> Tensor:
    return (w * m["x"]).square()


def x_ones(microbatch: dict[str, Tensor]) -> Tensor:
    return torch.ones_like(microbatch["x"])


WAYS: list[dict[str, Any]] = [{}, {"grad_and_value": torch.func.grad_and_value}]
