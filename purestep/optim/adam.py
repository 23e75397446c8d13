"""Adam with decoupled weight decay: the formula, and torch's fused kernel for it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from purestep import tree
from purestep.optim.base import Optimizer
from purestep.optim.leafwise import Columns, Norm, leafwise
from purestep.optim.partition import Mask, masked
from purestep.optim.schedules import LearningRate, check_rate, rate_at
from purestep.optim.transforms import number, root, zero_step
from purestep.torch_internals import fused_adamw_
from purestep.types import Params, Tree


class AdamWState(NamedTuple):
    """Steps taken, and the decaying means of gradients and of their squares.

    >>> adamw(0.1).init(torch.tensor(1.0))
    AdamWState(step=tensor(0), mu=tensor(0.), nu=tensor(0.))
    """

    step: Tensor
    mu: Tree
    nu: Tree


class _Numbers(NamedTuple):
    rate: float | Tensor
    decay: float | Tensor
    grad_scale: Tensor | None


def adamw(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float | Tensor = 1e-2,
    mask: Mask | None = None,
) -> Optimizer:
    """Adam with decoupled weight decay [Loshchilov and Hutter, 2019], as ``torch.optim.AdamW``.

        t ← t + 1
        μ ← b₁ μ + (1 − b₁) g
        ν ← b₂ ν + (1 − b₂) g²
        θ ← θ − lr · (μ̂ / (√ν̂ + ε) + weight_decay · θ)      where μ̂ = μ / (1 − b₁ᵗ), ν̂ = ν / (1 − b₂ᵗ)

    Float32 leaves go through torch's fused kernel where nobody transforms. The plain form, for every transform, gives
    the same bits on the host in whole vectors of sixteen elements; the kernel rounds the rest of a leaf as its scalar
    code does. On CUDA the kernel takes a rate that a schedule computes in float32.

    Args:
        learning_rate: a number, a scalar tensor or a schedule.
        b1, b2: the decay of the means of gradients and squares.
        eps: added outside the root.
        weight_decay: decoupled from the gradient.
        mask: which leaves decay: a tree of bools like the params, a prefix of it, or a function from params to
            one; None: all. With a mask it is a ``partition`` into ``"decay"`` and ``"rest"``, and so is its state.

    >>> optimizer = adamw(0.1, mask=lambda params: tree.map(lambda p: p.ndim > 1, params))
    >>> params = {"w": torch.tensor(1.0)}
    >>> optimizer.update({"w": torch.tensor(7.0)}, optimizer.init(params), params)[0]
    {'w': tensor(0.9000)}
    """

    check_rate(learning_rate)
    if mask is not None:
        plain = adamw(learning_rate, b1, b2, eps, 0.0)
        return masked(mask, adamw(learning_rate, b1, b2, eps, weight_decay), plain)

    def init(params: Params) -> AdamWState:
        return AdamWState(zero_step(params), tree.zeros_like(params), tree.zeros_like(params))

    def numbers(step: Tensor, _: Norm, grad_scale: Tensor | None) -> _Numbers:
        rate = rate_at(learning_rate, step)
        rate = rate.to(torch.float64) if isinstance(rate, Tensor) else rate
        return _Numbers(rate, weight_decay, grad_scale)

    def formula(numbers: _Numbers, step: Tensor) -> Callable[..., tuple[Tensor, ...]]:
        rate, decay, grad_scale = numbers
        mu_correction = 1 - b1 ** step.to(torch.float64)
        nu_root = (1 - b2 ** step.to(torch.float64)).sqrt()
        kept, moving = 1 - rate * decay, -(rate / mu_correction)

        def of_leaf(grad: Tensor, param: Tensor, mu: Tensor, nu: Tensor) -> tuple[Tensor, ...]:
            grad = grad.to(mu.dtype)
            grad = grad if grad_scale is None else grad / number(grad_scale, grad)
            mu = torch.lerp(mu, grad, 1 - b1)
            nu = torch.addcmul(nu * b2, grad, grad, value=1 - b2)
            shrunk = param.to(mu.dtype) * number(kept, mu)
            deviation = root(nu) / number(nu_root, nu) + eps
            moved = shrunk + number(moving, mu) * mu / deviation
            return moved.to(param.dtype), mu, nu

        return of_leaf

    def kernel(
        numbers: _Numbers,
        step: Tensor,
        grads: list[Tensor],
        params: list[Tensor],
        mu: list[Tensor],
        nu: list[Tensor],
        applied: Tensor | None = None,
    ) -> list[Tensor]:
        on_host = step.is_cpu
        rate = numbers.rate
        fused_adamw_(
            params,
            grads,
            mu,
            nu,
            [],
            # The host's kernel reads them as numbers, whatever their dtype; others take float32 alone.
            [step if on_host else step.to(torch.float32)] * len(params),
            lr=float(rate) if on_host or not isinstance(rate, Tensor) else rate.to(torch.float32),
            beta1=b1,
            beta2=b2,
            weight_decay=float(numbers.decay),
            eps=eps,
            amsgrad=False,
            maximize=False,
            grad_scale=_float32(numbers.grad_scale),
            found_inf=None if applied is None else _float32(~applied),
        )
        return params

    slots = ["mu", "nu"]
    return leafwise(
        Optimizer,
        init,
        AdamWState,
        slots,
        numbers,
        formula,
        kernel,
        unfit=_unfit,
        devices=("cpu", "cuda"),
    )


def _unfit(numbers: _Numbers, columns: Columns, dtypes: Collection[torch.dtype]) -> Collection[int]:
    """Leaves that the kernel does not know: it takes float32 alone, without gaps, and the decay as a number."""
    if isinstance(numbers.decay, Tensor) and not numbers.decay.is_cpu:
        return range(len(columns[0]))  # To read the number would wait for the device.
    if dtypes == {torch.float32} and all(map(Tensor.is_contiguous, chain(*columns))):
        return ()
    return {
        position
        for column in columns
        for position, leaf in enumerate(column)
        if leaf.dtype is not torch.float32 or not leaf.is_contiguous()
    }


def _float32(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(torch.float32)
