"""Sharded params as a loss sees them: gathered, differentiably, in few collectives.

    "step"         g = unshardᵀ Σₘ ∇Lₘ(unshard(p))
    "microbatch"   g = Σₘ unshardᵀ ∇Lₘ(unshard(p))

p are the pieces that a rank keeps, and g their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from purestep import tree
from purestep.axis.collectives import pvary
from purestep.axis.order import note
from purestep.axis.protocol import Axis, Gather
from purestep.axis.rows import sharded, side_by_side, summed_over
from purestep.tree.shard import Place, is_shard, own
from purestep.types import Params, Tree


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


def filled(
    tree_: Tree,
    leaves: Sequence[Tensor],
    places: Mapping[int, Place],
    check: Callable[[bool], None] = lambda together: None,
) -> Tree:
    """The tree of these leaves without ``Shard`` nodes, some of them gathered."""
    leaves = [*leaves]
    wholes = gathered([leaves[at] for at in places], [*places.values()], check)
    for at, one in zip(places, wholes, strict=True):
        leaves[at] = one
    return bare(tree.unflatten(tree.flatten(tree_)[1], leaves))


def bare(tree_: Tree, but: Collection[Axis] = ()) -> Tree:
    """The tree with the piece in the place of each ``Shard``, but for those over these axes.

    >>> import torch
    >>> from purestep import LocalAxis, Shard
    >>> bare({"w": Shard(torch.ones(2), LocalAxis(), (2,))})
    {'w': tensor([1., 1.])}
    """

    def is_leaf(node: Any) -> bool:
        return is_shard(node) and node.axis not in but

    nodes, structure = tree.flatten(tree_, is_leaf=is_leaf)
    return tree.unflatten(structure, [node.piece if is_leaf(node) else node for node in nodes])


def gathered(
    pieces: Sequence[Tensor], places: Sequence[Place], check: Callable[[bool], None]
) -> list[Tensor]:
    """The whole tensors, differentiably: together, or one by one where a transform looks on."""
    check(together := tree.eager())
    if together:
        gather: Callable[..., Sequence[Tensor]] = _Gather.apply
        return [*gather(tuple(places), *pieces)]
    pairs = zip(pieces, places, strict=True)
    return [side_by_side("all_gather", [x], [place])[0] for x, place in pairs]


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
    note(law, places)
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
        made = side_by_side(law, [tensors[at] for at in batch], [places[at] for at in batch])
        for at, result in zip(batch, made, strict=True):
            results[at] = result
    return tuple(results)
