"""Gradients of one microbatch by autograd's own pass, which adds them to their sums as it runs.

leaf.grad = total;  backward(losses, weights / N, leaves);  total = leaf.grad
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from purestep import hints, tree, validation
from purestep.grads.microbatch import (
    GradAccumulator,
    GradFn,
    MicrobatchInputs,
    MicrobatchResult,
)
from purestep.objective import forward_microbatch, weighted_sum
from purestep.torch_private import check_inference_mode, run_backward
from purestep.tree.opaque import tensors_in
from purestep.types import GradHook, LossFn, Tree


def inplace_backward(
    loss_fn: LossFn, own_leaves: Callable[[], list[Tensor]] | None = None
) -> GradFn:
    """Makes a backend by which autograd's own pass adds gradients to the sums in place.

    The loss gets detached aliases of the params, made for one microbatch alone. So hooks that it
    registers on them, and gradients of backward passes that it runs, are gone afterwards. Instead
    of aliases, it gets the leaves that ``own_leaves`` returns, if that is not None. These share the
    memory of the params, and are asked for at each microbatch. Each call clears autocast's cache.
    """

    def grad_fn(
        inputs: MicrobatchInputs,
        accumulator: GradAccumulator,
        on_grad_ready: GradHook | None,
    ) -> MicrobatchResult:
        if own_leaves is not None:
            leaves = own_leaves()
        else:
            # By map: with 2,000 leaves, comprehensions of methods take half as long again.
            leaves = [*map(Tensor.requires_grad_, map(Tensor.detach, inputs.leaves))]
            for leaf in leaves:  # A module takes such leaves without an alias of each.
                setattr(leaf, validation.LEAF_OF_STEP, True)
        params = tree.unflatten(inputs.spec, leaves)
        notes: AbstractContextManager[None] = nullcontext()
        backward_notes: AbstractContextManager[None] = nullcontext()
        if inputs.needs_checks:
            first = "params" if own_leaves is None else "model"
            notes = hints.annotate_loss_errors(first, params, inputs.microbatch)
            backward_notes = hints.annotate_backward_errors()
        with torch.enable_grad(), notes:
            terms, cotangents, weights, aux = forward_microbatch(
                loss_fn,
                params,
                inputs.microbatch,
                inputs.weights,
                inputs.denominators,
            )
        loss = weighted_sum(terms, cotangents, constant=True)
        with backward_notes:
            depends_on_params = run_backward_into(
                terms,
                cotangents,
                leaves,
                accumulator,
                on_grad_ready,
                data=inputs.data,
                needs_checks=inputs.needs_checks,
                are_module_parameters=own_leaves is not None,
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
    data: Sequence[Any] = (),
    needs_checks: bool = False,
    are_module_parameters: bool = False,
) -> bool:
    """Adds the gradients of Σ term · cotangent to the accumulator; clears ``.grad`` of the leaves.

    It removes terms that require no grad, and their cotangents, from the lists. If no term is left,
    it returns False at once; else whether any leaf has a sum, even from an earlier microbatch. The
    graph is freed. A leaf that requires no grad, or has another dtype than its sum, gets
    ``requires_grad``, and the dtype of the sum as ``grad_dtype``. So does a module's parameter
    with another ``grad_dtype`` than its sum.

    No sum shares memory with cotangents, leaves, another sum or ``data``, the leaves of the
    microbatch. Of ``data``, tensors in mappings, lists, tuples and dataclasses are compared.
    ``on_grad_ready`` takes each sum that the pass reaches, and returns the tensor to keep. Another
    tensor that it returns is kept as it is, even if it shares memory.

    With ``needs_checks``, it warns of module parameters that the loss reads beside ``leaves``, if
    ``leaves`` are copies of them. It also warns of a softmax before a cross entropy. It then raises
    ``ValueError`` for a reentrant checkpoint. It also does so for a checkpoint that recomputes with
    module parameters beside ``leaves``, unless ``are_module_parameters``: then the leaves are the
    module's.
    """
    for index in reversed(range(len(terms))):
        if not terms[index].requires_grad:
            del terms[index]
            del cotangents[index]
    if not terms:
        return False
    totals_before = [*accumulator.values]
    all_begun = True
    for leaf, total, dtype in zip(
        leaves, totals_before, accumulator.dtypes, strict=True
    ):
        has_own_dtype = are_module_parameters and leaf.grad_dtype != dtype
        if not leaf.requires_grad or leaf.dtype != dtype or has_own_dtype:
            leaf.requires_grad = True  # The loss may have frozen it,
            leaf.grad = None  # or run a backward pass.
            leaf.grad_dtype = dtype
        leaf.grad = total  # Autograd adds to it.
        if total is None:
            all_begun = False
    hooks: AbstractContextManager[None] = nullcontext()
    if on_grad_ready is not None:
        hooks = _grad_hooks(on_grad_ready, leaves, totals_before)
    if needs_checks:
        nodes = validation.reachable_nodes(terms)
        validation.warn_of_constants(validation.leaves_of_nodes(nodes), leaves)
        validation.warn_of_probabilities(nodes)
    watch: AbstractContextManager[object] = nullcontext()
    # A module computes again with its parameters, which are right where they are the leaves.
    if needs_checks and not are_module_parameters:
        watch = validation.forbid_module_recompute(leaves)
    with watch, hooks:
        run_backward(
            tuple(terms),
            tuple(cotangents),
            keep_graph=False,
            create_graph=False,
            inputs=tuple(leaves),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    others = [] if all_begun and on_grad_ready is None else [*cotangents, *leaves]
    return _take_totals(leaves, accumulator, others, data, totals_before)


def _take_totals(
    leaves: Sequence[Tensor],
    accumulator: GradAccumulator,
    others: Sequence[Tensor],
    data: Sequence[Any],
    totals_before: Sequence[Tensor | None],
) -> bool:
    """Moves each leaf's ``.grad`` into the accumulator; returns whether there is any.

    New sums, without one in ``totals_before``, are cloned if they share memory with tensors or
    parameters of ``others`` or ``data``, or with each other. Without ``others`` none are: autograd
    has added to sums that share no memory.
    """
    has_grad = False
    for index, leaf in enumerate(leaves):
        accumulator.values[index] = leaf.grad
        has_grad = has_grad or leaf.grad is not None
        leaf.grad = None  # A loss that keeps its leaves does not keep the sums.
    if others:
        clone_aliased(accumulator.values, [*others, *data], totals_before)
    return has_grad


@contextmanager
def _grad_hooks(
    on_grad_ready: GradHook, leaves: list[Tensor], totals_before: list[Tensor | None]
) -> Iterator[None]:
    """Calls ``on_grad_ready`` with the final sum of each leaf that a backward pass here reaches.

    What it returns becomes the leaf's ``.grad``. The hooks are removed at the end of the context.
    """
    handles = []
    for index, leaf in enumerate(leaves):
        hook = functools.partial(_call_grad_hook, on_grad_ready, totals_before, index)
        handles.append(leaf.register_post_accumulate_grad_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _call_grad_hook(
    on_grad_ready: GradHook,
    totals_before: list[Tensor | None],
    index: int,
    leaf: Tensor,
) -> None:
    """Replaces a leaf's ``.grad`` by what ``on_grad_ready`` returns for it.

    Without a ``.grad``, it does nothing and does not call the hook. If the hook returns another
    tensor than the sum, that is also written to ``totals_before``, so that nothing clones it.
    """
    total = leaf.grad
    if total is None:  # A torch.autograd.Function may return none for it.
        return
    leaf.grad = on_grad_ready(index, total)
    if leaf.grad is not total:
        totals_before[index] = leaf.grad


def clone_aliased(
    grads: list[Any],
    others: Sequence[Any] = (),
    totals_before: Sequence[Tensor | None] = (),
) -> None:
    """Replaces new gradients that share memory by clones in the list, so that they can be added to.

    They may share it with an earlier gradient, or with a tensor of ``others``: one of the list, or
    one in a mapping, list, tuple or dataclass there. Both gradients of
    ``torch.stack([a, b]).sum(0)``, say, lie in one storage, with the cotangent. And a
    ``torch.autograd.Function`` may return a param or data that it has saved. An expanded gradient
    shares memory with itself. One whose address is unknown, as of a subclass, is cloned, too. Where
    there was a sum before, the gradient is added to it, so it is not new. A new sparse gradient
    becomes dense. ``grads`` may have None, which stays.
    """
    addresses: list[int | None] = []
    used: set[int | None] = {None}
    for tensor in [*others, *grads]:
        address = None  # also of a subclass, which may hold its values elsewhere
        if type(tensor) in (Tensor, Parameter):
            try:  # noqa: SIM105  ``suppress`` takes as long again, for each param
                address = tensor.untyped_storage().data_ptr()
            except (RuntimeError, NotImplementedError):
                pass  # A device that computes later has none.
        else:
            used.update(_addresses_in(tensor))
        addresses.append(address)
    num_others = len(addresses) - len(grads)
    used.update(addresses[:num_others])
    for index, grad in enumerate(grads):
        if grad is None or (totals_before and totals_before[index] is not None):
            continue
        address = addresses[num_others + index]
        if grad.is_sparse:
            grads[index] = grad.to_dense()
        elif address in used or 0 in grad.stride():
            grads[index] = grad.clone()
        used.add(address)


def _addresses_in(leaf: Any) -> Iterator[int]:
    """Yields the addresses of storages in a leaf, such as a dataclass, or a subclass's own."""
    for tensor in tensors_in(leaf):
        # A subclass may refuse the call by any error.
        with suppress(Exception):
            yield tensor.untyped_storage().data_ptr()


def zeros_for_missing(
    accumulator: GradAccumulator, leaves: Sequence[Tensor], *, clone: bool = False
) -> list[Tensor]:
    """Fills the accumulator with zeros for leaves that no gradient has reached; returns its list.

    ``clone`` replaces the sums by clones in plain eager mode: a step that was to be recorded may
    not be, after all. Then an optimizer writes to the sums, which a ``torch.autograd.Function`` may
    share.
    """
    values = accumulator.values
    if clone and tree.is_plain_eager(values):
        values[:] = [None if total is None else total.clone() for total in values]
    for index, total in enumerate(values):
        if total is None:
            dtype = accumulator.dtypes[index]
            values[index] = torch.zeros_like(leaves[index], dtype=dtype)
    return cast("list[Tensor]", values)


def vjp_grads(
    function: Callable[..., tuple[Tensor, list[Tensor]]],
    leaves: Sequence[Tensor],
    data: Tree = (),
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Differentiates ``function(*leaves) -> (value, aux)`` by ``torch.func.vjp``.

    Returns gradients, value and aux. It does not need ``data``. Raises ``ValueError`` in inference
    mode on torch 2.11, unless a compiler traces.

    >>> vjp_grads(lambda w: (w**2, [2 * w]), [torch.tensor(3.0)])
    ([tensor(6.)], tensor(9.), [tensor(6.)])
    """
    check_inference_mode()
    vjp: Callable[..., Any] = torch.func.vjp
    value, pull_back, aux = vjp(function, *leaves, has_aux=True)
    grads = pull_back(torch.ones_like(value), retain_graph=False)
    return [*grads], value, aux


def is_inference(leaves: Sequence[Tensor]) -> bool:
    """Returns whether inference mode is on, or a leaf was made in it: autograd records nothing."""
    if torch.is_inference_mode_enabled():
        return True
    return any(leaf.is_inference() for leaf in leaves)
