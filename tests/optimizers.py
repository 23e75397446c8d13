"""Provides optimizers of every kind, with small params and gradients for them."""

from typing import Any

import torch

import purestep as ps
from support.random_updates import iterate_states as iterate_states
from support.strategies import RECIPES as RECIPES

PARAMS = {
    "w": torch.ones(2, 2),
    "b": torch.ones(2),
}
GRADS = {
    "w": torch.full((2, 2), 3.0),
    "b": torch.full((2,), -2.0),
}
TRANSFORMS = {
    "clip": ps.optim.clip_by_global_norm(1.0),
    "momentum": ps.optim.momentum(0.5, nesterov=True),
    "decay": ps.optim.add_decayed_weights(0.5),
}
UPDATE_METHODS = ["update", "update_"]


def call_update(part: Any, way: str, grads: Any, state: Any, params: Any) -> Any:
    """Calls ``update``, or ``update_``, which writes in place."""
    if way == "update":
        return part.update(grads, state, params)
    return part.update_(grads, state, params, None)
