"""Optimizers around an optimizer, with a wider or slower copy of the params beside its state."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep import tree
from purestep.optim.base import Optimizer, check_optimizer, check_params, in_place, refuse, written
from purestep.optim.leafwise import alike, number
from purestep.types import OptState, Params, State, Tree


class MasterState(NamedTuple):
    """The params in float32, and the state of the inner optimizer.

    >>> import torch
    >>> from purestep.optim import sgd
    >>> master_weights(sgd(0.1)).init(torch.ones((), dtype=torch.bfloat16)).master
    tensor(1.)
    """

    master: Params
    inner: OptState


def master_weights(optimizer: Optimizer) -> Optimizer[State]:
    """Runs the optimizer on a float32 copy of the params, which are its rounded values.

        m ← optimizer(g, m),    θ ← m rounded to the dtype of θ

    bfloat16 has eight bits, so it loses every step of less than 1/256 of a parameter.

    Gradients by the initial params flow through ``init``, under the transforms of ``torch.func``.
    Where params only require grad, they stop there: differentiate ``opt_state.master``.

    >>> import torch
    >>> from purestep.optim import sgd
    >>> params = torch.ones((), dtype=torch.bfloat16)
    >>> for optimizer in (sgd(1.0), master_weights(sgd(1.0))):
    ...     moved, opt_state = params, optimizer.init(params)
    ...     for _ in range(8):
    ...         moved, opt_state = optimizer.update(torch.tensor(0.001), opt_state, moved)
    ...     print(moved)
    tensor(1., dtype=torch.bfloat16)
    tensor(0.9922, dtype=torch.bfloat16)
    """
    check_optimizer("master_weights wraps an Optimizer", optimizer)

    def init(params: Params) -> MasterState:
        master = wide_copy(params)
        return MasterState(master, optimizer.init(master))

    def rounding(update: Any, grads: Tree, opt_state: Any, params: Params, *applied: Any) -> Any:
        if not isinstance(opt_state, MasterState) or not alike(grads, params, opt_state.master):
            refuse(init, grads, opt_state, params)
        wide = tree.map(lambda grad, m: grad.to(m.dtype), grads, opt_state.master)
        moved, inner = update(wide, opt_state.inner, opt_state.master, *applied)

        def rounded(param: Tensor, m: Tensor) -> Tensor:
            return written(param, m, *applied) if applied else m.to(param.dtype, copy=True)

        return tree.map(rounded, params, moved), MasterState(moved, inner)

    return Optimizer(
        init, partial(rounding, optimizer.update), partial(rounding, in_place(optimizer))
    )


def wide_copy(params: Params) -> Params:
    """The params in float32 at least, in other memory; detached where only autograd looks on."""
    check_params(params)
    differentiable = not tree.untransformed()

    def copied(param: Tensor) -> Tensor:
        param = param if differentiable else param.detach()
        return param.to(tree.accumulation_dtype(param.dtype), copy=True)

    return tree.map(copied, params)


class EmaState(NamedTuple):
    """The mean of the params, at least in float32, and the state of the inner optimizer.

    >>> from purestep.optim import sgd
    >>> ema(sgd(0.1), 0.5).init(torch.tensor(1.0)).average
    tensor(1.)
    """

    average: Params
    inner: OptState


def ema(optimizer: Optimizer, decay: float | Tensor) -> Optimizer[State]:
    """Adds a decaying mean of the params to the optimizer's state [Polyak and Juditsky, 1992].

        θ ← optimizer(g, θ),    a ← decay · a + (1 − decay) · θ

    The mean starts at the params, and moves when they move. So a skipped step, or one without
    tokens, leaves it. It shares no memory with params, and checkpoints hold it. Evaluate
    ``opt_state.average``, cast to the params' dtype if that is half precision.

    Around ``master_weights`` it is the mean of the rounded params. Inside, it is that of the
    float32 params.

    >>> from purestep.optim import sgd
    >>> optimizer = ema(sgd(1.0), 0.5)
    >>> params = torch.tensor(0.0)
    >>> params, opt_state = optimizer.update(torch.tensor(-4.0), optimizer.init(params), params)
    >>> params, opt_state.average
    (tensor(4.), tensor(2.))
    """
    check_optimizer("ema wraps an Optimizer", optimizer)
    if not isinstance(decay, Tensor) and not 0 <= decay <= 1:
        raise ValueError(f"ema: {decay=} must be from 0 to 1, such as 0.999")

    def init(params: Params) -> EmaState:
        return EmaState(wide_copy(params), optimizer.init(params))

    def averaged(update: Any, grads: Tree, opt_state: Any, params: Params, *applied: Any) -> Any:
        if not isinstance(opt_state, EmaState) or not alike(grads, params, opt_state.average):
            refuse(init, grads, opt_state, params)
        moved, inner = update(grads, opt_state.inner, params, *applied)

        def nearer(mean: Tensor, param: Tensor) -> Tensor:
            new = torch.lerp(mean, param.to(mean.dtype), number(1 - decay, mean))
            return written(mean, new, *applied) if applied else new

        return moved, EmaState(tree.map(nearer, opt_state.average, moved), inner)

    return Optimizer(
        init, partial(averaged, optimizer.update), partial(averaged, in_place(optimizer))
    )
