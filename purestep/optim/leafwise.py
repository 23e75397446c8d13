"""Optimizers that are one formula for each leaf, and torch's kernel for it where one may run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from purestep import tree
from purestep.optim.base import (
    Init,
    Optimizer,
    held_back,
    leaf_columns,
    runs_kernels,
    takes,
)
from purestep.types import OptState, Params, Tree


def leafwise(
    init: Init,
    state_type: type,
    slots: Sequence[str],
    numbers: Callable[..., Any],
    formula: Callable[..., tuple[Tensor, ...]],
    kernel: Callable[..., None] | None = None,
    devices: Sequence[str] = ("cpu",),
) -> Optimizer:
    """An Optimizer whose update is one formula for each leaf.

    Args:
        init: makes the state, a NamedTuple with a scalar ``step``.
        state_type: its type.
        slots: those of its fields that are trees like the params.
        numbers: ``numbers(state, grad_scale)``: what is the same for all leaves of a step.
        formula: ``formula(numbers, index, param, grad, *slots)`` of leaf ``index`` gives the new param and
            the new slots, in plain arithmetic, for any transform.
        kernel: ``kernel(numbers, params, grads, *slots)``, with a list of leaves for each, is the same in place, to
            the bit. To divide by a ``grad_scale``, it may write to the gradients. One that takes the
            keyword ``applied`` can be held back without the host's knowing.
        devices: where the kernel is at home.
    """

    columns_of = partial(leaf_columns, init, state_type, slots)

    def update(
        grads: Tree, opt_state: Any, params: Params, *, grad_scale: Tensor | None = None
    ) -> tuple[Params, OptState]:
        columns, structure = columns_of(grads, opt_state, params)
        given = numbers(opt_state, grad_scale)
        if kernel_runs(given, grads, opt_state, params):
            read = grads if grad_scale is None else tree.map(torch.clone, grads)
            params, opt_state = tree.map(torch.clone, (params, opt_state))
            return update_(read, opt_state, params, grad_scale=grad_scale)
        rows = [formula(given, index, *row) for index, row in enumerate(zip(*columns, strict=True))]
        return result(structure, rows, opt_state, opt_state.step + 1)

    def update_(
        grads: Tree,
        opt_state: Any,
        params: Params,
        *,
        grad_scale: Tensor | None = None,
        applied: Tensor | None = None,
    ) -> tuple[Params, OptState]:
        columns, structure = columns_of(grads, opt_state, params)
        given = numbers(opt_state, grad_scale)
        keywords = {} if applied is None else {"applied": applied}
        step = tree.overwrite(opt_state.step, opt_state.step + 1, applied)
        if kernel_runs(given, grads, opt_state, params, *keywords):
            kernel_(given, *columns, **keywords)
            return params, opt_state
        if applied is not None and not tree.untransformed(grads, opt_state, params, given):
            columns[1] = held_back(columns[1], applied)
        rows = []
        for index, (param, grad, *old) in enumerate(zip(*columns, strict=True)):
            new = formula(given, index, param, grad, *old)
            rows.append(tree.overwrite([param, *old], list(new), applied))
        return result(structure, rows, opt_state, step)

    def result(
        structure: tree.Structure, rows: Sequence[Any], state: Any, step: Tensor
    ) -> tuple[Params, OptState]:
        new_params, *new_slots = (
            tree.unflatten(structure, [row[place] for row in rows])
            for place in range(1 + len(slots))
        )
        return new_params, state._replace(step=step, **dict(zip(slots, new_slots, strict=True)))

    kernel_: Any = kernel

    def kernel_runs(
        given: Any, grads: Tree, state: OptState, params: Params, *keywords: str
    ) -> bool:
        return (
            kernel is not None
            and all(takes(kernel, keyword) for keyword in keywords)
            and runs_kernels(grads, state, params, given, devices=devices)
        )

    return Optimizer(init, update, update_, kernels=kernel is not None)
