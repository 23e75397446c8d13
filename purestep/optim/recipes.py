"""Whole optimizers: the last step of a chain, and the chains that everyone uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep import tree
from purestep.optim.base import Optimizer, Transform, chain
from purestep.optim.leafwise import Norm, leafwise
from purestep.optim.partition import Mask, masked
from purestep.optim.schedules import LearningRate, check_rate, rate_at
from purestep.optim.transforms import (
    add_decayed_weights,
    is_zero,
    momentum as momentum_transform,
    multiply_add,
    number,
    zero_step,
)
from purestep.torch_internals import foreach_add_
from purestep.types import Params, Tree


class DescentState(NamedTuple):
    """Steps taken.

    >>> descend(0.1).init(torch.tensor(1.0))
    DescentState(step=tensor(0))
    """

    step: Tensor


def descend(learning_rate: LearningRate) -> Optimizer:
    """θ ← θ − lr · u: the Optimizer that ends a chain of transforms.

    >>> from purestep.optim import scale_by_adam
    >>> optimizer = chain(scale_by_adam(), descend(0.1))
    >>> params = {"w": torch.tensor(1.0)}
    >>> optimizer.update({"w": torch.tensor(7.0)}, optimizer.init(params), params)[0]
    {'w': tensor(0.9000)}
    """

    check_rate(learning_rate)

    def init(params: Params) -> DescentState:
        return DescentState(zero_step(params))

    def numbers(step: Tensor, _: Norm, grad_scale: Tensor | None) -> tuple[float | Tensor]:
        rate = rate_at(learning_rate, step)
        return (rate if grad_scale is None else rate / grad_scale.to(torch.float64),)

    def formula(numbers: tuple[float | Tensor], _: Tensor) -> Callable[..., tuple[Tensor]]:
        (rate,) = numbers
        return lambda u, param: (multiply_add(param, -rate, u),)

    def kernel(
        numbers: tuple[float | Tensor], _: Tensor, updates: list[Tensor], params: list[Tensor]
    ) -> list[Tensor]:
        foreach_add_(params, updates, alpha=-float(numbers[0]))
        return params

    return leafwise(Optimizer, init, DescentState, (), numbers, formula, kernel)


def sgd(
    learning_rate: LearningRate,
    momentum: float = 0.0,
    *,
    nesterov: bool = False,
    weight_decay: float | Tensor = 0.0,
    mask: Mask | None = None,
) -> Optimizer:
    """Stochastic gradient descent, as ``torch.optim.SGD``.

        g ← g + weight_decay · θ,    t ← momentum · t + g,    θ ← θ − lr · t

    Args:
        learning_rate: a number, a scalar tensor or a schedule.
        momentum: the decay of the trace t.
        nesterov: look ahead, with g + momentum · t.
        weight_decay: added to the gradient, so that it takes part in the momentum.
        mask: which leaves decay: a tree of bools like the params, a prefix of it, or a function from params to
            one; None: all. With a mask, the decay is a ``partition``.

    >>> import torch
    >>> optimizer = sgd(0.1, momentum=0.9)
    >>> params = {"w": torch.tensor(1.0)}
    >>> optimizer.update({"w": torch.tensor(2.0)}, optimizer.init(params), params)[0]
    {'w': tensor(0.8000)}
    """
    if nesterov and momentum == 0:
        raise ValueError("sgd: nesterov=True looks ahead along the momentum, but momentum=0")
    transforms: list[Transform] = []
    if not is_zero(weight_decay):
        transforms.append(add_decayed_weights(weight_decay, mask))
    if momentum != 0:
        transforms.append(momentum_transform(momentum, nesterov=nesterov))
    return chain(*transforms, descend(learning_rate))


class LionState(NamedTuple):
    """Steps taken, and the decaying mean of the gradients.

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
) -> Optimizer:
    """The sign of a momentum [Chen et al., 2023]: half of Adam's state, and a smaller learning rate.

        θ ← θ − lr · (sign(b₁ μ + (1 − b₁) g) + weight_decay · θ)
        μ ← b₂ μ + (1 − b₂) g

    Args:
        learning_rate: a number, a scalar tensor or a schedule.
        b1: how much the mean weighs against the gradient in the sign.
        b2: the decay of the mean.
        weight_decay: decoupled from the gradient.
        mask: which leaves decay: a tree of bools like the params, a prefix of it, or a function from params to
            one; None: all. With a mask it is a ``partition`` into ``"decay"`` and ``"rest"``, and so is its state.

    >>> import torch
    >>> optimizer = lion(0.1)
    >>> params = {"w": torch.tensor([1.0, 1.0])}
    >>> optimizer.update({"w": torch.tensor([7.0, -0.1])}, optimizer.init(params), params)[0]
    {'w': tensor([0.9000, 1.1000])}
    """

    check_rate(learning_rate)
    if mask is not None:
        plain = lion(learning_rate, b1, b2, 0.0)
        return masked(mask, lion(learning_rate, b1, b2, weight_decay), plain)

    def init(params: Params) -> LionState:
        return LionState(zero_step(params), tree.zeros_like(params))

    def numbers(
        step: Tensor, _: Norm, grad_scale: Tensor | None
    ) -> tuple[float | Tensor | None, ...]:
        return rate_at(learning_rate, step), weight_decay, grad_scale

    def formula(numbers: tuple[Any, ...], _: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
        rate, decay, grad_scale = numbers

        def of_leaf(grad: Tensor, param: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
            grad = grad.to(mu.dtype)
            grad = grad if grad_scale is None else grad / number(grad_scale, grad)
            direction = torch.lerp(mu, grad, 1 - b1)
            # torch's sign of NaN is 0: training would stand still, and nobody would see why. So 0 times it is added.
            sign = torch.add(direction.sign(), direction, alpha=0)
            moved = multiply_add(param.to(mu.dtype) * number(1 - rate * decay, mu), -rate, sign)
            return moved.to(param.dtype), torch.lerp(mu, grad, 1 - b2)

        return of_leaf

    return leafwise(Optimizer, init, LionState, ["mu"], numbers, formula)
