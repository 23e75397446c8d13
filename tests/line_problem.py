"""Fits a line through points: the smallest problem for a step."""

from typing import Any

import torch
from torch import Tensor

import purestep as ps

SGD = ps.optim.sgd(0.1)


def loss_fn(params: Any, microbatch: dict[str, Tensor]) -> Tensor:
    """(w x − y)², for each token."""
    prediction = params["w"] * microbatch["x"]
    return (prediction - microbatch["y"]).square()


def weight_fn(microbatch: dict[str, Tensor]) -> Tensor:
    """Weighs every token by one."""
    return torch.ones_like(microbatch["x"])


PARAMS = {"w": torch.tensor(1.0)}
MICROBATCH = {
    "x": torch.tensor([1.0, 2.0]),
    "y": torch.tensor([3.0, 5.0]),
}


def run_step(
    loss: Any = loss_fn,
    optimizer: Any = SGD,
    group: Any = (MICROBATCH,),
    **settings: Any,
) -> Any:
    """Runs one update with these settings."""
    settings.setdefault("weight_fn", weight_fn)
    step = ps.make_update_step(loss, optimizer, **settings)
    return step(PARAMS, optimizer.init(PARAMS), group)
