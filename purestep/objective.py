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
from purestep.counts import check_total, validate_weights
from purestep.types import LossFn, LossOutput, Microbatch, Params, TokenCounts, Tree

MAX_EXACT_FLOAT32 = 2**24
"""Up to here, float32 holds every integer."""


class WeightedLoss(NamedTuple):
    """Holds a microbatch's terms of the loss L, ∂L/∂term for each, the weights, and ``aux``.

    The backward pass starts from the terms with these derivatives as cotangents. Without divisors,
    the cotangents are the weights, N · ∂L/∂term.
    """

    terms: list[Tensor]
    cotangents: list[Tensor]
    weights: Tensor
    aux: Tree


def forward_microbatch(
    loss_fn: LossFn,
    params: Params,
    microbatch: Microbatch,
    weights: Tensor | None,
    divisors: TokenCounts | None,
) -> WeightedLoss:
    """Runs the forward pass of a microbatch; returns its terms of the loss and cotangents.

    A cotangent is a weight divided by ``divisors.num_tokens``; without ``divisors``, the weight
    itself. If ``weights`` is None, the loss must return them; else it must not. Terms are in
    float32 or wider.

    ``LossOutput.microbatch_loss`` is a second term, unless the host sees that the microbatch has no
    tokens. Its cotangent is 1 / ``divisors.num_microbatches``, or 0 without tokens. Without
    ``divisors``, it raises ``ValueError``. Raises as ``as_loss_output`` and ``match_weights``, too.

    >>> divisors = denominators(TokenCounts(torch.tensor(4), torch.tensor(1)))
    >>> x, weights = torch.tensor([1.0, 5.0]), torch.tensor([1, 0])
    >>> forward_microbatch(lambda w, m: w * m, torch.tensor(3.0), x, weights, divisors).cotangents
    [tensor([0.2500, 0.0000])]
    """
    output = as_loss_output(loss_fn(params, microbatch))
    weights = match_weights(output, weights)
    losses = output.losses
    dtype = tree.accumulation_dtype(losses.dtype)
    # Casts that change nothing take as long as small operations, at each microbatch.
    if losses.dtype != dtype:
        losses = losses.to(dtype)
    shares = weights
    if divisors is not None:
        num_tokens = divisors.num_tokens
        # A small N is in float32, in which the quotient of integers would be rounded.
        if dtype == torch.float64:
            num_tokens = num_tokens.to(torch.float64)
        # The losses' dtype may not hold a float weight.
        exact = weights.to(torch.float64) if weights.is_floating_point() else weights
        shares = exact / num_tokens
    if shares.dtype != dtype:
        shares = shares.to(dtype)
    weighted = WeightedLoss([losses], [shares], weights, output.aux)
    if output.microbatch_loss is None:
        return weighted
    return _with_microbatch_loss(weighted, output.microbatch_loss, divisors)


def _with_microbatch_loss(
    weighted: WeightedLoss, term: Tensor, divisors: TokenCounts | None
) -> WeightedLoss:
    """Returns ``weighted`` with one more term, ``LossOutput.microbatch_loss``, and its cotangent.

    The cotangent is 1 / ``divisors.num_microbatches``. A microbatch without tokens adds no term. It
    adds one with cotangent 0 where the host cannot read its weights, or where a ``vmap`` has other
    members with tokens. Raises ``ValueError`` without ``divisors``.
    """
    if divisors is None:
        raise ValueError(
            "LossOutput.microbatch_loss is divided by the number of microbatches, which must be "
            'known before the backward pass: use normalize="loss" and a weight_fn (in accumulate: '
            "total=), or add the term to LossOutput.losses"
        )
    has_tokens = (weighted.weights > 0).any()
    on_host = tree.concrete(has_tokens)
    if on_host is not None and not on_host.any():
        return weighted
    term = term.to(weighted.terms[0].dtype)
    share = 1 / divisors.num_microbatches.to(torch.float64)
    share = torch.where(has_tokens, share, 0).to(term)
    return weighted._replace(
        terms=[*weighted.terms, term],
        cotangents=[*weighted.cotangents, share],
    )


def denominators(total: TokenCounts) -> TokenCounts:
    """Returns counts whose number of tokens is a float to divide by: 1 if it was 0.

    The float is float32 for an integer up to 2²⁴ that the host reads, and float64 otherwise. It is
    no clamp: 0.25 stays. The number of microbatches stays, too. Raises ``ValueError`` if the host
    reads a number that is negative, infinite or NaN: the sum of the weights has overflowed. Where
    the host does not read it, a negative number or NaN also becomes 1.

    >>> denominators(TokenCounts(torch.tensor(0.25), torch.tensor(0))).num_tokens
    tensor(0.2500, dtype=torch.float64)
    >>> denominators(TokenCounts(torch.tensor(2**24), torch.tensor(1))).num_tokens
    tensor(16777216.)
    """
    num_tokens = total.num_tokens
    value = tree.concrete_scalar(num_tokens)
    if value is not None:
        check_total(value)
    # The host does not compute what it can read: each small operation counts in a small step.
    if not value:
        num_tokens = torch.where(num_tokens > 0, num_tokens, 1)
    is_small = value is not None and value <= MAX_EXACT_FLOAT32
    # By float32 the weights of a microbatch become cotangents in one operation, not in two.
    if is_small and not num_tokens.is_floating_point():
        return total._replace(num_tokens=num_tokens.float())
    return total._replace(num_tokens=num_tokens.double())


def weighted_sum(
    terms: Sequence[Tensor], cotangents: Sequence[Tensor], *, constant: bool = False
) -> Tensor:
    """Computes Σ term · cotangent, where a term at a cotangent of zero may even be NaN.

    ``torch.where`` drops these terms, so that exactly zero flows back to them. If ``constant``, the
    terms are detached first. There must be one term at least.

    >>> weighted_sum([torch.tensor([1.0, math.nan])], [torch.tensor([0.5, 0.0])])
    tensor(0.5000)
    """
    total: Tensor | None = None
    for term, share in zip(terms, cotangents, strict=True):
        contribution: Tensor | None = None
        if constant:
            term = term.detach()
            if term.is_cpu:
                contribution = (term * share).sum()
                value = tree.concrete_scalar(contribution)
                if value is None or not math.isfinite(value):
                    contribution = None
        if contribution is None:
            contribution = (torch.where(share != 0, term, 0) * share).sum()
        total = contribution if total is None else total + contribution
    assert total is not None
    return total


def as_loss_output(output: object) -> LossOutput:
    """Makes a ``LossOutput`` of what a loss returns: its losses alone, or a ``LossOutput``.

    An ``aux`` of None becomes ``()``. Raises ``TypeError`` unless losses are a floating point
    tensor, and each leaf of ``aux`` is a tensor; None in it is no leaf. Raises ``ValueError``
    unless ``microbatch_loss`` is None or a real tensor without dimensions.
    """
    terms = output
    if not isinstance(terms, LossOutput):
        terms = LossOutput(output)  # type: ignore[arg-type]
    losses = terms.losses
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        actual = losses.dtype if isinstance(losses, Tensor) else type(losses).__name__
        raise TypeError(
            "loss_fn must return a floating point tensor, one loss per token, or name the parts as "
            f"ps.LossOutput(losses, microbatch_loss=..., aux=...); got {actual}"
        )
    term = terms.microbatch_loss
    is_scalar = isinstance(term, Tensor) and term.ndim == 0 and not term.is_complex()
    if term is not None and not is_scalar:
        text = type(term).__name__
        if isinstance(term, Tensor):
            text = tree.format_leaf(term)
        raise ValueError(
            f"LossOutput.microbatch_loss must be a real scalar tensor, got {text}; what has one "
            "value per token belongs into LossOutput.losses"
        )
    if terms.aux is None:
        return terms._replace(aux=())
    if not tree.is_empty(terms.aux):
        for position, leaf in enumerate(tree.leaves(terms.aux)):
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"LossOutput.{tree.paths(terms.aux, 'aux')[position]} must be a tensor, got "
                    f"{type(leaf).__name__}; wrap it in torch.tensor"
                )
    return terms


def match_weights(terms: LossOutput, counted: Tensor | None) -> Tensor:
    """Returns the weights, ``counted`` by a ``weight_fn`` or of the loss, on the losses' device.

    Raises ``ValueError`` unless there is exactly one of the two, of the shape of the losses, and
    ``TypeError`` for nested tensors. Weights of the loss are first checked by ``validate_weights``,
    where torch raises ``NotImplementedError`` for some nested tensors.
    """
    if counted is not None and terms.weights is not None:
        raise ValueError(
            "the weights come twice, from weight_fn and from LossOutput.weights: pass "
            'weight_fn=None (with normalize="grads"), or return no weights'
        )
    weights = counted
    if terms.weights is not None:
        weights = validate_weights(terms.weights)
    if weights is None:
        raise ValueError(
            "weight_fn=None needs a loss_fn that returns LossOutput(losses, weights=). To count "
            'every token alike, pass weight_fn=lambda m: torch.ones_like(m["y"]), one weight for '
            "each loss"
        )
    if terms.losses.is_nested or weights.is_nested:
        which = "losses" if terms.losses.is_nested else "weights"
        raise TypeError(
            f"{which} are a nested tensor, whose shape cannot be compared: return .values() of "
            "both, or pad them"
        )
    if terms.losses.shape != weights.shape:
        raise ValueError(
            f"losses of shape {tuple(terms.losses.shape)} against weights of shape "
            f"{tuple(weights.shape)}: {_shape_mismatch(terms.losses.shape, weights.shape)}"
        )
    device = terms.losses.device
    return weights if weights.device == device else tree.to_device(weights, device)


def _shape_mismatch(losses: torch.Size, weights: torch.Size) -> str:
    """Returns a message's part: the likely mistake behind two different shapes, and the way out."""
    if not losses:
        return (
            "loss_fn must return one loss per token; a scalar is most likely a mean or a sum: take "
            'reduction="none"'
        )
    if len(losses) == len(weights):
        gaps = []
        for loss_len, weight_len in zip(losses, weights, strict=True):
            gaps.append(abs(weight_len - loss_len))
        if sum(gaps) == 1:
            return (
                f"dimension {gaps.index(1)} differs by one, as where loss_fn shifts the labels: "
                "shift them in the data instead, before weight_fn counts them, or count what the "
                'loss uses, as in weight_fn=lambda m: m["labels"][:, 1:] != -100'
            )
    if len(losses) == 2 and losses == (*weights, *weights):
        return (
            "they are those of (n, 1) against (n,), which broadcast inside loss_fn: drop the last "
            "dimension of the model's output, as by .squeeze(-1)"
        )
    return (
        "they are multiplied one by one and never broadcast: reshape the losses, or the weights in "
        "weight_fn; or loss_fn takes a mean too many"
    )
