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
from purestep.counts import Group
from purestep.grads.backends import ReverseModes
from purestep.grads.inplace import filled as zeros_for_none
from purestep.grads.microbatch import Beside, Inputs, Reverse, Sums
from purestep.sharding.gather import filled, scatter
from purestep.types import Ready

JOIN = object()
"""A microbatch that this rank does not have while others do."""


def joined(group: Group, rounds: int) -> Group:
    """The group, and ``JOIN`` until there are so many microbatches.

    >>> len(joined(Group([{"x": torch.ones(2)}], None, None), 3).microbatches)
    3
    """
    microbatches, weights, counted = group
    missing = rounds - len(microbatches)
    if not missing:
        return group
    own_weights: Sequence[Any] = weights or [None] * len(microbatches)
    given = [*own_weights, *[_no_token()] * missing]
    return Group([*microbatches, *[JOIN] * missing], given, counted)


def per_microbatch(modes: ReverseModes) -> ReverseModes:
    """Each mode, at params that are gathered for one microbatch, and gradients in pieces again."""
    return ReverseModes(*(partial(_at_wholes, mode) for mode in modes))


def per_backward(modes: ReverseModes) -> ReverseModes:
    """Each mode, for losses that gather params themselves and scatter their gradients.

    All ranks scatter together in the backward pass. One whose loss reaches no param has none, so it
    raises before the next gather, with which the others would wait for it.
    """
    return ReverseModes(*(partial(_with_backward, mode) for mode in modes))


def _with_backward(
    mode: Reverse, inputs: Inputs, sums: Sums, ready: Ready | None
) -> Beside:
    beside = mode(inputs, sums, ready)
    if not beside.reached and any(
        place and place.axis.own_programs for place in tree.spread(inputs.structure)
    ):
        raise validation.unreached()
    return beside


def _at_wholes(
    mode: Reverse, inputs: Inputs, sums: Sums, ready: Ready | None
) -> Beside:
    places = tree.spread(inputs.structure)
    apart = {at: place for at, place in enumerate(places) if place}
    if not apart and inputs.microbatch is not JOIN:
        return mode(inputs, sums, ready)
    params = filled(
        tree.unflatten(inputs.structure, inputs.leaves), inputs.leaves, apart
    )
    wholes, structure = tree.flatten(params)
    here = Sums([None] * len(wholes), sums.dtypes)
    taken, finish = scatter(wholes, sums.dtypes, apart)
    if inputs.microbatch is JOIN:
        loss = wholes[0].new_zeros((), dtype=tree.accumulation_dtype(wholes[0].dtype))
        beside = Beside(loss, _no_token(), (), reached=False)
    else:
        beside = mode(inputs._replace(leaves=wholes, structure=structure), here, taken)
    grads = zeros_for_none(here, wholes)
    del params, wholes  # Where they are not needed any more, pieces take their memory.
    for at, grad in enumerate(finish(grads)):
        before = sums.values[at]
        sums.values[at] = grad if before is None else before + grad
    return beside


def _no_token() -> Tensor:
    return torch.zeros(1, dtype=torch.bool)
