"""A float32 copy of half-precision parameters, for the optimizer to move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from purestep import tree
from purestep.optim.base import Optimizer, Update, check_optimizer, composed, refuse, written
from purestep.optim.leafwise import belongs
from purestep.tree import accumulation_dtype
from purestep.types import OptState, Params, Tree


class MasterState(NamedTuple):
    """The params in float32, and the state of the optimizer that moves them.

    >>> import torch
    >>> from purestep.optim import sgd
    >>> master_weights(sgd(0.1)).init(torch.ones((), dtype=torch.bfloat16)).master
    tensor(1.)
    """

    master: Params
    inner: OptState


def master_weights(optimizer: Optimizer) -> Optimizer:
    """The same optimizer on a float32 copy of the params, of which they are the rounded values.

        m ← optimizer(g, m),    θ ← m rounded to the dtype of θ

    bfloat16 has eight bits: a step of less than 1/256 of a parameter is lost in it, however often it comes.

    The copy is what moves, and θ only what the gradient is taken at. So a derivative with respect to the params
    at the start goes by way of ``init``, which keeps it under the transforms of ``torch.func``, but cuts it off
    from params that merely require grad, as all optimizers do: differentiate ``opt_state.master`` there.

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

    def rounding(updates: Sequence[Update], in_place: bool) -> Update:
        (inner_update,) = updates

        def update(
            grads: Tree, opt_state: OptState, params: Params, **how: Any
        ) -> tuple[Params, OptState]:
            if not belongs(MasterState, ["master"], grads, opt_state, params):
                refuse(init, grads, opt_state, params)
            master, inner = cast("MasterState", opt_state)
            wide = tree.map(lambda grad, m: grad.to(m.dtype), grads, master)
            moved, inner = inner_update(wide, inner, master, **how)

            def rounded(param: Tensor, m: Tensor) -> Tensor:
                if in_place:
                    return written(param, m, how.get("applied"))
                return m.to(param.dtype, copy=True)

            return tree.map(rounded, params, moved), MasterState(moved, inner)

        return update

    return composed(Optimizer, init, [optimizer], rounding)


def wide_copy(params: Params) -> Params:
    """The params in float32 at least, in memory of their own; cut off from params that merely require grad."""
    differentiable = not tree.untransformed()

    def copied(param: Tensor) -> Tensor:
        param = param if differentiable else param.detach()
        return param.to(accumulation_dtype(param.dtype), copy=True)

    return tree.map(copied, params)
