"""What a microbatch contributes to the objective.

    L(θ) = Σₘ ( Σᵢ wᵢ ℓᵢ(θ) / num_tokens  +  [m has tokens] · term(θ) / num_microbatches )

The same weights that were counted multiply the losses here, shape against shape, so numerator and
denominator cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.tokens import checked_weights, count_of, tokens_of
from purestep.torch_internals import transformed, version
from purestep.tree import accumulation_dtype
from purestep.types import Count, LossFn, LossTerms, Microbatch, Params, Sums, Tree


class Part(NamedTuple):
    """A microbatch's part of L, before it is summed: its terms, and ∂L/∂term for each, with which a backward pass begins.

    ``num_tokens`` is empty where the weights were counted before.
    """

    terms: list[Tensor]
    cotangents: list[Tensor]
    num_tokens: list[Tensor]
    aux: Tree


PartOf: TypeAlias = Callable[[Params, Microbatch, Tensor | None, Count | None], Part]
"""``part_of(params, microbatch, weights, total)``; weights of None are those that the loss brings."""


def partial_loss(loss_fn: LossFn, *, as_counted: bool = False) -> PartOf:
    """A microbatch's part of L; without a ``total``, of plain sums.

    ``as_counted``: the total is the count itself, as for a graph, which makes its ``denominators`` beside all else that it
    does. Otherwise it is they, which are made once for all microbatches.

    >>> part_of = partial_loss(lambda w, m: w * m)
    >>> total = Count(torch.tensor(4), torch.tensor(1))
    >>> part_of(torch.tensor(3.0), torch.tensor([1.0, 5.0]), torch.tensor([1, 0]), total).cotangents
    [tensor([0.2500, 0.0000])]
    """

    def part_of(
        params: Params, microbatch: Microbatch, weights: Tensor | None, total: Count | None
    ) -> Part:
        given = loss_terms(loss_fn, params, microbatch)
        counted = total is not None and weights is not None
        total = denominators(total) if total and as_counted else total
        weights = weights_of(given, weights)
        losses = given.tokens.to(accumulation_dtype(given.tokens.dtype))
        # Divided before it is rounded: a weight need not be a number of the losses' dtype.
        shares = weights if total is None else _exact(weights) / total.num_tokens
        terms, cotangents = [losses], [shares.to(losses.dtype)]
        if given.microbatch is not None:
            if total is None:
                raise ValueError(
                    "LossTerms.microbatch is divided by the number of microbatches, which must be "
                    'known before the backward pass: use normalize="loss" and a weight_fn (in '
                    "accumulate: total=), or add the term to LossTerms.tokens"
                )
            present = (weights > 0).any()
            known = tree.at_hand(present)
            # Left out where that can be told, so that nothing that is not finite comes back from it.
            if known is None or known.any():
                terms.append(given.microbatch.to(losses.dtype))
                share = 1 / divisor(total.num_microbatches).to(losses)
                cotangents.append(torch.where(present, share, 0))
        return Part(terms, cotangents, [] if counted else [tokens_of(weights)], given.aux)

    return part_of


def _exact(weights: Tensor) -> Tensor:
    """What gives float64 when it is divided by a float64: integers are that by themselves."""
    return weights.to(torch.float64) if weights.dtype.is_floating_point else weights


def value(terms: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Tensor:
    """What a part is worth: the sum of its terms, each times its cotangent.

    A term at a cotangent of zero may be anything, even NaN: it is taken away by selection, and what flows
    back to it is exactly zero. Where the host sees that the sum is finite, there is nothing to take away.
    """
    pairs = [*zip(terms, cotangents, strict=True)]
    if tree.eager():
        total = _total([term * share for term, share in pairs])
        known = tree.number_at_hand(total)
        if known is not None and math.isfinite(known):
            return total
    return _total([torch.where(share != 0, term, 0) * share for term, share in pairs])


def _total(products: Sequence[Tensor]) -> Tensor:
    first, *others = [product.sum() for product in products]
    return sum(others, first)


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
    for position, leaf in enumerate(() if tree.is_empty(terms.aux) else tree.leaves_of(terms.aux)):
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


def denominators(total: Count) -> Count:
    """Both of them, as losses are divided by them."""
    return Count(divisor(total.num_tokens), total.num_microbatches)


def divisor(total: Tensor) -> Tensor:
    """The total in float64, but 1 where it is 0: there is nothing to divide then. Not a clamp: 0.25 stays."""
    known = tree.number_at_hand(total)
    positive = total if known is not None and known > 0 else torch.where(total > 0, total, 1)
    return positive.to(torch.float64)


class Worth(NamedTuple):
    """What microbatches give beside gradients: the loss and the tokens of each, and the sum of aux."""

    losses: list[Tensor]
    num_tokens: list[Tensor]
    aux: Tree


def plus(so_far: Worth | None, loss: Tensor, num_tokens: Sequence[Tensor], aux: Tree) -> Worth:
    """The same of one microbatch more; the lists grow, since there may be thousands."""
    own = aux
    if not tree.is_empty(aux):
        # A copy: what a loss returns may be a view of its inputs, and outputs share no storage with them.
        own = tree.map(lambda leaf: leaf.to(accumulation_dtype(leaf.dtype), copy=True), aux)
    if so_far is None:
        return Worth([loss], [*num_tokens], own)

    def add(one: Tensor, other: Tensor) -> Tensor:
        if one.shape != other.shape:
            raise ValueError(
                f"LossTerms.aux has a leaf of shape {tuple(one.shape)} in one microbatch and "
                f"{tuple(other.shape)} in another: it is summed, so return sums over the tokens"
            )
        return one + other

    so_far.losses.append(loss)
    so_far.num_tokens.extend(num_tokens)
    if tree.is_empty(own) and tree.is_empty(so_far.aux):
        return so_far
    return so_far._replace(aux=tree.map(add, so_far.aux, own))


def sums_of(grads: Tree, given: Worth | None, counted: Count | None, like: Tensor) -> Sums:
    """All of it together. ``like`` is a param: where there is no microbatch, the loss is a zero of its kind."""
    if given is None:
        zero = like.new_zeros((), dtype=accumulation_dtype(like.dtype))
        return Sums(grads, zero, counted or count_of([], like.device), ())
    loss, *others = given.losses
    dtype = accumulation_dtype(loss.dtype)
    if others:
        together = torch.stack(given.losses)
        loss, dtype = together.sum(0, dtype=torch.float64), accumulation_dtype(together.dtype)
    counted = counted or count_of(given.num_tokens, like.device)
    return Sums(grads, loss.to(dtype), counted, given.aux)


def versions_of(leaves: Sequence[Tensor]) -> list[int]:
    """How often each was written to; nothing where that is not counted, under transforms and compilers."""
    if torch.compiler.is_dynamo_compiling() or transformed():
        return []
    try:
        return list(map(version, leaves))
    except RuntimeError:
        if any(map(Tensor.is_inference, leaves)):
            return []
        raise


def check_untouched(
    structure: tree.Structure, leaves: Sequence[Tensor], versions: Sequence[int]
) -> None:
    """Refuses a loss that has written to what it was given."""
    now = versions_of(leaves)
    if versions != now:
        pairs = zip(versions, now, strict=True)
        index = next(index for index, (before, after) in enumerate(pairs) if before != after)
        name = tree.paths(tree.unflatten(structure, leaves), "params")[index]
        raise ValueError(
            f"loss_fn wrote to {name} in place, which is the caller's: compute a "
            "new tensor, or give a module that updates its buffers a clone of them"
        )


def over(value: Tensor, scale: Tensor | None) -> Tensor:
    """The value, divided where there is something to divide it by."""
    return value if scale is None else (value / scale).to(value.dtype)
