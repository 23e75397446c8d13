"""Sharded params as a loss sees them: gathered, differentiably, in few collectives.

    "step"         g = unshardᵀ Σₘ ∇Lₘ(unshard(p))
    "microbatch"   g = Σₘ unshardᵀ ∇Lₘ(unshard(p))

p are the pieces that a rank keeps, and g their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from purestep import tree
from purestep.axis.base import Axis
from purestep.axis.collectives import pvary
from purestep.sharding.buckets import Buckets, at_once
from purestep.sharding.layout import by_law, sharded, sum_axes
from purestep.tree.shard import Place, is_shard, own
from purestep.types import Gather, Params, Ready, Tree


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
    for at, (leaf, over) in enumerate(zip(leaves, sum_axes(places, axis), strict=True)):
        leaf = own(leaf, places[at])
        leaves[at] = leaf if over is None else pvary(leaf, over)
    if gather == "step":
        return filled(params, leaves, inside)
    # Not a set: torch 2.11's compiler hashes no axes.
    return bare(
        tree.unflatten(structure, leaves), [place.axis for place in inside.values()]
    )


def filled(tree_: Tree, leaves: Sequence[Tensor], places: Mapping[int, Place]) -> Tree:
    """The tree of these leaves without ``Shard`` nodes, some of them gathered, differentiably.

    Together, or one by one where a transform looks on.
    """
    leaves = [*leaves]
    pieces, each = [leaves[at] for at in places], [*places.values()]
    if _together(each):
        gather: Callable[..., Sequence[Tensor]] = _Gather.apply
        wholes = gather(each, *pieces)
    else:
        wholes = [
            by_law("all_gather", x, place)
            for x, place in zip(pieces, each, strict=True)
        ]
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
    return tree.unflatten(
        structure, [node.piece if is_leaf(node) else node for node in nodes]
    )


class _Gather(Function):
    """One node for all, so that a rank whose loss reaches a single leaf scatters the others too."""

    @staticmethod
    def forward(ctx: Any, places: list[Place], *pieces: Tensor) -> tuple[Tensor, ...]:
        ctx.places, ctx.pieces = places, pieces
        return tuple(at_once("all_gather", pieces, places))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        terms = []
        for each, piece in zip(cotangents, ctx.pieces, strict=True):
            # A step that sums gradients in another dtype reduces them in it as well.
            terms.append(each.to((piece.is_leaf and piece.grad_dtype) or piece.dtype))
        return None, *scattered(terms, ctx.places)


def scattered(wholes: Sequence[Tensor], places: Sequence[Place]) -> list[Tensor]:
    """This rank's pieces of the sums over ranks: together, or one by one under a transform."""
    _, finish = scatter(
        wholes, [each.dtype for each in wholes], dict(enumerate(places))
    )
    return finish([*wholes])


def scatter(
    wholes: Sequence[Tensor], dtypes: Sequence[torch.dtype], places: Mapping[int, Place]
) -> tuple[Ready | None, Callable[[list[Tensor]], list[Tensor]]]:
    """What takes gradients as they come, and what makes pieces of all, for these places.

    Buckets of gradients leave while the backward pass runs; None where a transform looks on.
    """
    if places and _together([*places.values()], wholes):
        leaves = {at: wholes[at] for at in places}
        buckets = Buckets(next(iter(places.values())).axis, leaves, dtypes, places, {})
        return buckets.ready, buckets.finish

    def finish(grads: list[Tensor]) -> list[Tensor]:
        for at, place in places.items():
            grads[at] = by_law("psum_scatter", grads[at], place)
        return grads

    return None, finish


def _together(places: Sequence[Place], *looked_at: Tree) -> bool:
    return tree.eager(*looked_at) and all(place.axis.own_programs for place in places)
