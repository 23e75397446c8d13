"""Provides optimizers as pure functions: transforms, schedules and the usual optimizers."""

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
