"""Gathers sharded params for a loss, differentiably, in few collectives.

    "step"         g = unshardᵀ Σₘ ∇Lₘ(unshard(p))
    "microbatch"   g = Σₘ unshardᵀ ∇Lₘ(unshard(p))

p are the shards of a rank, and g their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

from purestep import tree
from purestep.axis.base import Axis
from purestep.axis.collectives import pvary
from purestep.sharding.buckets import (
    GradBuckets,
    all_gather_in_buckets,
    reduce_scatter_in_buckets,
)
from purestep.sharding.layout import collective_on_shard, reduce_axes, shards_over
from purestep.tree.shard import ShardSpec, is_shard, zero_padding
from purestep.types import Gather, GradHook, Params, Tree

SpecsByIndex: TypeAlias = Mapping[int, ShardSpec]
"""How some leaves of a tree are sharded, by position."""

ScatterFn: TypeAlias = Callable[[list[Tensor]], list[Tensor]]
"""Takes full gradients, and returns this rank's shards of their sums over ranks."""


def params_for_loss(params: Params, axis: Axis, gather: Gather) -> Params:
    """Returns the params as ``accumulate`` sees them: marked by ``pvary`` as varying over ranks.

    A leaf that is sharded over ranks of the axis is marked only over the other ranks. With
    ``gather="step"``, a collective gathers each ``Shard`` over the axis or a subaxis. Otherwise
    these stay. A ``Shard`` over an axis that does not split tokens (tensor parallelism) becomes the
    local tensor. The padding of shards is set to zero. All ranks call it together.
    """
    leaves, spec = tree.flatten(params)
    shard_specs = tree.shard_specs(spec)
    if not shard_specs:
        return pvary(params, axis)
    grad_axes = reduce_axes(shard_specs, axis)
    visible = []
    for index, grad_axis in enumerate(grad_axes):
        leaf = zero_padding(leaves[index], shard_specs[index])
        if grad_axis is not None:
            leaf = pvary(leaf, grad_axis)
        visible.append(leaf)
    over_axis = shards_over(shard_specs, axis)
    if gather == "step":
        return gather_shards(params, visible, over_axis)
    # Not a set: torch 2.11's compiler hashes no axes.
    kept_axes = [shard_spec.axis for shard_spec in over_axis.values()]
    return strip_shards(tree.unflatten(spec, visible), kept_axes)


def gather_shards(
    tree_: Tree, leaves: Sequence[Tensor], shard_specs: SpecsByIndex
) -> Tree:
    """Returns the tree with ``leaves`` in place of its leaves, and without ``Shard`` nodes.

    Leaves in ``shard_specs`` are gathered to full tensors, differentiably. Processes gather them in
    buckets. Under a transform or a compiler, or where ranks run one program, each leaf takes a
    collective. Other leaves stay local.
    """
    gathered = [*leaves]
    specs = [*shard_specs.values()]
    if _can_bucket(specs):
        shards = [leaves[index] for index in shard_specs]
        gather: Callable[..., Sequence[Tensor]] = _GatherFunction.apply
        full_tensors = gather(specs, *shards)
        for index, full in zip(shard_specs, full_tensors, strict=True):
            gathered[index] = full
    else:
        for index, shard_spec in shard_specs.items():
            local = leaves[index]
            gathered[index] = collective_on_shard("all_gather", local, shard_spec)
    _, spec = tree.flatten(tree_)
    return strip_shards(tree.unflatten(spec, gathered))


def strip_shards(tree_: Tree, kept_axes: Collection[Axis] = ()) -> Tree:
    """Replaces each ``Shard`` by what it holds, but for those over ``kept_axes``.

    >>> import torch
    >>> from purestep import LocalAxis, Shard
    >>> strip_shards({"w": Shard(torch.ones(2), LocalAxis(), (2,))})
    {'w': tensor([1., 1.])}
    """

    def is_stripped(node: Any) -> bool:
        return is_shard(node) and node.axis not in kept_axes

    nodes, spec = tree.flatten(tree_, is_leaf=is_stripped)
    for index, node in enumerate(nodes):
        local = node
        while is_stripped(local):
            local = local.local
        nodes[index] = local
    return tree.unflatten(spec, nodes)


class _GatherFunction(Function):
    """Gathers all shards in one node of the graph; the backward pass scatters their gradients.

    So a rank whose loss reaches a single leaf scatters the gradients of the others too, as zeros.
    Shards that require no grad get none.
    """

    @staticmethod
    def forward(
        ctx: Any, shard_specs: list[ShardSpec], *shards: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.shard_specs = shard_specs
        ctx.shards = shards
        full_tensors = tuple(all_gather_in_buckets(shards, shard_specs))
        _, *needs_grad = ctx.needs_input_grad
        frozen = []
        for full, is_needed in zip(full_tensors, needs_grad, strict=True):
            if not is_needed:
                frozen.append(full)
        # Otherwise the backward pass would compute their gradients, and scatter them.
        ctx.mark_non_differentiable(*frozen)
        return full_tensors

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        _, *needs_grad = ctx.needs_input_grad
        grads: dict[int, Tensor] = {}
        for index, (cotangent, shard) in enumerate(
            zip(cotangents, ctx.shards, strict=True)
        ):
            if not needs_grad[index]:
                continue
            dtype = shard.dtype
            if shard.is_leaf and shard.grad_dtype is not None:
                # A step that sums gradients in another dtype reduces them in it as well.
                dtype = shard.grad_dtype
            grads[index] = cotangent.to(dtype)
        specs = [ctx.shard_specs[index] for index in grads]
        shards = reduce_scatter([*grads.values()], specs)
        by_index = dict(zip(grads, shards, strict=True))
        return None, *map(by_index.get, range(len(needs_grad)))  # None for frozen ones


def reduce_scatter(
    full_grads: Sequence[Tensor], shard_specs: Sequence[ShardSpec]
) -> list[Tensor]:
    """Sums each full gradient over the axis of its spec; returns this rank's shards of the sums."""
    if _can_bucket(shard_specs, *full_grads):
        return reduce_scatter_in_buckets(full_grads, shard_specs)
    shards = []
    for grad, shard_spec in zip(full_grads, shard_specs, strict=True):
        shards.append(collective_on_shard("psum_scatter", grad, shard_spec))
    return shards


def make_reduce_scatter(
    full_tensors: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    shard_specs: SpecsByIndex,
) -> tuple[GradHook | None, ScatterFn]:
    """Makes a gradient hook, and a function that replaces full gradients by shards of their sums.

    Both serve one backward pass. ``full_tensors`` are the params after the gather, and ``dtypes``
    those of their gradients, by position. The function takes and returns a list of all gradients.
    Gradients that are not in ``shard_specs`` stay.

    ``hook(index, grad)`` takes a final gradient. One in ``shard_specs`` it copies to a bucket, and
    returns expanded zeros in its place. It returns any other as it is. By the hook, full buckets
    are launched while the backward pass runs. None is launched early if the loss has run a
    collective, or if the backend does not count collectives.

    The hook is None without shards, where ranks run one program, and under a transform, a compiler
    or autograd. There, the function scatters gradients one by one, and writes to the list.
    """
    specs = [*shard_specs.values()]
    if specs and _can_bucket(specs, full_tensors):
        sharded = {index: full_tensors[index] for index in shard_specs}
        buckets = GradBuckets(
            axis=specs[0].axis,
            leaves=sharded,
            dtypes=dtypes,
            scatter_specs=shard_specs,
            reduce_axes={},
        )
        return buckets.ready, buckets.run_remaining

    def scatter_each(grads: list[Tensor]) -> list[Tensor]:
        for index, shard_spec in shard_specs.items():
            full = grads[index]
            grads[index] = collective_on_shard("psum_scatter", full, shard_spec)
        return grads

    return None, scatter_each


def _can_bucket(shard_specs: Sequence[ShardSpec], *values: Tree) -> bool:
    """Returns whether ranks of all these axes run their own programs, in plain eager mode.

    In that mode no compiler or transform runs, and none of ``values`` requires grad.
    """
    for shard_spec in shard_specs:
        if not shard_spec.axis.is_multi_program:
            return False
    return tree.is_plain_eager(*values)
