"""Optimizers, a problem and comparisons for steps on a device that is not the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from proofs import models
from proofs.devices import Waits, lazy, moved, placed
from proofs.strategies import Batch, integer_batch, labels, matrices
from purestep import optim, tree
from purestep.testing.bounds import gamma

line = optim.linear_schedule(0.5, 0.25, 4)
cosine = optim.cosine_decay_schedule(0.5, 8)
half = torch.tensor(0.5)


# Integers, their halves and their signs: no rounding anywhere.
EXACT = {
    "tensor": optim.sgd(half),
    "momentum": optim.sgd(0.5, 0.5),
    "decayed by a tensor": optim.sgd(0.5, weight_decay=half, mask=matrices),
    "all of sgd": optim.sgd(line, 0.5, nesterov=True, weight_decay=0.5, mask=matrices),
    "chain": optim.chain(optim.add_decayed_weights(0.5), optim.momentum(0.5), optim.descend(line)),
    "lion": optim.lion(0.5, 0.5, 0.5),
    "all of lion": optim.lion(line, 0.5, 0.5, weight_decay=0.5, mask=matrices),
    "master": optim.master_weights(optim.sgd(0.5, 0.5)),
    "ema": optim.ema(optim.sgd(0.5, 0.5), 0.5),
    "no update_": optim.sgd(0.5, 0.5, weight_decay=0.5, mask=matrices)._replace(update_=None),
}
OPTIMIZERS = EXACT | {
    "adamw": optim.adamw(0.125),
    "all of adamw": optim.adamw(cosine, 0.8, 0.99, 1e-3, weight_decay=half, mask=matrices),
    "joined": optim.adamw(optim.join_schedules([line, cosine], [2])),
    "scale_by_adam": optim.chain(optim.scale_by_adam(), optim.descend(0.125)),
    "clipped": optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.5, 0.5)),
    "clipped by a tensor": optim.chain(optim.clip_by_global_norm(half), optim.adamw(0.125)),
    "partition": optim.partition(
        labels, {"matrix": optim.sgd(0.5, 0.5), "rest": optim.adamw(0.125, mask=matrices)}
    ),
}


def problem(dtype: torch.dtype = torch.int64) -> tuple[Any, Batch]:
    """Parameters, and a batch of 8 tokens whose weights sum to 8."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.tensor([[1, 2], [0, 1], [1, 1], [2, 0]]).to(dtype)
    return models.integer_params(generator), integer_batch(weights, generator)


def on_both(run: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """What a program gives on the device, without a wait, and what it gives on the host."""
    expected = run(*tree.map(torch.clone, arguments))
    there = moved(arguments)
    with Waits() as waits:
        actual = run(*there)
    assert waits.seen == []
    assert {leaf.device for leaf in tree.leaves_of(actual)} == {lazy()}
    return placed(actual, expected), expected


def assert_near(actual: Any, expected: Any, state: Any) -> None:
    """The gradients are exact; the formula of a step, its powers and its norms round so often."""
    elements = sum(leaf.numel() for leaf in tree.leaves_of(state[0]))
    roundings = gamma(2 * (elements + 64), torch.float64)
    for path, *leaves in zip(
        tree.paths(state, "state"), *map(tree.leaves_of, (actual, expected, state)), strict=True
    ):
        ours, theirs, old = (leaf.to(torch.float64) for leaf in leaves)
        scale = old.abs() + (theirs - old).abs()
        assert ((ours - theirs).abs() <= roundings * scale).all(), path


def one_leaf(params: Any, batch: Batch) -> Tensor:
    return batch["x"] @ params["w"] - batch["y"]


def row(**more: Any) -> Batch:
    """A microbatch for it, on the device."""
    data = {"x": torch.tensor([[1.0, 2.0, 3.0]]), "y": torch.tensor([1.0]), **more}
    return {key: value.to(lazy()) for key, value in data.items()}


def ones(batch: Batch) -> Tensor:
    return torch.ones_like(batch["y"], dtype=torch.bool)
