"""Whole tensors to pieces that are spread over an axis, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from purestep import tree
from purestep.axis import Axis, MeshAxis, check_axis, pvary
from purestep.axis.whole import filled_up, whole
from purestep.form import flat, without_shards
from purestep.loss_gathers import Together, wholes
from purestep.pieces import Place, Shard, own_programs
from purestep.types import Tree


def shard(tree_: Tree, axis: Axis, dim: int = 0) -> Tree:
    """The tree with a ``Shard`` in the place of each leaf: this rank's piece of it, cut along ``dim``.

    Takes whole tensors, the same on every rank; a derivative by them is summed over ranks. A scalar is not cut, and stays as it is.

    >>> from purestep import VmapAxis
    >>> axis = VmapAxis(2)
    >>> pieces = lambda w: shard({"w": w, "scale": torch.tensor(1.0)}, axis)["w"].piece
    >>> axis.map(pieces, in_dims=None)(torch.tensor([1.0, 2.0, 3.0]))  # filled up, for ranks of one program
    tensor([[1., 2.],
            [3., 0.]])
    """
    check_axis(axis)
    leaves, structure = tree.flatten(tree_)
    return tree.unflatten(structure, [_cut(leaf, axis, dim) for leaf in pvary(leaves, axis)])


def _cut(whole: Tensor, axis: Axis, dim: int) -> Tensor | Shard:
    if whole.ndim == 0:
        return whole.clone()  # as each piece is the rank's own
    made = Shard(None, axis, tuple(whole.shape), dim)
    dim, place = made.dim, made.place
    if own_programs(axis):
        # A copy, so that nothing keeps the whole alive.
        made.piece = whole.narrow(dim, *place.span).clone(memory_format=torch.contiguous_format)
        return made
    filled = filled_up(whole, dim, place.length * axis.size)
    blocks = filled.unflatten(dim, (axis.size, place.length))
    made.piece = blocks.index_select(dim, axis.index.reshape(1).to(whole.device)).squeeze(dim)
    return made


def unshard(tree_: Tree) -> Tree:
    """The tree with the whole tensor in the place of each ``Shard``, gathered from all ranks; other leaves as they are.

    The whole is each rank's own, and a derivative sums over ranks what each computes of it: ``unshard(shard(x))`` is ``pvary(x)``.

    >>> from purestep import VmapAxis
    >>> axis = VmapAxis(2)
    >>> def square(w):
    ...     return unshard(tree.map(torch.square, shard(w, axis)))
    >>> axis.map(square, in_dims=None, out_dims=None)(torch.tensor([1.0, 2.0, 3.0]))
    tensor([1., 4., 9.])
    """
    return _begun(tree_)()


def unshard_each(trees: Iterable[Tree]) -> Iterator[Tree]:
    """``unshard`` of one tree after the other, where each is gathered while you work with the one before.

    In the loss of a step with ``gather="loss"``, they are not kept for the backward pass either, which gathers them again, one
    ahead. So of a network one block and the next are whole:

        for layer in ps.unshard_each(params["layers"]):
            x = block(layer, x)
            del layer  # before the one after the next is gathered

    >>> from purestep import VmapAxis
    >>> axis = VmapAxis(2)
    >>> def total(w):
    ...     return sum(layer.sum() for layer in unshard_each([shard(w, axis), shard(2 * w, axis)]))
    >>> axis.map(total, in_dims=None, out_dims=None)(torch.tensor([1.0, 2.0, 3.0]))
    tensor(18.)
    """
    coming: Callable[[], Tree] | None = None
    try:
        for tree_ in trees:
            next_ = _begun(tree_, again=True)
            if coming is not None:
                now, coming = coming, next_
                yield now()
                del now
            else:
                coming = next_
        if coming is not None:
            now, coming = coming, None
            yield now()
    finally:
        if coming is not None:
            coming()  # Others have begun it, too.


def _begun(tree_: Tree, *, again: bool = False) -> Callable[[], Tree]:
    """Begins to gather a tree; returns what waits for it."""
    given = flat(tree_)
    leaves, _, form = given
    # Beside pieces, an optimizer may keep other things for a param, such as a count.
    places = {
        at: place
        for at, place in enumerate(form.spread)
        if place is not None and tuple(leaves[at].shape) == place.piece_shape
    }
    # Several in one collective: of ranks that run programs of their own, where nobody transforms.
    at_once = [at for at in places if own_programs(places[at].axis) and tree.eager()]
    pieces = [leaves[at] for at in at_once]
    gather = Together(pieces, [places[at] for at in at_once], again) if at_once else None
    finish = gather.begin() if gather else None

    def finished() -> Tree:
        filled = list(leaves)
        if gather and finish:
            for at, each in zip(at_once, wholes(gather, finish, pieces), strict=True):
                filled[at] = each
        for at in places.keys() - {*at_once}:
            filled[at] = whole(leaves[at], places[at])
        return without_shards(given).tree(filled)

    return finished


def to_dtensor(tree_: Tree) -> Tree:
    """The tree with a DTensor in the place of each ``Shard`` over a ``MeshAxis``, in the memory of its piece.

    Other leaves stay as they are. That is what ``torch.distributed.checkpoint`` and other tools take. It is not recorded for autograd.

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> axis = MeshAxis(init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), "dp")
    >>> given = shard({"w": torch.ones(2)}, axis)
    >>> given["w"].piece.data_ptr() == from_dtensor(to_dtensor(given), axis)["w"].piece.data_ptr()
    True
    >>> torch.distributed.destroy_process_group()
    """
    from torch.distributed import tensor  # takes a second to import

    def converted(piece: Tensor, place: Place | None) -> Any:
        if place is None or tuple(piece.shape) != place.piece_shape:
            return piece
        if not isinstance(place.axis, MeshAxis):
            raise TypeError(
                f"a Shard over {place.axis} cannot be a DTensor, which lies on a DeviceMesh: spread it over a "
                "ps.MeshAxis, or take ps.unshard"
            )
        shape = torch.Size(place.shape)
        stride = torch.empty(shape, device="meta").stride()
        how: Any = {"run_check": False, "shape": shape, "stride": stride}
        placements = [tensor.Shard(place.dim)]
        return tensor.DTensor.from_local(piece.detach(), place.axis.mesh, placements, **how)

    given = flat(tree_)
    pairs = zip(given.leaves, given.form.spread or [None] * len(given.leaves), strict=True)
    return without_shards(given).tree([converted(piece, place) for piece, place in pairs])


def from_dtensor(tree_: Tree, axis: MeshAxis) -> Tree:
    """The tree with a ``Shard`` over the axis in the place of each DTensor that is spread there, in its memory.

    A replicated DTensor becomes a tensor; other leaves stay as they are. All is detached, as state is. The inverse of ``to_dtensor``, for what ``distribute_tensor``, ``fully_shard`` and a distributed checkpoint make.

    >>> from_dtensor({"w": torch.ones(2)}, axis=None)
    {'w': tensor([1., 1.])}
    """
    from torch.distributed import tensor

    def converted(leaf: Any) -> Any:
        if not isinstance(leaf, tensor.DTensor):
            return leaf
        (placement, *others), mesh = leaf.placements, leaf.device_mesh
        piece = leaf.to_local().detach()
        if all(each.is_replicate() for each in leaf.placements):
            return piece
        if (
            others
            or type(placement) is not tensor.Shard
            or mesh.get_group().group_name != axis.where.name
        ):
            raise ValueError(
                f"a DTensor of shape {tuple(leaf.shape)} has the placements {leaf.placements} on {mesh}, and a Shard is spread "
                f"over one axis, here {axis}: redistribute it to [Shard(dim)] on that axis's mesh"
            )
        return Shard(piece, axis, tuple(leaf.shape), placement.dim)

    return tree.map(converted, tree_)
