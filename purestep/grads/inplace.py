"""Forward and backward of one microbatch, by autograd's own pass.

    leaf.grad = Σ so far;  backward(losses, weights / N, leaves);  Σ = leaf.grad

Autograd adds each gradient to its sum while the pass runs. ``modes`` has the reverse modes for
transforms, compilers and functions of the user's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any, cast

import torch
from torch import Tensor

from purestep import hints, tree, validation
from purestep.grads.microbatch import (
    GradAccumulator,
    GradFn,
    MicrobatchInputs,
    MicrobatchResult,
)
from purestep.objective import forward_microbatch, weighted_sum
from purestep.torch_private import check_inference_mode, run_backward
from purestep.types import GradHook, LossFn, Tree

_GRAD, _DTYPE, _REQUIRES_GRAD = map(attrgetter, ["grad", "dtype", "requires_grad"])


_NOTHING: AbstractContextManager[None] = nullcontext()


def inplace_backward(loss_fn: LossFn) -> GradFn:
    """Autograd's own backward pass, on leaves made for this microbatch alone.

    What a loss does to its leaves, by hooks or backward passes, ends with them.
    """

    def reverse(
        inputs: MicrobatchInputs, sums: GradAccumulator, ready: GradHook | None
    ) -> MicrobatchResult:
        own = [*map(Tensor.requires_grad_, map(Tensor.detach, inputs.leaves))]
        params = tree.unflatten(inputs.structure, own)
        noted = hints.annotate_loss_errors() if inputs.check else _NOTHING
        with torch.enable_grad(), noted:
            terms, cotangents, weights, aux = forward_microbatch(
                loss_fn, params, inputs.microbatch, inputs.weights, inputs.divisors
            )
        loss = weighted_sum(terms, cotangents, constant=True)
        data = inputs.microbatch
        reached = run_backward_into(
            terms, cotangents, own, sums, ready, data=data, check=inputs.check
        )
        torch.clear_autocast_cache()  # Its casts of these leaves are of no use any more.
        return MicrobatchResult(
            loss, weights, tree.detach(aux) if not tree.is_empty(aux) else (), reached
        )

    return reverse


def run_backward_into(
    terms: list[Tensor],
    cotangents: list[Tensor],
    own: list[Tensor],
    sums: GradAccumulator,
    ready: GradHook | None = None,
    *,
    data: Tree = (),
    check: bool = False,
) -> bool:
    """Adds the gradients of Σ term · cotangent to the sums; whether any leaf received one.

    ``.grad`` of each leaf is its sum, to which autograd adds while the pass runs. No sum shares
    memory with the ``data``.
    """
    for index in reversed(range(len(terms))):
        if not terms[index].requires_grad:
            del terms[index], cotangents[index]
    if not terms:
        return False
    before = [*sums.values]
    begun = all(map(is_not, before, repeat(None)))
    if not all(map(_REQUIRES_GRAD, own)) or [*map(_DTYPE, own)] != sums.dtypes:
        for leaf, dtype in zip(own, sums.dtypes, strict=True):
            # The loss may have frozen it, or run a backward pass.
            leaf.requires_grad, leaf.grad, leaf.grad_dtype = True, None, dtype
    for leaf, so_far in zip(own, before, strict=True):
        leaf.grad = so_far
    if ready is not None:
        for index, leaf in enumerate(own):
            hand_over = functools.partial(_call_grad_hook, ready, before, index)
            leaf.register_post_accumulate_grad_hook(hand_over)
    given: Any = tuple(terms), tuple(cotangents), False, False, tuple(own)
    if check:
        validation.warn_of_constants(validation.reachable_leaves(terms), own)
        with validation.forbid_module_recompute(own):
            run_backward(*given, allow_unreachable=True, accumulate_grad=True)
    else:
        run_backward(*given, allow_unreachable=True, accumulate_grad=True)
    if ready is not None or not begun:  # Else autograd has added to the same tensors.
        sums.values[:] = map(_GRAD, own)
        clone_aliased(sums.values, [*cotangents, *own, *tree.flatten(data)[0]], before)
    for leaf in own:
        leaf.grad = None  # A loss that keeps its leaves does not keep the sums.
    return any(map(is_not, sums.values, repeat(None)))


def _call_grad_hook(
    ready: GradHook, before: list[Tensor | None], index: int, leaf: Tensor
) -> None:
    total = leaf.grad
    if total is not None:  # A Function may have none for it.
        leaf.grad = ready(index, total)
        before[index] = leaf.grad if leaf.grad is not total else before[index]


def clone_aliased(
    values: list[Any], others: Iterable[Any] = (), before: Sequence[Tensor | None] = ()
) -> None:
    """Clones each new gradient that shares memory, so that it can be added to.

    Both gradients of ``torch.stack([a, b]).sum(0)``, say, lie in one storage, with the cotangent;
    and a Function may return what it has saved, such as a param or data. ``others`` are these.
    Where a sum was there ``before``, the gradient is in it.
    """
    taken = {None, *_storage_addresses(others)}
    for index, (grad, address) in enumerate(
        zip(values, _storage_addresses(values), strict=True)
    ):
        if grad is None or (before and before[index] is not None):
            continue
        if grad.is_sparse:
            values[index] = grad.to_dense()
        elif address in taken or 0 in grad.stride():
            values[index] = grad.clone()
        taken.add(address)


def _storage_addresses(tensors: Iterable[Any]) -> list[int | None]:
    """Where each tensor's storage begins; None of a subclass, which may hold its values elsewhere.

    None as well on a device that computes later.
    """
    found: list[int | None] = []
    for tensor in tensors:
        try:
            found.append(
                tensor.untyped_storage().data_ptr() if type(tensor) is Tensor else None
            )
        except (RuntimeError, NotImplementedError):
            found.append(None)
    return found


def zeros_for_missing(sums: GradAccumulator, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The sums, with zeros for leaves that no gradient has reached."""
    values, dtypes = sums
    for index, so_far in enumerate(values):
        if so_far is None:
            values[index] = torch.zeros_like(leaves[index], dtype=dtypes[index])
    return cast("list[Tensor]", values)


def vjp_grads(
    function: Callable[..., tuple[Tensor, list[Tensor]]], leaves: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """The gradients of ``function(*leaves) -> (value, aux)``, its value, and aux.

    >>> vjp_grads(lambda w: (w**2, [2 * w]), [torch.tensor(3.0)])
    ([tensor(6.)], tensor(9.), [tensor(6.)])
    """
    check_inference_mode()
    vjp: Callable[..., Any] = torch.func.vjp
    value, pull, aux = vjp(function, *leaves, has_aux=True)
    return [*pull(torch.ones_like(value), retain_graph=False)], value, aux


def is_inference(leaves: Sequence[Tensor]) -> bool:
    """Whether autograd would record nothing, where ``torch.func`` does."""
    return torch.is_inference_mode_enabled() or any(map(Tensor.is_inference, leaves))
