"""A sound step of four uneven ranks, and that of one rank which holds all their data.

All numbers are integers in float64 and every N is a power of two, so nothing is ever rounded.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import purestep as ps

Arguments = dict[str, Any]
Batch = dict[str, Tensor]

SGD = ps.optim.sgd(0.5, momentum=0.5)
SHARE = [[2, 3], [], [1, 1, 2], [7]]
"""How many tokens each microbatch of each rank has: uneven, and one rank with none."""
BAD = 2
"""The rank that goes wrong."""


def params() -> dict[str, Tensor]:
    """Integers, in two leaves."""
    return {
        "b": torch.tensor(1.0).double(),
        "w": torch.tensor([1.0, -2.0, 3.0]).double(),
    }


def batch(size: int = 16, seed: int = 0) -> Batch:
    """Integers, without a random generator, which a transform would refuse."""
    count = torch.arange(size * 4).view(size, 4) + 5 * seed
    numbers = ((count * count * 3 + count) % 11 % 7 - 3).double()
    return {"x": numbers[:, :3], "y": numbers[:, 3]}


def cut(whole: Batch, share: Sequence[Sequence[int]] = SHARE) -> list[list[Batch]]:
    """The microbatches of each rank."""
    sizes = [size for rank in share for size in rank]
    parts = (
        dict(zip(whole, part, strict=True))
        for part in zip(*(value.split(sizes) for value in whole.values()), strict=True)
    )
    return [list(itertools.islice(parts, len(rank))) for rank in share]


def loss_fn(params: Any, microbatch: Batch) -> Tensor:
    """(xᵀw + b − y)², for each token."""
    return (microbatch["x"] @ params["w"] + params["b"] - microbatch["y"]).square()


def loss_with_aux(params: Any, microbatch: Batch) -> ps.LossOutput:
    """The same, with its sum and how many are small."""
    losses = loss_fn(params, microbatch)
    return ps.LossOutput(losses, aux={"small": (losses < 5).sum(), "sum": losses.sum()})


def ones(microbatch: Batch) -> Tensor:
    """Every token weighs the same."""
    return torch.ones(len(microbatch["y"]), dtype=torch.int64)


def sound(rank: int) -> Arguments:
    """A step of four uneven ranks."""
    return {
        "loss_fn": loss_fn,
        "optimizer": SGD,
        "weight_fn": ones,
        "params": params(),
        "opt_state": SGD.init(params()),
        "microbatches": cut(batch())[rank],
    }


def step(axis: ps.Axis, arguments: Arguments) -> Any:
    """One step with these arguments; with ``gather``, of the state in pieces."""
    settings = dict(arguments)
    theta, opt_state, group = map(settings.pop, ("params", "opt_state", "microbatches"))
    if "gather" in settings:
        theta, opt_state = ps.shard((theta, opt_state), axis)
    update_step = ps.make_update_step(**settings, axis=axis)
    *new, metrics = update_step(theta, opt_state, group)
    return *ps.unshard(tuple(new)), metrics


def alone() -> Any:
    """The sound step of one rank that holds the whole batch as one microbatch."""
    new_params, opt_state, metrics = step(
        ps.LocalAxis(), {**sound(0), "microbatches": [batch()]}
    )
    count = sum(map(len, SHARE))
    return new_params, opt_state, metrics._replace(num_microbatches=torch.tensor(count))
