"""A float32 copy of half-precision parameters, for the optimizer to move."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from purestep import tree
from purestep.optim.base import (
    Optimizer,
    check_optimizer,
    check_params,
    in_place,
    refuse,
    written,
)
from purestep.optim.leafwise import alike
from purestep.types import OptState, Params, State, Tree


class MasterState(NamedTuple):
    """The params in float32, and the state of the optimizer that moves them.

    >>> import torch
    >>> from purestep.optim import sgd
    >>> master_weights(sgd(0.1)).init(torch.ones((), dtype=torch.bfloat16)).master
    tensor(1.)
    """

    master: Params
    inner: OptState


def master_weights(optimizer: Optimizer) -> Optimizer[State]:
    """The same optimizer on a float32 copy of the params, of which they are the rounded values.

        m ← optimizer(g, m),    θ ← m rounded to the dtype of θ

    bfloat16 has eight bits: a step of less than 1/256 of a parameter is lost in it, however often.

    The copy is what moves, and θ only what the gradient is taken at. So a derivative by the params
    at the start goes by way of ``init``. It passes under the transforms of ``torch.func``, and is
    cut off from params that merely require grad: differentiate ``opt_state.master`` there.

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
