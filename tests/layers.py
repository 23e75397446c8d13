"""A deep network of integers, whole and in pieces, and each way to gather it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import purestep as ps
from purestep.types import Gather

WIDTH, ADAMW = 16, ps.optim.adamw(0.1)
GATHERS: list[Gather] = ["step", "microbatch", "loss"]


def network(layers: int, width: int = WIDTH) -> list[Tensor]:
    """Equal layers of integers."""
    generator = torch.Generator().manual_seed(0)
    shape = (layers, width, width)
    return [*torch.randint(-1, 2, shape, generator=generator).to(torch.float64)]


def rows(count: int, seed: int = 0, width: int = WIDTH) -> Tensor:
    """Inputs, integers as well."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, (count, width), generator=generator).to(torch.float64)


def of_whole(params: Sequence[Tensor], x: Tensor) -> Tensor:
    """A deep network, one loss for each row."""
    for layer in params:
        x = torch.relu(x @ layer) * 0.125
    return x.square().sum(-1)


def of_pieces(params: Sequence[Any], x: Tensor) -> Tensor:
    """The same, of which one layer is whole at a time, gathered again in the backward pass."""
    for layer in params:
        x = ps.remat(block)(layer, x)
    return x.square().sum(-1)


def block(layer: Any, x: Tensor) -> Tensor:
    """One layer, which gathers its params."""
    return torch.relu(x @ ps.unshard(layer)) * 0.125


def loss_of(gather: Gather) -> Callable[..., Tensor]:
    """The one that this way needs."""
    return of_pieces if gather == "loss" else of_whole


def ones(x: Tensor) -> Tensor:
    """Every row is a token."""
    return torch.ones(len(x), dtype=torch.int64)
