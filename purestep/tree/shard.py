"""``Shard``: a tensor that is sharded over an axis, as a node of a tree."""

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
    """Holds a tensor that is sharded over an axis: a node of a tree. Its leaf is this rank's shard.

    Shards are those of DTensor's ``Shard(dim)`` and ``torch.chunk``: ⌈n / size⌉ entries along
    ``dim``, where the last shards are shorter or empty. On a ``VmapAxis``, short shards are padded
    with zeros.

    Elementwise arithmetic, such as an optimizer's, works on shards as on any leaf. The tree's
    structure holds the axis. Norms, ``tree.all_finite``, clipping, ``grad_norm`` and skips
    therefore sum over it.

    If the axis is that of the step, or some of its dimensions, the loss sees the full tensor, or
    with ``gather="loss"`` the ``Shard``. Over an axis that does not split tokens it sees the local
    tensor: tensor parallelism. ``ps.shard`` shards full tensors, and ``ps.unshard`` gathers them.

    A ``Shard`` may be in a ``Shard``: ``ps.shard(params, dp)`` of params that are sharded over tp.
    Each rank then holds, over dp, a part of its part over tp. The step's axis is the inner one.

    Raises ``TypeError`` unless ``axis`` is an axis object. Raises ``ValueError`` if the full tensor
    has no dimension ``dim``, or if an inner ``Shard`` does not have the shape of this rank's part.
    A ``Shard`` around another one also raises it where ranks run one program, and their number does
    not divide the dimension.

    Args:
        local: this rank's part of the tensor, or a ``Shard`` of that part.
        axis: the axis whose ranks hold the shards.
        shape: the shape of the full tensor.
        dim: the dimension that is sharded; a negative one counts from the end.

    >>> from purestep import VmapAxis, tree
    >>> axis = VmapAxis(2)
    >>> norm = lambda local: tree.global_norm({"w": Shard(local, axis, (2, 3))})
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
        self.shape = tuple(self.shape)
        ndim = len(self.shape)
        if not -ndim <= self.dim < ndim:
            hint = ""
            if ndim == 0:
                hint = "; a scalar is not cut: let it stand as it is, on every rank"
            raise ValueError(
                f"Shard(shape={self.shape}, dim={self.dim}): the whole tensor has no such dimension"
                f"{hint}"
            )
        self.dim %= ndim
        if is_shard(self.local):
            self._check_inner(self.local)

    def _check_inner(self, inner: Shard) -> None:
        """Raises ValueError unless the inner ``Shard`` has the shape of this rank's part.

        Where ranks run one program, it also raises unless their number divides the sharded
        dimension: some parts would be padded.
        """
        spec = self.spec
        part_shape = spec.local_shape
        is_padded = False
        if not self.axis.is_multi_program:
            is_padded = spec.full_len % self.axis.size != 0
        if inner.shape != part_shape or is_padded:
            raise ValueError(
                f"a Shard of shape {inner.shape} is in one of shape {self.shape}, whose part on "
                f"each rank of {self.axis} has shape {part_shape}: shard that part, as "
                "ps.shard(params, dp) does. An axis of one program must divide the dimension"
            )

    @property
    def spec(self) -> ShardSpec:
        """Returns axis, full shape and dimension of this ``Shard``, not of one inside."""
        return ShardSpec(self.axis, self.shape, self.dim)

    @property
    def inner_spec(self) -> ShardSpec:
        """Returns the spec of the innermost ``Shard``, which has those around it as ``outer``."""
        spec = self.spec
        return self.local.inner_spec.within(spec) if is_shard(self.local) else spec


class ShardSpec(NamedTuple):
    """Describes how a leaf is sharded: a ``Shard`` without its local tensor."""

    axis: Any
    shape: tuple[int, ...]
    dim: int
    outer: ShardSpec | None = None
    """How the tensor of this shape is itself a part of another one, if it is."""

    @property
    def axes(self) -> tuple[Any, ...]:
        """Returns the axes over which a leaf is sharded, from the inner to the outer."""
        if self.outer is None:
            return (self.axis,)
        return (self.axis, *self.outer.axes)

    def within(self, outer: ShardSpec) -> ShardSpec:
        """Returns the spec of the same leaf inside of one more ``Shard``, of spec ``outer``."""
        if self.outer is None:
            return self._replace(outer=outer)
        return self._replace(outer=self.outer.within(outer))

    def wrap(self, local: Any) -> Shard:
        """Wraps a local tensor in its ``Shard``, and in those around it; returns the outermost."""
        node = Shard(local, self.axis, self.shape, self.dim)
        if self.outer is None:
            return node
        return self.outer.wrap(node)

    @property
    def full_len(self) -> int:
        """Returns the length of the full tensor along ``dim``."""
        return self.shape[self.dim]

    @property
    def shard_len(self) -> int:
        """Returns the length ⌈n / size⌉ of a shard along ``dim``; the last ones may be shorter."""
        return int(-(-self.full_len // self.axis.size))

    @property
    def local_range(self) -> tuple[int, int]:
        """Returns start and length of this rank's shard along ``dim``.

        Raises TypeError if several ranks run one program: they are all in this process.
        """
        if self.axis.size == 1:
            return 0, self.full_len
        if not self.axis.is_multi_program:
            raise TypeError(
                f"a tensor of shape {self.shape} is sharded over {self.axis}, whose ranks are in "
                "this process: make full tensors, and call ps.shard in the program that it maps"
            )
        start = min(self.axis.rank * self.shard_len, self.full_len)
        return start, min(self.shard_len, self.full_len - start)

    @property
    def local_block(self) -> list[tuple[int, int]]:
        """Returns start and length of this rank's part, along each dimension of the full tensor.

        The full tensor is that of the outermost ``Shard``. Raises TypeError as ``local_range``.
        """
        block = []
        for length in self.shape:
            block.append((0, length))
        block[self.dim] = self.local_range
        if self.outer is None:
            return block
        for dim, outer_range in enumerate(self.outer.local_block):
            outer_start, _ = outer_range
            start, length = block[dim]
            block[dim] = (outer_start + start, length)
        return block

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Returns the shape of this rank's shard, with its padding where ranks run one program."""
        length = self.shard_len
        if self.axis.is_multi_program:
            _, length = self.local_range
        return *self.shape[: self.dim], length, *self.shape[self.dim + 1 :]

    def matches(self, tensor: Tensor) -> bool:
        """Returns whether a tensor of an optimizer's state is a shard, rather than a count.

        It is one if it has as many dimensions as the full tensor. Raises ValueError if it then does
        not have the shape of this rank's shard.
        """
        if tensor.ndim != len(self.shape):
            return False
        self.check("the piece of a Shard", tensor)
        return True

    def check(self, name: str, tensor: Tensor) -> None:
        """Raises ValueError, with this name, unless a tensor has the shape of this rank's shard."""
        if tuple(tensor.shape) != self.local_shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but this rank's piece of a tensor of "
                f"shape {self.shape}, cut along dim={self.dim} over {self.axis}, has shape "
                f"{self.local_shape}: take ps.shard, or torch.chunk"
            )


def flatten_shard(node: Any) -> tuple[tuple[Any], ShardSpec, tuple[str]]:
    """Flattens a ``Shard`` for optree: returns its child, its spec, and the child's name."""
    return (node.local,), node.spec, ("local",)


def unflatten_shard(shard_spec: Any, children: Iterable[Any]) -> Any:
    """Builds a ``Shard`` from its spec and its only child, whatever that is.

    Raises ``ValueError`` for a child that is a ``Shard`` and does not fit.
    """
    (local,) = children
    return shard_spec.wrap(local)


_register: Any = (
    optree.register_pytree_node
)  # Its types want a node to be a collection.
_register(
    Shard,
    flatten_shard,
    unflatten_shard,
    path_entry_type=optree.GetAttrEntry,
    namespace=NAMESPACE,
)

ShardSpecs: TypeAlias = tuple[ShardSpec | None, ...]
"""How each leaf of a tree is sharded; empty where none is."""


def is_shard(node: Any) -> bool:
    """Returns whether an object is a ``Shard``; a subclass does not count."""
    return type(node) is Shard


def zero_padding(leaf: Tensor, shard_spec: ShardSpec | None) -> Tensor:
    """Returns a shard with its padding set to zero, in a new tensor, where ranks run one program.

    Returns other leaves, and shards without padding, as they are.
    """
    if shard_spec is None or shard_spec.axis.is_multi_program:
        return leaf
    length = shard_spec.shard_len
    if length * shard_spec.axis.size == shard_spec.full_len:
        return leaf
    index = shard_spec.axis.index
    positions = index * length + torch.arange(length, device=index.device)
    is_entry = positions < shard_spec.full_len
    shape = [1] * len(shard_spec.shape)
    shape[shard_spec.dim] = length
    is_entry = is_entry.view(shape).to(leaf.device)
    return torch.where(is_entry, leaf, 0)
