"""Exchanges shards with DTensor, which ``torch.distributed.checkpoint`` and other tools take."""

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
    """Replaces each ``Shard`` by a DTensor that shares its memory.

    Raises ``TypeError`` for a ``Shard`` that is in another one, or not over a ``MeshAxis``. Other
    leaves stay as they are. Autograd does not record this. A leaf in a ``Shard`` that has
    another number of dimensions, such as a step count, becomes a plain tensor. Any other shape than
    that of this rank's part raises ``ValueError``.

    >>> from purestep import shard
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> axis = MeshAxis(init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), "dp")
    >>> shards = shard({"w": torch.ones(2)}, axis)
    >>> shards["w"].local.data_ptr() == from_dtensor(to_dtensor(shards), axis)["w"].local.data_ptr()
    True
    >>> torch.distributed.destroy_process_group()
    """
    leaves, spec = tree.flatten(tree_)
    shard_specs = tree.shard_specs(spec)
    if not shard_specs:
        return tree.unflatten(spec, leaves)
    converted: list[Any] = []
    for leaf, shard_spec in zip(leaves, shard_specs, strict=True):
        if shard_spec is not None and shard_spec.matches(leaf):
            converted.append(_dtensor_from_local(leaf, shard_spec))
        else:
            converted.append(leaf)
    _, stripped_spec = tree.flatten(strip_shards(tree_))
    return tree.unflatten(stripped_spec, converted)


def _dtensor_from_local(local: Tensor, shard_spec: ShardSpec) -> Any:
    from torch.distributed import tensor  # takes a second to import

    if shard_spec.outer is not None:
        raise TypeError(
            f"a Shard over {shard_spec.axis} in one over {shard_spec.outer.axis} cannot be a "
            "DTensor here: save it by ps.checkpoint, whose folders are those of "
            "torch.distributed.checkpoint, or take ps.unshard"
        )
    if not isinstance(shard_spec.axis, MeshAxis):
        raise TypeError(
            f"a Shard over {shard_spec.axis} cannot be a DTensor, which lies on a DeviceMesh: "
            "shard it over a ps.MeshAxis, or take ps.unshard"
        )
    shape = torch.Size(shard_spec.shape)
    return tensor.DTensor.from_local(
        local.detach(),
        shard_spec.axis.mesh,
        [tensor.Shard(shard_spec.dim)],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def from_dtensor(tree_: Tree, axis: MeshAxis) -> Tree:
    """Replaces each DTensor over the axis by a ``Shard`` that shares its memory.

    It is the inverse of ``to_dtensor``, but a leaf that became a plain tensor there, such as a step
    count, stays one. It also takes trees from ``distribute_tensor``, ``fully_shard`` and
    distributed checkpoints. A DTensor that is replicated, over any mesh, becomes a tensor. Both are
    detached; leaves that are no DTensor stay as they are. Raises ``ValueError`` for a DTensor of
    other placements, sharded on a mesh of several dimensions, or over another axis.

    >>> from_dtensor({"w": torch.ones(2)}, axis=None)
    {'w': tensor([1., 1.])}
    """
    from torch.distributed import tensor

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, tensor.DTensor):
            return leaf
        local = leaf.to_local().detach()
        if all(placement.is_replicate() for placement in leaf.placements):
            return local
        # Not ``isinstance``: a subclass, such as ``_StridedShard``, cuts in another order.
        placement: Any = leaf.placements[0]
        mesh = leaf.device_mesh
        is_sharded = len(leaf.placements) == 1 and type(placement) is tensor.Shard
        if not is_sharded or mesh.get_group().group_name != axis.process_group.name:
            raise ValueError(
                f"a DTensor of shape {tuple(leaf.shape)} has the placements {leaf.placements} on "
                f"{mesh}, and a Shard lies on one axis, here {axis}: redistribute it to "
                "[Shard(dim)] on that axis's mesh"
            )
        return Shard(local, axis, tuple(leaf.shape), placement.dim)

    return tree.map(convert, tree_)
