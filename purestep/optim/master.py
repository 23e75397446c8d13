"""A float32 copy of half-precision parameters, for the optimizer to move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from purestep import tree
from purestep.optim.base import (
    Optimizer,
    check_optimizer,
    composed,
    leaf_columns,
    with_grad_scale,
)
from purestep.tree import accumulation_dtype
from purestep.types import OptState, Params, Tree


class MasterState(NamedTuple):
    """The params in float32, and the state of the optimizer that moves them."""

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
        differentiable = not tree.untransformed()

        def copied(param: Tensor) -> Tensor:
            param = param if differentiable else param.detach()
            return param.to(accumulation_dtype(param.dtype), copy=True)

        master = tree.map(copied, params)
        return MasterState(master, optimizer.init(master))

    def update(
        grads: Tree, opt_state: OptState, params: Params, *, grad_scale: Tensor | None = None
    ) -> tuple[Params, OptState]:
        master, inner = checked(grads, opt_state, params)
        moved, inner = with_grad_scale(optimizer.update)(
            wide(grads, master), inner, master, grad_scale=grad_scale
        )
        rounded = tree.map(lambda param, m: m.to(param.dtype, copy=True), params, moved)
        return rounded, MasterState(moved, inner)

    def rounding(updates_: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        (inner_,) = updates_

        def update_(
            grads: Tree,
            opt_state: OptState,
            params: Params,
            *,
            grad_scale: Tensor | None = None,
            applied: Tensor | None = None,
        ) -> tuple[Params, OptState]:
            master, inner = checked(grads, opt_state, params)
            moved, inner = inner_(
                wide(grads, master), inner, master, grad_scale=grad_scale, applied=applied
            )
            rounded = tree.map(
                lambda param, m: tree.overwrite(param, m.to(param.dtype), applied), params, moved
            )
            return rounded, MasterState(moved, inner)

        return update_

    def checked(grads: Tree, opt_state: OptState, params: Params) -> MasterState:
        leaf_columns(init, MasterState, ["master"], grads, opt_state, params)
        return cast("MasterState", opt_state)

    def wide(grads: Tree, master: Params) -> Tree:
        return tree.map(lambda grad, m: grad.to(m.dtype), grads, master)

    return composed(Optimizer, init, update, [optimizer], rounding)
