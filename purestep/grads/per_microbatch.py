"""Sharded params that are gathered for each microbatch, or by the loss itself.

With ``gather="microbatch"``, gradients are scattered in buckets while each backward pass runs. All
ranks gather and scatter together, so a rank with fewer microbatches joins the others with zeros.
"""

from functools import partial

import torch
from torch import Tensor

from purestep import tree, validation
from purestep.counts import WeightedMicrobatches
from purestep.grads.backends import GradBackends
from purestep.grads.inplace import zeros_for_missing
from purestep.grads.microbatch import (
    GradAccumulator,
    GradFn,
    MicrobatchInputs,
    MicrobatchResult,
)
from purestep.sharding.gather import gather_shards, make_reduce_scatter
from purestep.types import Gather, GradHook

JOIN = object()
"""A microbatch that this rank does not have while others do."""


def pad_microbatches(group: WeightedMicrobatches, length: int) -> WeightedMicrobatches:
    """Appends ``JOIN`` to the group until it has this many microbatches.

    >>> group = WeightedMicrobatches([{"x": torch.ones(2)}], [None], None)
    >>> len(pad_microbatches(group, 3).microbatches)
    3
    """
    num_missing = length - len(group.microbatches)
    if not num_missing:
        return group
    return WeightedMicrobatches(
        [*group.microbatches, *[JOIN] * num_missing],
        [*group.weights, *[_no_tokens()] * num_missing],
        group.counts,
    )


def gather_in_backends(backends: GradBackends, gather: Gather) -> GradBackends:
    """Wraps backends, so that sharded params are gathered where ``gather`` says.

    "step": they are gathered before, once. "microbatch": the backends see params gathered for one
    microbatch, and their gradients become shards. "loss": the loss gathers params, and all ranks
    scatter their gradients together in the backward pass.
    """
    if gather == "step":
        return backends
    wrap = _with_full_params if gather == "microbatch" else _with_check_of_grads
    return GradBackends(
        plain=partial(wrap, backends.plain), recorded=partial(wrap, backends.recorded)
    )


def _with_check_of_grads(
    grad_fn: GradFn,
    inputs: MicrobatchInputs,
    accumulator: GradAccumulator,
    on_grad_ready: GradHook | None,
) -> MicrobatchResult:
    """Computes gradients; raises if the loss reaches no param and other ranks would wait.

    Such a rank scatters no gradients. The others would wait for it at the next gather.
    """
    result = grad_fn(inputs, accumulator, on_grad_ready)
    if not result.depends_on_params:
        for shard_spec in tree.shard_specs(inputs.spec):
            if shard_spec is not None and shard_spec.axis.is_multi_program:
                raise validation.no_dependence_error()
    return result


def _with_full_params(
    grad_fn: GradFn,
    inputs: MicrobatchInputs,
    accumulator: GradAccumulator,
    on_grad_ready: GradHook | None,
) -> MicrobatchResult:
    """Differentiates at gathered params, and adds this rank's shards of the gradients."""
    shard_specs = {}
    for index, shard_spec in enumerate(tree.shard_specs(inputs.spec)):
        if shard_spec is not None:
            shard_specs[index] = shard_spec
    if not shard_specs and inputs.microbatch is not JOIN:
        return grad_fn(inputs, accumulator, on_grad_ready)
    shards = tree.unflatten(inputs.spec, inputs.leaves)
    params = gather_shards(shards, inputs.leaves, shard_specs)
    leaves, spec = tree.flatten(params)
    dtypes = accumulator.dtypes
    full_grads = GradAccumulator([None] * len(leaves), dtypes)
    hook, finish = make_reduce_scatter(leaves, dtypes, shard_specs)
    if inputs.microbatch is JOIN:
        zero = leaves[0].new_zeros((), dtype=tree.accumulation_dtype(leaves[0].dtype))
        result = MicrobatchResult(zero, _no_tokens(), (), depends_on_params=False)
    else:
        result = grad_fn(inputs._replace(leaves=leaves, spec=spec), full_grads, hook)
    grads = zeros_for_missing(full_grads, leaves)
    del params, leaves  # The memory is free before gradients become shards.
    for index, grad in enumerate(finish(grads)):
        total = accumulator.values[index]
        accumulator.values[index] = grad if total is None else total + grad
    return result


def _no_tokens() -> Tensor:
    """Returns the weights of a microbatch without tokens."""
    return torch.zeros(1, dtype=torch.bool)
