"""Adam with decoupled weight decay: the formula, and torch's fused kernel for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.optim.base import Optimizer
from purestep.optim.leafwise import leafwise
from purestep.optim.schedules import LearningRate, check_rate, rate_at
from purestep.optim.transforms import Mask, decay_flags, flags_of, number, root, zero_step
from purestep.torch_internals import foreach_copy_, fused_adamw_
from purestep.types import Params, Tree

VECTOR = 16
"""A multiple of the elements that one instruction takes. What is left of a leaf, the kernel rounds otherwise."""


class AdamWState(NamedTuple):
    """Steps taken, the decaying means of gradients and of their squares, and which leaves decay (empty: all)."""

    step: Tensor
    mu: Tree
    nu: Tree
    decays: Tensor


Row: TypeAlias = tuple[Tensor, ...]
"""A leaf of params, with its gradient and its means."""


class _Numbers(NamedTuple):
    rate: float | Tensor
    decay: float | Tensor
    decays: Sequence[Tensor]
    step: Tensor
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

    Float32 leaves go through torch's fused kernel where nobody transforms; the plain form, for every
    transform, gives the same bits on the host. On CUDA the kernel takes a rate that a schedule computes in float32.

    Args:
        learning_rate: a number, a scalar tensor or a schedule.
        b1, b2: the decay of the means of gradients and squares.
        eps: added outside the root.
        weight_decay: decoupled from the gradient.
        mask: which leaves decay: a tree of bools like the params, a prefix of it, or a function from params to
            one; None: all.

    >>> optimizer = adamw(0.1, mask=lambda params: tree.map(lambda p: p.ndim > 1, params))
    >>> params = {"w": torch.tensor(1.0)}
    >>> optimizer.update({"w": torch.tensor(7.0)}, optimizer.init(params), params)[0]
    {'w': tensor(0.9000)}
    """

    check_rate(learning_rate)

    def init(params: Params) -> AdamWState:
        mu, nu = tree.zeros_like(params), tree.zeros_like(params)
        return AdamWState(zero_step(params), mu, nu, decay_flags(mask, params))

    def numbers(state: AdamWState, grad_scale: Tensor | None) -> _Numbers:
        rate = rate_at(learning_rate, state.step)
        rate = rate.to(torch.float64) if isinstance(rate, Tensor) else rate
        return _Numbers(
            rate, weight_decay, flags_of(state.decays, state.mu), state.step + 1, grad_scale
        )

    def formula(
        numbers: _Numbers, index: int, param: Tensor, grad: Tensor, mu: Tensor, nu: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rate, decay, decays, step, grad_scale = numbers
        decay = decay * decays[index].to(torch.float64) if decays else decay
        grad = grad.to(mu.dtype)
        grad = grad if grad_scale is None else grad / number(grad_scale, grad)
        mu = torch.lerp(mu, grad, 1 - b1)
        nu = torch.addcmul(nu * b2, grad, grad, value=1 - b2)
        mu_correction = 1 - b1 ** step.to(torch.float64)
        nu_correction = 1 - b2 ** step.to(torch.float64)
        shrunk = param.to(mu.dtype) * number(1 - rate * decay, mu)
        deviation = root(nu) / number(nu_correction.sqrt(), nu) + eps
        moved = shrunk + number(-(rate / mu_correction), mu) * mu / deviation
        return moved.to(param.dtype), mu, nu

    def kernel(
        numbers: _Numbers,
        params: list[Tensor],
        grads: list[Tensor],
        mu: list[Tensor],
        nu: list[Tensor],
        applied: Tensor | None = None,
    ) -> None:
        on_host = all(param.device.type == "cpu" for param in params)
        # The kernel takes a number for the decay, and to read what is on a device would wait.
        read = [value for value in (numbers.decay, *numbers.decays) if isinstance(value, Tensor)]
        at_hand = all(value.device.type == "cpu" for value in read)
        flags = [bool(flag) for flag in numbers.decays if at_hand] or [True] * len(params)
        for decays in {*flags}:
            wholes: list[Row] = []
            rests: list[Row] = []
            for index, row in enumerate(zip(params, grads, mu, nu, strict=True)):
                if flags[index] != decays:
                    continue
                if not (at_hand and _alike(row)):
                    plain(numbers, index, row, applied)
                elif on_host and row[0].numel() % VECTOR:
                    flat = [leaf.view(-1) for leaf in row]
                    whole = len(flat[0]) // VECTOR * VECTOR
                    wholes.append(tuple(leaf[:whole] for leaf in flat))
                    rests.append(tuple(leaf[whole:] for leaf in flat))
                else:
                    wholes.append(row)
            if wholes:
                run(numbers, decays, wholes, applied)
            if rests:
                columns = [list(column) for column in zip(*rests, strict=True)]
                joined = tuple(map(torch.cat, columns))
                plain(numbers, flags.index(decays), joined, applied)
                for column, values in zip(columns, joined, strict=True):
                    foreach_copy_(column, values.split([len(rest) for rest in column]))

    def run(numbers: _Numbers, decays: bool, rows: list[Row], applied: Tensor | None) -> None:
        columns = ([*column] for column in zip(*rows, strict=True))
        steps = [numbers.step.to(torch.float32)] * len(rows)
        fused_adamw_(
            *columns,
            [],
            steps,
            lr=_rate(numbers.rate),
            beta1=b1,
            beta2=b2,
            weight_decay=float(numbers.decay) if decays else 0.0,
            eps=eps,
            amsgrad=False,
            maximize=False,
            grad_scale=_float32(numbers.grad_scale),
            found_inf=None if applied is None else _float32(~applied),
        )

    def plain(numbers: _Numbers, index: int, row: Row, applied: Tensor | None) -> None:
        param, grad, *means = row
        new = formula(numbers, index, param, grad, *means)
        tree.overwrite([param, *means], list(new), applied)

    slots = ["mu", "nu"]
    return leafwise(init, AdamWState, slots, numbers, formula, kernel, ("cpu", "cuda"))


def _alike(row: Row) -> bool:
    """Whether the kernel knows them: float32, one beside the other in memory."""
    param, grad, mu, nu = row
    return (
        param.dtype == grad.dtype == mu.dtype == nu.dtype == torch.float32
        and param.is_contiguous()
        and grad.is_contiguous()
        and mu.is_contiguous()
        and nu.is_contiguous()
    )


def _rate(rate: float | Tensor) -> float | Tensor:
    """What is read without waiting as a number; on a device a float32, which is all that the kernel takes there."""
    if isinstance(rate, Tensor) and rate.device.type != "cpu":
        return rate.to(torch.float32)
    return float(rate)


def _float32(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(torch.float32)
