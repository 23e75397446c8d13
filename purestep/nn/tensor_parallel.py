"""Parameters that are DTensors: params hold this rank's parts, and a call has DTensors around them.

    apply(params, x) = module(x), with DTensor.from_local(local part) for each parameter

torch's ``parallelize_module`` and Hugging Face's ``tp_plan`` make such modules. A part is a
``Shard`` over the DTensor's mesh, or a plain tensor where all ranks of the mesh hold the same.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from purestep.axis import MeshAxis, pvary
from purestep.torch_private import has_transforms
from purestep.tree.shard import Shard, is_shard

Layouts: TypeAlias = Mapping[str, "DTensorSpec | PartialGradSpec"]
"""How the ranks of tensor parallelism hold tensors of a module, by name; others they ignore."""


class DTensorSpec(NamedTuple):
    """Describes a DTensor without its local tensor."""

    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]
    local_shape: torch.Size

    def wrap(self, local: Tensor) -> Tensor:
        """Returns a DTensor around this rank's part, differentiable by the part.

        The gradient comes back in these placements: one that is partial is summed over the mesh, a
        collective of the backward pass. Raises ``ValueError`` under transforms of ``torch.func``.
        """
        from torch.distributed.tensor import DTensor

        if has_transforms():
            raise ValueError(
                "torch.func cannot see through a DTensor: call apply without its transforms, as a "
                "step does without compile, vmap and grad_and_value"
            )
        wrapped: Tensor = DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )
        return wrapped


class PartialGradSpec(NamedTuple):
    """Describes a param that all ranks share, each of which gets a part of its gradient."""

    axis: MeshAxis

    def wrap(self, local: Tensor) -> Tensor:
        """Returns ``pvary`` of the param: the backward pass sums its gradient over the ranks."""
        varying: Tensor = pvary(local, self.axis)
        return varying


def is_dtensor(value: Any) -> bool:
    """Returns whether a value is a DTensor, without the second that DTensor's import takes.

    >>> is_dtensor(torch.ones(1))
    False
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_part(tensor: Any) -> Tensor:
    """Returns this rank's part of a DTensor, detached, in its memory; any other tensor as it is."""
    if not is_dtensor(tensor):
        plain: Tensor = tensor
        return plain
    local: Tensor = tensor.detach().to_local()
    return local


def spec_of(dtensor: Any) -> DTensorSpec:
    """Returns a DTensor's mesh, placements, shape, stride, and the shape of its local part."""
    return DTensorSpec(
        dtensor.device_mesh,
        dtensor.placements,
        dtensor.shape,
        dtensor.stride(),
        local_part(dtensor).shape,
    )


def find_dtensors(tensors: Mapping[str, Tensor]) -> dict[str, DTensorSpec]:
    """Returns the specs of the DTensors among a module's tensors, by name.

    Raises ``ValueError`` for placements other than one ``Shard`` or ``Replicate``.
    """
    specs = {}
    for name, value in tensors.items():
        if is_dtensor(value):
            spec = spec_of(value)
            _check_placements(name, spec)
            specs[name] = spec
    return specs


def _check_placements(name: str, spec: DTensorSpec) -> None:
    from torch.distributed import tensor

    # Not ``isinstance``: a subclass, such as ``_StridedShard``, cuts in another order.
    kinds = {type(placement) for placement in spec.placements}
    if len(spec.placements) > 1 or not kinds <= {tensor.Shard, tensor.Replicate}:
        raise ValueError(
            f"{name} is a DTensor with the placements {spec.placements} on {spec.mesh}, and "
            "from_module takes [Shard(dim)] or [Replicate()] on a mesh of one dimension: leave "
            "plans that interleave features (of experts, say) out, parallelize the module over "
            'mesh["tp"], and shard over other dimensions by ps.shard(params, axis)'
        )


def local_parts(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns all tensors, each DTensor replaced by this rank's part, which is detached.

    A sharded DTensor becomes a ``Shard``, a replicated one a plain tensor. Other tensors stay as
    they are. Raises ``ValueError`` for placements other than one ``Shard`` or ``Replicate``.
    """
    axes: dict[int, MeshAxis] = {}
    parts: dict[str, Any] = dict(tensors)
    for name, spec in find_dtensors(tensors).items():
        local = local_part(tensors[name])
        parts[name] = local
        (placement,) = spec.placements
        if placement.is_shard():
            key = id(spec.mesh)
            if key not in axes:
                axes[key] = axis_of(spec.mesh)
            parts[name] = Shard(local, axes[key], tuple(spec.shape), placement.dim)
    return parts


def axis_of(mesh: Any) -> MeshAxis:
    """Makes the ``MeshAxis`` of a mesh of one dimension.

    Of a mesh without names, the axis lies on a new mesh of the same process group, named "tp".
    """
    if mesh.mesh_dim_names:
        return MeshAxis(mesh, mesh.mesh_dim_names)
    from torch.distributed.device_mesh import DeviceMesh

    group = mesh.get_group()
    named = DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=("tp",))
    return MeshAxis(named, "tp")


def select_parts(
    params: Mapping[str, Any], parameters: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Returns all params, with this rank's part of each that is a DTensor in ``parameters``.

    A full tensor is cut to a view of the part. A ``Shard`` over the mesh becomes its ``local``.
    Other values stay as they are. All params must have a parameter of that name.
    """
    layouts = find_dtensors({name: parameters[name] for name in params})
    selected = dict(select_local(params, layouts))
    for name, shard in local_parts(
        {name: parameters[name] for name in layouts}
    ).items():
        value = selected[name]
        if is_shard(shard) and not is_shard(value) and value.shape == shard.shape:
            start, length = shard.spec.local_range
            selected[name] = value.narrow(shard.dim, start, length)
    return selected


def select_local(params: Mapping[str, Any], layouts: Layouts) -> Mapping[str, Any]:
    """Returns all params; a ``Shard`` over the mesh of its DTensor's layout becomes its ``local``.

    Other shards, and params without a layout, stay as they are.
    """
    selected = params
    for name, layout in layouts.items():
        param: Any = params.get(name)
        if not isinstance(layout, DTensorSpec) or not is_shard(param):
            continue
        if _is_over(param, layout.mesh):
            selected = {**selected, name: param.local}
    return selected


def _is_over(shard: Any, mesh: Any) -> bool:
    """Returns whether the axis of a ``Shard`` has the process group of a mesh of one dimension.

    Groups are compared by name: another group of the same ranks does not count.
    """
    group = getattr(shard.axis, "process_group", None)
    name: str = mesh.get_group().group_name
    return getattr(group, "name", None) == name


def _check_local(name: str, local: Any, layout: DTensorSpec | PartialGradSpec) -> None:
    """Raises ``ValueError`` if a tensor has another shape than this rank's part of a DTensor.

    Layouts other than ``DTensorSpec`` pass.
    """
    if isinstance(layout, DTensorSpec) and local.shape != layout.local_shape:
        raise ValueError(
            f"{name} has shape {tuple(local.shape)}, but this rank's part of the DTensor has "
            f"shape {tuple(layout.local_shape)}: pass params of from_module, or ps.shard of "
            "these, and no full tensors"
        )


def wrap(params: Mapping[str, Tensor], layouts: Layouts) -> Mapping[str, Tensor]:
    """Returns all params, with those in ``layouts`` wrapped: as DTensors, or by ``pvary``.

    Params that are DTensors stay. A param that would become one raises ``ValueError`` if it lacks
    the shape of this rank's part, or if a transform of ``torch.func`` is active.
    """
    wrapped = {}
    for name in params:
        if name in layouts and not is_dtensor(params[name]):
            _check_local(name, params[name], layouts[name])
            wrapped[name] = layouts[name].wrap(params[name])
    return {**params, **wrapped} if wrapped else params
