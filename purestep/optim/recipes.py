"""Whole optimizers: the last step of a chain, and the chains that everyone uses."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from purestep import tree
from purestep.optim.base import Optimizer, Transform, chain, runs_kernels
from purestep.optim.schedules import LearningRate, rate_at
from purestep.optim.transforms import (
    Mask,
    add_decayed_weights,
    momentum as momentum_transform,
    scale_by_adam,
    zero_step,
)
from purestep.types import Params, Tree


class DescentState(NamedTuple):
    """Steps taken."""

    step: Tensor


def descend(learning_rate: LearningRate) -> Optimizer:
    """θ ← θ − lr · u: the Optimizer that ends a chain of transforms.

    >>> import torch
    >>> optimizer = chain(scale_by_adam(), descend(0.1))
    >>> params = {"w": torch.tensor(1.0)}
    >>> optimizer.update({"w": torch.tensor(7.0)}, optimizer.init(params), params)[0]
    {'w': tensor(0.9000)}
    """

    def init(params: Params) -> DescentState:
        return DescentState(zero_step(params))

    def rate_of(opt_state: DescentState, grad_scale: Tensor | None) -> float | Tensor:
        rate = rate_at(learning_rate, _descent_of(opt_state).step)
        return rate if grad_scale is None else rate / grad_scale

    def moved(param: Tensor, u: Tensor, rate: float | Tensor) -> Tensor:
        # Both are θ + (−lr) u with one rounding, so that the kernel below gives the same bits.
        wide = torch.promote_types(param.dtype, u.dtype)
        if isinstance(rate, Tensor):
            return torch.addcmul(param, u, -rate.to(wide)).to(param.dtype)
        return torch.add(param, u, alpha=-rate).to(param.dtype)

    def update(
        grads: Tree, opt_state: DescentState, params: Params, *, grad_scale: Tensor | None = None
    ) -> tuple[Params, DescentState]:
        rate = rate_of(opt_state, grad_scale)
        after = DescentState(opt_state.step + 1)
        return tree.map(lambda param, u: moved(param, u, rate), params, grads), after

    def update_(
        grads: Tree,
        opt_state: DescentState,
        params: Params,
        *,
        grad_scale: Tensor | None = None,
        applied: Tensor | None = None,
    ) -> tuple[Params, DescentState]:
        rate = rate_of(opt_state, grad_scale)
        after = DescentState(opt_state.step + 1)
        if applied is None and runs_kernels(grads, opt_state, params, rate):
            torch._foreach_add_(tree.leaves_of(params), tree.leaves_of(grads), alpha=-float(rate))
        else:
            tree.map(
                lambda param, u: tree.overwrite(param, moved(param, u, rate), applied),
                params,
                grads,
            )
        return params, cast("DescentState", tree.overwrite(opt_state, after, applied))

    return Optimizer(init, update, update_)


def _descent_of(opt_state: DescentState) -> DescentState:
    if not isinstance(opt_state, DescentState):
        raise ValueError(
            f"opt_state is {type(opt_state).__name__} where DescentState was expected: take "
            "optimizer.init(params) of this very optimizer"
        )
    return opt_state


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
        mask: which leaves decay: a tree of bools, or a function from params to one; None: all.

    >>> import torch
    >>> optimizer = sgd(0.1, momentum=0.9)
    >>> params = {"w": torch.tensor(1.0)}
    >>> optimizer.update({"w": torch.tensor(2.0)}, optimizer.init(params), params)[0]
    {'w': tensor(0.8000)}
    """
    if nesterov and momentum == 0:
        raise ValueError("sgd: nesterov=True looks ahead along the momentum, but momentum=0")
    transforms: list[Transform] = []
    if not _is_zero(weight_decay):
        transforms.append(add_decayed_weights(weight_decay, mask))
    if momentum != 0:
        transforms.append(momentum_transform(momentum, nesterov=nesterov))
    return chain(*transforms, descend(learning_rate))


def adamw(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float | Tensor = 1e-2,
    mask: Mask | None = None,
) -> Optimizer:
    """Adam with decoupled weight decay [Loshchilov and Hutter, 2019], as ``torch.optim.AdamW``.

        θ ← θ − lr · (μ̂ / (√ν̂ + ε) + weight_decay · θ)        μ̂, ν̂ as in ``scale_by_adam``

    Args:
        learning_rate: a number, a scalar tensor or a schedule.
        b1, b2: the decay of the means of gradients and squares.
        eps: added outside the root.
        weight_decay: decoupled from the gradient.
        mask: which leaves decay: a tree of bools, or a function from params to one; None: all.

    >>> import torch
    >>> optimizer = adamw(0.1, mask=lambda params: tree.map(lambda p: p.ndim > 1, params))
    >>> params = {"w": torch.tensor(1.0)}
    >>> optimizer.update({"w": torch.tensor(7.0)}, optimizer.init(params), params)[0]
    {'w': tensor(0.9000)}
    """
    return chain(
        scale_by_adam(b1, b2, eps),
        add_decayed_weights(weight_decay, mask),
        descend(learning_rate),
    )


def _is_zero(value: float | Tensor) -> bool:
    return not isinstance(value, Tensor) and value == 0
