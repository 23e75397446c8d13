"""Optimizers as pure functions: what they are, transforms, schedules, recipes."""

import torch

from purestep.optim.base import Optimizer, Transform, chain
from purestep.optim.optimizers import (
    AdamWState,
    DescentState,
    LionState,
    adamw,
    descend,
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

# Tuples of tensors, which ``torch.load`` may make: of others' classes it loads nothing.
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

__all__ = ["Optimizer", "Transform", "chain"]
__all__ += [
    "clip_by_global_norm",
    "momentum",
    "MomentumState",
    "scale_by_adam",
    "AdamState",
]
__all__ += [
    "add_decayed_weights",
    "Mask",
    "descend",
    "DescentState",
    "sgd",
    "adamw",
    "AdamWState",
]
__all__ += ["lion", "LionState", "from_torch", "TorchState", "partition"]
__all__ += [
    "master_weights",
    "MasterState",
    "ema",
    "EmaState",
    "LearningRate",
    "Schedule",
]
__all__ += ["linear_schedule", "cosine_decay_schedule", "warmup_cosine_decay_schedule"]
__all__ += ["join_schedules"]
