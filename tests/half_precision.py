"""A loss and groups of microbatches, in half precision and in wider ones."""

from typing import Any

import torch
from torch import Tensor

from support.random_updates import random_params

HALVES = [torch.bfloat16, torch.float16]


def get_weights(microbatch: Any) -> Tensor:
    """Returns the weights, which stand in the microbatch."""
    weights: Tensor = microbatch["w"]
    return weights


def count_tokens(group: list[Any]) -> Tensor:
    """Counts the tokens of a group."""
    sums = [microbatch["w"].sum() for microbatch in group]
    return torch.stack(sums).sum()


def quadratic_loss(params: Any, microbatch: Any) -> Tensor:
    """Computes a loss for each row, which depends on all parameters."""
    inputs = microbatch["x"].to(params["up"].dtype)
    hidden = torch.tanh(inputs @ params["up"])
    outputs = (hidden @ params["down"]).squeeze(-1)
    return outputs.square()


def draw_training(dtype: torch.dtype, groups: int = 3) -> tuple[Any, list[list[Any]]]:
    """Draws params, and groups of two microbatches."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"up": (4, 6), "down": (6, 1)}
    params = random_params(shapes, dtype, generator)

    def draw_microbatch(rows: int) -> Any:
        x = torch.randn(rows, 4, generator=generator)
        return {"x": x, "w": torch.ones(rows)}

    drawn = []
    for _ in range(groups):
        group = [draw_microbatch(3), draw_microbatch(1)]
        drawn.append(group)
    return params, drawn
