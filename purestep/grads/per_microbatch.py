"""Sharded params that are gathered for each microbatch, or by the loss itself.

With ``gather="microbatch"``, gradients are scattered in buckets while each backward pass runs. All
ranks gather and scatter together, so a rank with fewer microbatches joins the others with zeros.
With ``gather="loss"``, it runs its last microbatch again, with weights of zero.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep import tree, validation
from purestep.counts import WeightedMicrobatches, compute_weights
from purestep.grads.backends import GradBackends
from purestep.grads.inplace import zeros_for_missing
from purestep.grads.microbatch import (
    GradAccumulator,
    GradFn,
    MicrobatchInputs,
    MicrobatchResult,
)
from purestep.sharding.gather import gather_shards, make_reduce_scatter
from purestep.types import (
    Gather,
    GradHook,
    LossFn,
    LossOutput,
    Microbatch,
    Params,
    WeightFn,
)

JOIN = object()
"""A microbatch that this rank does not have while others do."""


class Repeated(NamedTuple):
    """Holds a microbatch that this rank runs again, at weight 0, since other ranks have more."""

    microbatch: Microbatch


def accept_repeated(loss_fn: LossFn, gather: Gather) -> LossFn:
    """Wraps a loss to take ``Repeated`` microbatches, too.

    Of these, ``aux`` is dropped, since the microbatch has added it before. Returns the loss itself
    unless ``gather`` is "loss".
    """
    if gather != "loss":
        return loss_fn

    @wraps(loss_fn)
    def wrapped(params: Params, microbatch: Any) -> Tensor | LossOutput:
        if not isinstance(microbatch, Repeated):
            return loss_fn(params, microbatch)
        losses = loss_fn(params, microbatch.microbatch)
        if isinstance(losses, LossOutput):
            return losses._replace(aux=())
        return losses

    return wrapped


class PaddedMicrobatches(Sequence[Microbatch]):
    """Appends one microbatch several times to a sequence.

    A microbatch of the sequence is read only on demand, since it may be made only then.
    """

    def __init__(
        self, microbatches: Sequence[Microbatch], padding: Microbatch, times: int
    ) -> None:
        self.microbatches = microbatches
        self.padding = [padding] * times

    def __len__(self) -> int:
        return len(self.microbatches) + len(self.padding)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        num_own = len(self.microbatches)
        return self.microbatches[number] if number < num_own else self.padding[0]

    def __iter__(self) -> Iterator[Microbatch]:
        return itertools.chain(self.microbatches, self.padding)


def pad_microbatches(
    group: WeightedMicrobatches,
    length: int,
    gather: Gather,
    weight_fn: WeightFn | None,
) -> WeightedMicrobatches:
    """Returns a group of ``length`` with microbatches without tokens appended; counts stay.

    ``length`` is at least that of the group, which is not written to. Each appended one is
    ``JOIN``, for which no loss runs. With ``gather="loss"``, each is a ``Repeated`` of the last
    microbatch, at weight 0, so the group must have one. There a group without ``weight_fn`` stays
    as it is: its losses return the weights.

    >>> group = WeightedMicrobatches([torch.ones(2)], [torch.ones(2)], None)
    >>> pad_microbatches(group, 2, "loss", torch.ones_like).weights
    [tensor([1., 1.]), tensor([0., 0.])]
    """
    num_missing = length - len(group.microbatches)
    if not num_missing:
        return group
    padding: Any = JOIN
    weights = _no_tokens()
    if gather == "loss":
        if weight_fn is None:
            return group
        last = group.microbatches[-1]
        padding = Repeated(last)
        weights = torch.zeros_like(compute_weights(weight_fn, last))
    present = group.weights or [None] * len(group.microbatches)
    return WeightedMicrobatches(
        PaddedMicrobatches(group.microbatches, padding, num_missing),
        [*present, *[weights] * num_missing],
        group.counts,
    )


def gather_in_backends(backends: GradBackends, gather: Gather) -> GradBackends:
    """Wraps backends, so that sharded params are gathered where ``gather`` says.

    "step": the caller has gathered them once, and the backends stay as they are. "microbatch": the
    backends see params gathered for one microbatch, and their gradients become shards. "loss": the
    loss gathers params, and all ranks scatter their gradients together in the backward pass. A
    loss that reaches no param then raises ``ValueError``, if other ranks would wait for this one.
    """
    if gather == "step":
        return backends
    wrap = _with_full_params if gather == "microbatch" else _with_check_of_grads
    return GradBackends(*(partial(wrap, grad_fn) for grad_fn in backends))


def _with_check_of_grads(
    grad_fn: GradFn,
    inputs: MicrobatchInputs,
    accumulator: GradAccumulator,
    on_grad_ready: GradHook | None,
) -> MicrobatchResult:
    """Calls ``grad_fn``; raises ``ValueError`` if the loss reaches no param and others would wait.

    That is where a param is sharded over ranks that run separate programs. This rank would scatter
    no gradients, and the others would wait for it at the next gather.
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
    """Gathers params, differentiates there, and adds this rank's shards of the gradients.

    All ranks of a shard's axis take part. For ``JOIN`` no loss runs, and the gradients are zeros.
    ``on_grad_ready`` is called only where no param is sharded.
    """
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
    """Returns the weights of a microbatch without tokens: one False, on the default device."""
    return torch.zeros(1, dtype=torch.bool)
