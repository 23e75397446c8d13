"""Leaves that are spread over an axis: the node of a tree that says so, and what follows from it for each leaf."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from purestep import torch_internals

NAMESPACE = "purestep"


@dataclass(eq=False)
class Shard:
    """A tensor that is spread over an axis, as a node of a tree whose only leaf is this rank's piece.

    Pieces are those of DTensor's ``Shard(dim)`` and of ``torch.chunk``: ⌈n / size⌉ entries each along ``dim``, the last ones
    shorter or empty. The ranks of a ``VmapAxis`` run one program, so that there all pieces are as long as the first, and what
    they are filled up with is never read: a loss is given zeros in its place.

    Whatever is computed for each element (optimizers, means, casts) works on pieces as on any leaf. Whatever is
    computed of a whole tree (``tree.global_norm``, ``tree.all_finite``, clipping, a step's ``grad_norm`` and its skip) sums
    over the axis, which is part of the tree's structure.

    A step hands its loss a tensor: over an axis that does not split tokens the piece, which is tensor parallelism, and over
    its own axis the whole. ``ps.shard`` cuts whole tensors into pieces, and ``ps.unshard`` puts them together again.

    Args:
        piece: what this rank holds.
        axis: over whose ranks the tensor is spread.
        shape: of the whole tensor.
        dim: the dimension that is cut.

    >>> from purestep import VmapAxis, tree
    >>> axis = VmapAxis(2)
    >>> norm = lambda piece: tree.global_norm({"w": Shard(piece, axis, (2, 3))})
    >>> axis.map(norm, out_dims=None)(torch.tensor([[[2.0, 0.0, 0.0]], [[0.0, 4.0, 4.0]]]))
    tensor(6.)
    """

    piece: Any
    axis: Any
    shape: tuple[int, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        if not hasattr(self.axis, "apply") or isinstance(self.axis, type):
            raise TypeError(
                f'Shard(axis={self.axis!r}) must have an axis object, such as ps.MeshAxis(mesh, "tp")'
            )
        self.shape, ndim = tuple(self.shape), len(self.shape)
        if not -ndim <= self.dim < ndim:
            raise ValueError(
                f"Shard(shape={self.shape}, dim={self.dim}): the whole tensor has no such dimension"
                + ("" if ndim else "; a scalar is not cut: let it stand as it is, on every rank")
            )
        self.dim %= ndim

    @property
    def place(self) -> Place:
        """All of it but the piece."""
        return Place(self.axis, self.shape, self.dim)


class Place(NamedTuple):
    """Over which axis a leaf is spread, and how: all of a ``Shard`` but the piece."""

    axis: Any
    shape: tuple[int, ...]
    dim: int

    @property
    def length(self) -> int:
        """How long all pieces are along ``dim``, but for the last ones."""
        size: int = self.axis.size
        return -(-self.shape[self.dim] // size)

    @property
    def span(self) -> tuple[int, int]:
        """Where this rank's piece begins and how long it is, where each rank runs a program of its own."""
        start = min(self.axis.rank * self.length, self.shape[self.dim])
        return start, min(self.length, self.shape[self.dim] - start)

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """The shape that a piece has here."""
        length = self.span[1] if own_programs(self.axis) else self.length
        return *self.shape[: self.dim], length, *self.shape[self.dim + 1 :]


def _flatten(node: Any) -> tuple[tuple[Any], Place, tuple[str]]:
    return (node.piece,), node.place, ("piece",)


def _unflatten(place: Any, children: Iterable[Any]) -> Any:
    (piece,) = children
    return Shard(piece, *place)


_register: Any = optree.register_pytree_node  # by its types, a node is a collection
_register(Shard, _flatten, _unflatten, path_entry_type=optree.GetAttrEntry, namespace=NAMESPACE)

Spread: TypeAlias = tuple[Place | None, ...]
"""Of each leaf of a tree, how it is spread; empty where none is."""


def is_shard(node: Any) -> bool:
    """Whether this node of a tree is a ``Shard``."""
    return type(node) is Shard


def own_programs(axis: Any) -> bool:
    """Whether each rank of the axis runs a program of its own, in which pieces are as long as they are."""
    return bool(getattr(axis, "own_programs", False))


def spread(structure: Any) -> Spread:
    """How each leaf of a tree of this structure is spread."""
    if hasattr(structure, "walk"):
        found = structure.walk([[None]] * structure.num_leaves, _node)
    else:
        found = _traced(structure)  # one of a compiler's own
    return tuple(found) if any(place is not None for place in found) else ()


def _node(kind: type, data: Any, children: Sequence[list[Place | None]]) -> list[Place | None]:
    found = [place for child in children for place in child]
    return _below(data, found) if kind is Shard else found


def _traced(structure: Any) -> list[Place | None]:
    if structure.is_leaf():
        return [None]
    found = [place for child in structure.children() for place in _traced(child)]
    if structure.type is Shard:
        return _below(torch_internals.traced_metadata(structure), found)
    return found


def _below(place: Place, found: list[Place | None]) -> list[Place | None]:
    for other in found:
        if other is not None:
            raise ValueError(
                f"a leaf is spread over {place.axis} and over {other.axis}: a Shard within a Shard is not supported; "
                "spread it over one axis"
            )
    return [place] * len(found)


def own(leaf: Tensor, place: Place | None) -> Tensor:
    """The leaf, with zeros where a piece is filled up."""
    if place is None or own_programs(place.axis):
        return leaf
    length, whole = place.length, place.shape[place.dim]
    if length * place.axis.size == whole:
        return leaf
    entries = place.axis.index * length + torch.arange(length)
    along = [-1 if dim == place.dim else 1 for dim in range(len(place.shape))]
    return torch.where((entries < whole).view(along).to(leaf.device), leaf, 0)
