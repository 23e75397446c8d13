"""``gather="microbatch"``: the loss over pieces, which it gathers itself in each microbatch.

    g = Σₘ ∇(Lₘ ∘ unshard)(p)

p are the pieces that a rank keeps, and g their gradients. All ranks gather and scatter together, so
that one with fewer microbatches joins the others with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from purestep import tree
from purestep.sharding.cut import unshard
from purestep.types import LossFn, LossTerms, Microbatch, Params, WeightFn
from purestep.weights import Group


class _Join:
    """A microbatch that this rank does not have while others do."""


JOIN = _Join()


def joined(group: Group, rounds: int) -> Group:
    """The group, and ``JOIN`` until there are so many microbatches.

    >>> len(joined(Group([{"x": torch.ones(2)}], None, None), 3).microbatches)
    3
    """
    microbatches, weights, counted = group
    missing = rounds - len(microbatches)
    if not missing:
        return group
    if weights is not None:
        weights = [*weights, *[_no_token()] * missing]
    return Group([*microbatches, *[JOIN] * missing], weights, counted)


def per_microbatch(loss_fn: LossFn, weight_fn: WeightFn | None) -> tuple[LossFn, WeightFn | None]:
    """The loss over pieces and its weights, which are zero for ``JOIN``.

    >>> loss_fn, weight_fn = per_microbatch(lambda w, x: w * x, torch.ones_like)
    >>> loss_fn(torch.tensor(2.0), JOIN), weight_fn(JOIN)
    (tensor([2.]), tensor([False]))
    """

    def loss(params: Params, microbatch: Microbatch, /) -> Tensor | LossTerms:
        wholes = unshard(params)
        if microbatch is not JOIN:
            return loss_fn(wholes, microbatch)
        zero = torch.stack([leaf.sum() for leaf in tree.leaves_of(wholes)]).sum()[None]
        return zero if weight_fn else LossTerms(zero, weights=_no_token())

    def weights(microbatch: Microbatch, /) -> Tensor:
        assert weight_fn is not None
        return _no_token() if microbatch is JOIN else weight_fn(microbatch)

    return loss, weights if weight_fn else None


def _no_token() -> Tensor:
    return torch.zeros(1, dtype=torch.bool)
