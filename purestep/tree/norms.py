"""Sums over all leaves of a tree, and of shards over their ranks: dtypes, norms, finiteness."""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from purestep import torch_private
from purestep.tree import foreach
from purestep.tree.attributes import get_dtype
from purestep.tree.shard import ShardSpecs, zero_padding
from purestep.tree.spec import flatten, shard_specs
from purestep.tree.tracing import (
    concrete_scalar,
    is_plain_eager,
    leaves_require_grad,
    may_be_differentiated,
)
from purestep.types import Tree

SMALL_LEAF = 4096
"""Leaves of fewer elements, on average, are concatenated: a kernel call for each costs more."""

LeavesFn: TypeAlias = Callable[[list[Tensor]], Tensor]
"""Computes a scalar of some leaves."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which values of ``dtype`` are summed: int64, or at least float32.

    int64 is for bool and integers. Complex values are summed in complex64 at least.

    >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.bool)
    (torch.float32, torch.int64)
    """
    if dtype in (torch.float32, torch.float64):
        return dtype
    if dtype.is_floating_point or dtype.is_complex:
        return torch.promote_types(dtype, torch.float32)
    return torch.int64


def widen(x: Tensor) -> Tensor:
    """Returns a tensor in the dtype in which it is summed; the tensor itself if it has that.

    >>> widen(torch.ones(1, dtype=torch.bfloat16)), widen(torch.tensor(True))
    (tensor([1.]), tensor(1))
    """
    dtype = accumulation_dtype(x.dtype)
    # A cast that changes nothing takes as long as a small operation, at each microbatch.
    return x if x.dtype == dtype else x.to(dtype)


def global_norm(tree: Tree) -> Tensor:
    """Returns ‖tree‖₂ over all leaves; for a ``Shard``, over all ranks of its axis.

    It is a scalar in float32 at least, and 0 without leaves. Its gradient at zero is zero. Leaves
    are floating-point; in a tree without a ``Shard``, some may be complex. With a ``Shard`` it is a
    collective: each rank of the axis calls it.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    tensor(5.)
    >>> global_norm([torch.full((2**14,), 3.0), torch.full((2**14,), 4.0)])
    tensor(640.)
    """
    leaves, spec = flatten(tree)
    if not leaves:
        return torch.zeros(())
    # ``map`` and ``reduce`` here and below: every step takes this norm, and loops take longer.
    dtypes = frozenset(map(get_dtype, leaves))
    common_dtype = functools.reduce(torch.promote_types, dtypes)
    dtype = accumulation_dtype(common_dtype)
    specs = shard_specs(spec)
    if specs:
        total = _sum_over_axes(_sum_of_squares, leaves, specs)
        return _sqrt(total).to(dtype)
    if leaves[0].is_cpu:
        # By map: a step takes this norm of all gradients.
        num_elements = sum(map(Tensor.numel, leaves))
        if num_elements < SMALL_LEAF * len(leaves):
            leaves = [torch.cat([*map(torch.flatten, leaves)])]
    # A fused kernel takes no complex dtype for real leaves, which may be beside complex ones.
    # As arguments of is_plain_eager, the leaves would be flattened once more.
    if dtype.is_complex or not is_plain_eager() or leaves_require_grad(leaves):
        leaf_norms = [_norm(leaf) for leaf in leaves]
        return _norm(torch.stack(leaf_norms))
    columns = [leaves]
    if len(dtypes) > 1:
        columns = foreach.split_by_kind(leaves)
    norms: list[Tensor] = []
    for column in columns:
        norms += foreach.norm(column, 2, dtype=dtype)
    if len(norms) == 1:
        return norms[0]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _sum_over_axes(
    compute: LeavesFn, leaves: list[Tensor], specs: ShardSpecs
) -> Tensor:
    """Returns the sum of ``compute``, a scalar of a list of leaves, over all leaves and all shards.

    ``compute`` is called once for each set of axes, with the padding of shards at 0, and its result
    is summed over them by psum. All ranks run these collectives in one order.
    """
    # Not a dict: torch 2.11's compiler hashes no axes.
    kinds: list[tuple[Any, ...]] = []
    groups: list[list[Tensor]] = []
    for leaf, shard_spec in zip(leaves, specs, strict=True):
        axes: tuple[Any, ...] = ()
        if shard_spec is not None:
            axes = shard_spec.axes
        leaf = zero_padding(leaf, shard_spec)
        # Not by ``index``: dynamo cannot ask whether two tuples are the same object.
        for position, other_axes in enumerate(kinds):
            if other_axes == axes:
                groups[position].append(leaf)
                break
        else:
            kinds.append(axes)
            groups.append([leaf])
    terms = []
    for axes, group in zip(kinds, groups, strict=True):
        term = compute(group)
        for axis in axes:
            term = axis.apply("psum", term)
        terms.append(term)
    return torch.stack(terms).sum()


def _sum_of_squares(leaves: list[Tensor]) -> Tensor:
    """Returns ‖leaves‖² as a float64 scalar; each square is computed in float32 at least.

    A norm is not squared, because its root is rounded.
    """
    squares = []
    for leaf in leaves:
        wide = widen(leaf)
        square = torch.sum(wide * wide, dtype=torch.float64)
        squares.append(square)
    return torch.stack(squares).sum()


def _sqrt(total: Tensor) -> Tensor:
    """Returns √total of a scalar; at zero it has the derivative 1.

    So the derivative of √Σx² is 0 at x = 0, and not NaN.
    """
    value = concrete_scalar(total)
    if value is not None and value >= 0 and not may_be_differentiated([total]):
        # MKL's root, which torch takes, is not correctly rounded.
        return total.new_tensor(math.sqrt(value))
    is_positive = total > 0
    safe = torch.where(is_positive, total, 1)
    return torch.where(is_positive, safe.sqrt(), total)


def _norm(x: Tensor) -> Tensor:
    """Returns ‖x‖₂ in float32 at least, with derivatives of zero at zero.

    torch's second derivative is NaN there.
    """
    dtype = accumulation_dtype(x.dtype)
    has_nonzero = (x != 0).any()
    safe = torch.where(has_nonzero, x, 1)
    norm = torch.linalg.vector_norm(safe, dtype=dtype)
    return torch.where(has_nonzero, norm, 0)


def all_finite(tree: Tree) -> Tensor:
    """Returns whether all leaves are finite, as a scalar; of a ``Shard``, on all its axis's ranks.

    It is True without leaves. No leaf may be complex. On a device, leaves must be floating-point,
    as integers and bools have no norm. With a ``Shard`` it is a collective: each rank of the axis
    calls it.

    >>> all_finite({"w": torch.tensor([1.0, float("nan")])}), all_finite({})
    (tensor(False), tensor(True))
    """
    leaves, spec = flatten(tree)
    specs = shard_specs(spec)
    if not specs:
        return _leaves_finite(leaves)
    num_nonfinite = _sum_over_axes(_has_nonfinite, leaves, specs)
    return num_nonfinite == 0


def _has_nonfinite(leaves: list[Tensor]) -> Tensor:
    """Returns a scalar that ranks can sum: 1 if any leaf is not finite, else 0."""
    is_nonfinite = _leaves_finite(leaves).logical_not()
    return is_nonfinite.to(torch.int64)


def _leaves_finite(leaves: list[Tensor]) -> Tensor:
    device = leaves[0].device if leaves else None
    leaves = [leaf for leaf in leaves if leaf.numel()]
    if not leaves:
        return torch.tensor(True, device=device)
    parts = []
    if leaves[0].is_cpu or not is_plain_eager() or leaves_require_grad(leaves):
        # The extremes are finite if all values are, and nothing is written to find them.
        for leaf in leaves:
            least, largest = _extremes(leaf)
            parts.append(least.isfinite())
            parts.append(largest.isfinite())
        return torch.stack(parts).all()
    for column in foreach.split_by_kind(leaves):
        norms = torch.stack(foreach.norm(column, math.inf))
        is_finite = norms < math.inf  # NaN is not less.
        parts.append(is_finite.all())
    if len(parts) == 1:
        return parts[0]
    return torch.stack(parts).all()


def _extremes(leaf: Tensor) -> tuple[Tensor, Tensor]:
    # torch 2.11 has no derivative of aminmax in forward mode.
    if torch_private.forward_level() >= 0:
        return leaf.amin(), leaf.amax()
    return torch.aminmax(leaf)
