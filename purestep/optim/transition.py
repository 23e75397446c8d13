"""One transition of the state: the optimizer's update, or the identity."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from purestep import tree
from purestep.compiler import Compiler
from purestep.form import Flat, copied
from purestep.optim.base import (
    Optimizer,
    compiled_,
    foreign,
    on_leaves_of,
    selected,
    with_grad_scale,
)
from purestep.types import OptState, Params


class Transition(Protocol):
    """The optimizer's update where ``applied`` holds, and the identity where it does not."""

    def __call__(
        self,
        grads: list[Tensor],
        state: Flat,
        params: Flat,
        /,
        *,
        grad_scale: Tensor | None,
        applied: Tensor,
    ) -> tuple[Params, OptState]: ...


def transition(
    optimizer: Optimizer, *, donate: bool, compile: bool | Compiler = False
) -> Transition:
    """The optimizer's update where ``applied`` holds, and the identity, to the bit, where it does not.

    ``update_`` does it in place where nobody transforms: on the buffers that come in, with ``donate``, and otherwise on
    one copy of them. A compiler gets what is no kernel of ``update_``. Under a transform the old state is still
    needed, and the choice is a selection.
    """
    update = with_grad_scale(optimizer.update, optimizer.takes)
    update_ = compiled_(optimizer, compile)
    copies = not donate and (compile is not False or optimizer.update_ is not None)

    # What is compiled takes trees.
    plain = compile is False or optimizer.kernels

    def transit(
        grads: list[Tensor],
        state: Flat,
        params: Flat,
        /,
        *,
        grad_scale: Tensor | None,
        applied: Tensor,
    ) -> tuple[Params, OptState]:
        eager = tree.eager()
        recorded = params.form.requires_grad or state.form.requires_grad
        in_place = donate or (copies and eager and not recorded)
        how = {"grad_scale": grad_scale, "applied": applied}
        try:
            if not in_place:
                trees = params.tree(grads), state.tree(), params.tree()
                return selected(Optimizer, update, *trees, **how)
            if not donate:
                params, state = copied(params), copied(state)
            if eager and applied.is_cpu:
                # The host knows already whether the step is taken, so nothing has to be selected.
                if not applied:
                    return params.tree(), state.tree()
                how["applied"] = None
            at = on_leaves_of(optimizer, params.form, state.form) if plain and eager else None
            if at is not None:
                moved, after = at(grads, state, params, **how)
                return params.tree(moved), state.tree(after)
            return update_(params.tree(grads), state.tree(), params.tree(), **how)
        except Exception as error:
            if mismatch := _mismatch(optimizer, state.tree(), params.tree()):
                raise ValueError(mismatch) from error
            raise

    return transit


def _mismatch(optimizer: Optimizer, opt_state: OptState, params: Params) -> str | None:
    """In what this state is not the optimizer's own, where that can be told."""
    try:
        return foreign(optimizer.init, opt_state, params)
    except Exception:
        return None  # What went wrong first is what matters.
