"""Questions about the leaves of a tree, and what many leaves come to.

Code that writes into a buffer, or reads a value on the host, asks here first: does autograd, a
transform of ``torch.func`` or a compiler see it? Sums over leaves know ``Shard``: pieces count with
those of all ranks of their axis.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from purestep import torch_private
from purestep.tree import foreach
from purestep.tree.opaque import tensors_in
from purestep.tree.shard import Spread, own
from purestep.tree.structure import flatten, leaves_of, spread, unflatten
from purestep.types import Tree

SMALL = 4096
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


def eager(*trees: Tree) -> bool:
    """Whether neither a compiler, nor a transform, nor autograd sees what is done with these.

    Only then may a buffer be written to, or a kernel be used that no transform knows.

    >>> eager({"w": torch.ones(2)}), eager(torch.ones(2, requires_grad=True))
    (True, False)
    """
    # Not ``is_compiling``, which is true of every thread while one of them compiles.
    traced = torch.compiler.is_dynamo_compiling() or torch_private.transformed()
    if traced or torch_private.forward_level() >= 0:
        return False
    return not (trees and any_requires_grad(flatten(trees)[0]))


def untransformed(*trees: Tree) -> bool:
    """Whether neither a transform nor autograd sees what is done with these; a compiler may."""
    if torch_private.transformed() or torch_private.forward_level() >= 0:
        return False
    return not (trees and any_requires_grad(flatten(trees)[0]))


def differentiated(leaves: Sequence[Any]) -> bool:
    """Whether anybody may ask for derivatives of these leaves: a ``vmap`` alone does not."""
    if torch_private.forward_level() >= 0:
        return True
    if torch.compiler.is_dynamo_compiling():
        # A compiler cannot ask which transforms there are, nor look below them.
        return torch_private.transformed() or any_requires_grad(leaves)
    if torch_private.transforms_differentiate():
        return True
    return any_requires_grad([below_transforms(leaf) for leaf in leaves])


def below_transforms(leaf: Any) -> Any:
    """The leaf below all wrappers of ``torch.func``."""
    return torch.func.debug_unwrap(leaf) if isinstance(leaf, Tensor) else leaf


def requires_grad(tree: Tree) -> bool:
    """Returns whether autograd follows any leaf, also in mappings that are leaves.

    >>> requires_grad([torch.ones(2), torch.ones(2, requires_grad=True)])
    True
    """
    return any_requires_grad(leaves_of(tree))


def any_requires_grad(leaves: Sequence[Any]) -> bool:
    """``requires_grad`` of a tree's leaves."""
    for leaf in leaves:
        if type(leaf) is Tensor or isinstance(leaf, Tensor):
            if leaf.requires_grad:
                return True
            continue
        has_fields = isinstance(leaf, Mapping) or hasattr(leaf, "__dataclass_fields__")
        if has_fields and any_requires_grad([*tensors_in(leaf)]):
            return True
    return False


def known_to_compilers(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """Leaves that ``torch.func`` differentiates, as views where a compiler traces.

    It does not see that such a leaf itself requires grad. A ``torch.autograd.Function`` of it would
    lose its ``backward`` (pytorch/pytorch#193279).
    """
    if not torch.compiler.is_dynamo_compiling():
        return leaves
    return [leaf.view_as(leaf) for leaf in leaves]


def detached(tree: Tree) -> Tree:
    """Detaches the tensors of a tree; other leaves stay as they are.

    >>> detached({"w": torch.ones(2, requires_grad=True), "name": "w"})
    {'w': tensor([1., 1.]), 'name': 'w'}
    """
    leaves, structure = flatten(tree)
    return unflatten(structure, cut_off(leaves))


def cut_off(leaves: Sequence[Any]) -> list[Any]:
    """``detached`` of a tree's leaves."""
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def at_hand(tensor: Tensor) -> Tensor | None:
    """The values below all wrappers of ``torch.func``; None where the host cannot read them.

    >>> torch.vmap(lambda x: x + at_hand(x).sum())(torch.tensor([1.0, 2.0]))
    tensor([4., 5.])
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    tensor = torch.func.debug_unwrap(tensor)
    return tensor if type(tensor) is Tensor and tensor.is_cpu else None


def number_at_hand(tensor: Tensor) -> float | None:
    """The value of a scalar; None where the host cannot read it, or a ``vmap`` has several."""
    known = at_hand(tensor)
    return None if known is None or known.ndim else known.item()


def brought(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; only the host waits for it, where it could read it too early."""
    return tensor.to(device, non_blocking=device.type != "cpu")


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
    if places := spread(structure):
        return _root(_over_axes(_squares, leaves, places)).to(dtype)
    if leaves[0].is_cpu and sum(map(Tensor.numel, leaves)) < SMALL * len(leaves):
        leaves = [torch.cat([*map(torch.flatten, leaves)])]
    if not eager(leaves):
        return _norm(torch.stack([_norm(leaf) for leaf in leaves]))
    norms: list[Tensor] = []
    for column in [leaves] if len(dtypes) == 1 else foreach.split_by_kind(leaves):
        norms += foreach.norm(column, 2, dtype=dtype)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _over_axes(
    value: Callable[..., Tensor], leaves: list[Tensor], places: Spread
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
        parts_of[axes.index(axis)].append(own(leaf, place))
    terms = []
    for axis, parts in zip(axes, parts_of, strict=True):
        here = value(parts)
        terms.append(here if axis is None else axis.apply("psum", here))
    return torch.stack(terms).sum()


def _squares(leaves: list[Tensor]) -> Tensor:
    """‖leaves‖² in float64, and not by way of its root, which rounds."""
    wide = [x.to(accumulation_dtype(x.dtype)) for x in leaves]
    return torch.stack([torch.sum(x * x, dtype=torch.float64) for x in wide]).sum()


def _root(total: Tensor) -> Tensor:
    """√total, whose derivative at zero is zero."""
    known = number_at_hand(total)
    if known is not None and known >= 0 and not differentiated([total]):
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
    if not (places := spread(structure)):
        return _finite(leaves)
    return (
        _over_axes(lambda parts: (~_finite(parts)).to(torch.int64), leaves, places) == 0
    )


def _finite(leaves: list[Tensor]) -> Tensor:
    leaves = [leaf for leaf in leaves if leaf.numel()]
    if not leaves:
        return torch.tensor(True)
    if leaves[0].is_cpu or not eager(leaves):
        # Both ends are as finite as all that lies between, and are found without writing anything.
        return torch.stack(
            [end.isfinite() for leaf in leaves for end in _ends(leaf)]
        ).all()
    parts = []
    for column in foreach.split_by_kind(leaves):
        largest = torch.stack(foreach.norm(column, math.inf))
        parts.append((largest < math.inf).all())  # NaN is not less
    return parts[0] if len(parts) == 1 else torch.stack(parts).all()


def _ends(leaf: Tensor) -> tuple[Tensor, Tensor]:
    # torch 2.11 has no derivative of aminmax in forward mode.
    if torch_private.forward_level() >= 0:
        return leaf.amin(), leaf.amax()
    return torch.aminmax(leaf)
