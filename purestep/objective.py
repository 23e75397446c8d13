"""What a microbatch contributes to the objective.

    L(θ) = Σₘ ( Σᵢ wᵢ ℓᵢ(θ) / num_tokens  +  [m has tokens] · term(θ) / num_microbatches )

The same weights that were counted multiply the losses here, shape against shape, so numerator and
denominator cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.tokens import Weighed, checked_weights, count_weights
from purestep.torch_internals import transformed, version
from purestep.tree import accumulation_dtype
from purestep.types import LossFn, LossTerms, Microbatch, Params, Tree

Part: TypeAlias = Callable[
    [Params, Microbatch, Tensor | None, Tensor | None, Tensor | None], tuple[Tensor, Tree]
]
"""``part(params, microbatch, weights, num_tokens, num_microbatches) -> (loss, (count, aux))``: its part of L."""


def partial_loss(loss_fn: LossFn) -> Part:
    """The microbatch's part of L, its count and its aux; without the totals, plain sums.

    ``weights`` are those that were counted; None where the loss brings them.

    A loss at a weight of zero may be anything, even NaN: it is taken away by selection, and what flows
    back to it is exactly zero.
    """

    def part(
        params: Params,
        microbatch: Microbatch,
        weights: Tensor | None,
        num_tokens: Tensor | None,
        num_microbatches: Tensor | None,
    ) -> tuple[Tensor, Tree]:
        terms = loss_terms(loss_fn, params, microbatch)
        weights = weights_of(terms, weights)
        counted = count_weights(weights)
        losses = terms.tokens.to(accumulation_dtype(terms.tokens.dtype))
        # Divided before it is rounded: a weight need not be a number of the losses' dtype.
        seed = weights if num_tokens is None else weights.to(torch.float64) / divisor(num_tokens)
        seed = seed.to(losses.dtype)
        loss = (torch.where(weights != 0, losses, 0) * seed).sum()
        if terms.microbatch is not None:
            if num_microbatches is None:
                raise ValueError(
                    "LossTerms.microbatch is divided by the number of microbatches, which must be "
                    'known before the backward pass: use normalize="loss" and a weight_fn (in '
                    "accumulate: num_microbatches=), or add the term to LossTerms.tokens"
                )
            term = terms.microbatch.to(losses.dtype)
            present = counted.num_tokens > 0
            known = tree.at_hand(present)
            # Left out where that can be told, so that nothing that is not finite comes back from it.
            if known is None or known.any():
                loss = loss + torch.where(present, term, 0) / divisor(num_microbatches).to(losses)
        return loss, (counted, terms.aux)

    return part


def loss_terms(loss_fn: LossFn, params: Params, microbatch: Microbatch) -> LossTerms:
    """What ``loss_fn`` returned, as ``LossTerms``, refused where it cannot be a loss."""
    output = loss_fn(params, microbatch)
    if isinstance(output, tuple) and not isinstance(output, LossTerms):
        raise TypeError(
            f"loss_fn returned a tuple of {len(output)}: return one loss per token, or name the parts as "
            "ps.LossTerms(tokens=losses, aux=...)"
        )
    terms = output if isinstance(output, LossTerms) else LossTerms(output)
    if terms.aux is None:
        terms = terms._replace(aux=())
    if not isinstance(terms.tokens, Tensor) or not terms.tokens.is_floating_point():
        found = terms.tokens.dtype if isinstance(terms.tokens, Tensor) else type(output).__name__
        raise TypeError(
            "loss_fn must return a floating point tensor, one loss per token, or LossTerms "
            f"(tokens=, microbatch=, aux=); got {found}"
        )
    term = terms.microbatch
    if term is not None and (not isinstance(term, Tensor) or term.ndim != 0):
        kind = f"shape {tuple(term.shape)}" if isinstance(term, Tensor) else type(term).__name__
        raise ValueError(
            f"LossTerms.microbatch must be a scalar tensor, got {kind}; what has one value per token "
            "belongs into LossTerms.tokens"
        )
    for position, leaf in enumerate(tree.leaves_of(terms.aux)):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"LossTerms.{tree.paths(terms.aux, 'aux')[position]} must be a tensor, got "
                f"{type(leaf).__name__}; wrap it in torch.tensor"
            )
    return terms


def weights_of(terms: LossTerms, counted: Tensor | None) -> Tensor:
    """The weights of a microbatch's losses: those that were counted, or the loss's own where there are none."""
    if counted is not None and terms.weights is not None:
        raise ValueError(
            "the weights come twice, from weight_fn and from LossTerms.weights: pass weight_fn=None "
            '(with normalize="grads"), or return no weights'
        )
    weights = counted
    if terms.weights is not None:
        weights = checked_weights(terms.weights)
    if weights is None:
        raise ValueError("weight_fn=None needs a loss_fn that returns LossTerms(tokens=, weights=)")
    if terms.tokens.shape != weights.shape:
        raise ValueError(
            f"losses of shape {tuple(terms.tokens.shape)} against weights of shape "
            f"{tuple(weights.shape)}: {_mismatch(terms.tokens.shape, weights.shape)}"
        )
    return tree.brought(weights, terms.tokens.device)


def _mismatch(losses: torch.Size, weights: torch.Size) -> str:
    """What is most likely the matter, and what to do."""
    if not losses:
        return (
            "loss_fn must return one loss per token; a scalar is most likely a mean or a sum: take "
            'reduction="none"'
        )
    if len(losses) == len(weights):
        gaps = [weight - loss for loss, weight in zip(losses, weights, strict=True)]
        if sorted(map(abs, gaps))[-2:] in ([1], [0, 1]):
            return (
                f"dimension {[*map(abs, gaps)].index(1)} differs by one, as where loss_fn shifts the labels: shift "
                "them in the data instead, before weight_fn counts them, or count what the loss uses, as in "
                'weight_fn=lambda m: m["labels"][:, 1:] != -100'
            )
    return "they are multiplied one by one and never broadcast"


def divisor(total: Tensor) -> Tensor:
    """The total, but 1 where it is 0: there is nothing to divide then. Not a clamp: 0.25 stays."""
    return torch.where(total > 0, total, 1)


class GroupTotal(NamedTuple):
    """The sum over microbatches of their parts of L, in float64, and of what they carry; and the losses' dtype."""

    loss: Tensor
    carried: Tree
    dtype: torch.dtype


def add_part(total: GroupTotal | None, loss: Tensor, carried: Tree) -> GroupTotal:
    """The total with one microbatch more; a ``total`` of None is nothing yet."""
    dtype = accumulation_dtype(loss.dtype)
    if total is None:
        return GroupTotal(loss.to(torch.float64), plus(None, carried), dtype)
    dtype = torch.promote_types(total.dtype, dtype)
    return GroupTotal(total.loss + loss, plus(total.carried, carried), dtype)


def of_group(total: GroupTotal | None, params: Params) -> tuple[Tensor, Tree]:
    """The loss of a group in the losses' own dtype, and what it carries: ``()`` where there is no microbatch."""
    if total is None:
        leaf: Tensor = tree.leaves_of(params)[0]
        return leaf.new_zeros((), dtype=accumulation_dtype(leaf.dtype)), ()
    return total.loss.to(total.dtype), total.carried


def plus(total: Tree, term: Tree) -> Tree:
    """``total + term`` in the dtype in which each leaf is summed; a ``total`` of None is nothing yet."""

    def add(so_far: Tensor, leaf: Tensor) -> Tensor:
        if so_far.shape != leaf.shape:
            raise ValueError(
                f"LossTerms.aux has a leaf of shape {tuple(so_far.shape)} in one microbatch and "
                f"{tuple(leaf.shape)} in another: it is summed, so return sums over the tokens"
            )
        return so_far + leaf

    if total is None:
        # A copy: what a loss returns may be a view of its inputs, and outputs share no storage with them.
        return tree.map(lambda leaf: leaf.to(accumulation_dtype(leaf.dtype), copy=True), term)
    return tree.map(add, total, term)


def versions_of(params: Params) -> list[int]:
    """How often each leaf was written to; nothing where that is not counted, under transforms and compilers."""
    if torch.compiler.is_dynamo_compiling() or transformed():
        return []
    leaves = tree.leaves_of(params)
    return [] if any(map(Tensor.is_inference, leaves)) else list(map(version, leaves))


def check_untouched(params: Params, versions: Sequence[int]) -> None:
    """Refuses a loss that has written to what it was given."""
    if versions != versions_of(params):
        pairs = zip(versions, versions_of(params), strict=True)
        index = next(index for index, (before, after) in enumerate(pairs) if before != after)
        raise ValueError(
            f"loss_fn wrote to {tree.paths(params, 'params')[index]} in place, which is the caller's: compute a "
            "new tensor, or give a module that updates its buffers a clone of them"
        )


def evaluate(
    part: Part,
    params: Params,
    group: Iterable[Weighed],
    num_tokens: Tensor | None = None,
    num_microbatches: Tensor | None = None,
) -> tuple[Tensor, Tree]:
    """The loss of a group, and what it carries, without gradients."""
    total: GroupTotal | None = None
    versions = versions_of(params)
    for microbatch, weights in group:
        here = part(params, microbatch, weights, num_tokens, num_microbatches)
        total = add_part(total, *tree.map(Tensor.detach, here))
    check_untouched(params, versions)
    return of_group(total, params)
