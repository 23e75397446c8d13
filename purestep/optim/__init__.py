"""Provides optimizers as pure functions: transforms, schedules and the usual optimizers."""

from typing import TYPE_CHECKING, NoReturn

import torch

from purestep.optim.base import Optimizer, Transform, chain
from purestep.optim.optimizers import (
    AdamWState,
    DescentState,
    LionState,
    adamw,
    lion,
    sgd,
)
from purestep.optim.partition import Mask, partition
from purestep.optim.schedules import (
    LearningRate,
    Schedule,
    cosine_decay_schedule,
    join_schedules,
    linear_schedule,
    warmup_cosine_decay_schedule,
)
from purestep.optim.torch_optim import TorchState, from_torch
from purestep.optim.transforms import (
    AdamState,
    MomentumState,
    add_decayed_weights,
    clip_by_global_norm,
    momentum,
    scale_by_adam,
)
from purestep.optim.wrappers import EmaState, MasterState, ema, master_weights

# These are tuples of tensors. ``torch.load`` refuses classes that are not in its list.
torch.serialization.add_safe_globals(
    [
        AdamState,
        AdamWState,
        DescentState,
        EmaState,
        LionState,
        MasterState,
        MomentumState,
        TorchState,
    ]
)

__all__ = [
    "Optimizer",
    "Transform",
    "chain",
    "clip_by_global_norm",
    "momentum",
    "MomentumState",
    "scale_by_adam",
    "AdamState",
    "add_decayed_weights",
    "Mask",
    "DescentState",
    "sgd",
    "adamw",
    "AdamWState",
    "lion",
    "LionState",
    "from_torch",
    "TorchState",
    "partition",
    "master_weights",
    "MasterState",
    "ema",
    "EmaState",
    "LearningRate",
    "Schedule",
    "linear_schedule",
    "cosine_decay_schedule",
    "warmup_cosine_decay_schedule",
    "join_schedules",
]

_OTHER_NAMES = {
    "adam": "write adamw(lr, weight_decay=0.0)",
    "apply_updates": "optimizer.update returns the new params, so nothing is left to add",
    "scale": "sgd(lr) ends a chain, and subtracts lr times the updates",
    "scale_by_learning_rate": "sgd(lr) ends a chain, and subtracts lr times the updates",
    "scale_by_schedule": "sgd(schedule) ends a chain, and subtracts",
    "trace": "write momentum(decay)",
    "masked": "adamw and others take mask=; else take partition",
    "multi_transform": "write partition(optimizers, param_labels)",
    "MultiSteps": "pass all microbatches of an update to one step",
    "clip": "write clip_by_global_norm(max_norm)",
}
"""The names here of what optax and torch.optim call otherwise."""

if not TYPE_CHECKING:  # A checker would take any name for defined.

    def __getattr__(name: str) -> NoReturn:
        """Raises ``AttributeError``; for ``_OTHER_NAMES``, it says what stands for them here."""
        text = f"module {__name__!r} has no attribute {name!r}"
        if name in _OTHER_NAMES:
            text += f": {_OTHER_NAMES[name]}"
        raise AttributeError(text)
