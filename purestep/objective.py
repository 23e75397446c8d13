"""The part of the objective that belongs to one microbatch.

    L(θ) = Σₘ ( Σᵢ wᵢ ℓᵢ(θ) / num_tokens  +  [m has tokens] · term(θ) / num_microbatches )

The same weights that were counted multiply the losses here, shape against shape, so numerator and
denominator cannot disagree.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from purestep import tree
from purestep.counts import checked_weights
from purestep.tree import accumulation_dtype
from purestep.types import Count, LossFn, LossTerms, Microbatch, Params, Tree


class Part(NamedTuple):
    """A microbatch's terms of L, and ∂L/∂term for each, with which the backward pass begins."""

    terms: list[Tensor]
    cotangents: list[Tensor]
    weights: Tensor
    aux: Tree


def part_of(
    loss_fn: LossFn,
    params: Params,
    microbatch: Microbatch,
    weights: Tensor | None,
    divisors: Count | None,
) -> Part:
    """The forward pass of a microbatch; without ``divisors``, of plain sums.

    ``weights`` of None are those that the loss returns.

    >>> divisors = divisors_of(Count(torch.tensor(4), torch.tensor(1)))
    >>> x, weights = torch.tensor([1.0, 5.0]), torch.tensor([1, 0])
    >>> part_of(lambda w, m: w * m, torch.tensor(3.0), x, weights, divisors).cotangents
    [tensor([0.2500, 0.0000])]
    """
    output = loss_terms(loss_fn(params, microbatch))
    weights = matching_weights(output, weights)
    losses = output.tokens.to(accumulation_dtype(output.tokens.dtype))
    shares = weights
    if divisors is not None:
        # Divided in float64, since the losses' dtype may not hold the weight or the count.
        exact = weights.to(torch.float64) if weights.is_floating_point() else weights
        shares = exact / divisors.num_tokens
    part = Part([losses], [shares.to(losses.dtype)], weights, output.aux)
    return (
        part
        if output.microbatch is None
        else _with_term(part, output.microbatch, divisors)
    )


def _with_term(part: Part, term: Tensor, divisors: Count | None) -> Part:
    """The part with ``LossTerms.microbatch``, which an empty microbatch leaves out."""
    if divisors is None:
        raise ValueError(
            "LossTerms.microbatch is divided by the number of microbatches, which must be known "
            'before the backward pass: use normalize="loss" and a weight_fn (in accumulate: '
            "total=), or add the term to LossTerms.tokens"
        )
    present = (part.weights > 0).any()
    known = tree.at_hand(present)
    if known is not None and not known.any():
        return part
    term = term.to(part.terms[0].dtype)
    share = torch.where(present, 1 / divisors.num_microbatches.to(torch.float64), 0).to(
        term
    )
    return part._replace(
        terms=[*part.terms, term], cotangents=[*part.cotangents, share]
    )


def divisors_of(total: Count) -> Count:
    """The count with its tokens in float64, and 1 in the place of 0. Not a clamp: 0.25 stays.

    >>> divisors_of(Count(torch.tensor(0.25), torch.tensor(0))).num_tokens
    tensor(0.2500, dtype=torch.float64)
    """
    tokens = total.num_tokens
    return total._replace(
        num_tokens=torch.where(tokens > 0, tokens, 1).to(torch.float64)
    )


def value(
    terms: Sequence[Tensor], cotangents: Sequence[Tensor], *, constant: bool = False
) -> Tensor:
    """Σ term · cotangent. A term at a cotangent of zero may be anything, even NaN.

    It is taken away by selection, so that exactly zero flows back to it. A ``constant`` has no
    derivative: where the host sees a finite sum, there is nothing to take away.

    >>> value([torch.tensor([1.0, math.nan])], [torch.tensor([0.5, 0.0])])
    tensor(0.5000)
    """
    total: Tensor | None = None
    for term, share in zip(terms, cotangents, strict=True):
        term = term.detach() if constant else term
        worth = (term * share).sum() if constant and term.is_cpu else None
        known = None if worth is None else tree.number_at_hand(worth)
        if worth is None or known is None or not math.isfinite(known):
            worth = (torch.where(share != 0, term, 0) * share).sum()
        total = worth if total is None else total + worth
    assert total is not None
    return total


def loss_terms(output: object) -> LossTerms:
    """The output of a loss function as ``LossTerms``, refused where it cannot be a loss."""
    terms = output if isinstance(output, LossTerms) else LossTerms(output)  # type: ignore[arg-type]
    if not isinstance(terms.tokens, Tensor) or not terms.tokens.is_floating_point():
        found = (
            terms.tokens.dtype
            if isinstance(terms.tokens, Tensor)
            else type(output).__name__
        )
        raise TypeError(
            "loss_fn must return a floating point tensor, one loss per token, or name the parts as "
            f"ps.LossTerms(tokens=losses, microbatch=..., aux=...); got {found}"
        )
    term = terms.microbatch
    if term is not None and (not isinstance(term, Tensor) or term.ndim != 0):
        kind = (
            f"shape {tuple(term.shape)}"
            if isinstance(term, Tensor)
            else type(term).__name__
        )
        raise ValueError(
            f"LossTerms.microbatch must be a scalar tensor, got {kind}; what has one value per "
            "token belongs into LossTerms.tokens"
        )
    if terms.aux is None:
        return terms._replace(aux=())
    if not tree.is_empty(terms.aux):
        for position, leaf in enumerate(tree.leaves_of(terms.aux)):
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"LossTerms.{tree.paths(terms.aux, 'aux')[position]} must be a tensor, got "
                    f"{type(leaf).__name__}; wrap it in torch.tensor"
                )
    return terms


def matching_weights(terms: LossTerms, counted: Tensor | None) -> Tensor:
    """The counted weights, else those of the loss, in the losses' shape and on their device."""
    if counted is not None and terms.weights is not None:
        raise ValueError(
            "the weights come twice, from weight_fn and from LossTerms.weights: pass "
            'weight_fn=None (with normalize="grads"), or return no weights'
        )
    weights = counted
    if terms.weights is not None:
        weights = checked_weights(terms.weights)
    if weights is None:
        raise ValueError(
            "weight_fn=None needs a loss_fn that returns LossTerms(tokens=, weights=)"
        )
    if terms.tokens.is_nested or weights.is_nested:
        which = "losses" if terms.tokens.is_nested else "weights"
        raise TypeError(
            f"{which} are a nested tensor, whose shape cannot be compared: return .values() of "
            "both, or pad them"
        )
    if terms.tokens.shape != weights.shape:
        raise ValueError(
            f"losses of shape {tuple(terms.tokens.shape)} against weights of shape "
            f"{tuple(weights.shape)}: {_mismatch(terms.tokens.shape, weights.shape)}"
        )
    device = terms.tokens.device
    return weights if weights.device == device else tree.brought(weights, device)


def _mismatch(losses: torch.Size, weights: torch.Size) -> str:
    """The likely mistake, and the way out."""
    if not losses:
        return (
            "loss_fn must return one loss per token; a scalar is most likely a mean or a sum: take "
            'reduction="none"'
        )
    if len(losses) == len(weights):
        gaps = [
            abs(weight - loss) for loss, weight in zip(losses, weights, strict=True)
        ]
        if sum(gaps) == 1:
            return (
                f"dimension {gaps.index(1)} differs by one, as where loss_fn shifts the labels: "
                "shift them in the data instead, before weight_fn counts them, or count what the "
                'loss uses, as in weight_fn=lambda m: m["labels"][:, 1:] != -100'
            )
    return (
        "they are multiplied one by one and never broadcast: reshape the losses, or the weights in "
        "weight_fn; or loss_fn takes a mean too many"
    )
