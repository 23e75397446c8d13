"""Where sharded params are gathered: for a step, for each microbatch, or by the loss itself.

    "step"         g = unshardᵀ Σₘ ∇Lₘ(unshard(p))
    "microbatch"   g = Σₘ unshardᵀ ∇Lₘ(unshard(p))

p are the pieces that a rank keeps, and g their gradients. Blocks of leaves are scattered as soon as
their gradients are there. All ranks gather and scatter together, so that one with fewer
microbatches joins the others with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from purestep import tree
from purestep.axis import Axis, Gather, Session, pvary
from purestep.axis.rows import sharded, side_by_side, summed_over
from purestep.axis.session import OwnPrograms
from purestep.checks import is_new
from purestep.modes import ReverseModes
from purestep.reverse import Beside, Inputs, Reverse, Sums
from purestep.sharding.order import Order, note, noted
from purestep.tree.shard import Place, is_shard, own
from purestep.types import Params, Ready, Tree
from purestep.weights import Group


class _Join:
    """A microbatch that this rank does not have while others do."""


JOIN = _Join()


def joined(group: Group, rounds: int) -> Group:
    """The group, and ``JOIN`` until there are so many microbatches.

    >>> len(joined(Group([{"x": torch.ones(2)}], None, None), 3).microbatches)
    3
    """
    microbatches, weights, counted = group
    missing = rounds - len(microbatches)
    if not missing:
        return group
    own_weights: Sequence[Any] = weights or [None] * len(microbatches)
    given = [*own_weights, *[_no_token()] * missing]
    return Group([*microbatches, *[JOIN] * missing], given, counted)


def per_microbatch(modes: ReverseModes, ranks: Session) -> ReverseModes:
    """Each mode, at params that are gathered for one microbatch, and gradients in pieces again."""
    return ReverseModes(*(partial(_at_wholes, mode, ranks) for mode in modes))


def _at_wholes(
    mode: Reverse, ranks: Session, inputs: Inputs, sums: Sums, ready: Ready | None
) -> Beside:
    places = tree.spread(inputs.structure)
    apart = {at: place for at, place in enumerate(places) if place}
    if not apart and inputs.microbatch is not JOIN:
        return mode(inputs, sums, ready)
    params = filled(tree.unflatten(inputs.structure, inputs.leaves), inputs.leaves, apart)
    wholes, structure = tree.flatten(params)
    here = Sums([None] * len(wholes), sums.dtypes)
    take, pieces_of = ranks.scatter(wholes, here.dtypes, apart)
    if inputs.microbatch is JOIN:
        loss = wholes[0].new_zeros((), dtype=tree.accumulation_dtype(wholes[0].dtype))
        beside = Beside(loss, _no_token(), (), reached=False)
    else:
        beside = mode(inputs._replace(leaves=wholes, structure=structure), here, take)
    own_sums = {at: grad for at, grad in enumerate(here.values) if at not in apart}
    for at, grad in {**own_sums, **pieces_of(here.values)}.items():
        before = sums.values[at]
        sums.values[at] = grad if before is None else before if grad is None else before + grad
    return beside


def _no_token() -> Tensor:
    return torch.zeros(1, dtype=torch.bool)


def gathering(
    axis: Axis, gather: Gather, *, follow: bool = True
) -> Callable[[Params, Session], tuple[Params, Order]]:
    """A function from params to what a loss sees of them, and the order in which it gathers.

    ``follow`` the losses where they gather, which a compiler does not.
    """
    compared: dict[int, list[tree.Structure]] = {}  # of each rank, where threads share it

    def gathered_by(params: Params, ranks: Session) -> tuple[Params, Order]:
        wholes, order = whole(params, axis, gather), Order(axis, compare=False)
        if gather == "loss" and follow and isinstance(ranks, OwnPrograms):
            new = is_new(compared.setdefault(ranks.rank, []), params)
            wholes, order = noted(wholes, axis, compare=new)
        ranks.begin()
        return wholes, order

    return gathered_by


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
