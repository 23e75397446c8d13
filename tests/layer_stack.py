"""Provides a deep network of integers, unsharded and sharded, and each way to gather it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import purestep as ps
from purestep.types import Gather

WIDTH = 16
ADAMW = ps.optim.adamw(0.1)
GATHERS: list[Gather] = ["step", "microbatch", "loss"]


def make_layers(layers: int, width: int = WIDTH) -> list[Tensor]:
    """Draws square layers of integers, all of one width."""
    generator = torch.Generator().manual_seed(0)
    shape = (layers, width, width)
    stacked = torch.randint(-1, 2, shape, generator=generator)
    return list(stacked.to(torch.float64).unbind())


def make_rows(count: int, seed: int = 0, width: int = WIDTH) -> Tensor:
    """Draws inputs, integers as well."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, (count, width), generator=generator)
    return x.to(torch.float64)


def loss_of_full(params: Sequence[Tensor], x: Tensor) -> Tensor:
    """Computes one loss for each row, from full tensors."""
    for layer in params:
        x = torch.relu(x @ layer) * 0.125
    return x.square().sum(-1)


def loss_of_shards(params: Sequence[Any], x: Tensor) -> Tensor:
    """Computes the same from shards: gathers layer after layer, again in the backward pass."""
    for layer in params:
        x = ps.remat(apply_layer)(layer, x)
    return x.square().sum(-1)


def apply_layer(layer: Any, x: Tensor) -> Tensor:
    """Gathers one layer and applies it."""
    return torch.relu(x @ ps.unshard(layer)) * 0.125


def loss_for(gather: Gather) -> Callable[..., Tensor]:
    """Returns the loss that this ``gather`` needs."""
    if gather == "loss":
        return loss_of_shards
    return loss_of_full


def weigh_ones(x: Tensor) -> Tensor:
    """Weighs every row the same: each is a token."""
    return torch.ones(len(x), dtype=torch.int64)
