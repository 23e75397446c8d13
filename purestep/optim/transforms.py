"""Transforms of gradients, each a few lines of plain tensor arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep import tree
from purestep.optim.base import Transform
from purestep.optim.leafwise import (
    HOST,
    Columns,
    OfLeaf,
    fits,
    leafwise,
    multiply_add,
    number,
    root,
    widened,
)
from purestep.optim.partition import Mask, masked
from purestep.torch_private import foreach_add_, foreach_mul_
from purestep.types import OptState, Params, Tree


def clip_by_global_norm(max_norm: float | Tensor) -> Transform:
    """Scales gradients down to ``max_norm``: g · min(1, max_norm / ‖g‖₂).

    The norm is that of the whole tree. For a ``Shard`` it includes all ranks of its axis.

    >>> clip_by_global_norm(1.0).update({"w": torch.tensor([3.0, 4.0])}, (), None)
    ({'w': tensor([0.6000, 0.8000])}, ())
    """

    def clipped(grads: Tree, fitting: Callable[[list[Tensor]], bool]) -> Tree:
        leaves, structure = tree.flatten(grads)
        leaves = [widened(leaf) for leaf in leaves]
        grads = tree.unflatten(structure, leaves)
        norm = tree.global_norm(grads)
        longer = norm > max_norm
        # Divided by 1 where nothing is clipped: a derivative reaches both branches.
        factor = torch.where(longer, max_norm / torch.where(longer, norm, 1), 1)
        if factor.requires_grad or not fitting(leaves):
            return tree.unflatten(structure, [leaf * number(factor, leaf) for leaf in leaves])
        if leaves and factor != 1:
            foreach_mul_(leaves, float(factor))
        return grads

    def update(grads: Tree, state: OptState, params: Params) -> tuple[Tree, OptState]:
        return clipped(grads, lambda leaves: False), state

    def update_(grads: Tree, state: OptState, params: Params, _: Any) -> tuple[Tree, OptState]:
        return clipped(grads, partial(fits, HOST)), state

    return Transform(lambda params: (), update, update_)


class MomentumState(NamedTuple):
    """The decaying sum of gradients.

    >>> momentum(0.9).init(torch.ones(2))
    MomentumState(trace=tensor([0., 0.]))
    """

    trace: Tree


def momentum(decay: float | Tensor, *, nesterov: bool = False) -> Transform:
    """Keeps a decaying sum of gradients: t ← decay · t + g.

    The update is t, or g + decay · t with ``nesterov``.

    >>> transform = momentum(0.5)
    >>> state = MomentumState({"w": torch.tensor(2.0)})
    >>> transform.update({"w": torch.tensor(1.0)}, state, None)[0]
    {'w': tensor(2.)}
    """

    def rule(step: None, decay: float | Tensor) -> OfLeaf:
        def of_leaf(grad: Tensor, _: Tensor, trace: Tensor) -> tuple[Tensor, Tensor]:
            if nesterov:
                trace = (trace * number(decay, trace) + grad).to(trace.dtype)
                return multiply_add(grad, decay, trace), trace
            trace = multiply_add(grad.to(trace.dtype), decay, trace)
            return trace, trace

        return of_leaf

    def kernel(step: None, numbers: Any, applied: None, columns: Columns) -> Sequence[Tensor]:
        decay, (grads, _, trace) = float(numbers[0]), columns
        if nesterov:
            foreach_mul_(trace, decay)
            foreach_add_(trace, grads)
            foreach_add_(grads, trace, alpha=decay)
        else:
            # Two lists, for what comes next may write to the updates.
            grads = [grad.to(t.dtype) for grad, t in zip(grads, trace, strict=True)]
            foreach_add_(grads, trace, alpha=decay)
            for old, new in zip(trace, grads, strict=True):
                old.copy_(new)
        return grads

    return leafwise(Transform, MomentumState, [decay], rule, kernel, reads_params=False)


class AdamState(NamedTuple):
    """The number of steps, and the decaying means of the gradients and of their squares.

    >>> scale_by_adam().init(torch.tensor(1.0))
    AdamState(step=tensor(0), mu=tensor(0.), nu=tensor(0.))
    """

    step: Tensor
    mu: Tree
    nu: Tree


def scale_by_adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Transform:
    """Scales gradients to Adam's direction [Kingma and Ba, 2015].

        t ← t + 1
        μ ← b₁ μ + (1 − b₁) g
        ν ← b₂ ν + (1 − b₂) g²
        u = μ̂ / (√ν̂ + ε)      where μ̂ = μ / (1 − b₁ᵗ), ν̂ = ν / (1 − b₂ᵗ)

    >>> transform = scale_by_adam()
    >>> params = {"w": torch.tensor([0.0, 0.0])}
    >>> transform.update({"w": torch.tensor([5.0, -0.1])}, transform.init(params), None)[0]
    {'w': tensor([ 1., -1.])}
    """

    def rule(step: Tensor) -> OfLeaf:
        mu_correction = 1 - b1 ** step.to(torch.float64)
        nu_correction = 1 - b2 ** step.to(torch.float64)

        def of_leaf(grad: Tensor, _: Tensor, mu: Tensor, nu: Tensor) -> tuple[Tensor, ...]:
            mu = (b1 * mu + (1 - b1) * grad).to(mu.dtype)
            nu = (b2 * nu + (1 - b2) * (grad * grad)).to(nu.dtype)
            return (mu / mu_correction / (root(nu / nu_correction) + eps)).to(mu.dtype), mu, nu

        return of_leaf

    return leafwise(Transform, AdamState, [], rule, reads_params=False)


def add_decayed_weights(weight_decay: float | Tensor, mask: Mask | None = None) -> Transform:
    """Adds weight decay to the updates: u + weight_decay · θ, where ``mask`` is True.

    None decays all leaves. With a mask, it is a ``partition``.

    >>> decay = add_decayed_weights(0.1, lambda params: tree.map(lambda p: p.ndim > 1, params))
    >>> params = {"bias": torch.ones(1), "weight": torch.ones(1, 1)}
    >>> decay.update(tree.zeros_like(params), decay.init(params), params)[0]
    {'bias': tensor([0.]), 'weight': tensor([[0.1000]])}
    """
    if mask is not None:
        return masked(mask, add_decayed_weights(weight_decay), add_decayed_weights(0.0))
    # What does not decay is not touched, not even multiplied by zero.
    decays = isinstance(weight_decay, Tensor) or weight_decay != 0

    def rule(step: None, weight_decay: float | Tensor) -> OfLeaf:
        if not decays:
            return lambda grad, param: (grad,)
        return lambda grad, param: (multiply_add(grad, weight_decay, param),)

    def kernel(step: None, numbers: Any, applied: None, columns: Columns) -> Sequence[Tensor]:
        grads, params = columns
        if decays:
            foreach_add_(grads, params, alpha=float(numbers[0]))
        return grads

    return leafwise(Transform, tuple, [weight_decay], rule, kernel)
