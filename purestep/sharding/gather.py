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
from purestep.sharding.buckets import GradBuckets, run_in_buckets
from purestep.sharding.layout import collective_on_shard, reduce_axes, shards_over
from purestep.tree.shard import ShardSpec, is_shard, zero_padding
from purestep.types import Gather, GradHook, Params, Tree


def params_for_loss(params: Params, axis: Axis, gather: Gather) -> Params:
    """The params as ``accumulate`` sees them: each rank's own, gathered where ``gather`` says.

    With "step", a ``Shard`` over the axis is gathered here; with the others it stays. One over an
    axis that does not split tokens (tensor parallelism) becomes its piece.
    """
    leaves, structure = tree.flatten(params)
    places = tree.shard_specs(structure)
    if not places:
        return pvary(params, axis)
    inside = shards_over(places, axis)
    for at, (leaf, over) in enumerate(
        zip(leaves, reduce_axes(places, axis), strict=True)
    ):
        leaf = zero_padding(leaf, places[at])
        leaves[at] = leaf if over is None else pvary(leaf, over)
    if gather == "step":
        return gather_shards(params, leaves, inside)
    # Not a set: torch 2.11's compiler hashes no axes.
    return strip_shards(
        tree.unflatten(structure, leaves), [place.axis for place in inside.values()]
    )


def gather_shards(
    tree_: Tree, leaves: Sequence[Tensor], places: Mapping[int, ShardSpec]
) -> Tree:
    """The tree of these leaves without ``Shard`` nodes, some of them gathered, differentiably.

    Together, or one by one where a transform looks on.
    """
    leaves = [*leaves]
    pieces, each = [leaves[at] for at in places], [*places.values()]
    if _can_bucket(each):
        gather: Callable[..., Sequence[Tensor]] = _GatherFunction.apply
        wholes = gather(each, *pieces)
    else:
        wholes = [
            collective_on_shard("all_gather", x, place)
            for x, place in zip(pieces, each, strict=True)
        ]
    for at, one in zip(places, wholes, strict=True):
        leaves[at] = one
    return strip_shards(tree.unflatten(tree.flatten(tree_)[1], leaves))


def strip_shards(tree_: Tree, but: Collection[Axis] = ()) -> Tree:
    """The tree with the piece in the place of each ``Shard``, but for those over these axes.

    >>> import torch
    >>> from purestep import LocalAxis, Shard
    >>> strip_shards({"w": Shard(torch.ones(2), LocalAxis(), (2,))})
    {'w': tensor([1., 1.])}
    """

    def is_leaf(node: Any) -> bool:
        return is_shard(node) and node.axis not in but

    nodes, structure = tree.flatten(tree_, is_leaf=is_leaf)
    return tree.unflatten(
        structure, [node.local if is_leaf(node) else node for node in nodes]
    )


class _GatherFunction(Function):
    """One node for all, so that a rank whose loss reaches a single leaf scatters the others too."""

    @staticmethod
    def forward(
        ctx: Any, places: list[ShardSpec], *pieces: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.places, ctx.pieces = places, pieces
        return tuple(run_in_buckets("all_gather", pieces, places))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        terms = []
        for each, piece in zip(cotangents, ctx.pieces, strict=True):
            # A step that sums gradients in another dtype reduces them in it as well.
            terms.append(each.to((piece.is_leaf and piece.grad_dtype) or piece.dtype))
        return None, *reduce_scatter(terms, ctx.places)


def reduce_scatter(
    wholes: Sequence[Tensor], places: Sequence[ShardSpec]
) -> list[Tensor]:
    """This rank's pieces of the sums over ranks: together, or one by one under a transform."""
    _, finish = make_reduce_scatter(
        wholes, [each.dtype for each in wholes], dict(enumerate(places))
    )
    return finish([*wholes])


def make_reduce_scatter(
    wholes: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    places: Mapping[int, ShardSpec],
) -> tuple[GradHook | None, Callable[[list[Tensor]], list[Tensor]]]:
    """What takes gradients as they come, and what makes pieces of all, for these places.

    Buckets of gradients leave while the backward pass runs; None where a transform looks on.
    """
    if places and _can_bucket([*places.values()], wholes):
        leaves = {at: wholes[at] for at in places}
        buckets = GradBuckets(
            next(iter(places.values())).axis, leaves, dtypes, places, {}
        )
        return buckets.ready, buckets.finish

    def finish(grads: list[Tensor]) -> list[Tensor]:
        for at, place in places.items():
            grads[at] = collective_on_shard("psum_scatter", grads[at], place)
        return grads

    return None, finish


def _can_bucket(places: Sequence[ShardSpec], *looked_at: Tree) -> bool:
    return tree.is_plain_eager(*looked_at) and all(
        place.axis.is_multi_program for place in places
    )
