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
from purestep.grads.compiled import compiled
from purestep.grads.functional import by_users, returning
from purestep.grads.grad_and_value import grad_and_value as plain_grad_and_value
from purestep.grads.inplace import by_vjp, in_place
from purestep.grads.microbatch import Reverse
from purestep.types import GradAndValue, LossFn


class ReverseModes(NamedTuple):
    """The reverse mode of a plain step, and of one that is transformed or recorded."""

    plain: Reverse
    recorded: Reverse


def reverse_modes(
    loss_fn: LossFn, grad_and_value: GradAndValue, compile: bool | Compiler = False
) -> ReverseModes:
    """The reverse modes of a loss, made once, so that a compiler compiles it once."""
    if grad_and_value is not plain_grad_and_value:
        mode = returning(loss_fn, by_users(grad_and_value), compile, copy=True)
        return ReverseModes(mode, mode)
    eager = in_place(loss_fn) if compile is False else compiled(loss_fn, compile)
    return ReverseModes(eager, returning(loss_fn, by_vjp))
