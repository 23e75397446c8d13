"""One transition of the state: the optimizer's update, or the identity."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from purestep import tree
from purestep.optim.base import Optimizer, foreign, guarded, has_kernels, held_back, with_grad_scale
from purestep.types import OptState, Params, Tree


class Transition(Protocol):
    """The optimizer's update where ``applied`` holds, and the identity where it does not."""

    def __call__(
        self,
        grads: Tree,
        opt_state: OptState,
        params: Params,
        /,
        *,
        grad_scale: Tensor | None,
        applied: Tensor,
    ) -> tuple[Params, OptState]: ...


def transition(optimizer: Optimizer, *, donate: bool, compile: bool = False) -> Transition:
    """The optimizer's update where ``applied`` holds, and the identity, to the bit, where it does not.

    Where nobody transforms, ``update_`` does it in place: on the buffers that come in, with ``donate``, and
    else on one copy of them. Under a transform the old state is still needed. A step that the host knows not
    to be taken is then never computed; else the choice is a selection, never a multiplication, of what was
    computed from finite gradients, so that nothing non-finite passes through it or through its derivative.
    A compiler gets an ``update_`` without kernels of its own.
    """
    update = with_grad_scale(optimizer.update)
    update_ = guarded(optimizer)
    if compile and not has_kernels(optimizer):
        update_ = torch.compile(update_)
    copies = not donate and (compile or optimizer.update_ is not None)

    def transit(
        grads: Tree,
        opt_state: OptState,
        params: Params,
        /,
        *,
        grad_scale: Tensor | None,
        applied: Tensor,
    ) -> tuple[Params, OptState]:
        compiling = torch.compiler.is_dynamo_compiling()
        in_place = donate or (copies and not compiling)
        if not in_place or not tree.untransformed(grads, opt_state, params):
            known = tree.at_hand(applied)
            if known is not None and not known.any():
                return cast("tuple[Params, OptState]", tree.map(torch.clone, (params, opt_state)))
            if known is None or not known.all():
                grads = held_back(grads, applied)
            moved = partial(update, grads, opt_state, params, grad_scale=grad_scale)
            selected = tree.select(applied, moved(), (params, opt_state))
            return cast("tuple[Params, OptState]", selected)
        if copies:
            params, opt_state = tree.map(torch.clone, (params, opt_state))
        if compiling or applied.device.type != "cpu":
            return update_(grads, opt_state, params, grad_scale=grad_scale, applied=applied)
        # The host knows already whether the step is taken, so nothing has to be selected.
        if not applied:
            return params, opt_state
        return update_(grads, opt_state, params, grad_scale=grad_scale, applied=None)

    def explained(grads: Tree, opt_state: OptState, params: Params, /, **how: Any) -> Any:
        try:
            return transit(grads, opt_state, params, **how)
        except Exception as error:
            if mismatch := _mismatch(optimizer, opt_state, params):
                raise ValueError(mismatch) from error
            raise

    return explained


def _mismatch(optimizer: Optimizer, opt_state: OptState, params: Params) -> str | None:
    """In what this state is not the optimizer's own, where that can be told."""
    try:
        return foreign(optimizer.init, opt_state, params)
    except Exception:
        return None  # What went wrong first is what matters.


def check_buffers(state: Tree) -> None:
    """Refuses a buffer that is given away twice: one of its owners would find the other's values."""
    if not tree.eager(state):
        return  # Nothing is written over then.
    leaves = tree.leaves_of(state)
    pointers = [leaf.data_ptr() for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]
    if len(set(pointers)) == len(pointers):
        return
    owners: dict[int, int] = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.numel():
            first = owners.setdefault(leaf.data_ptr(), position)
            if first != position:
                names = tree.paths(state, "(params, opt_state)")
                raise ValueError(
                    f"donate=True needs a buffer for each leaf, but {names[first]} and "
                    f"{names[position]} share one: clone one of them, or tie them inside loss_fn"
                )
