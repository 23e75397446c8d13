"""What many leaves come to: the norm of a tree, and whether all of it is finite.

Leaves that are spread over an axis count with the pieces of all its ranks.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from purestep import pieces, torch_internals
from purestep.tree.alike import accumulation_dtype
from purestep.tree.memory import number_at_hand
from purestep.tree.observers import any_requires_grad, differentiated, eager
from purestep.tree.structure import flatten
from purestep.types import Tree

SMALL = 4096
"""Leaves of fewer elements are joined where each would cost a kernel's call of its own."""


def global_norm(tree: Tree) -> Tensor:
    """‖tree‖₂ over all its leaves, with a zero gradient at zero; of a ``Shard`` over its axis, too.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    tensor(5.)
    """
    leaves, structure = flatten(tree)
    return norm_of(leaves, pieces.spread(structure))


def norm_of(leaves: list[Tensor], spread: pieces.Spread) -> Tensor:
    """``global_norm`` of a tree's leaves, of which ``spread`` tells over what they are spread."""
    if spread:
        return _norm_of_pieces(leaves, spread)
    if not leaves:
        return torch.zeros(())
    parts = _joined(leaves)
    if not eager() or any_requires_grad(parts):
        return _norm(torch.stack([_norm(part) for part in parts]))
    norms = _norms(parts)
    norm: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _norm_of_pieces(leaves: list[Tensor], spread: pieces.Spread) -> Tensor:
    """The root of the sum of all squares, of which those of pieces are summed over their axes."""
    squares = []
    for axis, parts in _by_axis(leaves, spread):
        square = torch.stack([_square(part) for part in _joined(parts)]).sum()
        squares.append(square if axis is None else axis.apply("psum", square))
    root = _root(torch.stack(squares).sum())
    dtypes = [accumulation_dtype(leaf.dtype) for leaf in leaves]
    return root.to(functools.reduce(torch.promote_types, dtypes))


def _root(total: Tensor) -> Tensor:
    """√total, whose derivative at zero is zero."""
    known = number_at_hand(total)
    if known is not None and known >= 0 and not differentiated([total]):
        # MKL's root, which torch takes, is not correctly rounded.
        return total.new_tensor(math.sqrt(known))
    return torch.where(total > 0, torch.where(total > 0, total, 1).sqrt(), total)


def _square(x: Tensor) -> Tensor:
    """‖x‖² in float64, and not by way of its root, which rounds."""
    x = x.to(accumulation_dtype(x.dtype))
    return torch.sum(x * x, dtype=torch.float64)


def _by_axis(leaves: list[Tensor], spread: pieces.Spread) -> list[tuple[Any, list[Tensor]]]:
    """The leaves that are spread over each axis, with zeros where pieces are filled up; in one order on all ranks."""
    found: dict[Any, list[Tensor]] = {}
    for leaf, place in zip(leaves, spread, strict=True):
        axis = None if place is None else place.axis
        found.setdefault(axis, []).append(pieces.own(leaf, place))
    return list(found.items())


def _norm(x: Tensor) -> Tensor:
    """‖x‖₂, all of whose derivatives are zero at zero: those of torch's are NaN from the second one on."""
    dtype = accumulation_dtype(x.dtype)
    held = (x != 0).any()
    norm = torch.linalg.vector_norm(torch.where(held, x, 1), dtype=dtype)
    return torch.where(held, norm, 0)


def _joined(leaves: list[Tensor]) -> list[Tensor]:
    """The leaves, with those that are too small to repay a call of their own in one piece for each dtype."""
    sizes = [leaf.numel() for leaf in leaves]
    if sum(sizes) <= 4 * SMALL and len({leaf.dtype for leaf in leaves}) == 1:
        return [_in_one(leaves)]
    small = [leaf for leaf, size in zip(leaves, sizes, strict=True) if size < SMALL]
    large = [leaf for leaf, size in zip(leaves, sizes, strict=True) if size >= SMALL]
    for dtype in dict.fromkeys([leaf.dtype for leaf in small]):
        large.append(_in_one([leaf for leaf in small if leaf.dtype == dtype]))
    return large


def _in_one(leaves: list[Tensor]) -> Tensor:
    if eager():
        return torch_internals.joined(leaves)
    return torch.cat([leaf.reshape(-1) for leaf in leaves])


def _norms(leaves: list[Tensor]) -> list[Tensor]:
    """The norm of each leaf, by one kernel for all of a dtype."""
    if len(leaves) == 1:
        return [torch.linalg.vector_norm(leaves[0], dtype=accumulation_dtype(leaves[0].dtype))]
    dtypes = {leaf.dtype for leaf in leaves}
    if len(dtypes) > 1:
        return [norm for leaf in leaves for norm in _norms([leaf])]
    return list(torch_internals.foreach_norm(leaves, 2, dtype=accumulation_dtype(*dtypes)))


def all_finite(tree: Tree) -> Tensor:
    """Whether no leaf holds an infinity or a NaN; of a ``Shard``, on no rank of its axis.

    >>> all_finite({"w": torch.tensor([1.0, float("nan")])})
    tensor(False)
    """
    leaves, structure = flatten(tree)
    return are_finite(leaves, pieces.spread(structure))


def are_finite(leaves: list[Tensor], spread: pieces.Spread) -> Tensor:
    """``all_finite`` of a tree's leaves, of which ``spread`` tells over what they are spread."""
    if spread:
        broken = []
        for axis, parts in _by_axis(leaves, spread):
            here = (~are_finite(parts, ())).to(torch.int64)
            broken.append(here if axis is None else axis.apply("psum", here))
        return torch.stack(broken).sum() == 0
    # Both ends are as finite as all that lies between, and are found without writing anything.
    ends = [end for leaf in leaves if leaf.numel() for end in torch.aminmax(leaf)]
    if not ends:
        return torch.tensor(True, device=leaves[0].device if leaves else None)
    return torch.stack([end.isfinite() for end in ends]).all()
