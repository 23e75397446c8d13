"""Bounds what rounding may add to the cross entropy of hidden · weightᵀ, which it computes in float64.

With u the roundoff of sums and v ≥ u that of values passed from product to product (both are the dtype's own but for half
precision, where sums are float32), of one token with cotangent c:

    logits      |δx| ≤ e = γ_D Σ |h w| + v |x|, D features; softcaps and temperatures are counted with the 16 roundings below
    normaliser  |δz| ≤ max e + γ_V + 16 u (1 + max |x|), V classes: a sum of V exponentials
    softmax     |δp| ≤ p (e^r − 1),  r = e + δz + 16 u (1 + max |x|)
    gradients   each term c (p − y) by |c| (δp + 4 v (p + y)); their sum by γ of its length, and v for each partial sum
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from purestep.testing.bounds import rounding_bound
from purestep.tree import accumulation_dtype


class LogitsCase(NamedTuple):
    """Inputs of any dtype: (tokens, features), (classes, features), (tokens,), (tokens,)."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    cotangents: Tensor


CHUNK_ELEMENTS = 2**25
"""How many logits are computed together."""


def compute_reference(case: LogitsCase) -> dict[str, Tensor]:
    """Computes the losses and their gradients in float64, some tokens at a time."""
    weight = case.weight.double().requires_grad_()
    weight_grad = torch.zeros_like(weight)
    losses, hidden_grads = [], []
    for hidden, labels, cotangents in _split_tokens(case):
        hidden = hidden.double().requires_grad_()
        loss = functional.cross_entropy(hidden @ weight.T, labels, reduction="none")
        to_hidden, to_weight = torch.autograd.grad(
            loss, (hidden, weight), cotangents.double()
        )
        losses.append(loss.detach())
        hidden_grads.append(to_hidden)
        weight_grad += to_weight
    return {
        "losses": torch.cat(losses),
        "hidden": torch.cat(hidden_grads),
        "weight": weight_grad,
    }


def error_bounds(case: LogitsCase) -> dict[str, Tensor]:
    """Bounds how far ``compute_reference`` computed in the case's dtype may be off, whatever the order of its sums."""
    weight = case.weight.double()
    classes, features = weight.shape
    sum_dtype = accumulation_dtype(case.hidden.dtype)
    u = rounding_bound(1, sum_dtype)
    v = rounding_bound(1, case.hidden.dtype)
    over_features = rounding_bound(features, sum_dtype)
    over_classes = rounding_bound(classes, sum_dtype)
    over_tokens = rounding_bound(len(case.hidden), sum_dtype)
    weight_bound = torch.zeros_like(weight)
    losses, hidden_bounds = [], []
    for hidden, labels, cotangents in _split_tokens(case):
        hidden = hidden.double()
        x = hidden @ weight.T
        e = over_features * (hidden.abs() @ weight.abs().T) + v * x.abs()
        elementwise = 16 * u * (1 + x.abs().amax(-1))
        of_normaliser = e.amax(-1) + over_classes + elementwise
        # The rounding of the loss itself, which some return in the dtype of hidden.
        loss = functional.cross_entropy(x, labels, reduction="none")
        losses.append(of_normaliser + e.amax(-1) + elementwise + v * loss)

        p = x.softmax(-1)
        y = functional.one_hot(labels, classes)
        r = e + (of_normaliser + elementwise).unsqueeze(-1)
        c = cotangents.double().abs().unsqueeze(-1)
        of_terms = c * (p * torch.expm1(r) + 4 * v * (p + y))
        terms = c * (p + y)
        to_hidden = of_terms + (over_classes + 4 * v) * terms
        hidden_bounds.append(to_hidden @ weight.abs())
        to_weight = of_terms + (over_tokens + 4 * v) * terms
        weight_bound += to_weight.T @ hidden.abs()
    return {
        "losses": torch.cat(losses),
        "hidden": torch.cat(hidden_bounds),
        "weight": weight_bound,
    }


def _split_tokens(case: LogitsCase) -> list[tuple[Tensor, Tensor, Tensor]]:
    chunk_size = max(1, CHUNK_ELEMENTS // len(case.weight))
    return list(
        zip(
            case.hidden.split(chunk_size),
            case.labels.split(chunk_size),
            case.cotangents.split(chunk_size),
            strict=True,
        )
    )
