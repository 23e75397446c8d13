"""``gather="microbatch"``: params that are gathered for each microbatch.

Gradients are scattered in buckets while each backward pass runs. All ranks gather and scatter
together, so that one with fewer microbatches joins the others with zeros.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from purestep import tree, validation
from purestep.counts import WeightedMicrobatches
from purestep.grads.backends import GradBackends
from purestep.grads.inplace import zeros_for_missing as zeros_for_none
from purestep.grads.microbatch import (
    GradAccumulator,
    GradFn,
    MicrobatchInputs,
    MicrobatchResult,
)
from purestep.sharding.gather import gather_shards, make_reduce_scatter
from purestep.types import GradHook

JOIN = object()
"""A microbatch that this rank does not have while others do."""


def pad_microbatches(group: WeightedMicrobatches, rounds: int) -> WeightedMicrobatches:
    """The group, and ``JOIN`` until there are so many microbatches.

    >>> group = WeightedMicrobatches([{"x": torch.ones(2)}], None, None)
    >>> len(pad_microbatches(group, 3).microbatches)
    3
    """
    microbatches, weights, counted = group
    missing = rounds - len(microbatches)
    if not missing:
        return group
    own_weights: Sequence[Any] = weights or [None] * len(microbatches)
    given = [*own_weights, *[_no_tokens()] * missing]
    return WeightedMicrobatches([*microbatches, *[JOIN] * missing], given, counted)


def gather_per_microbatch(modes: GradBackends) -> GradBackends:
    """Each mode, at params that are gathered for one microbatch, and gradients in pieces again."""
    return GradBackends(*(partial(_with_full_params, mode) for mode in modes))


def gather_in_loss(modes: GradBackends) -> GradBackends:
    """Each mode, for losses that gather params themselves and scatter their gradients.

    All ranks scatter together in the backward pass. One whose loss reaches no param has none, so it
    raises before the next gather, with which the others would wait for it.
    """
    return GradBackends(*(partial(_check_reduces, mode) for mode in modes))


def _check_reduces(
    mode: GradFn,
    inputs: MicrobatchInputs,
    sums: GradAccumulator,
    ready: GradHook | None,
) -> MicrobatchResult:
    beside = mode(inputs, sums, ready)
    if not beside.reached and any(
        place and place.axis.is_multi_program
        for place in tree.shard_specs(inputs.structure)
    ):
        raise validation.no_dependence_error()
    return beside


def _with_full_params(
    mode: GradFn,
    inputs: MicrobatchInputs,
    sums: GradAccumulator,
    ready: GradHook | None,
) -> MicrobatchResult:
    places = tree.shard_specs(inputs.structure)
    apart = {at: place for at, place in enumerate(places) if place}
    if not apart and inputs.microbatch is not JOIN:
        return mode(inputs, sums, ready)
    params = gather_shards(
        tree.unflatten(inputs.structure, inputs.leaves), inputs.leaves, apart
    )
    wholes, structure = tree.flatten(params)
    here = GradAccumulator([None] * len(wholes), sums.dtypes)
    taken, finish = make_reduce_scatter(wholes, sums.dtypes, apart)
    if inputs.microbatch is JOIN:
        loss = wholes[0].new_zeros((), dtype=tree.accumulation_dtype(wholes[0].dtype))
        beside = MicrobatchResult(loss, _no_tokens(), (), reached=False)
    else:
        beside = mode(inputs._replace(leaves=wholes, structure=structure), here, taken)
    grads = zeros_for_none(here, wholes)
    del params, wholes  # Where they are not needed any more, pieces take their memory.
    for at, grad in enumerate(finish(grads)):
        before = sums.values[at]
        sums.values[at] = grad if before is None else before + grad
    return beside


def _no_tokens() -> Tensor:
    return torch.zeros(1, dtype=torch.bool)
