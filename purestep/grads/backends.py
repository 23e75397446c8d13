"""How a group is differentiated: one way where nothing is recorded, and one where something is.

    in_place      autograd's backward pass, which adds gradients to their sums as it goes
    returning     torch.func.vjp, under transforms and wherever a step is recorded; or the user's
                  ``grad_and_value``
    compiled      one graph of forward, backward and sums

All differentiate the same part of the objective, and have one signature.
"""

from __future__ import annotations

from typing import NamedTuple

from purestep.compiling import Compiler
from purestep.grads.compiled import compiled_backward
from purestep.grads.functional import from_user_grad_and_value, functional_backward
from purestep.grads.grad_and_value import grad_and_value as plain_grad_and_value
from purestep.grads.inplace import inplace_backward, vjp_grads
from purestep.grads.microbatch import GradFn
from purestep.types import GradAndValue, LossFn


class GradBackends(NamedTuple):
    """The reverse mode of a plain step, and of one that is transformed or recorded."""

    plain: GradFn
    recorded: GradFn


def make_backends(
    loss_fn: LossFn, grad_and_value: GradAndValue, compile: bool | Compiler = False
) -> GradBackends:
    """The reverse modes of a loss, made once, so that a compiler compiles it once."""
    if grad_and_value is not plain_grad_and_value:
        mode = functional_backward(
            loss_fn, from_user_grad_and_value(grad_and_value), compile, copy=True
        )
        return GradBackends(mode, mode)
    eager = (
        inplace_backward(loss_fn)
        if compile is False
        else compiled_backward(loss_fn, compile)
    )
    return GradBackends(eager, functional_backward(loss_fn, vjp_grads))
