"""Compares what ranks beside those of the step have in common: tokens, losses, replicated params.

Ranks of tensor parallelism get the same microbatches. A param that is not sharded over them has the
same gradient on each, since each updates it by its own. If a rank has a part of that gradient
instead, the params drift apart, and no later collective shows it.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from purestep import tree
from purestep.axis.base import Axis
from purestep.axis.collectives import shares_ranks
from purestep.types import GradSums, Params


def check_replicas(params: Params, axis: Axis, sums: GradSums) -> None:
    """Raises if ranks over which params are sharded, but not tokens, have summed different things.

    All ranks call it together, after the sums over ``axis``, and all of them raise.
    """
    grads = tree.leaves(sums.grads)
    _, spec = tree.flatten(params)
    shard_specs = tree.shard_specs(spec)
    if not shard_specs or not tree.is_plain_eager(grads):
        return
    axes_of_leaves = [
        shard_spec.axes if shard_spec else () for shard_spec in shard_specs
    ]
    others: list[Any] = []
    for axes in axes_of_leaves:
        for other in axes:
            is_known = other in others or shares_ranks(other, axis)
            if other.is_multi_program and not is_known:
                others.append(other)
    if not others:
        return
    squares = _sum_squares(grads, axes_of_leaves)
    for other in others:
        _compare_totals(other, sums)
        names = {}
        for index, axes in enumerate(axes_of_leaves):
            if other not in axes:
                names[index] = tree.paths(params, "params")[index]
        norms = squares[[*names]].sqrt()
        for name, values in zip(names.values(), _gather(other, norms), strict=True):
            _check_grads(name, values, other, grads)


def _sum_squares(grads: Sequence[Tensor], axes_of_leaves: Sequence[Any]) -> Tensor:
    """Returns the sum of the squares of each leaf, of a sharded one over all its ranks."""
    squares = [torch.sum(grad.double() ** 2) for grad in grads]
    total = torch.stack(squares)
    for axes in dict.fromkeys(axes_of_leaves):
        of_kind = torch.tensor([other == axes for other in axes_of_leaves])
        for axis in axes:
            summed = axis.apply("psum", total)
            total = torch.where(of_kind.to(total.device), summed, total)
    return total


def _gather(axis: Axis, values: Tensor) -> list[list[float]]:
    """Returns each value on all ranks, in order of rank."""
    rows: list[list[float]] = axis.apply("all_gather", values.contiguous()).T.tolist()
    return rows


def _compare_totals(axis: Axis, sums: GradSums) -> None:
    """Raises if ranks have summed other tokens."""
    totals = torch.stack([sums.counts.num_tokens.double(), sums.loss.double()])
    num_tokens, losses = _gather(axis, totals)
    if _differ(num_tokens, sums.loss.dtype) or _differ(losses, sums.loss.dtype):
        raise ValueError(
            f"the ranks of {axis}, over which params are sharded, have summed different losses: "
            f"{losses} of {num_tokens} tokens. Let them have the same microbatches, those of their "
            "rank on the step's axis (mesh.get_local_rank of its dimension), or name their "
            "dimension in that axis"
        )


def _check_grads(
    name: str, norms: Sequence[float], axis: Axis, grads: Sequence[Tensor]
) -> None:
    """Raises if a replicated param has another gradient on each rank."""
    if _differ(norms, grads[0].dtype):
        raise ValueError(
            f"{name} is the same on all ranks of {axis}, but each has another gradient, of norm "
            f"{norms}: it multiplies what differs between them, such as a rank's heads. Sum its "
            "gradient by ps.pvary(param, axis) in the loss, or make it a DTensor, as "
            "torch's SequenceParallel() does"
        )


def _differ(values: Sequence[float], dtype: torch.dtype) -> bool:
    """Returns whether finite values differ by more than half of the digits of their dtype."""
    if not all(math.isfinite(value) for value in values):
        return False
    tolerance = math.sqrt(torch.finfo(dtype).eps)
    largest = max(abs(value) for value in values)
    return max(values) - min(values) > tolerance * largest
