"""Optimizers that the theorems draw."""

from collections.abc import Callable
from typing import Any

import purestep as ps
from purestep import optim, tree

EPS = 0.125
"""So large that a step of Adam is smooth where gradients are small."""


def mask_matrices(params: Any) -> Any:
    """Returns a mask by which only leaves of two or more dimensions decay."""
    return tree.map(lambda leaf: leaf.ndim > 1, params)


def label_leaves(params: Any) -> Any:
    """Labels leaves of two or more dimensions "matrix", and others "rest"."""
    return tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "rest", params)


RECIPES: dict[str, Callable[[Any], ps.optim.Optimizer]] = {
    "sgd": optim.sgd,
    "momentum": lambda rate: optim.sgd(
        rate,
        momentum=0.9,
        nesterov=True,
        weight_decay=0.1,
        mask=mask_matrices,
    ),
    "clipped": lambda rate: optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.sgd(rate, 0.5),
    ),
    "adamw": lambda rate: optim.adamw(rate, eps=EPS),
    "masked adamw": lambda rate: optim.adamw(
        rate,
        b1=0.5,
        b2=0.9,
        eps=EPS,
        weight_decay=0.1,
        mask=mask_matrices,
    ),
    "lion": lambda rate: optim.lion(rate, weight_decay=0.1),
    "adam": lambda rate: optim.chain(
        optim.scale_by_adam(eps=EPS),
        optim.sgd(rate),
    ),
    "partition": lambda rate: optim.partition(
        {
            "matrix": optim.adamw(rate, eps=EPS),
            "rest": optim.sgd(rate, 0.9, nesterov=True),
        },
        label_leaves,
    ),
    "master": lambda rate: optim.master_weights(optim.sgd(rate, 0.9)),
    "ema": lambda rate: optim.ema(optim.sgd(rate, 0.9), 0.9),
}
"""Optimizers of a learning rate, in which most operations round."""

OPTIMIZERS: dict[str, ps.optim.Optimizer] = {
    "sgd": optim.sgd(0.5),
    "momentum": optim.sgd(0.25, momentum=0.5, nesterov=True, weight_decay=0.5),
    "decayed": optim.sgd(0.5, weight_decay=0.5, mask=mask_matrices),
    "scheduled": optim.sgd(optim.linear_schedule(0.5, 0.25, 4)),
    "clipped": optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.125)),
    "adamw": optim.adamw(0.125, weight_decay=0.5),
    "adam": optim.chain(optim.scale_by_adam(), optim.sgd(0.125)),
    "lion": optim.lion(0.125, weight_decay=0.5, mask=mask_matrices),
    "partition": optim.partition(
        {
            "matrix": optim.sgd(0.5, momentum=0.5),
            "rest": optim.adamw(0.125),
        },
        label_leaves,
    ),
    "master": optim.master_weights(optim.sgd(0.5)),
    "ema": optim.ema(optim.sgd(0.5, momentum=0.5), 0.75),
}
"""Optimizers that most theorems draw, by the names that processes can be sent."""

EXACT = ["sgd", "momentum", "decayed", "scheduled", "master", "ema"]
"""Optimizers of which no operation rounds in narrower dtypes either, so that kernels may fuse them."""


def _capture(grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    captured = tree.map(lambda grad, old: grad.to(old.dtype), grads, opt_state)
    return params, captured


CAPTURE = ps.optim.Optimizer(init=tree.zeros_like, update=_capture)
"""An optimizer that moves nothing and keeps the gradients it receives as its state."""
