"""Defines a correct step of four uneven ranks, and of one rank that holds all their data.

All numbers are integers in float64 and every N is a power of two, so nothing is ever rounded.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import purestep as ps

Arguments = dict[str, Any]
Batch = dict[str, Tensor]

SGD = ps.optim.sgd(0.5, momentum=0.5)
SHARES = [[2, 3], [], [1, 1, 2], [7]]
"""How many tokens each microbatch of each rank has: uneven, and one rank with none."""
FAILING_RANK = 2
"""The rank that goes wrong."""


def make_params() -> dict[str, Tensor]:
    """Makes integers, in two leaves."""
    return {
        "b": torch.tensor(1.0).double(),
        "w": torch.tensor([1.0, -2.0, 3.0]).double(),
    }


def make_batch(size: int = 16, seed: int = 0) -> Batch:
    """Makes integers without a random generator, which a transform would refuse."""
    count = torch.arange(size * 4).view(size, 4) + 5 * seed
    hashed = count * count * 3 + count
    numbers = (hashed % 11 % 7 - 3).double()
    return {
        "x": numbers[:, :3],
        "y": numbers[:, 3],
    }


def cut_batch(
    batch: Batch, share: Sequence[Sequence[int]] = SHARES
) -> list[list[Batch]]:
    """Cuts a batch into the microbatches of each rank."""
    ranks = []
    start = 0
    for sizes in share:
        microbatches = []
        for size in sizes:
            tokens = slice(start, start + size)
            microbatch = {name: value[tokens] for name, value in batch.items()}
            microbatches.append(microbatch)
            start += size
        ranks.append(microbatches)
    return ranks


def loss_fn(params: Any, microbatch: Batch) -> Tensor:
    """(xᵀw + b − y)², for each token."""
    prediction = microbatch["x"] @ params["w"] + params["b"]
    return (prediction - microbatch["y"]).square()


def loss_with_aux(params: Any, microbatch: Batch) -> ps.LossOutput:
    """Computes the same, with its sum and how many are small."""
    losses = loss_fn(params, microbatch)
    aux = {
        "small": (losses < 5).sum(),
        "sum": losses.sum(),
    }
    return ps.LossOutput(losses, aux=aux)


def weigh_by_one(microbatch: Batch) -> Tensor:
    """Weighs every token by one."""
    return torch.ones(len(microbatch["y"]), dtype=torch.int64)


def make_arguments(rank: int) -> Arguments:
    """Makes the arguments of a step of four uneven ranks."""
    return {
        "loss_fn": loss_fn,
        "optimizer": SGD,
        "weight_fn": weigh_by_one,
        "params": make_params(),
        "opt_state": SGD.init(make_params()),
        "microbatches": cut_batch(make_batch())[rank],
    }


def run_step(axis: ps.Axis, arguments: Arguments, *, times: int = 1) -> Any:
    """Runs one step with these arguments, some times; with ``gather``, of a sharded state."""
    settings = dict(arguments)
    theta = settings.pop("params")
    opt_state = settings.pop("opt_state")
    group = settings.pop("microbatches")
    if "gather" in settings:
        theta, opt_state = ps.shard((theta, opt_state), axis)
    update_step = ps.make_update_step(**settings, axis=axis)
    for _ in range(times):
        new_params, new_state, metrics = update_step(theta, opt_state, group)
    new_params, new_state = ps.unshard((new_params, new_state))
    return new_params, new_state, metrics


def run_alone() -> Any:
    """Runs the correct step on one rank that holds the whole batch as one microbatch."""
    arguments = make_arguments(0)
    arguments["microbatches"] = [make_batch()]
    new_params, opt_state, metrics = run_step(ps.LocalAxis(), arguments)
    count = sum(len(microbatches) for microbatches in SHARES)
    metrics = metrics._replace(num_microbatches=torch.tensor(count))
    return new_params, opt_state, metrics
