"""A tensor that is sharded over an axis, as a node of a tree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

NAMESPACE = "purestep"
"""The optree namespace in which your classes become nodes of a tree."""


@dataclass(eq=False)
class Shard:
    """A tensor that is sharded over an axis: a node of a tree, whose leaf is this rank's piece.

    Pieces are those of DTensor's ``Shard(dim)`` and ``torch.chunk``: ⌈n / size⌉ entries along
    ``dim``, where the last pieces are shorter or empty. On a ``VmapAxis``, short pieces are filled
    up with zeros.

    Elementwise arithmetic, such as an optimizer's, works on pieces as on any leaf. The tree's
    structure holds the axis. Norms, ``tree.all_finite``, clipping, ``grad_norm`` and skips
    therefore sum over it.

    If the axis is the step's own, the loss sees the gathered tensor. Over another axis it sees the
    piece: tensor parallelism. ``ps.shard`` cuts tensors into pieces, and ``ps.unshard`` gathers
    them.

    Args:
        local: this rank's part of the tensor.
        axis: the axis whose ranks hold the pieces.
        shape: the shape of the gathered tensor.
        dim: the dimension that is cut.

    >>> from purestep import VmapAxis, tree
    >>> axis = VmapAxis(2)
    >>> norm = lambda piece: tree.global_norm({"w": Shard(piece, axis, (2, 3))})
    >>> axis.map(norm, out_dims=None)(torch.tensor([[[2.0, 0.0, 0.0]], [[0.0, 4.0, 4.0]]]))
    tensor(6.)
    """

    local: Any
    axis: Any
    shape: tuple[int, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        if not hasattr(self.axis, "apply") or isinstance(self.axis, type):
            raise TypeError(
                f"Shard(axis={self.axis!r}) must have an axis object, such as "
                'ps.MeshAxis(mesh, "tp")'
            )
        self.shape, ndim = tuple(self.shape), len(self.shape)
        if not -ndim <= self.dim < ndim:
            raise ValueError(
                f"Shard(shape={self.shape}, dim={self.dim}): the whole tensor has no such dimension"
                + (
                    ""
                    if ndim
                    else "; a scalar is not cut: let it stand as it is, on every rank"
                )
            )
        self.dim %= ndim

    @property
    def spec(self) -> ShardSpec:
        """All of it but the piece."""
        return ShardSpec(self.axis, self.shape, self.dim)


class ShardSpec(NamedTuple):
    """The axis of a sharded leaf, and how it is cut: all of a ``Shard`` but the piece."""

    axis: Any
    shape: tuple[int, ...]
    dim: int

    @property
    def shard_len(self) -> int:
        """The length of a piece along ``dim``; the last ones may be shorter."""
        return int(-(-self.shape[self.dim] // self.axis.size))

    @property
    def local_range(self) -> tuple[int, int]:
        """The start and the length of this rank's piece, where each rank runs its own program."""
        start = min(self.axis.rank * self.shard_len, self.shape[self.dim])
        return start, min(self.shard_len, self.shape[self.dim] - start)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape that a piece has here."""
        length = self.local_range[1] if self.axis.is_multi_program else self.shard_len
        return *self.shape[: self.dim], length, *self.shape[self.dim + 1 :]

    def matches(self, piece: Tensor) -> bool:
        """Whether it is a piece; not another thing that an optimizer keeps, such as a count."""
        if piece.ndim == len(self.shape):
            self.check("the piece of a Shard", piece)
        return piece.ndim == len(self.shape)

    def check(self, name: str, piece: Tensor) -> None:
        """Refuses a piece of another shape."""
        if tuple(piece.shape) != self.local_shape:
            raise ValueError(
                f"{name} has shape {tuple(piece.shape)}, but this rank's piece of a tensor of "
                f"shape {self.shape}, cut along dim={self.dim} over {self.axis}, has shape "
                f"{self.local_shape}: take ps.shard, or torch.chunk"
            )


def _flatten(node: Any) -> tuple[tuple[Any], ShardSpec, tuple[str]]:
    return (node.local,), node.spec, ("local",)


def _unflatten(place: Any, children: Iterable[Any]) -> Any:
    return Shard(*children, *place)


_register: Any = optree.register_pytree_node  # by its types, a node is a collection
_register(
    Shard,
    _flatten,
    _unflatten,
    path_entry_type=optree.GetAttrEntry,
    namespace=NAMESPACE,
)

ShardSpecs: TypeAlias = tuple[ShardSpec | None, ...]
"""How each leaf of a tree is sharded; empty where none is."""


def is_shard(node: Any) -> bool:
    """Whether this node of a tree is a ``Shard``."""
    return type(node) is Shard


def zero_padding(leaf: Tensor, place: ShardSpec | None) -> Tensor:
    """The leaf, with zeros where a piece is filled up."""
    if place is None or place.axis.is_multi_program:
        return leaf
    length, whole = place.shard_len, place.shape[place.dim]
    if length * place.axis.size == whole:
        return leaf
    entries = place.axis.index * length + torch.arange(length)
    along = [-1 if dim == place.dim else 1 for dim in range(len(place.shape))]
    return torch.where((entries < whole).view(along).to(leaf.device), leaf, 0)
