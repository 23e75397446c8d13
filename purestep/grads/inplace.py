"""Gradients of one microbatch by autograd's own pass, which adds them to their sums as it runs.

leaf.grad = total;  backward(losses, weights / N, leaves);  total = leaf.grad
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
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


def inplace_backward(loss_fn: LossFn) -> GradFn:
    """Differentiates the loss by autograd's own pass, on leaves made for this microbatch alone.

    Hooks that a loss registers on its leaves, and backward passes that it runs, end with them.
    """

    def grad_fn(
        inputs: MicrobatchInputs,
        accumulator: GradAccumulator,
        on_grad_ready: GradHook | None,
    ) -> MicrobatchResult:
        # By map: with 2,000 leaves, comprehensions of method calls take half as long again.
        leaves = [*map(Tensor.requires_grad_, map(Tensor.detach, inputs.leaves))]
        params = tree.unflatten(inputs.spec, leaves)
        notes = hints.annotate_loss_errors() if inputs.needs_checks else nullcontext()
        with torch.enable_grad(), notes:
            terms, cotangents, weights, aux = forward_microbatch(
                loss_fn,
                params,
                inputs.microbatch,
                inputs.weights,
                inputs.denominators,
            )
        loss = weighted_sum(terms, cotangents, constant=True)
        depends_on_params = run_backward_into(
            terms,
            cotangents,
            leaves,
            accumulator,
            on_grad_ready,
            data=inputs.microbatch,
            needs_checks=inputs.needs_checks,
        )
        # The casts of these leaves are of no use to another microbatch.
        torch.clear_autocast_cache()
        if not tree.is_empty(aux):
            aux = tree.detach(aux)
        return MicrobatchResult(loss, weights, aux, depends_on_params)

    return grad_fn


def run_backward_into(
    terms: list[Tensor],
    cotangents: list[Tensor],
    leaves: list[Tensor],
    accumulator: GradAccumulator,
    on_grad_ready: GradHook | None = None,
    *,
    data: Tree = (),
    needs_checks: bool = False,
) -> bool:
    """Adds the gradients of Σ term · cotangent to the accumulator.

    Returns whether any leaf has a gradient. No sum shares memory with ``data``.
    """
    for index in reversed(range(len(terms))):
        if not terms[index].requires_grad:
            del terms[index]
            del cotangents[index]
    if not terms:
        return False
    totals_before = [*accumulator.values]
    all_begun = _attach_totals(leaves, accumulator)
    if on_grad_ready is not None:
        for index, leaf in enumerate(leaves):
            hook = functools.partial(
                _call_grad_hook, on_grad_ready, totals_before, index
            )
            leaf.register_post_accumulate_grad_hook(hook)
    if needs_checks:
        reachable = validation.reachable_leaves(terms)
        validation.warn_of_constants(reachable, leaves)
    watch = (
        validation.forbid_module_recompute(leaves) if needs_checks else nullcontext()
    )
    with watch:
        run_backward(
            tuple(terms),
            tuple(cotangents),
            keep_graph=False,
            create_graph=False,
            inputs=tuple(leaves),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    has_grad = False
    for index, leaf in enumerate(leaves):
        accumulator.values[index] = leaf.grad
        has_grad = has_grad or leaf.grad is not None
        leaf.grad = None  # A loss that keeps its leaves does not keep the sums.
    if on_grad_ready is not None or not all_begun:
        # Otherwise autograd has added to sums of ours, which share no memory.
        others = [*cotangents, *leaves, *tree.flatten(data)[0]]
        clone_aliased(accumulator.values, others, totals_before)
    return has_grad


def _attach_totals(leaves: Sequence[Tensor], accumulator: GradAccumulator) -> bool:
    """Makes ``.grad`` of each leaf its sum so far; returns whether there is one for every leaf."""
    all_begun = True
    for index, leaf in enumerate(leaves):
        total = accumulator.values[index]
        dtype = accumulator.dtypes[index]
        if not leaf.requires_grad or leaf.dtype != dtype:
            leaf.requires_grad = True  # The loss may have frozen it,
            leaf.grad = None  # or run a backward pass.
            leaf.grad_dtype = dtype
        leaf.grad = total
        if total is None:
            all_begun = False
    return all_begun


def _call_grad_hook(
    on_grad_ready: GradHook,
    totals_before: list[Tensor | None],
    index: int,
    leaf: Tensor,
) -> None:
    """Hands over the final sum of a leaf, and notes a sum that lies elsewhere from then on."""
    total = leaf.grad
    if total is None:  # A torch.autograd.Function may return none for it.
        return
    leaf.grad = on_grad_ready(index, total)
    if leaf.grad is not total:
        totals_before[index] = leaf.grad


def clone_aliased(
    grads: list[Any],
    others: Iterable[Any] = (),
    totals_before: Sequence[Tensor | None] = (),
) -> None:
    """Clones each new gradient that shares memory, so that it can be added to.

    Both gradients of ``torch.stack([a, b]).sum(0)``, say, lie in one storage, with the cotangent.
    And a ``torch.autograd.Function`` may return a param or data that it has saved: ``others``.
    Where there was a sum before, the gradient is added to it, so it is not new.
    """
    used = {None, *_storage_addresses(others)}
    addresses = _storage_addresses(grads)
    for index, (grad, address) in enumerate(zip(grads, addresses, strict=True)):
        if grad is None or (totals_before and totals_before[index] is not None):
            continue
        if grad.is_sparse:
            grads[index] = grad.to_dense()
        elif address in used or 0 in grad.stride():
            grads[index] = grad.clone()
        used.add(address)


def _storage_addresses(tensors: Iterable[Any]) -> list[int | None]:
    """Returns where each tensor's storage begins.

    None for a subclass, which may hold its values elsewhere, and on a device that computes later.
    """
    addresses: list[int | None] = []
    for tensor in tensors:
        address = None
        if type(tensor) is Tensor:
            try:
                address = tensor.untyped_storage().data_ptr()
            except (RuntimeError, NotImplementedError):
                address = None
        addresses.append(address)
    return addresses


def zeros_for_missing(
    accumulator: GradAccumulator, leaves: Sequence[Tensor]
) -> list[Tensor]:
    """Returns the sums, with zeros for leaves that no gradient has reached."""
    values = accumulator.values
    for index, (total, dtype) in enumerate(
        zip(values, accumulator.dtypes, strict=True)
    ):
        if total is None:
            values[index] = torch.zeros_like(leaves[index], dtype=dtype)
    return cast("list[Tensor]", values)


def vjp_grads(
    function: Callable[..., tuple[Tensor, list[Tensor]]], leaves: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Differentiates ``function(*leaves) -> (value, aux)`` by ``torch.func.vjp``.

    Returns gradients, value and aux.

    >>> vjp_grads(lambda w: (w**2, [2 * w]), [torch.tensor(3.0)])
    ([tensor(6.)], tensor(9.), [tensor(6.)])
    """
    check_inference_mode()
    vjp: Callable[..., Any] = torch.func.vjp
    value, pull_back, aux = vjp(function, *leaves, has_aux=True)
    grads = pull_back(torch.ones_like(value), retain_graph=False)
    return [*grads], value, aux


def is_inference(leaves: Sequence[Tensor]) -> bool:
    """Returns whether autograd would record nothing, where ``torch.func`` does."""
    if torch.is_inference_mode_enabled():
        return True
    return any(leaf.is_inference() for leaf in leaves)
