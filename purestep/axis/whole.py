"""Sharded leaves: gathered for a loss, and their gradients scattered, in few collectives.

A leaf in n pieces is n rows, one for each rank: its entries along the dimension that is cut, filled
up with zeros. The rows of small leaves travel side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from purestep import tree
from purestep.axis.collectives import all_gather, psum_scatter, pvary, within
from purestep.axis.protocol import Axis, Gather
from purestep.tree.shard import Place, Spread, is_shard, own, own_programs
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
    inside = {at: place for at, place in enumerate(places) if place and within(place.axis, axis)}
    for at, leaf in enumerate(leaves):
        over = summed_over(places[at], axis)
        leaf = own(leaf, places[at])
        leaves[at] = leaf if over is None else pvary(leaf, over)
    if gather == "step":
        return filled(params, leaves, inside)
    return filled(params, leaves, {}, but={place.axis for place in inside.values()})


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


def filled(
    tree_: Tree, leaves: list[Tensor], places: Mapping[int, Place], but: Collection[Axis] = ()
) -> Tree:
    """The tree of these leaves without ``Shard`` nodes, some of them gathered.

    ``but``: ``Shard`` nodes over these axes stay.
    """
    leaves = [*leaves]
    wholes = gathered([leaves[at] for at in places], [*places.values()])
    for at, one in zip(places, wholes, strict=True):
        leaves[at] = one
    return tree.unflatten(tree.flatten(bare(tree_, but))[1], leaves)


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
    """The whole tensors, differentiably; where ranks run their own programs, in few all-gathers."""
    return _together(pieces, places, _gathered_by_law, _Gather)


def scattered(wholes: Sequence[Tensor], places: Sequence[Place]) -> list[Tensor]:
    """This rank's pieces of the sums over ranks: the transpose of ``gathered``."""
    return _together(wholes, places, _scattered_by_law, _Scatter)


def _gathered_by_law(piece: Tensor, place: Place) -> Tensor:
    row = filled_up(piece, place.dim, place.length)
    # Pieces are filled up behind their last entry, and all that are shorter come last.
    rows: Tensor = all_gather(row, place.axis, place.dim, tiled=True)
    return rows.narrow(place.dim, 0, place.shape[place.dim]).contiguous()


def _scattered_by_law(terms: Tensor, place: Place) -> Tensor:
    rows = filled_up(terms, place.dim, place.length * place.axis.size)
    piece: Tensor = psum_scatter(rows, place.axis, place.dim, tiled=True)
    return piece.narrow(place.dim, 0, place.piece_shape[place.dim])


def _together(
    tensors: Sequence[Tensor],
    places: Sequence[Place],
    by_law: Callable[[Tensor, Place], Tensor],
    node: type[Function],
) -> list[Tensor]:
    """All tensors in one node of the graph; under transforms, one by one.

    One node, so that a rank whose loss reaches a single leaf takes part in all reduce-scatters.
    """
    results: list[Any] = list(tensors)
    inside = []
    for at, (tensor, place) in enumerate(zip(tensors, places, strict=True)):
        if own_programs(place.axis) and tree.eager():
            inside.append(at)
        else:
            results[at] = by_law(tensor, place)
    if inside:
        apply: Callable[..., tuple[Tensor, ...]] = node.apply
        made = apply(tuple(places[at] for at in inside), *(tensors[at] for at in inside))
        for at, result in zip(inside, made, strict=True):
            results[at] = result
    return results


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, places: tuple[Place, ...], *pieces: Tensor) -> tuple[Tensor, ...]:
        ctx.places, ctx.pieces = places, pieces
        return _carried(pieces, places, _all_gather)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        apply: Callable[..., Any] = _Scatter.apply
        terms = []
        for each, piece in zip(cotangents, ctx.pieces, strict=True):
            # A step that sums gradients in another dtype reduces them in it as well.
            dtype = (piece.is_leaf and piece.grad_dtype) or piece.dtype
            terms.append((each.to_dense() if each.is_sparse else each).to(dtype))
        return None, *apply(ctx.places, *terms)


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, places: tuple[Place, ...], *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.places = places
        return _carried(wholes, places, _reduce_scatter)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        apply: Callable[..., Any] = _Gather.apply
        return None, *apply(ctx.places, *cotangents)


def _carried(
    tensors: Sequence[Tensor],
    places: Sequence[Place],
    collective: Callable[[list[Tensor], list[Place]], list[Tensor]],
) -> tuple[Tensor, ...]:
    """Batches of one axis and dtype and of at most ``bucket_bytes``, last first."""
    batches: list[list[int]] = []
    latest: dict[Any, tuple[list[int], int]] = {}
    for at in reversed(range(len(tensors))):
        axis, dtype = places[at].axis, tensors[at].dtype
        size = math.prod(places[at].shape) * dtype.itemsize
        batch, held = latest.get((axis, dtype), ([], 0))
        if not batch or held + size > axis.bucket_bytes:
            batch, held = [], 0
            batches.append(batch)
        batch.append(at)
        latest[axis, dtype] = batch, held + size
    results = [*tensors]
    for batch in batches:
        made = collective([tensors[at] for at in batch], [places[at] for at in batch])
        for at, result in zip(batch, made, strict=True):
            results[at] = result
    return tuple(results)


def _all_gather(pieces: list[Tensor], places: list[Place]) -> list[Tensor]:
    own_rows = [_row(piece, place) for piece, place in zip(pieces, places, strict=True)]
    row = own_rows[0] if len(own_rows) == 1 else torch.cat(own_rows)
    rows = places[0].axis.apply("all_gather", row) if row.numel() else row.new_empty(1, 0)
    blocks = rows.split([_width(place) for place in places], 1)
    return [_from_rows(block, place) for block, place in zip(blocks, places, strict=True)]


def _reduce_scatter(wholes: list[Tensor], places: list[Place]) -> list[Tensor]:
    blocks = [_rows(one, place) for one, place in zip(wholes, places, strict=True)]
    rows = blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)
    row = places[0].axis.apply("psum_scatter", rows) if rows.numel() else rows.new_empty(0)
    parts = row.split([_width(place) for place in places])
    return [_from_row(part, place) for part, place in zip(parts, places, strict=True)]


def _width(place: Place) -> int:
    return place.length * math.prod(_others(place))


def _others(place: Place) -> tuple[int, ...]:
    return place.shape[: place.dim] + place.shape[place.dim + 1 :]


def _row(piece: Tensor, place: Place) -> Tensor:
    return filled_up(piece.movedim(place.dim, 0), 0, place.length).reshape(-1)


def _rows(terms: Tensor, place: Place) -> Tensor:
    rows = filled_up(terms.movedim(place.dim, 0), 0, place.length * place.axis.size)
    return rows.reshape(place.axis.size, _width(place))


def _from_row(row: Tensor, place: Place) -> Tensor:
    piece = row.view(place.length, *_others(place))
    return piece.narrow(0, 0, place.piece_shape[place.dim]).movedim(0, place.dim).contiguous()


def _from_rows(rows: Tensor, place: Place) -> Tensor:
    entries = rows.reshape(place.axis.size * place.length, *_others(place))
    return entries.narrow(0, 0, place.shape[place.dim]).movedim(0, place.dim).contiguous()


def filled_up(x: Tensor, dim: int, length: int) -> Tensor:
    """The tensor with zeros behind it, so that it is that long."""
    missing = length - x.shape[dim]
    return functional.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x
