"""Sharded leaves as rows: one for each rank, so that many leaves travel in one collective.

A leaf in n pieces is n rows: its entries along the dimension that is cut, filled up with zeros. The
rows of several leaves lie side by side.
"""

import math
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from purestep.axis.base import Axis
from purestep.axis.collectives import is_subaxis
from purestep.axis.process import ProcessAxis
from purestep.tree.shard import ShardSpec, ShardSpecs


def reduce_axis(place: ShardSpec | None, axis: Axis) -> Axis | None:
    """The axis over which a leaf's gradient is summed, beside its scatter; None: over none.

    >>> from purestep import VmapAxis
    >>> dp, tp = VmapAxis(2), VmapAxis(2)
    >>> reduce_axis(ShardSpec(tp, (4,), 0), dp) == dp, reduce_axis(ShardSpec(dp, (4,), 0), dp)
    (True, None)
    """
    if place is None or not is_subaxis(place.axis, axis):
        return axis
    return None if place.axis == axis else cast("ProcessAxis", axis).across(place.axis)


def shards_over(places: ShardSpecs, axis: Axis) -> dict[int, ShardSpec]:
    """The leaves that are sharded over the axis or a part of it, by position."""
    # Leaves share few axes, and to compare two of thousands of ranks takes as long as a kernel.
    parts: dict[int, bool] = {}
    found: dict[int, ShardSpec] = {}
    for at, place in enumerate(places):
        if place is None:
            continue
        if id(place.axis) not in parts:
            parts[id(place.axis)] = is_subaxis(place.axis, axis)
        if parts[id(place.axis)]:
            found[at] = place
    return found


def reduce_axes(places: ShardSpecs, axis: Axis) -> list[Axis | None]:
    """``reduce_axis`` of each leaf, which compares each pair of axes once."""
    axes: dict[int, Axis | None] = {}
    found: list[Axis | None] = []
    for place in places:
        key = id(place and place.axis)
        if key not in axes:
            axes[key] = reduce_axis(place, axis)
        found.append(axes[key])
    return found


def collective_on_shard(law: str, x: Tensor, place: ShardSpec) -> Tensor:
    """The whole of all pieces, or this rank's piece of the sum, under any transform."""
    sent, received = (
        (1, place.axis.size) if law == "all_gather" else (place.axis.size, 1)
    )
    rows = pack_rows(x, place, sent)
    met = torch.empty(0, dtype=rows.dtype, device=rows.device)  # the same on all ranks
    if rows.numel():
        met = place.axis.apply(law, rows)
    return unpack_rows(met.reshape(received, rows.shape[1]), place)


def pack_rows(x: Tensor, place: ShardSpec, number: int) -> Tensor:
    """So many rows of a leaf: one of a piece, or those of all ranks."""
    # Pieces are filled up behind their last entry, and all that are shorter come last.
    dense = x.to_dense() if x.is_sparse else x
    entries = pad_dim(dense.movedim(place.dim, 0), 0, place.shard_len * number)
    return entries.reshape(number, row_numel(place))


def unpack_rows(rows: Tensor, place: ShardSpec) -> Tensor:
    """The leaf that is these rows: a piece of one, or the whole of several."""
    others = place.shape[: place.dim] + place.shape[place.dim + 1 :]
    shape = place.local_shape if rows.shape[0] < place.axis.size else place.shape
    entries = rows.reshape(place.shard_len * rows.shape[0], *others)
    return entries.narrow(0, 0, shape[place.dim]).movedim(0, place.dim).contiguous()


def row_numel(place: ShardSpec) -> int:
    """How many elements a row has."""
    return place.shard_len * math.prod(place.shape) // max(1, place.shape[place.dim])


def pad_dim(x: Tensor, dim: int, length: int) -> Tensor:
    """The tensor with zeros behind it, so that it is that long."""
    missing = length - x.shape[dim]
    return (
        functional.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x
    )
