"""Compares what ranks beside those of the step have in common: tokens, losses, replicated params.

Ranks of tensor parallelism get the same microbatches. A param that is not sharded over them has the
same gradient on each, since each updates a copy. If a rank has a part of that gradient instead,
the copies drift apart, and no later collective shows it.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.axis.base import Axis
from purestep.axis.collectives import shares_ranks
from purestep.tree.shard import ShardSpecs
from purestep.types import GradSums, Params

Place: TypeAlias = tuple[int, frozenset[Any]]
"""The rank on the step's axis, and on other axes with their ranks."""

Comparisons: TypeAlias = dict[Place, list[tree.TreeSpec]]
"""The containers of params, once for each comparison, by the ranks of this process.

None is dropped, and a rank without microbatches compares, too. So all ranks have the same entries.
"""
MAX_COMPARISONS = 8
"""How many steps compare what ranks of tensor parallelism share, at most."""
MAX_NUMEL = 2**20
"""How many elements of a gradient are measured at a time."""


def compare_replicas(
    comparisons: Comparisons,
    rank: int,
    params: Params,
    axis: Axis,
    sums: GradSums,
) -> bool:
    """Runs ``check_replicas``, which may raise; returns whether later steps can do without it.

    All ranks call it together. ``rank`` is the session's: that on the step's ``axis``, or 0 where
    ranks run one program.

    Without sharded params no check runs, and it returns True. Otherwise checks are counted for each
    structure of params and place: after one that returned True, or ``MAX_COMPARISONS`` of them,
    none runs, and it returns True. ``comparisons`` is updated in place.
    """
    _, spec = tree.flatten(params)
    shard_specs = tree.shard_specs(spec)
    if not shard_specs:
        return True
    specs = comparisons.setdefault(place_of(rank, shard_specs), [])
    num_compared = 0
    for other in specs:
        try:
            num_compared += spec == other
        except Exception:  # A node class of the user's may not compare.
            num_compared += 1
    if num_compared >= MAX_COMPARISONS:
        return True
    specs.append(spec)
    if check_replicas(params, axis, sums):
        specs += [spec] * MAX_COMPARISONS
        return True
    return False


def place_of(rank: int, shard_specs: ShardSpecs) -> Place:
    """Returns ``rank`` with the caller's rank and global ranks on each axis of the shards.

    ``rank`` is that on the step's axis. Axes whose ranks run one program are left out. ``rank``
    alone is not enough: threads of tensor parallelism may all be rank 0 of the step's axis.
    """
    axes = {axis for shard in shard_specs if shard for axis in shard.axes}
    places = [(axis.rank, axis.global_ranks) for axis in axes if axis.is_multi_program]
    return rank, frozenset(places)


def check_replicas(params: Params, axis: Axis, sums: GradSums) -> bool:
    """Raises ``ValueError`` if ranks that share tokens have sums that differ by more than rounding.

    It compares the ranks of each axis over which params are sharded, but tokens are not split. Axes
    whose ranks run one program are left out. Compared are N, the loss, and the gradients of params
    that are not sharded over the compared axis. ``sums`` are those over ``axis``, the axis of the
    step. All ranks call this together, and all of them raise.

    Returns False if equal sums show nothing yet. That is so without tokens, if a loss is not
    finite, or if a compared gradient is zero or not finite. Otherwise returns True, also where
    nothing is compared: without such an axis, and under autograd, a transform or a compiler.
    """
    grads = tree.leaves(sums.grads)
    _, spec = tree.flatten(params)
    shard_specs = tree.shard_specs(spec)
    if not shard_specs or not tree.is_plain_eager(grads):
        return True
    axes_of_leaves = [
        shard_spec.axes if shard_spec else () for shard_spec in shard_specs
    ]
    others = _find_other_axes(axes_of_leaves, axis)
    if not others:
        return True
    paths = tree.paths(params, "params")
    figures = _measure(grads, axes_of_leaves, others)
    is_settled = True
    errors: list[ValueError] = []
    for other in others:
        totals = torch.stack([sums.counts.num_tokens.double(), sums.loss.double()])
        num_tokens, losses = _gather(other, totals)
        replicated = [i for i, axes in enumerate(axes_of_leaves) if other not in axes]
        squares, projections = (_gather(other, part[replicated]) for part in figures)
        # Raised after the collectives over all axes: ranks beside these may find nothing.
        with _collect(errors):
            is_settled &= _compare_totals(other, num_tokens, losses, sums.loss.dtype)
            for position, index in enumerate(replicated):
                norms = [math.sqrt(square) for square in squares[position]]
                values = projections[position]
                _check_grads(paths[index], norms, values, other, grads[index].dtype)
                is_settled &= all(math.isfinite(norm) and norm > 0 for norm in norms)
    _raise_together(errors, others, sums.loss.device)
    return is_settled


@contextmanager
def _collect(errors: list[ValueError]) -> Iterator[None]:
    """Makes a context that appends a ``ValueError`` raised in it to a list, and ends it there."""
    try:
        yield
    except ValueError as error:
        errors.append(error)


def _raise_together(
    errors: Sequence[ValueError], axes: Sequence[Any], device: torch.device
) -> None:
    """Raises the first error; on ranks that have none, ``ValueError`` if another rank has one.

    With several axes, the errors are counted by a collective over each. Ranks of a single axis
    compare the same numbers, so they agree without a collective.
    """
    if len(axes) == 1:
        if errors:
            raise errors[0]
        return
    num_errors = torch.tensor([len(errors)], device=device)
    for axis in axes:
        num_errors = axis.apply("psum", num_errors)
    if errors:
        raise errors[0]
    if num_errors.item():
        raise ValueError(
            f"ranks of {axes} have summed different losses or gradients: see their errors"
        )


def _find_other_axes(axes_of_leaves: Sequence[Any], axis: Axis) -> list[Any]:
    """Lists, each once, the axes of shards that share at most this rank with the step's axis.

    ``axes_of_leaves`` has a tuple of axes for each leaf. Axes whose ranks run one program are left
    out.
    """
    others: list[Any] = []
    for axes in dict.fromkeys(axes_of_leaves):
        for other in axes:
            is_known = other in others or shares_ranks(other, axis)
            if other.is_multi_program and not is_known:
                others.append(other)
    return others


def _measure(
    grads: Sequence[Tensor], axes_of_leaves: Sequence[Any], others: Sequence[Any]
) -> tuple[Tensor, Tensor]:
    """Returns each gradient's squared norm, and its dot product with fixed numbers, in float64.

    ``axes_of_leaves`` has for each gradient a tuple of the axes over which it is sharded.
    ``others`` are the axes whose ranks will compare both figures. A gradient that is sharded over
    all of these is not compared, and has zeros.

    Of a sharded gradient, both figures are sums over all its ranks, which call this together. Norms
    may agree by chance, as of gradients in different rows of an embedding. The dot product tells
    these apart.
    """
    rows = []
    for grad, axes in zip(grads, axes_of_leaves, strict=True):
        row = torch.zeros(2, dtype=torch.float64, device=grad.device)
        if any(other not in axes for other in others):
            # In parts: wide copies of a large leaf would be larger than its state.
            for number, part in enumerate(grad.flatten().split(MAX_NUMEL)):
                row += _measure_part(part.double(), number * MAX_NUMEL)
        rows.append(row)
    totals = torch.stack(rows)
    for axes in dict.fromkeys(axes_of_leaves):
        rows_of_kind = [[other == axes] for other in axes_of_leaves]
        of_kind = torch.tensor(rows_of_kind, device=totals.device)
        for axis in axes:
            summed = axis.apply("psum", totals)
            totals = torch.where(of_kind, summed, totals)
    squares, projections = totals.unbind(1)
    return squares, projections


def _measure_part(wide: Tensor, start: int) -> Tensor:
    """Returns a vector's squared norm, and its dot product with sin(start + 1) and so on."""
    numbers = torch.arange(len(wide), dtype=wide.dtype, device=wide.device)
    return torch.stack([wide.dot(wide), wide.dot((numbers + (start + 1)).sin())])


def _gather(axis: Axis, values: Tensor) -> list[list[float]]:
    """Returns for each value a list of that value on all ranks, in order of rank; a collective."""
    rows: list[list[float]] = axis.apply("all_gather", values.contiguous()).T.tolist()
    return rows


def _compare_totals(
    axis: Axis,
    num_tokens: Sequence[float],
    losses: Sequence[float],
    dtype: torch.dtype,
) -> bool:
    """Raises ``ValueError`` if N or losses differ between the axis's ranks by more than rounding.

    ``num_tokens`` and ``losses`` have one number for each rank. Rounding is a relative difference
    up to the square root of the dtype's eps. Numbers of which one is not finite are not compared.
    Returns whether N > 0 and losses are finite, on all ranks.
    """
    if _differ(num_tokens, _largest(num_tokens), dtype) or _differ(
        losses, _largest(losses), dtype
    ):
        raise ValueError(
            f"the ranks of {axis}, over which params are sharded, have summed different losses: "
            f"{losses} of {num_tokens} tokens. Let them have the same microbatches, those of their "
            "rank on the step's axis (mesh.get_local_rank of its dimension), or name their "
            "dimension in that axis. If each returns a part of the losses, return "
            "ps.psum(losses, that axis); if they drop different activations, give them one seed"
        )
    return min(num_tokens) > 0 and all(math.isfinite(loss) for loss in losses)


def _check_grads(
    name: str,
    norms: Sequence[float],
    projections: Sequence[float],
    axis: Axis,
    dtype: torch.dtype,
) -> None:
    """Raises ``ValueError`` if norms or projections of one param's gradients differ between ranks.

    ``norms`` and ``projections`` have one number for each rank. A difference of either is rounding
    up to the largest norm times the square root of the dtype's eps. Numbers of which one is not
    finite are not compared. ``name`` and ``axis`` are for the error.
    """
    scale = _largest(norms)
    if _differ(norms, scale, dtype) or _differ(projections, scale, dtype):
        raise ValueError(
            f"{name} is the same on all ranks of {axis}, but each has another gradient, of norm "
            f"{norms}: it multiplies what differs between them, such as a rank's heads. Sum its "
            "gradient by ps.pvary(param, axis) in the loss, or make it a DTensor, as "
            "torch's SequenceParallel() does"
        )


def _largest(values: Sequence[float]) -> float:
    return max(abs(value) for value in values)


def _differ(values: Sequence[float], scale: float, dtype: torch.dtype) -> bool:
    """Returns whether values differ by more than sqrt(eps) * scale; False if one is not finite.

    The eps is that of ``dtype``.
    """
    if not all(math.isfinite(value) for value in values):
        return False
    tolerance = math.sqrt(torch.finfo(dtype).eps)
    return max(values) - min(values) > tolerance * scale
