"""Whole optimizers: the last step of a chain, and the recipes that everyone uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep.optim.arithmetic import Arithmetic, Number
from purestep.optim.base import Optimizer, Transform, chain
from purestep.optim.elementwise import Columns, Formula, Kind, elementwise
from purestep.optim.partition import Mask, masked
from purestep.optim.schedules import LearningRate, check_rate
from purestep.optim.transforms import (
    add_decayed_weights,
    momentum as momentum_transform,
)
from purestep.torch_private import fused_adamw_
from purestep.tree import foreach
from purestep.types import State, Tree


class DescentState(NamedTuple):
    """The number of steps.

    >>> descend(0.1).init(torch.tensor(1.0))
    DescentState(step=tensor(0))
    """

    step: Tensor


def descend(learning_rate: LearningRate) -> Optimizer[State]:
    """Takes the step, θ ← θ − lr · u: the Optimizer that ends a chain of transforms.

    >>> from purestep.optim import scale_by_adam
    >>> optimizer = chain(scale_by_adam(), descend(0.1))
    >>> params = {"w": torch.tensor(1.0)}
    >>> optimizer.update({"w": torch.tensor(7.0)}, optimizer.init(params), params)[0]
    {'w': tensor(0.9000)}
    """
    check_rate(learning_rate)

    def rule(ops: Arithmetic, step: Tensor, rate: Number) -> Formula:
        return lambda updates, params: (ops.add_(params, updates, -rate),)

    return elementwise(Optimizer, DescentState, [learning_rate], rule)


def sgd(
    learning_rate: LearningRate,
    momentum: float = 0.0,
    *,
    nesterov: bool = False,
    weight_decay: float | Tensor = 0.0,
    mask: Mask | None = None,
) -> Optimizer[State]:
    """Stochastic gradient descent, as ``torch.optim.SGD``.

        g ← g + weight_decay · θ,    t ← momentum · t + g,    θ ← θ − lr · t

    Args:
        learning_rate: a number, a scalar tensor or a schedule.
        momentum: the decay of the trace t.
        nesterov: look ahead, with g + momentum · t.
        weight_decay: added to the gradient, so that it takes part in the momentum.
        mask: which leaves decay: a tree of bools like the params, a prefix of it, or a function
            from params to one; None: all. With a mask, the decay is a ``partition``.

    >>> optimizer = sgd(0.1, momentum=0.9)
    >>> params = {"w": torch.tensor(1.0)}
    >>> optimizer.update({"w": torch.tensor(2.0)}, optimizer.init(params), params)[0]
    {'w': tensor(0.8000)}
    """
    if nesterov and momentum == 0:
        raise ValueError(
            "sgd: nesterov=True looks ahead along the momentum, but momentum=0"
        )
    transforms: list[Transform] = []
    if isinstance(weight_decay, Tensor) or weight_decay != 0:
        transforms.append(add_decayed_weights(weight_decay, mask))
    if momentum != 0:
        transforms.append(momentum_transform(momentum, nesterov=nesterov))
    return chain(*transforms, descend(learning_rate))


class AdamWState(NamedTuple):
    """The number of steps, and the decaying means of gradients and of their squares.

    >>> adamw(0.1).init(torch.tensor(1.0))
    AdamWState(step=tensor(0), mu=tensor(0.), nu=tensor(0.))
    """

    step: Tensor
    mu: Tree
    nu: Tree


FUSED_ADAMW = {
    Kind(
        (torch.float32, params_dtype, torch.float32, torch.float32),
        device,
        is_contiguous=True,
    )
    for params_dtype, device in [
        (torch.float32, "cpu"),
        (torch.float32, "cuda"),
        (torch.bfloat16, "cuda"),
        (torch.float16, "cuda"),
    ]
}
"""What torch's kernel takes. Params in half precision are widened for it."""


def adamw(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float | Tensor = 1e-2,
    mask: Mask | None = None,
) -> Optimizer[State]:
    """Adam with decoupled weight decay [Loshchilov and Hutter, 2019], as ``torch.optim.AdamW``.

        t ← t + 1
        μ ← b₁ μ + (1 − b₁) g
        ν ← b₂ ν + (1 − b₂) g²
        θ ← θ − lr · (μ̂ / (√ν̂ + ε) + weight_decay · θ)

    where μ̂ = μ / (1 − b₁ᵗ) and ν̂ = ν / (1 − b₂ᵗ).

    In place, float32 leaves use torch's fused kernel. Under transforms, plain arithmetic gives the
    same bits on the host, in vectors of sixteen elements. The kernel rounds the last elements of a
    leaf as its scalar code does. On CUDA the kernel takes a schedule's rate in float32.

    Args:
        learning_rate: a number, a scalar tensor or a schedule.
        b1, b2: the decay of the means of gradients and squares.
        eps: added outside the root.
        weight_decay: decoupled from the gradient.
        mask: which leaves decay: a tree of bools like the params, a prefix of it, or a function
            from params to one. None: all. With a mask it is a ``partition`` into ``"decay"`` and
            ``"rest"``, and so is its state.

    >>> from purestep import tree
    >>> optimizer = adamw(0.1, mask=lambda params: tree.map(lambda p: p.ndim > 1, params))
    >>> params = {"w": torch.tensor(1.0)}
    >>> optimizer.update({"w": torch.tensor(7.0)}, optimizer.init(params), params)[0]
    {'w': tensor(0.9000)}
    """
    check_rate(learning_rate)
    if mask is not None:
        plain = adamw(learning_rate, b1, b2, eps, 0.0)
        return masked(mask, adamw(learning_rate, b1, b2, eps, weight_decay), plain)

    def rule(ops: Arithmetic, step: Tensor, rate: Number, decay: Number) -> Formula:
        rate = rate.to(torch.float64) if isinstance(rate, Tensor) else rate
        count = step.to(torch.float64)
        nu_root = (1 - b2**count).sqrt()
        shrinking, moving = 1 - rate * decay, -rate / (1 - b1**count)

        def formula(grads: Any, params: Any, mu: Any, nu: Any) -> tuple[Any, Any, Any]:
            grads = ops.cast(grads, mu)
            mu = ops.lerp_(mu, grads, 1 - b1)
            nu = ops.addcmul_(ops.mul_(nu, b2), grads, grads, 1 - b2)
            deviation = ops.add_(ops.div_(ops.sqrt(nu), nu_root), eps)
            direction = ops.div_(ops.mul(mu, moving), deviation)
            shrunk = ops.mul_(ops.cast(params, mu), shrinking)
            return ops.add_(shrunk, direction), mu, nu

        return formula

    constants: Any = {
        "beta1": b1,
        "beta2": b2,
        "eps": eps,
        "amsgrad": False,
        "maximize": False,
    }

    def fused(
        step: Tensor,
        hyperparams: Sequence[Any],
        applied: Tensor | None,
        columns: Columns,
    ) -> list[Tensor]:
        rate, decay = hyperparams
        grads, params, mu, nu = columns
        if not step.is_cpu:
            # On the host the kernel reads both as numbers; elsewhere it takes float32 alone.
            step = step.to(torch.float32)
            rate = rate.to(torch.float32) if isinstance(rate, Tensor) else rate
        wide = params if params[0].dtype == torch.float32 else foreach.cast(params, mu)
        fused_adamw_(
            *(wide, grads, mu, nu, [], [step] * len(params)),
            **constants,
            lr=float(rate) if step.is_cpu else rate,
            weight_decay=float(decay),
            found_inf=None if applied is None else (~applied).to(torch.float32),
        )
        # Where nothing is applied, rounding gives back what was widened.
        if wide is not params:
            foreach.copy_(params, wide)
        return params

    # To read a decay that lies on a device would wait for it: the formula does without.
    readable = not isinstance(weight_decay, Tensor) or weight_decay.is_cpu
    hyperparams = [learning_rate, weight_decay]
    kernel = fused if readable else None
    return elementwise(
        Optimizer, AdamWState, hyperparams, rule, kernel, supported=FUSED_ADAMW
    )


class LionState(NamedTuple):
    """The number of steps, and the decaying mean of the gradients.

    >>> lion(0.1).init(torch.tensor(1.0))
    LionState(step=tensor(0), mu=tensor(0.))
    """

    step: Tensor
    mu: Tree


def lion(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float | Tensor = 0.0,
    mask: Mask | None = None,
) -> Optimizer[State]:
    """Lion [Chen et al., 2023]: steps by the sign of a momentum, with half of Adam's state.

        θ ← θ − lr · (sign(b₁ μ + (1 − b₁) g) + weight_decay · θ)
        μ ← b₂ μ + (1 − b₂) g

    It needs a smaller learning rate than Adam.

    Args:
        learning_rate: a number, a scalar tensor or a schedule.
        b1: the weight of the mean against the gradient, in the sign.
        b2: the decay of the mean.
        weight_decay: decoupled from the gradient.
        mask: which leaves decay: a tree of bools like the params, a prefix of it, or a function
            from params to one. None: all. With a mask it is a ``partition`` into ``"decay"`` and
            ``"rest"``, and so is its state.

    >>> optimizer = lion(0.1)
    >>> params = {"w": torch.tensor([1.0, 1.0])}
    >>> optimizer.update({"w": torch.tensor([7.0, -0.1])}, optimizer.init(params), params)[0]
    {'w': tensor([0.9000, 1.1000])}
    """
    check_rate(learning_rate)
    if mask is not None:
        plain = lion(learning_rate, b1, b2, 0.0)
        return masked(mask, lion(learning_rate, b1, b2, weight_decay), plain)

    def rule(ops: Arithmetic, step: Tensor, rate: Number, decay: Number) -> Formula:
        def formula(grads: Any, params: Any, mu: Any) -> tuple[Any, Any]:
            grads = ops.cast(grads, mu)
            direction = ops.lerp(mu, grads, 1 - b1)
            # torch's sign of NaN is 0, which would hide it. So 0 times the direction is added.
            sign = ops.add_(ops.sign(direction), direction, 0)
            shrunk = ops.mul_(ops.cast(params, mu), 1 - rate * decay)
            return ops.add_(shrunk, sign, -rate), ops.lerp_(mu, grads, 1 - b2)

        return formula

    return elementwise(Optimizer, LionState, [learning_rate, weight_decay], rule)
