"""One transition of the state: the optimizer's update, or the identity."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from purestep import tree
from purestep.compiler import Compiler
from purestep.optim.base import Optimizer, compiled_, foreign, selected, with_grad_scale
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

    def transit(
        grads: Tree,
        opt_state: OptState,
        params: Params,
        /,
        *,
        grad_scale: Tensor | None,
        applied: Tensor,
    ) -> tuple[Params, OptState]:
        eager = tree.eager()
        try:
            given = params, opt_state
            own = given if donate else tree.copied(given) if copies and eager else None
            if own is None:
                how = {"grad_scale": grad_scale, "applied": applied}
                return selected(Optimizer, update, grads, opt_state, params, **how)
            params, opt_state = own
            # The host knows already whether the step is taken, so nothing has to be selected.
            if eager and applied.is_cpu:
                if not applied:
                    return params, opt_state
                return update_(grads, opt_state, params, grad_scale=grad_scale, applied=None)
            return update_(grads, opt_state, params, grad_scale=grad_scale, applied=applied)
        except Exception as error:
            if mismatch := _mismatch(optimizer, opt_state, params):
                raise ValueError(mismatch) from error
            raise

    return transit


def _mismatch(optimizer: Optimizer, opt_state: OptState, params: Params) -> str | None:
    """In what this state is not the optimizer's own, where that can be told."""
    try:
        return foreign(optimizer.init, opt_state, params)
    except Exception:
        return None  # What went wrong first is what matters.
