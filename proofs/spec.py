"""The specification: the equation, on one big batch. It shares no code with the package.

N = Σ wᵢ        L(θ) = (1/N) Σ wᵢ ℓᵢ(θ)        (θ′, s′) = optimizer(∇L(θ), s, θ)
"""

from collections.abc import Callable
from typing import Any

import torch


def spec(
    loss_fn: Callable[..., Any], update: Callable[..., Any], params: Any, opt_state: Any, batch: Any
) -> Any:
    """One step on one batch whose weights are ``batch["w"]``: ``(params, opt_state), grads, loss``."""
    weights = batch["w"].to(torch.float64)
    num_tokens = weights.sum()

    def loss_of(params: Any) -> Any:
        return (weights * loss_fn(params, batch)).sum() / num_tokens

    grads = torch.func.grad(loss_of)(params)
    return update(grads, opt_state, params), grads, loss_of(params)
