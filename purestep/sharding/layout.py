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
from purestep.axis.collectives import within
from purestep.axis.process import Ranks
from purestep.tree.shard import Place, Spread


def summed_over(place: Place | None, axis: Axis) -> Axis | None:
    """The axis over which a leaf's gradient is summed, beside its scatter; None: over none.

    >>> from purestep import VmapAxis
    >>> dp, tp = VmapAxis(2), VmapAxis(2)
    >>> summed_over(Place(tp, (4,), 0), dp) == dp, summed_over(Place(dp, (4,), 0), dp)
    (True, None)
    """
    if place is None or not within(place.axis, axis):
        return axis
    return None if place.axis == axis else cast("Ranks", axis).across(place.axis)


def sharded(places: Spread, axis: Axis) -> dict[int, Place]:
    """The leaves that are sharded over the axis or a part of it, by position."""
    # Leaves share few axes, and to compare two of thousands of ranks takes as long as a kernel.
    parts: dict[int, bool] = {}
    found: dict[int, Place] = {}
    for at, place in enumerate(places):
        if place is None:
            continue
        if id(place.axis) not in parts:
            parts[id(place.axis)] = within(place.axis, axis)
        if parts[id(place.axis)]:
            found[at] = place
    return found


def sum_axes(places: Spread, axis: Axis) -> list[Axis | None]:
    """``summed_over`` of each leaf, which compares each pair of axes once."""
    axes: dict[int, Axis | None] = {}
    found: list[Axis | None] = []
    for place in places:
        key = id(place and place.axis)
        if key not in axes:
            axes[key] = summed_over(place, axis)
        found.append(axes[key])
    return found


def by_law(law: str, x: Tensor, place: Place) -> Tensor:
    """The whole of all pieces, or this rank's piece of the sum, under any transform."""
    sent, received = (
        (1, place.axis.size) if law == "all_gather" else (place.axis.size, 1)
    )
    rows = rows_of(x, place, sent)
    met = torch.empty(0, dtype=rows.dtype, device=rows.device)  # the same on all ranks
    if rows.numel():
        met = place.axis.apply(law, rows)
    return entries_of(met.reshape(received, rows.shape[1]), place)


def rows_of(x: Tensor, place: Place, number: int) -> Tensor:
    """So many rows of a leaf: one of a piece, or those of all ranks."""
    # Pieces are filled up behind their last entry, and all that are shorter come last.
    dense = x.to_dense() if x.is_sparse else x
    entries = filled_up(dense.movedim(place.dim, 0), 0, place.length * number)
    return entries.reshape(number, width_of(place))


def entries_of(rows: Tensor, place: Place) -> Tensor:
    """The leaf that is these rows: a piece of one, or the whole of several."""
    others = place.shape[: place.dim] + place.shape[place.dim + 1 :]
    shape = place.piece_shape if rows.shape[0] < place.axis.size else place.shape
    entries = rows.reshape(place.length * rows.shape[0], *others)
    return entries.narrow(0, 0, shape[place.dim]).movedim(0, place.dim).contiguous()


def width_of(place: Place) -> int:
    """How many elements a row has."""
    return place.length * math.prod(place.shape) // max(1, place.shape[place.dim])


def filled_up(x: Tensor, dim: int, length: int) -> Tensor:
    """The tensor with zeros behind it, so that it is that long."""
    missing = length - x.shape[dim]
    return (
        functional.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x
    )
