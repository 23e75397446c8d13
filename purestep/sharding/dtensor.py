"""Exchange with DTensor, which ``torch.distributed.checkpoint`` and other tools take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from purestep import tree
from purestep.axis import MeshAxis
from purestep.sharding.gather import strip_shards
from purestep.tree.shard import Shard, ShardSpec
from purestep.types import Tree


def to_dtensor(tree_: Tree) -> Tree:
    """Replaces each ``Shard`` over a ``MeshAxis`` by a DTensor that shares its memory.

    Other leaves stay as they are. Autograd does not record this.

    >>> from purestep import shard
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> axis = MeshAxis(init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), "dp")
    >>> given = shard({"w": torch.ones(2)}, axis)
    >>> given["w"].local.data_ptr() == from_dtensor(to_dtensor(given), axis)["w"].local.data_ptr()
    True
    >>> torch.distributed.destroy_process_group()
    """
    from torch.distributed import tensor  # takes a second to import

    def converted(piece: Tensor, place: ShardSpec | None) -> Any:
        if place is None or not place.matches(piece):
            return piece
        if not isinstance(place.axis, MeshAxis):
            raise TypeError(
                f"a Shard over {place.axis} cannot be a DTensor, which lies on a DeviceMesh: shard "
                "it over a ps.MeshAxis, or take ps.unshard"
            )
        shape = torch.Size(place.shape)
        stride = torch.empty(shape, device="meta").stride()
        how: Any = {"run_check": False, "shape": shape, "stride": stride}
        placements = [tensor.Shard(place.dim)]
        return tensor.DTensor.from_local(
            piece.detach(), place.axis.mesh, placements, **how
        )

    leaves, structure = tree.flatten(tree_)
    places = tree.shard_specs(structure) or [None] * len(leaves)
    made = [converted(leaf, place) for leaf, place in zip(leaves, places, strict=True)]
    return tree.unflatten(tree.flatten(strip_shards(tree_))[1], made)


def from_dtensor(tree_: Tree, axis: MeshAxis) -> Tree:
    """Replaces each DTensor over the axis by a ``Shard`` that shares its memory.

    It is the inverse of ``to_dtensor``, for trees from ``distribute_tensor``, ``fully_shard`` and
    distributed checkpoints. A replicated DTensor becomes a tensor, and other leaves stay.
    Everything is detached.

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
        fits = not others and mesh.get_group().group_name == axis.where.name
        if type(placement) is not tensor.Shard or not fits:
            raise ValueError(
                f"a DTensor of shape {tuple(leaf.shape)} has the placements {leaf.placements} on "
                f"{mesh}, and a Shard lies on one axis, here {axis}: redistribute it to "
                "[Shard(dim)] on that axis's mesh"
            )
        return Shard(piece, axis, tuple(leaf.shape), placement.dim)

    return tree.map(converted, tree_)
