"""Transforms of gradients, each a few lines of plain tensor arithmetic: they vmap, differentiate, compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep import tree
from purestep.optim.base import Transform
from purestep.optim.leafwise import Norm, leafwise
from purestep.optim.partition import Mask, masked
from purestep.torch_internals import foreach_add_, foreach_copy_, foreach_mul_
from purestep.types import Params, Tree


def clip_by_global_norm(max_norm: float | Tensor) -> Transform:
    """g · min(1, max_norm / ‖g‖₂), the norm taken over the whole tree, and of a ``Shard`` over its axis.

    >>> clip_by_global_norm(1.0).update({"w": torch.tensor([3.0, 4.0])}, (), None)
    ({'w': tensor([0.6000, 0.8000])}, ())
    """

    def numbers(_: None, norm_of: Norm, grad_scale: Tensor | None) -> tuple[Tensor]:
        scale = 1 if grad_scale is None else inverse(grad_scale)
        norm = norm_of() * scale
        longer = norm > max_norm
        # Divided by what is not 0 also where nothing is clipped: a derivative reaches both branches.
        factor = torch.where(longer, max_norm / torch.where(longer, norm, 1), 1)
        return (scale * factor,)

    def formula(numbers: tuple[Tensor], _: None) -> Callable[..., tuple[Tensor]]:
        (factor,) = numbers
        return lambda grad, _: (grad * number(factor, grad),)

    def kernel(
        numbers: tuple[Tensor], _: None, grads: list[Tensor], __: list[Tensor]
    ) -> list[Tensor]:
        factor = float(numbers[0])
        if factor != 1:
            foreach_mul_(grads, factor)
        return grads

    return leafwise(Transform, _stateless, tuple, (), numbers, formula, kernel, reads_params=False)


class MomentumState(NamedTuple):
    """The decaying sum of gradients.

    >>> momentum(0.9).init(torch.ones(2))
    MomentumState(trace=tensor([0., 0.]))
    """

    trace: Tree


def momentum(decay: float | Tensor, *, nesterov: bool = False) -> Transform:
    """t ← decay · t + g, and the update t; or g + decay · t, as ``nesterov`` looks ahead.

    >>> transform = momentum(0.5)
    >>> state = MomentumState({"w": torch.tensor(2.0)})
    >>> transform.update({"w": torch.tensor(1.0)}, state, None)[0]
    {'w': tensor(2.)}
    """

    def init(params: Params) -> MomentumState:
        return MomentumState(tree.zeros_like(params))

    def numbers(_: None, __: Norm, grad_scale: Tensor | None) -> tuple[Any, ...]:
        return decay, None if grad_scale is None else inverse(grad_scale)

    def formula(numbers: tuple[Any, ...], _: None) -> Callable[..., tuple[Tensor, Tensor]]:
        decay, factor = numbers

        def of_leaf(grad: Tensor, _: Tensor, trace: Tensor) -> tuple[Tensor, Tensor]:
            grad = scaled(grad, factor)
            if nesterov:
                trace = (trace * number(decay, trace) + grad).to(trace.dtype)
                return multiply_add(grad, decay, trace), trace
            trace = multiply_add(grad.to(trace.dtype), decay, trace)
            return trace, trace

        return of_leaf

    def kernel(
        numbers: tuple[Any, ...],
        _: None,
        grads: list[Tensor],
        __: list[Tensor],
        trace: list[Tensor],
    ) -> list[Tensor]:
        decay, factor = numbers
        if factor is not None:
            foreach_mul_(grads, float(factor))
        if nesterov:
            foreach_mul_(trace, float(decay))
            foreach_add_(trace, grads)
            foreach_add_(grads, trace, alpha=float(decay))
        else:
            # Two lists, for what comes next may write to the updates.
            grads = [grad.to(t.dtype) for grad, t in zip(grads, trace, strict=True)]
            foreach_add_(grads, trace, alpha=float(decay))
            foreach_copy_(trace, grads)
        return grads

    return leafwise(
        Transform, init, MomentumState, ["trace"], numbers, formula, kernel, reads_params=False
    )


class AdamState(NamedTuple):
    """Steps taken, and the decaying means of the gradients and of their squares.

    >>> scale_by_adam().init(torch.tensor(1.0))
    AdamState(step=tensor(0), mu=tensor(0.), nu=tensor(0.))
    """

    step: Tensor
    mu: Tree
    nu: Tree


def scale_by_adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Transform:
    """Adam's direction [Kingma and Ba, 2015].

        t ← t + 1
        μ ← b₁ μ + (1 − b₁) g
        ν ← b₂ ν + (1 − b₂) g²
        u = μ̂ / (√ν̂ + ε)      where μ̂ = μ / (1 − b₁ᵗ), ν̂ = ν / (1 − b₂ᵗ)

    >>> transform = scale_by_adam()
    >>> params = {"w": torch.tensor([0.0, 0.0])}
    >>> transform.update({"w": torch.tensor([5.0, -0.1])}, transform.init(params), params)[0]
    {'w': tensor([ 1., -1.])}
    """

    def init(params: Params) -> AdamState:
        return AdamState(zero_step(params), tree.zeros_like(params), tree.zeros_like(params))

    def numbers(_: Tensor, __: Norm, grad_scale: Tensor | None) -> tuple[Any]:
        return (1.0 if grad_scale is None else inverse(grad_scale),)

    def formula(numbers: tuple[Any], step: Tensor) -> Callable[..., tuple[Tensor, ...]]:
        (scale,) = numbers
        c1, c2 = (1 - b1) * scale, (1 - b2) * scale * scale
        mu_correction = 1 - b1 ** step.to(torch.float64)
        nu_correction = 1 - b2 ** step.to(torch.float64)

        def of_leaf(grad: Tensor, _: Tensor, mu: Tensor, nu: Tensor) -> tuple[Tensor, ...]:
            mu = (b1 * mu + c1 * grad).to(mu.dtype)
            nu = (b2 * nu + c2 * (grad * grad)).to(nu.dtype)
            direction = (mu / mu_correction) / (root(nu / nu_correction) + eps)
            return direction.to(mu.dtype), mu, nu

        return of_leaf

    return leafwise(Transform, init, AdamState, ["mu", "nu"], numbers, formula, reads_params=False)


def add_decayed_weights(weight_decay: float | Tensor, mask: Mask | None = None) -> Transform:
    """u + weight_decay · θ, where the mask says so (None: everywhere).

    With a mask, it is a ``partition``.

    >>> decay = add_decayed_weights(0.1, mask=lambda params: tree.map(lambda p: p.ndim > 1, params))
    >>> params = {"bias": torch.ones(1), "weight": torch.ones(1, 1)}
    >>> decay.update(tree.zeros_like(params), decay.init(params), params)[0]
    {'bias': tensor([0.]), 'weight': tensor([[0.1000]])}
    """
    if mask is not None:
        return masked(mask, add_decayed_weights(weight_decay), add_decayed_weights(0.0))
    decays = not is_zero(weight_decay)

    def numbers(_: None, __: Norm, grad_scale: Tensor | None) -> tuple[Any, ...]:
        return weight_decay, None if grad_scale is None else inverse(grad_scale)

    def formula(numbers: tuple[Any, ...], _: None) -> Callable[..., tuple[Tensor]]:
        weight_decay, factor = numbers

        def of_leaf(grad: Tensor, param: Tensor) -> tuple[Tensor]:
            grad = scaled(grad, factor)
            return (multiply_add(grad, weight_decay, param) if decays else grad,)

        return of_leaf

    def kernel(
        numbers: tuple[Any, ...], _: None, grads: list[Tensor], params: list[Tensor]
    ) -> list[Tensor]:
        weight_decay, factor = numbers
        if factor is not None:
            foreach_mul_(grads, float(factor))
        if decays:
            foreach_add_(grads, params, alpha=float(weight_decay))
        return grads

    return leafwise(Transform, _stateless, tuple, (), numbers, formula, kernel)


def multiply_add(x: Tensor, factor: float | Tensor, y: Tensor) -> Tensor:
    """x + factor · y with one rounding, as the kernels of torch's ``alpha`` do, in the dtype of x."""
    if isinstance(factor, Tensor):
        wide = torch.promote_types(x.dtype, y.dtype)
        return torch.addcmul(x, y, factor.to(wide)).to(x.dtype)
    return torch.add(x, y, alpha=factor).to(x.dtype)


def scaled(grad: Tensor, factor: Tensor | None) -> Tensor:
    """factor · grad (None: the gradient itself)."""
    return grad if factor is None else grad * number(factor, grad)


def number(value: float | Tensor, x: Tensor) -> float | Tensor:
    """A number that is the same for all leaves, in the dtype of x: it must not promote a leaf that is a scalar."""
    return value.to(x.dtype) if isinstance(value, Tensor) else value


def is_zero(value: float | Tensor) -> bool:
    """Whether a setting is the number 0, so that nothing comes of it."""
    return not isinstance(value, Tensor) and value == 0


def zero_step(params: Params) -> Tensor:
    """A step counter at 0, where the params are."""
    leaves = tree.leaves_of(params)
    return torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else None)


def _stateless(params: Params) -> tuple[()]:
    return ()


def inverse(grad_scale: Tensor) -> Tensor:
    """1 / grad_scale, whatever its dtype is."""
    return 1 / grad_scale.to(torch.float64)


def root(x: Tensor) -> Tensor:
    """√x with derivative 0 at 0, by selection: where no gradient ever came, none is made up.

    By way of float64, because torch's own float32 root is not correctly rounded where MKL takes it. What a compiler writes
    is the processor's root, which is.
    """
    positive = x > 0
    dtype = x.dtype if torch.compiler.is_dynamo_compiling() else torch.float64
    roots = torch.where(positive, x, 1).to(dtype).sqrt().to(x.dtype)
    return torch.where(positive, roots, 0)
