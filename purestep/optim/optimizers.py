"""Defines the usual optimizers, and the last step of a chain of transforms."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep.optim.arithmetic import Arithmetic, Number
from purestep.optim.base import Optimizer, Transform, chain, explain_torch_names
from purestep.optim.elementwise import (
    Formula,
    FusedKernel,
    Layout,
    Results,
    elementwise,
)
from purestep.optim.partition import Mask, partition_by_mask
from purestep.optim.schedules import (
    LearningRate,
    check_adam_decays,
    check_hyperparams,
    check_rate,
)
from purestep.optim.transforms import (
    add_decayed_weights,
    momentum as momentum_transform,
    update_moments,
)
from purestep.torch_private import fused_adamw_
from purestep.types import State, Tree


class DescentState(NamedTuple):
    """Holds the number of steps.

    >>> sgd(0.1).init(torch.tensor(1.0))
    DescentState(step=tensor(0))
    """

    step: Tensor


def _descend(learning_rate: LearningRate) -> Optimizer[State]:
    """Makes the Optimizer θ ← θ − lr · u, where u is the gradient, or the update of a transform."""

    def rule(ops: Arithmetic, step: Tensor, rate: Number) -> Formula:
        def formula(updates: Any, params: Any) -> Results:
            return (ops.add_(params, updates, -rate),)

        return formula

    return elementwise(Optimizer, DescentState, [learning_rate], rule)


@explain_torch_names
def sgd(
    learning_rate: LearningRate,
    momentum: float = 0.0,
    *,
    nesterov: bool = False,
    weight_decay: float | Tensor = 0.0,
    mask: Mask | None = None,
) -> Optimizer[State]:
    """Makes stochastic gradient descent, as ``torch.optim.SGD``.

        g ← g + weight_decay · θ,    t ← momentum · t + g,    θ ← θ − lr · t

    ``sgd(learning_rate)`` alone is the step that ends a chain of transforms. With momentum or decay
    the optimizer is itself a ``chain``, whose state is a tuple. Raises ``ValueError`` for negative
    numbers.

    Args:
        learning_rate: a number, a scalar tensor or a schedule; others raise ``TypeError``.
        momentum: the decay of the trace t.
        nesterov: look ahead, with g + momentum · t. Raises ``ValueError`` if the momentum is 0.
        weight_decay: added to the gradient, so that it takes part in the momentum.
        mask: which leaves decay: a tree of bools like the params, a prefix of it, or a function
            from params to one; None: all. With a mask, the decay is a ``partition``. Without decay
            the mask is not read.

    >>> optimizer = sgd(0.1, momentum=0.9)
    >>> params = {"w": torch.tensor(1.0)}
    >>> optimizer.update({"w": torch.tensor(2.0)}, optimizer.init(params), params)[0]
    {'w': tensor(0.8000)}

    >>> from purestep.optim import scale_by_adam
    >>> optimizer = chain(scale_by_adam(), sgd(0.1))
    >>> optimizer.update({"w": torch.tensor(7.0)}, optimizer.init(params), params)[0]
    {'w': tensor(0.9000)}
    """
    check_rate(learning_rate)
    check_hyperparams(
        learning_rate=learning_rate, momentum=momentum, weight_decay=weight_decay
    )
    if nesterov and momentum == 0:
        raise ValueError(
            "sgd: nesterov=True looks ahead along the momentum, but momentum=0"
        )
    transforms: list[Transform] = []
    if isinstance(weight_decay, Tensor) or weight_decay != 0:
        transforms.append(add_decayed_weights(weight_decay, mask))
    if momentum != 0:
        transforms.append(momentum_transform(momentum, nesterov=nesterov))
    descent = _descend(learning_rate)
    return chain(*transforms, descent) if transforms else descent


class AdamWState(NamedTuple):
    """Holds the number of steps, and the decaying means of gradients and of their squares.

    >>> adamw(0.1).init(torch.tensor(1.0))
    AdamWState(step=tensor(0), mu=tensor(0.), nu=tensor(0.))
    """

    step: Tensor
    mu: Tree
    nu: Tree


def _fused_layout(params_dtype: torch.dtype, device: str) -> Layout:
    """Returns the layout of gradients, params and both means, for contiguous tensors.

    All but the params are in float32.
    """
    dtypes = (torch.float32, params_dtype, torch.float32, torch.float32)
    return Layout(dtypes, device, is_contiguous=True)


FUSED_LAYOUTS = {
    _fused_layout(torch.float32, "cpu"),
    _fused_layout(torch.float32, "cuda"),
    _fused_layout(torch.bfloat16, "cuda"),
    _fused_layout(torch.float16, "cuda"),
}
"""The layouts that torch's kernel takes. Params in half precision are widened for it."""


@explain_torch_names
def adamw(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float | Tensor = 1e-2,
    mask: Mask | None = None,
) -> Optimizer[State]:
    """Makes Adam with decoupled weight decay [Loshchilov and Hutter, 2019], ``torch.optim.AdamW``.

        t ← t + 1
        μ ← b₁ μ + (1 − b₁) g
        ν ← b₂ ν + (1 − b₂) g²
        θ ← θ − lr · (μ̂ / (√ν̂ + ε) + weight_decay · θ)

    where μ̂ = μ / (1 − b₁ᵗ) and ν̂ = ν / (1 − b₂ᵗ).

    In place, contiguous float32 leaves use torch's fused kernel, on CUDA those in half precision
    too. Under transforms, plain arithmetic gives the same bits on the host, in vectors of sixteen
    elements. The last elements of a leaf, beyond these vectors, may differ by a rounding. On CUDA,
    the kernel rounds a rate that is a tensor, such as a schedule's, to float32; plain arithmetic
    does not. No leaf uses the kernel with a ``weight_decay`` that is a tensor on a device. Nor does
    one if that, the rate or a gradient requires grad.

    Adam is ``adamw(learning_rate, weight_decay=0.0)``. Raises ``ValueError`` for negative numbers,
    and unless ``b1`` and ``b2`` are below 1.

    Args:
        learning_rate: a number, a scalar tensor or a schedule; others raise ``TypeError``.
        b1, b2: the decay of the means of gradients and squares.
        eps: added outside the root.
        weight_decay: decoupled from the gradient.
        mask: which leaves decay: a tree of bools like the params, a prefix of it, or a function
            from params to one. None: all. With a mask the optimizer is a ``partition``, and its
            state a dict by the labels ``"decay"`` and ``"rest"``.

    >>> from purestep import tree
    >>> optimizer = adamw(0.1, mask=lambda params: tree.map(lambda p: p.ndim > 1, params))
    >>> params = {"w": torch.tensor(1.0)}
    >>> optimizer.update({"w": torch.tensor(7.0)}, optimizer.init(params), params)[0]
    {'w': tensor(0.9000)}
    """
    check_rate(learning_rate)
    check_hyperparams(learning_rate=learning_rate, eps=eps, weight_decay=weight_decay)
    check_adam_decays(b1=b1, b2=b2)
    if mask is not None:
        with_decay = adamw(learning_rate, b1, b2, eps, weight_decay)
        without_decay = adamw(learning_rate, b1, b2, eps, weight_decay=0.0)
        return partition_by_mask(mask, with_decay, without_decay)

    def rule(ops: Arithmetic, step: Tensor, rate: Number, decay: Number) -> Formula:
        if isinstance(rate, Tensor):
            rate = rate.to(torch.float64)
        count = step.to(torch.float64)
        mu_correction = 1 - b1**count
        nu_correction_root = (1 - b2**count).sqrt()
        shrink_factor = 1 - rate * decay
        mu_factor = -rate / mu_correction

        def formula(grads: Any, params: Any, mu: Any, nu: Any) -> Results:
            grads = ops.cast(grads, mu)
            mu, nu = update_moments(ops, grads, mu, nu, b1=b1, b2=b2)
            deviation = ops.sqrt(nu)
            deviation = ops.div_(deviation, nu_correction_root)
            deviation = ops.add_(deviation, eps)
            change = ops.mul(mu, mu_factor)
            change = ops.div_(change, deviation)
            params = ops.cast(params, mu)
            params = ops.mul_(params, shrink_factor)
            params = ops.add_(params, change)
            return params, mu, nu

        return formula

    kernel = FusedKernel(
        fused_adamw_,
        {
            "max_exp_avg_sqs": [],
            "beta1": b1,
            "beta2": b2,
            "eps": eps,
            "amsgrad": False,
            "maximize": False,
        },
        FUSED_LAYOUTS,
    )
    # To read a decay on a device would wait for the device: the formula does not read it.
    is_readable = not isinstance(weight_decay, Tensor) or weight_decay.is_cpu
    return elementwise(
        Optimizer,
        AdamWState,
        [learning_rate, weight_decay],
        rule,
        kernel if is_readable else None,
    )


class LionState(NamedTuple):
    """Holds the number of steps, and the decaying mean of the gradients.

    >>> lion(0.1).init(torch.tensor(1.0))
    LionState(step=tensor(0), mu=tensor(0.))
    """

    step: Tensor
    mu: Tree


@explain_torch_names
def lion(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float | Tensor = 0.0,
    mask: Mask | None = None,
) -> Optimizer[State]:
    """Makes Lion [Chen et al., 2023]: steps by the sign of a momentum, with half of Adam's state.

        θ ← θ − lr · (sign(b₁ μ + (1 − b₁) g) + weight_decay · θ)
        μ ← b₂ μ + (1 − b₂) g

    It needs a smaller learning rate than Adam. Where g is not finite, θ becomes NaN. Raises
    ``ValueError`` for negative numbers.

    Args:
        learning_rate: a number, a scalar tensor or a schedule; others raise ``TypeError``.
        b1: the weight of the mean against the gradient, in the sign.
        b2: the decay of the mean.
        weight_decay: decoupled from the gradient.
        mask: which leaves decay: a tree of bools like the params, a prefix of it, or a function
            from params to one. None: all. With a mask the optimizer is a ``partition``, and its
            state a dict by the labels ``"decay"`` and ``"rest"``.

    >>> optimizer = lion(0.1)
    >>> params = {"w": torch.tensor([1.0, 1.0])}
    >>> optimizer.update({"w": torch.tensor([7.0, -0.1])}, optimizer.init(params), params)[0]
    {'w': tensor([0.9000, 1.1000])}
    """
    check_rate(learning_rate)
    check_hyperparams(
        learning_rate=learning_rate, b1=b1, b2=b2, weight_decay=weight_decay
    )
    if mask is not None:
        with_decay = lion(learning_rate, b1, b2, weight_decay)
        without_decay = lion(learning_rate, b1, b2, weight_decay=0.0)
        return partition_by_mask(mask, with_decay, without_decay)

    def rule(ops: Arithmetic, step: Tensor, rate: Number, decay: Number) -> Formula:
        shrink_factor = 1 - rate * decay

        def formula(grads: Any, params: Any, mu: Any) -> Results:
            grads = ops.cast(grads, mu)
            direction = ops.lerp(mu, grads, 1 - b1)
            # torch's sign of NaN is 0, which would hide it. So 0 times the direction is added.
            sign = ops.sign(direction)
            sign = ops.add_(sign, direction, 0)
            params = ops.cast(params, mu)
            params = ops.mul_(params, shrink_factor)
            params = ops.add_(params, sign, -rate)
            mu = ops.lerp_(mu, grads, 1 - b2)
            return params, mu

        return formula

    return elementwise(Optimizer, LionState, [learning_rate, weight_decay], rule)
