"""Sums over the leaves of a tree: their dtype, norms, finiteness. Shards count together."""

import functools
import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from purestep import torch_private
from purestep.tree import foreach
from purestep.tree.shard import ShardSpecs, zero_padding
from purestep.tree.spec import flatten, shard_specs
from purestep.tree.tracing import concrete_scalar, is_plain_eager, may_be_differentiated
from purestep.types import Tree

SMALL_LEAF = 4096
"""Leaves of fewer elements, on average, are joined: each would cost a call of a kernel."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which values of ``dtype`` are summed: int64, or at least float32.

    >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.bool)
    (torch.float32, torch.int64)
    """
    if dtype in (torch.float32, torch.float64):
        return dtype
    number = dtype.is_floating_point or dtype.is_complex
    return torch.promote_types(dtype, torch.float32) if number else torch.int64


def global_norm(tree: Tree) -> Tensor:
    """Returns ‖tree‖₂ over all leaves; for a ``Shard``, over all ranks of its axis.

    Its gradient at zero is zero.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    tensor(5.)
    >>> global_norm([torch.full((2**14,), 3.0), torch.full((2**14,), 4.0)])
    tensor(640.)
    """
    leaves, structure = flatten(tree)
    if not leaves:
        return torch.zeros(())
    dtypes = {*map(attrgetter("dtype"), leaves)}
    dtype = accumulation_dtype(functools.reduce(torch.promote_types, dtypes))
    if places := shard_specs(structure):
        return _sqrt(_sum_over_axes(_sum_of_squares, leaves, places)).to(dtype)
    if leaves[0].is_cpu and sum(map(Tensor.numel, leaves)) < SMALL_LEAF * len(leaves):
        leaves = [torch.cat([*map(torch.flatten, leaves)])]
    if not is_plain_eager(leaves):
        return _norm(torch.stack([_norm(leaf) for leaf in leaves]))
    norms: list[Tensor] = []
    for column in [leaves] if len(dtypes) == 1 else foreach.split_by_kind(leaves):
        norms += foreach.norm(column, 2, dtype=dtype)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _sum_over_axes(
    value: Callable[..., Tensor], leaves: list[Tensor], places: ShardSpecs
) -> Tensor:
    """Σ ``value`` of the leaves; of pieces, over their axes, in one order on all ranks."""
    axes: list[
        Any
    ] = []  # Not the keys of a dict: torch 2.11's compiler hashes no axes.
    parts_of: list[list[Tensor]] = []
    for leaf, place in zip(leaves, places, strict=True):
        axis = place and place.axis
        if axis not in axes:
            axes.append(axis)
            parts_of.append([])
        parts_of[axes.index(axis)].append(zero_padding(leaf, place))
    terms = []
    for axis, parts in zip(axes, parts_of, strict=True):
        here = value(parts)
        terms.append(here if axis is None else axis.apply("psum", here))
    return torch.stack(terms).sum()


def _sum_of_squares(leaves: list[Tensor]) -> Tensor:
    """‖leaves‖² in float64, and not by way of its root, which rounds."""
    wide = [x.to(accumulation_dtype(x.dtype)) for x in leaves]
    return torch.stack([torch.sum(x * x, dtype=torch.float64) for x in wide]).sum()


def _sqrt(total: Tensor) -> Tensor:
    """√total, whose derivative at zero is zero."""
    known = concrete_scalar(total)
    if known is not None and known >= 0 and not may_be_differentiated([total]):
        # MKL's root, which torch takes, is not correctly rounded.
        return total.new_tensor(math.sqrt(known))
    return torch.where(total > 0, torch.where(total > 0, total, 1).sqrt(), total)


def _norm(x: Tensor) -> Tensor:
    """‖x‖₂, all of whose derivatives are zero at zero: torch's are NaN from the second one on."""
    dtype = accumulation_dtype(x.dtype)
    held = (x != 0).any()
    norm = torch.linalg.vector_norm(torch.where(held, x, 1), dtype=dtype)
    return torch.where(held, norm, 0)


def all_finite(tree: Tree) -> Tensor:
    """Returns whether all leaves are finite; for a ``Shard``, on all ranks of its axis.

    >>> all_finite({"w": torch.tensor([1.0, float("nan")])}), all_finite({})
    (tensor(False), tensor(True))
    """
    leaves, structure = flatten(tree)
    if not (places := shard_specs(structure)):
        return _leaves_finite(leaves)
    return (
        _sum_over_axes(
            lambda parts: (~_leaves_finite(parts)).to(torch.int64), leaves, places
        )
        == 0
    )


def _leaves_finite(leaves: list[Tensor]) -> Tensor:
    leaves = [leaf for leaf in leaves if leaf.numel()]
    if not leaves:
        return torch.tensor(True)
    if leaves[0].is_cpu or not is_plain_eager(leaves):
        # Both ends are as finite as all that lies between, and are found without writing anything.
        return torch.stack(
            [end.isfinite() for leaf in leaves for end in _extremes(leaf)]
        ).all()
    parts = []
    for column in foreach.split_by_kind(leaves):
        largest = torch.stack(foreach.norm(column, math.inf))
        parts.append((largest < math.inf).all())  # NaN is not less
    return parts[0] if len(parts) == 1 else torch.stack(parts).all()


def _extremes(leaf: Tensor) -> tuple[Tensor, Tensor]:
    # torch 2.11 has no derivative of aminmax in forward mode.
    if torch_private.forward_level() >= 0:
        return leaf.amin(), leaf.amax()
    return torch.aminmax(leaf)
