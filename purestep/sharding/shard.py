"""Whole tensors to pieces that are sharded over an axis, and back."""

import torch
from torch import Tensor

from purestep import tree
from purestep.axis import Axis, check_axis, pvary
from purestep.sharding.gather import gather_shards
from purestep.sharding.layout import pad_dim
from purestep.tree.shard import Shard
from purestep.types import Tree


def shard(tree_: Tree, axis: Axis, dim: int = 0) -> Tree:
    """Replaces each leaf by a ``Shard``: this rank's piece of it, cut along ``dim``.

    Every rank passes the same full tensors; gradients by them are summed over ranks. A scalar is
    not cut, and stays as it is.

    >>> from purestep import VmapAxis
    >>> axis = VmapAxis(2)
    >>> pieces = lambda w: shard({"w": w, "scale": torch.tensor(1.0)}, axis)["w"].local
    >>> axis.map(pieces, in_dims=None)(torch.tensor([1.0, 2.0, 3.0]))  # gather_shards up with zeros
    tensor([[1., 2.],
            [3., 0.]])
    """
    check_axis(axis)
    leaves, structure = tree.flatten(tree_)
    return tree.unflatten(
        structure, [_shard_leaf(leaf, axis, dim) for leaf in pvary(leaves, axis)]
    )


def _shard_leaf(whole: Tensor, axis: Axis, dim: int) -> Tensor | Shard:
    if whole.ndim == 0:
        return whole.clone()  # A piece shares no memory with the whole.
    made = Shard(None, axis, tuple(whole.shape), dim)
    dim, place = made.dim, made.spec
    if axis.is_multi_program:
        # A copy, so that nothing keeps the whole alive.
        made.local = whole.narrow(dim, *place.local_range).clone(
            memory_format=torch.contiguous_format
        )
        return made
    filled = pad_dim(whole, dim, place.shard_len * axis.size)
    blocks = filled.unflatten(dim, (axis.size, place.shard_len))
    made.local = blocks.index_select(
        dim, axis.index.reshape(1).to(whole.device)
    ).squeeze(dim)
    return made


def unshard(tree_: Tree) -> Tree:
    """Replaces each ``Shard`` by the full tensor, gathered from all ranks. Other leaves stay.

    There is one all-gather for each dtype, and one reduce-scatter in the backward pass, which sums
    the ranks' gradients. So ``unshard(shard(x))`` is ``pvary(x)``.

    With ``gather="loss"``, call it inside ``ps.remat(block)``. The backward pass then gathers
    again, and only pieces stay in memory. There, all ranks must gather the same params in the same
    order. The losses of each rank must depend on all that it gathers: add ``0 * w.sum()`` if they
    may not. purestep does not compare this: a wrong order mixes up tensors.

    >>> from purestep import VmapAxis
    >>> axis = VmapAxis(2)
    >>> def square(w):
    ...     return unshard(tree.map(torch.square, shard(w, axis)))
    >>> axis.map(square, in_dims=None, out_dims=None)(torch.tensor([1.0, 2.0, 3.0]))
    tensor([1., 4., 9.])
    """
    leaves, structure = tree.flatten(tree_)
    places = tree.shard_specs(structure)
    if not places:
        return tree_
    found = {
        at: place
        for at, place in enumerate(places)
        if place and place.matches(leaves[at])
    }
    return gather_shards(tree_, leaves, found)
