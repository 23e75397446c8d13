"""Params of which matrices are one part and the rest the other, and optimizers for both."""

from typing import Any

import torch
from torch import Tensor

import purestep as ps
from proofs.strategies import labels
from proofs.test_t08_optimizers import random_grads, random_params
from purestep import tree

SHAPES = {
    "blocks": [{"w": (4, 16), "b": (16,)}, {"w": (16, 32), "b": (32,)}],
    "head": {"w": (32, 16), "scale": (16,)},
}
"""Whole vectors, in which ``adamw`` has the same bits in place and out of place."""
LEARNING_RATE = 0.05


def drawn(seed: int, dtype: torch.dtype = torch.float32, steps: int = 5) -> tuple[Any, list[Any]]:
    """Params, and the gradients of some steps."""
    generator = torch.Generator().manual_seed(seed)
    params = random_params(SHAPES, dtype, generator)
    return params, [random_grads(params, generator) for _ in range(steps)]


def split(whole: Any) -> dict[str, list[Tensor]]:
    """The leaves of each label, in order: by hand."""
    first, second = whole["blocks"]
    return {
        "matrix": [first["w"], second["w"], whole["head"]["w"]],
        "rest": [first["b"], second["b"], whole["head"]["scale"]],
    }


def muon() -> ps.optim.Optimizer:
    """For matrices only."""
    return ps.optim.from_torch(torch.optim.Muon, lr=LEARNING_RATE)


def muon_and_adamw() -> ps.optim.Optimizer:
    """What people train with."""
    return ps.optim.partition(labels, {"matrix": muon(), "rest": ps.optim.adamw(LEARNING_RATE)})


SGD = {"slow": ps.optim.sgd(0.125, 0.5), "fast": ps.optim.sgd(0.5)}


def plain_sgd() -> ps.optim.Optimizer:
    """One with three arguments, as others write it."""
    return ps.optim.Optimizer(
        lambda params: (),
        lambda grads, state, params: (tree.map(lambda p, g: p - g / 8, params, grads), state),
    )


NATIVE = {
    "matrix": ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ps.optim.adamw(0.1)),
    "rest": ps.optim.sgd(0.1, 0.9, nesterov=True, weight_decay=0.1),
}
PARTS: dict[str, dict[str, ps.optim.Optimizer]] = {
    "torch and native": {"matrix": muon(), "rest": ps.optim.adamw(0.1)},
    "native": NATIVE,
    "without kernels": {"matrix": ps.optim.lion(0.1), "rest": plain_sgd()},
    "nested": {
        "matrix": ps.optim.partition("all of it", {"all of it": muon()}),
        "rest": plain_sgd(),
    },
}
