"""Shards full tensors over an axis, and gathers them again."""

import torch
from torch import Tensor

from purestep import tree
from purestep.axis import Axis, check_axis, pvary
from purestep.axis.collectives import shares_ranks
from purestep.sharding.gather import gather_shards
from purestep.sharding.layout import pad_dim
from purestep.tree.shard import Shard, ShardSpec
from purestep.types import Tree


def shard(tree_: Tree, axis: Axis, dim: int = 0) -> Tree:
    """Replaces each leaf by a ``Shard``: this rank's part of it along ``dim``.

    Every rank passes the same full tensors; gradients by them are summed over ranks. The parts are
    copies, and the last ones may be shorter, or padded with zeros where ranks run one program. A
    scalar is copied, not sharded. The part in a ``Shard`` over another axis is sharded in turn.
    Raises ``ValueError`` for a leaf without such a ``dim``, and, unless ``axis`` has one rank, for
    a ``Shard`` over it or over ranks in common. Also raises it for a ``Shard`` over another axis
    whose ranks run one program, if their number does not divide the sharded dimension. Raises
    ``TypeError`` unless ``axis`` is an axis object.

    >>> from purestep import VmapAxis
    >>> axis = VmapAxis(2)
    >>> local = lambda w: shard({"w": w, "scale": torch.tensor(1.0)}, axis)["w"].local
    >>> axis.map(local, in_dims=None)(torch.tensor([1.0, 2.0, 3.0]))  # padded with zeros
    tensor([[1., 2.],
            [3., 0.]])
    """
    check_axis(axis)
    if axis.size > 1:
        _check_unsharded(tree_, axis)
    full_tensors = pvary(tree_, axis)
    return tree.map(lambda full: _shard_leaf(full, axis, dim), full_tensors)


def _check_unsharded(tree_: Tree, axis: Axis) -> None:
    """Raises ``ValueError`` if a leaf is sharded over ``axis``, or over ranks in common with it."""
    _, spec = tree.flatten(tree_)
    for shard_spec in tree.shard_specs(spec):
        if shard_spec is None:
            continue
        for other in shard_spec.axes:
            if shares_ranks(axis, other):
                raise ValueError(
                    f"a leaf is sharded over {other} already, which has ranks in common with "
                    f"{axis}: shard it once, or over another dimension of the mesh"
                )


def _shard_leaf(full: Tensor, axis: Axis, dim: int) -> Tensor | Shard:
    if full.ndim == 0:
        return full.clone()  # No result shares memory with a full tensor.
    node = Shard(local=None, axis=axis, shape=tuple(full.shape), dim=dim)
    if axis.is_multi_program:
        start, length = node.spec.local_range
        local = full.narrow(node.dim, start, length)
        # A copy, so that nothing keeps the full tensor alive.
        node.local = local.clone(memory_format=torch.contiguous_format)
    else:
        node.local = _select_block(full, node.spec)
    return node


def _select_block(full: Tensor, shard_spec: ShardSpec) -> Tensor:
    """Returns this rank's block of a full tensor where ranks run one program; zeros pad it."""
    axis = shard_spec.axis
    dim = shard_spec.dim
    shard_len = shard_spec.shard_len
    padded = pad_dim(full, dim, shard_len * axis.size)
    blocks = padded.unflatten(dim, (axis.size, shard_len))
    # Not ``blocks.select``: under vmap, the index is a tensor.
    index = axis.index.to(full.device)
    block: Tensor = blocks.index_select(dim, index.reshape(1))
    return block.squeeze(dim)


def unshard(tree_: Tree) -> Tree:
    """Replaces each ``Shard`` by the full tensor, gathered from all ranks. Other leaves stay.

    A ``Shard`` in a ``Shard`` is gathered over both axes. A leaf in a ``Shard`` that has another
    number of dimensions, such as a step count, becomes a plain tensor as it is. Any other shape
    than that of this rank's part raises ``ValueError``.

    Processes gather leaves of one dtype together, up to ``bucket_bytes`` in each all-gather. In the
    backward pass, reduce-scatters sum the ranks' gradients. So ``unshard(shard(x))`` is
    ``pvary(x)``.

    With ``gather="loss"``, call it inside ``ps.remat(block)``. The backward pass then gathers
    again, and only shards stay in memory. There, all ranks must gather the same params in the same
    order. The losses of each rank must depend on all that it gathers: add ``0 * w.sum()`` if they
    may not. purestep compares the number of elements and the dtype in each all-gather of the ranks,
    but not which tensors they are. It compares nothing on an accelerator, with ``compile=``, or in
    tensor parallelism. ``from_module(units=)`` does all of it for a module, and compares the units,
    too.

    >>> from purestep import VmapAxis
    >>> axis = VmapAxis(2)
    >>> def square(w):
    ...     return unshard(tree.map(torch.square, shard(w, axis)))
    >>> axis.map(square, in_dims=None, out_dims=None)(torch.tensor([1.0, 2.0, 3.0]))
    tensor([1., 4., 9.])
    """
    leaves, spec = tree.flatten(tree_)
    shard_specs = tree.shard_specs(spec)
    if not shard_specs:
        return tree_
    gathered = {}
    outer_specs = {}
    for index, shard_spec in enumerate(shard_specs):
        if shard_spec is None or not shard_spec.matches(leaves[index]):
            continue
        gathered[index] = shard_spec
        if shard_spec.outer is not None:
            outer_specs[index] = shard_spec.outer
    full_tree = gather_shards(tree_, leaves, gathered)
    if not outer_specs:
        return full_tree
    # What a ``Shard`` in a ``Shard`` gathers is a shard itself.
    nodes, spec = tree.flatten(full_tree)
    for index, outer_spec in outer_specs.items():
        nodes[index] = outer_spec.wrap(nodes[index])
    return unshard(tree.unflatten(spec, nodes))
