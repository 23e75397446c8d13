"""Sharded leaves: gathered for a loss, and their gradients scattered, in few collectives.

A leaf in n pieces is n rows, one for each rank: its entries along the dimension that is cut, filled
up with zeros. The rows of small leaves travel side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from purestep import tree
from purestep.axis.collectives import pvary, within
from purestep.axis.protocol import Axis, Gather
from purestep.tree.shard import Place, Spread, is_shard, own
from purestep.types import Params, Tree

if TYPE_CHECKING:
    from purestep.axis.ranks import Ranks


def whole(params: Params, axis: Axis, gather: Gather) -> Params:
    """The params as ``accumulate`` sees them: each rank's own, gathered where ``gather`` says.

    With "step", a ``Shard`` over the axis is gathered here; with the others it stays. One over an
    axis that does not split tokens (tensor parallelism) becomes its piece.
    """
    leaves, structure = tree.flatten(params)
    places = tree.spread(structure)
    if not places:
        return pvary(params, axis)
    inside = sharded(places, axis)
    for at, leaf in enumerate(leaves):
        over = summed_over(places[at], axis)
        leaf = own(leaf, places[at])
        leaves[at] = leaf if over is None else pvary(leaf, over)
    if gather == "step":
        return filled(params, leaves, inside)
    but = {place.axis for place in inside.values()}
    return bare(tree.unflatten(structure, leaves), but)


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
    return {at: place for at, place in enumerate(places) if place and within(place.axis, axis)}


def reduced_pieces(
    grads: Sequence[Tensor], apart: Mapping[int, Place], axis: Axis, gather: Gather
) -> dict[int, Tensor]:
    """The sums of sharded leaves over all ranks: of each one, this rank's piece."""
    pieces = [grads[at] for at in apart]
    if gather == "step":
        pieces = scattered(pieces, [*apart.values()])
    reduced = dict(zip(apart, pieces, strict=True))
    groups: dict[Axis, list[int]] = {}
    for at, place in apart.items():
        if (over := summed_over(place, axis)) is not None:
            groups.setdefault(over, []).append(at)
    for over, group in groups.items():
        totals = over.apply_tree("psum", [reduced[at] for at in group])
        reduced |= zip(group, totals, strict=True)
    return reduced


def filled(tree_: Tree, leaves: Sequence[Tensor], places: Mapping[int, Place]) -> Tree:
    """The tree of these leaves without ``Shard`` nodes, some of them gathered."""
    leaves = [*leaves]
    wholes = gathered([leaves[at] for at in places], [*places.values()])
    for at, one in zip(places, wholes, strict=True):
        leaves[at] = one
    return bare(tree.unflatten(tree.flatten(tree_)[1], leaves))


def bare(tree_: Tree, but: Collection[Axis] = ()) -> Tree:
    """The tree with the piece in the place of each ``Shard``, but for those over these axes.

    >>> from purestep import LocalAxis, Shard
    >>> bare({"w": Shard(torch.ones(2), LocalAxis(), (2,))})
    {'w': tensor([1., 1.])}
    """

    def is_leaf(node: Any) -> bool:
        return is_shard(node) and node.axis not in but

    nodes, structure = tree.flatten(tree_, is_leaf=is_leaf)
    return tree.unflatten(structure, [node.piece if is_leaf(node) else node for node in nodes])


def gathered(pieces: Sequence[Tensor], places: Sequence[Place]) -> list[Tensor]:
    """The whole tensors, differentiably, in few all-gathers."""
    return _met("all_gather", _Gather.apply, pieces, places)


def scattered(wholes: Sequence[Tensor], places: Sequence[Place]) -> list[Tensor]:
    """This rank's pieces of the sums over ranks: the transpose of ``gathered``."""
    return _met("psum_scatter", partial(_batched, "psum_scatter"), wholes, places)


def _met(
    law: str,
    together: Callable[..., Sequence[Tensor]],
    tensors: Sequence[Tensor],
    places: Sequence[Place],
) -> list[Tensor]:
    """All together; one by one where a compiler or a transform looks on."""
    if tree.eager():
        return [*together(tuple(places), *tensors)]
    pairs = zip(tensors, places, strict=True)
    return [_side_by_side(law, [x], [place])[0] for x, place in pairs]


class _Gather(Function):
    """One node for all, so that a rank whose loss reaches a single leaf scatters the others too."""

    @staticmethod
    def forward(ctx: Any, places: tuple[Place, ...], *pieces: Tensor) -> tuple[Tensor, ...]:
        ctx.places, ctx.pieces = places, pieces
        return _batched("all_gather", places, *pieces)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        terms = []
        for each, piece in zip(cotangents, ctx.pieces, strict=True):
            # A step that sums gradients in another dtype reduces them in it as well.
            dtype = (piece.is_leaf and piece.grad_dtype) or piece.dtype
            terms.append(each.to(dtype))
        return None, *_batched("psum_scatter", ctx.places, *terms)


def _batched(law: str, places: Sequence[Place], *tensors: Tensor) -> tuple[Tensor, ...]:
    """In batches of one axis and dtype, of at most ``bucket_bytes``, last first."""
    batches: list[list[int]] = []
    latest: dict[Any, tuple[list[int], int]] = {}
    for at in reversed(range(len(tensors))):
        axis, dtype = places[at].axis, tensors[at].dtype
        batch, held = latest.get((axis, dtype), ([], 0))
        size = math.prod(places[at].shape) * dtype.itemsize
        if not batch or held + size > getattr(axis, "bucket_bytes", math.inf):
            batch, held = [], 0
            batches.append(batch)
        batch.append(at)
        latest[axis, dtype] = batch, held + size
    results = [*tensors]
    for batch in batches:
        made = _side_by_side(law, [tensors[at] for at in batch], [places[at] for at in batch])
        for at, result in zip(batch, made, strict=True):
            results[at] = result
    return tuple(results)


def _side_by_side(law: str, tensors: list[Tensor], places: list[Place]) -> list[Tensor]:
    """One collective: a row of each rank becomes all rows, or all rows become the sum of one."""
    axis = places[0].axis
    sent, received = (1, axis.size) if law == "all_gather" else (axis.size, 1)
    blocks = [_rows(x, place, sent) for x, place in zip(tensors, places, strict=True)]
    rows = torch.cat(blocks, 1) if blocks[1:] else blocks[0]
    width = rows.shape[1]
    met = axis.apply(law, rows) if width else torch.empty(0, dtype=rows.dtype, device=rows.device)
    parts = met.reshape(received, width).split([block.shape[1] for block in blocks], 1)
    return [_entries(part, place, law) for part, place in zip(parts, places, strict=True)]


def _rows(x: Tensor, place: Place, number: int) -> Tensor:
    # Pieces are filled up behind their last entry, and all that are shorter come last.
    dense = x.to_dense() if x.is_sparse else x
    entries = filled_up(dense.movedim(place.dim, 0), 0, place.length * number)
    return entries.reshape(number, place.length * math.prod(_others(place)))


def _entries(rows: Tensor, place: Place, law: str) -> Tensor:
    shape = place.shape if law == "all_gather" else place.piece_shape
    entries = rows.reshape(place.length * rows.shape[0], *_others(place))
    return entries.narrow(0, 0, shape[place.dim]).movedim(0, place.dim).contiguous()


def _others(place: Place) -> tuple[int, ...]:
    return place.shape[: place.dim] + place.shape[place.dim + 1 :]


def filled_up(x: Tensor, dim: int, length: int) -> Tensor:
    """The tensor with zeros behind it, so that it is that long."""
    missing = length - x.shape[dim]
    return functional.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x
