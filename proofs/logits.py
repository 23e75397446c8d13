"""Cross entropy of hidden · weightᵀ in float64, and what rounding may add to it in other dtypes.

With u the roundoff of sums and v ≥ u that of what is handed from product to product (both are the dtype's own but for half
precision, where sums are float32), of one token with cotangent c:

    logits      |δx| ≤ e = γ_D Σ |h w| + v |x|, D features; what bends or divides them is counted with the 16 roundings below
    normaliser  |δz| ≤ max e + γ_V + 16 u (1 + max |x|), V classes: a sum of V exponentials
    softmax     |δp| ≤ p (e^r − 1),  r = e + δz + 16 u (1 + max |x|)
    gradients   each term c (p − y) by |c| (δp + 4 v (p + y)); their sum by γ of its length, and v for each partial sum
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from purestep.testing.bounds import gamma
from purestep.tree import accumulation_dtype


class Case(NamedTuple):
    """Of some dtype: (tokens, features), (classes, features), (tokens,), (tokens,)."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    cotangents: Tensor


AT_ONCE = 2**25


def reference(case: Case) -> dict[str, Tensor]:
    """The losses and their gradients in float64, a few tokens at a time."""
    weight = case.weight.double().requires_grad_()
    to_weight = torch.zeros_like(weight)
    losses, to_hidden = [], []
    for hidden, labels, cotangents in _few(case):
        hidden = hidden.double().requires_grad_()
        loss = functional.cross_entropy(hidden @ weight.T, labels, reduction="none")
        grads = torch.autograd.grad(loss, (hidden, weight), cotangents.double())
        losses.append(loss.detach())
        to_hidden.append(grads[0])
        to_weight += grads[1]
    return {
        "losses": torch.cat(losses),
        "hidden": torch.cat(to_hidden),
        "weight": to_weight,
    }


def bounds(case: Case) -> dict[str, Tensor]:
    """How far a computation of ``reference`` in the case's dtype may be from it, whatever the order of its sums."""
    weight = case.weight.double()
    tokens, (classes, features) = len(case.hidden), weight.shape
    sums = accumulation_dtype(case.hidden.dtype)
    u, v = gamma(1, sums), gamma(1, case.hidden.dtype)
    size_of_weight = weight.abs()
    to_weight = torch.zeros_like(weight)
    losses, to_hidden = [], []
    for hidden, labels, cotangents in _few(case):
        hidden, cotangents = hidden.double(), cotangents.double().abs().unsqueeze(-1)
        x = hidden @ weight.T
        e = gamma(features, sums) * (hidden.abs() @ size_of_weight.T) + v * x.abs()
        few = 16 * u * (1 + x.abs().amax(-1))
        of_z = e.amax(-1) + gamma(classes, sums) + few
        # The rounding of the loss itself, which some return in the dtype of hidden.
        loss = functional.cross_entropy(x, labels, reduction="none")
        losses.append(of_z + e.amax(-1) + few + v * loss)
        p = x.softmax(-1)
        y = functional.one_hot(labels, classes)
        terms = cotangents * (
            p * torch.expm1(e + (of_z + few).unsqueeze(-1)) + 4 * v * (p + y)
        )
        sizes = cotangents * (p + y)
        to_hidden.append(
            (terms + (gamma(classes, sums) + 4 * v) * sizes) @ size_of_weight
        )
        to_weight += (terms + (gamma(tokens, sums) + 4 * v) * sizes).T @ hidden.abs()
    return {
        "losses": torch.cat(losses),
        "hidden": torch.cat(to_hidden),
        "weight": to_weight,
    }


def _few(case: Case) -> list[tuple[Tensor, Tensor, Tensor]]:
    at_once = max(1, AT_ONCE // len(case.weight))
    columns = (
        each.split(at_once) for each in (case.hidden, case.labels, case.cotangents)
    )
    return list(zip(*columns, strict=True))
