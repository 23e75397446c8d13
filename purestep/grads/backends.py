"""The gradient backends of a loss: one for a plain step, one where anything is recorded.

    inplace_backward      autograd's own pass, which adds gradients to their sums as it runs
    functional_backward   torch.func.vjp, under transforms and wherever a step is recorded;
                          autograd, where a compiler traces; or the user's ``grad_and_value``
    compiled_backward     one graph of forward pass, backward pass and sums

All differentiate the same part of the loss, and have the same signature.
"""

from __future__ import annotations

from typing import NamedTuple

from purestep import validation
from purestep.compiling import Compiler
from purestep.grads.compiled import compiled_backward
from purestep.grads.functional import (
    from_user_grad_and_value,
    functional_backward,
    in_graphs,
)
from purestep.grads.grad_and_value import grad_and_value as default_grad_and_value
from purestep.grads.inplace import inplace_backward, vjp_grads
from purestep.grads.microbatch import GradFn
from purestep.types import GradAndValue, LossFn


class GradBackends(NamedTuple):
    """Holds the gradient backends of a loss, for each way in which a step may run.

    ``plain`` serves in plain eager mode, and is compiled if the step has ``compile``. ``recorded``
    serves where a transform, autograd or a compiler around the step follows the values. ``scanned``
    serves in the body of a loop in a compiler's trace.
    """

    plain: GradFn
    recorded: GradFn
    scanned: GradFn
    """In the body of a compiled loop, whose sizes do not vary, and where autograd gives zeros."""


def make_backends(
    loss_fn: LossFn, grad_and_value: GradAndValue, compile_: bool | Compiler = False
) -> GradBackends:
    """Makes the backends of a loss; call it once for all updates, so that a loss compiles once.

    ``compile_`` compiles the plain backend. If ``grad_and_value`` is not the default, all backends
    call it, and the recorded one is the plain one, compiled or not. Raises ``TypeError`` if
    ``grad_and_value`` is not callable, or if ``compile_`` is neither a bool nor a function.
    """
    validation.check_callable("grad_and_value", grad_and_value)
    if grad_and_value is not default_grad_and_value:
        grads_of = from_user_grad_and_value(grad_and_value)
        users = functional_backward(loss_fn, in_graphs(grads_of), compile_, copy=True)
        scanned = functional_backward(loss_fn, grads_of)
        return GradBackends(users, users, scanned)
    plain = inplace_backward(loss_fn)
    if compile_ is not False:
        plain = compiled_backward(loss_fn, compile_)
    recorded = functional_backward(loss_fn, in_graphs(vjp_grads, is_autograd=True))
    return GradBackends(plain, recorded, functional_backward(loss_fn, vjp_grads))
