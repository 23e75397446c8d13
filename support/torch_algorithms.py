"""The algorithms of ``torch.optim``: settings and kernels of each, and how to run them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import purestep as ps
from purestep import tree

Make = Callable[[list[Any]], torch.optim.Optimizer]

MATRICES = {"wide": (4, 6), "nested": {"tall": (5, 3)}}
SHAPES = {**MATRICES, "rest": [(17,), (), (2, 3, 4)]}
WHOLE_VECTORS = [(16,), (4, 8), (2, 3, 16), (160,), (64, 80)]
"""Numbers of elements that are multiples of sixteen, the longest vector of a CPU."""


LOOP: dict[str, bool] = {}
KERNELS = [LOOP, {"foreach": True}, {"fused": True}]
HAS_FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
ASCENT: dict[str, Any] = {"maximize": True}
DECAY: dict[str, Any] = {"weight_decay": 0.1}
UPHILL = {**ASCENT, **DECAY}
MOMENTUM: dict[str, Any] = {"momentum": 0.9}
NESTEROV = {**MOMENTUM, "nesterov": True}
MEANS: dict[str, Any] = {"betas": (0.5, 0.9)}
DECOUPLED = {**DECAY, "decoupled_weight_decay": True}
START: dict[str, Any] = {"initial_accumulator_value": 0.3}
AMSGRAD: dict[str, Any] = {"amsgrad": True}
ADAM = [
    {},
    {**MEANS, **DECAY, "eps": 1e-3},
    {**AMSGRAD, **DECAY},
    {**AMSGRAD, **ASCENT},
]
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {},
        DECAY,
        MOMENTUM,
        {**MOMENTUM, **DECAY, "dampening": 0.5},
        NESTEROV,
        {**NESTEROV, **DECAY},
        {**MOMENTUM, **UPHILL},
    ],
    "Adam": [*ADAM, DECOUPLED],
    "AdamW": ADAM,
    "RMSprop": [
        {},
        {"centered": True, "alpha": 0.9},
        {**MOMENTUM, **DECAY},
        {**MOMENTUM, "centered": True, **UPHILL},
        ASCENT,
    ],
    "Adagrad": [{}, START, {"lr_decay": 0.1, **START, **UPHILL}, ASCENT],
    "Adafactor": [
        {},
        {"d": 1.5, "beta2_decay": -0.5, "eps": (1e-6, 1e-2)},
        UPHILL,
        ASCENT,
    ],
    "Adadelta": [{}, {"rho": 0.5}, UPHILL, ASCENT],
    "NAdam": [{}, DECAY, DECOUPLED, {"momentum_decay": 0.1, **UPHILL}, ASCENT],
    "RAdam": [{}, DECAY, DECOUPLED, {**MEANS, **UPHILL}, ASCENT],
    "Adamax": [{}, MEANS, UPHILL, ASCENT],
    "Rprop": [{}, {"etas": (0.4, 1.3), "step_sizes": (1e-3, 0.2)}, ASCENT],
    "ASGD": [{}, {"t0": 3.0, "lambd": 0.1, "alpha": 0.5}, UPHILL, ASCENT],
    "Muon": [
        {},
        {"nesterov": False, "momentum": 0.5},
        {"weight_decay": 0.0, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"},
    ],
}


class Algorithm(NamedTuple):
    """A class of ``torch.optim``, settings of it, and its kernels on the host."""

    cls: Any
    settings: list[dict[str, Any]]
    kernels: list[dict[str, bool]]


def kernels_of(name: str) -> list[dict[str, bool]]:
    """Returns the kernels that an algorithm has on the host."""
    if name in HAS_FUSED:
        return KERNELS
    if name == "Muon":
        return [LOOP]
    return [LOOP, {"foreach": True}]


ALGORITHMS = {
    name: Algorithm(getattr(torch.optim, name), settings, kernels_of(name))
    for name, settings in SETTINGS.items()
}


def shapes_of(name: str) -> Any:
    """Returns shapes that an algorithm updates: Muon is for matrices."""
    return MATRICES if name == "Muon" else SHAPES


def inverse(step: Any) -> Any:
    """Computes the schedule 1 / (1 + step) for both libraries: of a tensor, and of a number."""
    if isinstance(step, Tensor):
        step = step.to(torch.float64)
    return 1 / (1 + step)


class Namesake:
    """Runs the torch.optim object the usual way: leaves that require grad, ``.grad``, ``step()``."""

    def __init__(self, params: Any, make: Make, *, scheduled: bool = False) -> None:
        self.params = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
        self.leaves = tree.leaves(self.params)
        self.optimizer = make(self.leaves)
        self.scheduler = LambdaLR(self.optimizer, inverse) if scheduled else None
        self.steps = 0

    def step(self, grads: Any) -> None:
        """Takes a step on these gradients."""
        for leaf, grad in zip(self.leaves, tree.leaves(grads), strict=True):
            leaf.grad = grad.clone()
        self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        self.steps += 1

    def state(self) -> Any:
        """Returns the state that ``from_torch`` has to have."""
        states = [dict(self.optimizer.state[leaf]) for leaf in self.leaves]
        _, structure = tree.flatten(self.params)
        leaves = tree.unflatten(structure, states)
        return ps.optim.TorchState(torch.tensor(self.steps), leaves)
