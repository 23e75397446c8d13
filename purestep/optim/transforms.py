"""Transforms of gradients, each a few lines of plain tensor arithmetic: they vmap, differentiate, compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from purestep import tree
from purestep.optim.base import Transform, in_place, leaf_columns
from purestep.torch_internals import foreach_add_, foreach_mul_
from purestep.types import OptState, Params, Tree

Mask: TypeAlias = Tree | Callable[[Params], Tree]
"""A tree of bools like the params, or a function that makes one from them."""


def clip_by_global_norm(max_norm: float | Tensor) -> Transform:
    """g · min(1, max_norm / ‖g‖₂), the norm taken over the whole tree.

    >>> clip_by_global_norm(1.0).update({"w": torch.tensor([3.0, 4.0])}, (), None)
    ({'w': tensor([0.6000, 0.8000])}, ())
    """

    def update(
        grads: Tree, state: OptState, params: Params, *, grad_scale: Tensor | None = None
    ) -> tuple[Tree, OptState]:
        factor = factor_of(grads, grad_scale)
        return tree.map(lambda grad: scaled(grad, factor), grads), state

    def kernel(_: OptState, grad_scale: Tensor | None, grads: list[Tensor]) -> list[Tensor]:
        factor = factor_of(grads, grad_scale)
        wide = [widened(grad) for grad in grads]
        if factor != 1:
            foreach_mul_(wide, float(factor))
        return wide

    def factor_of(grads: Tree, grad_scale: Tensor | None) -> Tensor:
        scale = _inverse(grad_scale)
        norm = tree.global_norm(grads) * scale
        longer = norm > max_norm
        # Divided by what is not 0 also where nothing is clipped: a derivative reaches both branches.
        factor = torch.where(longer, max_norm / torch.where(longer, norm, 1), 1)
        return cast("Tensor", scale * factor)

    return Transform(
        _stateless,
        update,
        in_place(update, lambda grads, *_: tree.columns(grads), kernel, max_norm),
        kernels=True,
    )


class MomentumState(NamedTuple):
    """The decaying sum of gradients."""

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

    def update(
        grads: Tree, state: MomentumState, params: Params, *, grad_scale: Tensor | None = None
    ) -> tuple[Tree, MomentumState]:
        columns_of(grads, state, params)
        factor = None if grad_scale is None else _inverse(grad_scale)
        grads = tree.map(lambda grad: scaled(grad, factor), grads)
        trace = tree.map(lambda t, g: (t * number(decay, t) + g).to(t.dtype), state.trace, grads)
        updates = tree.map(lambda g, t: plus(g, decay, t), grads, trace) if nesterov else trace
        return updates, MomentumState(trace)

    def kernel(
        _: MomentumState, grad_scale: Tensor | None, grads: list[Tensor], trace: list[Tensor]
    ) -> list[Tensor]:
        grads = [widened(grad) for grad in grads]
        if grad_scale is not None:
            foreach_mul_(grads, float(_inverse(grad_scale)))
        foreach_mul_(trace, float(decay))
        foreach_add_(trace, grads)
        if nesterov:
            foreach_add_(grads, trace, alpha=float(decay))
        return grads if nesterov else trace

    def columns_of(
        grads: Tree, state: MomentumState, params: Params
    ) -> tuple[list[list[Tensor]], tree.Structure]:
        params = grads if params is None else params
        columns, structure = leaf_columns(init, MomentumState, ["trace"], grads, state, params)
        return columns[1:], structure

    return Transform(init, update, in_place(update, columns_of, kernel, decay), kernels=True)


class AdamState(NamedTuple):
    """Steps taken, and the decaying means of the gradients and of their squares."""

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

    def update(
        grads: Tree, state: AdamState, params: Params, *, grad_scale: Tensor | None = None
    ) -> tuple[Tree, AdamState]:
        like = grads if params is None else params
        leaf_columns(init, AdamState, ["mu", "nu"], grads, state, like)
        scale = _inverse(grad_scale)
        grads = tree.map(widened, grads)
        step = state.step + 1
        c1, c2 = (1 - b1) * scale, (1 - b2) * scale * scale
        mu = tree.map(lambda m, g: (b1 * m + c1 * g).to(m.dtype), state.mu, grads)
        nu = tree.map(lambda v, g: (b2 * v + c2 * (g * g)).to(v.dtype), state.nu, grads)
        mu_correction = 1 - b1 ** step.to(torch.float64)
        nu_correction = 1 - b2 ** step.to(torch.float64)

        def direction(m: Tensor, v: Tensor) -> Tensor:
            return ((m / mu_correction) / (root(v / nu_correction) + eps)).to(m.dtype)

        return tree.map(direction, mu, nu), AdamState(step, mu, nu)

    return Transform(init, update)


class DecayState(NamedTuple):
    """Which leaves decay, in the order of the leaves; empty where all do."""

    decays: Tensor


def add_decayed_weights(weight_decay: float | Tensor, mask: Mask | None = None) -> Transform:
    """u + weight_decay · θ, where the mask says so (None: everywhere).

    The mask is asked once, by ``init``, and is part of the state from then on.

    >>> decay = add_decayed_weights(0.1, mask=lambda params: tree.map(lambda p: p.ndim > 1, params))
    >>> params = {"bias": torch.ones(1), "weight": torch.ones(1, 1)}
    >>> decay.update(tree.zeros_like(params), decay.init(params), params)[0]
    {'bias': tensor([0.]), 'weight': tensor([[0.1000]])}
    """

    def init(params: Params) -> DecayState:
        return DecayState(decay_flags(mask, params))

    def update(
        grads: Tree, state: DecayState, params: Params, *, grad_scale: Tensor | None = None
    ) -> tuple[Tree, DecayState]:
        columns_of(grads, state, params)
        factor = None if grad_scale is None else _inverse(grad_scale)
        rates = []
        if state.decays.numel():
            flags = flags_of(state.decays, params)
            decays = [weight_decay * flag.to(torch.float64) for flag in flags]
            rates.append(tree.unflatten(tree.flatten(params)[1], decays))

        def decayed(grad: Tensor, param: Tensor, rate: float | Tensor = weight_decay) -> Tensor:
            return plus(scaled(grad, factor), rate, param)

        return tree.map(decayed, grads, params, *rates), state

    def kernel(
        state: DecayState,
        grad_scale: Tensor | None,
        params: list[Tensor],
        grads: list[Tensor],
    ) -> list[Tensor]:
        grads = [widened(grad) for grad in grads]
        if grad_scale is not None:
            foreach_mul_(grads, float(_inverse(grad_scale)))
        decays = state.decays.tolist() or [True] * len(params)
        decayed, theirs = (list(compress(leaves, decays)) for leaves in (grads, params))
        if decayed:
            foreach_add_(decayed, theirs, alpha=float(weight_decay))
        return grads

    columns_of = partial(leaf_columns, init, DecayState, [])
    return Transform(init, update, in_place(update, columns_of, kernel, weight_decay), kernels=True)


def plus(x: Tensor, factor: float | Tensor, y: Tensor) -> Tensor:
    """x + factor · y with one rounding, as the kernels of torch's ``alpha`` do, in the dtype of x."""
    if isinstance(factor, Tensor):
        wide = torch.promote_types(x.dtype, y.dtype)
        return torch.addcmul(x, y, factor.to(wide)).to(x.dtype)
    return torch.add(x, y, alpha=factor).to(x.dtype)


def widened(grad: Tensor) -> Tensor:
    """A gradient in float32 at least, before it is scaled or squared: both leave the range of float16."""
    return grad if grad.dtype.itemsize >= 4 else grad.to(tree.accumulation_dtype(grad.dtype))


def scaled(grad: Tensor, factor: float | Tensor | None) -> Tensor:
    """factor · grad, in float32 at least (None: the gradient itself)."""
    grad = widened(grad)
    return grad if factor is None else grad * number(factor, grad)


def number(value: float | Tensor, x: Tensor) -> float | Tensor:
    """A number that is the same for all leaves, in the dtype of x: it must not promote a leaf that is a scalar."""
    return value.to(x.dtype) if isinstance(value, Tensor) else value


def decay_flags(mask: Mask | None, params: Params) -> Tensor:
    """Which leaves decay, in the order of the leaves, as the mask says; empty where all do.

    It stays on the host, where the choice of kernels is made.
    """
    if mask is None:
        return torch.zeros(0, dtype=torch.bool)
    return torch.tensor(_flags(mask(params) if callable(mask) else mask, params), dtype=torch.bool)


def flags_of(decays: Tensor, like: Tree) -> Sequence[Tensor]:
    """The flags one by one, each a number on the host; behind a transform, where the leaves are.

    An ensemble has as many flags for each leaf as it has members, and that is no number any more.
    """
    if tree.at_hand(decays) is decays:
        return decays.unbind()
    leaves = tree.leaves_of(like)
    there = tree.brought(decays, leaves[0].device) if leaves else decays
    return [there[index] for index in range(len(decays))]


def _flags(mask: Tree, params: Params) -> list[bool]:
    try:
        flags = tree.broadcast_prefix(mask, params)
    except ValueError:
        flags = [mask]
    if not all(isinstance(flag, bool) for flag in flags):
        wanted = tree.describe(tree.flatten(params)[1])
        raise ValueError(
            f"the weight-decay mask must be a tree of bools like the params, or a prefix of it, {wanted}, but "
            f"it is {mask}"
        )
    return flags


def zero_step(params: Params) -> Tensor:
    """A step counter at 0, where the params are."""
    leaves = tree.leaves_of(params)
    return torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else None)


def _stateless(params: Params) -> tuple[()]:
    return ()


def _inverse(grad_scale: Tensor | None) -> Any:
    return 1.0 if grad_scale is None else 1 / grad_scale.to(torch.float64)


def root(x: Tensor) -> Tensor:
    """√x with derivative 0 at 0, by selection: where no gradient ever came, none is made up.

    By way of float64, because torch's own float32 root is not correctly rounded where MKL takes it.
    """
    positive = x > 0
    roots = torch.where(positive, x, 1).to(torch.float64).sqrt().to(x.dtype)
    return torch.where(positive, roots, 0)
