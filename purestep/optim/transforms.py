"""Defines transforms of gradients, each a few lines of plain tensor arithmetic."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep import tree
from purestep.optim.arithmetic import Arithmetic, Number, as_scalar
from purestep.optim.base import Transform
from purestep.optim.elementwise import Formula, Results, elementwise
from purestep.optim.partition import Mask, partition_by_mask
from purestep.optim.schedules import check_adam_decays, check_hyperparams
from purestep.tree import foreach
from purestep.types import OptState, Params, Tree


def clip_by_global_norm(max_norm: float | Tensor) -> Transform:
    """Scales gradients down to the norm ``max_norm``: g · min(1, max_norm / ‖g‖₂).

    The norm is that of the whole tree. For a ``Shard`` it includes all ranks of its axis. The
    results are in float32 at least. If the norm is NaN, the gradients keep their values. Raises
    ``ValueError`` for a negative number.

    >>> clip_by_global_norm(1.0).update({"w": torch.tensor([3.0, 4.0])}, (), None)
    ({'w': tensor([0.6000, 0.8000])}, ())
    """
    check_hyperparams(max_norm=max_norm)

    def update(grads: Tree, state: OptState, params: Params) -> tuple[Tree, OptState]:
        grads = tree.map(tree.widen, grads)
        norm = tree.global_norm(grads)
        is_longer = norm > max_norm
        # Divided by 1 where nothing is clipped: a derivative reaches both branches.
        divisor = torch.where(is_longer, norm, 1)
        factor = torch.where(is_longer, max_norm / divisor, 1)
        grads = tree.map(lambda grad: grad * as_scalar(factor, grad), grads)
        return grads, state

    def update_(
        grads: Tree, state: OptState, params: Params, applied: Tensor | None
    ) -> tuple[Tree, OptState]:
        leaves, structure = tree.flatten(grads)
        leaves = [tree.widen(leaf) for leaf in leaves]
        # An expanded gradient, as of x.sum(), has one memory for all elements. A map, at each step.
        is_dense = all(map(Tensor.is_contiguous, leaves))
        if not is_dense or tree.leaves_require_grad([*leaves, max_norm]):
            return update(grads, state, params)
        grads = tree.unflatten(structure, leaves)
        norm = tree.global_norm(grads)
        factor = (max_norm / norm).clamp(max=1).nan_to_num(1)
        # Nothing to write if the factor is 1, which the host reads without waiting for a device.
        if leaves and (not factor.is_cpu or factor != 1):
            foreach.scale_(leaves, factor)
        return grads, state

    return Transform(lambda params: (), update, update_)


class MomentumState(NamedTuple):
    """Holds the decaying sum of gradients.

    >>> momentum(0.9).init(torch.ones(2))
    MomentumState(trace=tensor([0., 0.]))
    """

    trace: Tree


def momentum(decay: float | Tensor, *, nesterov: bool = False) -> Transform:
    """Keeps a decaying sum of gradients: t ← decay · t + g.

    The update is t, or g + decay · t with ``nesterov``. Raises ``ValueError`` for a
    negative number.

    >>> transform = momentum(0.5)
    >>> state = MomentumState({"w": torch.tensor(2.0)})
    >>> transform.update({"w": torch.tensor(1.0)}, state, None)[0]
    {'w': tensor(2.)}
    """
    check_hyperparams(decay=decay)

    def rule(ops: Arithmetic, step: None, decay: Number) -> Formula:
        def formula(grads: Any, params: Any, trace: Any) -> Results:
            if nesterov:
                trace = ops.mul_(trace, decay)
                trace = ops.add_(trace, grads)
                updates = ops.add_(grads, trace, decay)
            else:
                updates = ops.cast(grads, trace)
                updates = ops.add_(updates, trace, decay)
                trace = ops.assign_(trace, updates)
            return updates, trace

        return formula

    return elementwise(Transform, MomentumState, [decay], rule, reads_params=False)


class AdamState(NamedTuple):
    """Holds the number of steps, and the decaying means of the gradients and of their squares.

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

    Raises ``ValueError`` for negative numbers, and for a number from 1 on as ``b1`` or ``b2``.

    >>> transform = scale_by_adam()
    >>> params = {"w": torch.tensor([0.0, 0.0])}
    >>> transform.update({"w": torch.tensor([5.0, -0.1])}, transform.init(params), None)[0]
    {'w': tensor([ 1., -1.])}
    """
    check_hyperparams(eps=eps)
    check_adam_decays(b1=b1, b2=b2)

    def rule(ops: Arithmetic, step: Tensor) -> Formula:
        count = step.to(torch.float64)
        mu_correction = 1 - b1**count
        nu_correction = 1 - b2**count

        def formula(grads: Any, params: Any, mu: Any, nu: Any) -> Results:
            grads = ops.cast(grads, mu)
            mu, nu = update_moments(ops, grads, mu, nu, b1=b1, b2=b2)
            mean = ops.div(mu, mu_correction)
            variance = ops.div(nu, nu_correction)
            deviation = ops.sqrt(variance)
            deviation = ops.add_(deviation, eps)
            updates = ops.div_(mean, deviation)
            return updates, mu, nu

        return formula

    return elementwise(Transform, AdamState, [], rule, reads_params=False)


def update_moments(
    ops: Arithmetic, grads: Any, mu: Any, nu: Any, *, b1: float, b2: float
) -> Results:
    """Returns Adam's new means: ``mu`` of gradients and ``nu`` of squares.

    It may write to the old ones: ``ops`` decides.
    """
    mu = ops.lerp_(mu, grads, 1 - b1)
    nu = ops.mul_(nu, b2)
    nu = ops.addcmul_(nu, grads, grads, 1 - b2)
    return mu, nu


def add_decayed_weights(
    weight_decay: float | Tensor, mask: Mask | None = None
) -> Transform:
    """Adds weight decay to the updates: u + weight_decay · θ, where ``mask`` is True.

    Without a mask, all leaves decay. With one, the transform is a ``partition``. The mask is a tree
    of bools like the params, a prefix of it, or a function from params to one. Raises
    ``ValueError`` for a negative number; a tensor passes, whatever its value.

    >>> decay = add_decayed_weights(0.1, lambda params: tree.map(lambda p: p.ndim > 1, params))
    >>> params = {"bias": torch.ones(1), "weight": torch.ones(1, 1)}
    >>> decay.update(tree.zeros_like(params), decay.init(params), params)[0]
    {'bias': tensor([0.]), 'weight': tensor([[0.1000]])}
    """
    check_hyperparams(weight_decay=weight_decay)
    if mask is not None:
        decay = add_decayed_weights(weight_decay)
        no_decay = add_decayed_weights(0.0)
        return partition_by_mask(mask, decay, no_decay)
    # Without decay gradients pass through: 0 · θ would turn an infinite θ into NaN.
    decays = isinstance(weight_decay, Tensor) or weight_decay != 0

    def rule(ops: Arithmetic, step: None, weight_decay: Number) -> Formula:
        def formula(grads: Any, params: Any) -> Results:
            if decays:
                grads = ops.add_(grads, params, weight_decay)
            return (grads,)

        return formula

    return elementwise(Transform, tuple, [weight_decay], rule)
