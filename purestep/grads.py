"""Reverse mode, summed over a group of microbatches.

    grads = Σₘ Σᵢ (wᵢ/N) ∇ℓᵢ(θ)        over tokens i of microbatches m

1/N enters as the seed of the backward pass: ``weights / N`` is the cotangent of the losses. So there
is no pass over the gradients to scale them, and nothing to forget.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from purestep import tree
from purestep.objective import Part, no_loss, partial_loss, plus
from purestep.tokens import label_weights
from purestep.tree import accumulation_dtype
from purestep.types import GradAndValue, LossFn, Microbatch, Params, Tree, WeightFn


def grad_and_value(
    func: Callable[..., Any], /, argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """``torch.func.grad_and_value``, to the bit, in half its memory.

    ``torch.func`` keeps every activation until the whole backward pass is done, ready for a second
    derivative that nobody may ask for. Here each is freed as soon as the pass has used it, as
    ``.backward()`` does; second derivatives and all other transforms work as before.

    Args:
        func: a function to a scalar tensor, or to ``(scalar, aux)`` with ``has_aux``.
        argnums: the positions to differentiate; each argument a tree of floating point tensors.
        has_aux: whether ``func`` returns a tree of tensors beside its value.

    Returns:
        A function to ``(grads, value)``, or to ``(grads, (value, aux))`` with ``has_aux``.

    >>> grads, value = grad_and_value(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([3.0])})
    >>> grads, value
    ({'w': tensor([6.])}, tensor(9.))
    """
    positions = argnums if isinstance(argnums, tuple) else (argnums,)

    @functools.wraps(func)
    def grads_and_value_of(*args: Any, **kwargs: Any) -> Any:
        for position in positions:
            if not -len(args) <= position < len(args):
                raise ValueError(
                    f"argnums={argnums} needs more than the {len(args)} arguments given"
                )
        leaves, structure = tree.flatten(tuple(args[position] for position in positions))
        aux_structure: tree.Structure = None

        def over_leaves(*leaves: Tensor) -> tuple[Tensor, list[Tensor]]:
            nonlocal aux_structure
            filled = list(args)
            for position, argument in zip(
                positions, tree.unflatten(structure, leaves), strict=True
            ):
                filled[position] = argument
            value, aux = _value_and_aux(func(*filled, **kwargs), has_aux)
            aux_leaves, aux_structure = tree.flatten(aux)
            return value, aux_leaves

        vjp: Callable[..., Any] = torch.func.vjp
        value, pull, aux_leaves = vjp(over_leaves, *leaves, has_aux=True)
        grads = tree.unflatten(structure, pull(torch.ones_like(value), retain_graph=False))
        grads = grads if isinstance(argnums, tuple) else grads[0]
        if has_aux:
            return grads, (value, tree.unflatten(aux_structure, aux_leaves))
        return grads, value

    return grads_and_value_of


def _value_and_aux(output: Any, has_aux: bool) -> tuple[Tensor, Tree]:
    if has_aux and not (isinstance(output, tuple) and len(output) == 2):
        raise ValueError(
            f"with has_aux=True the function must return (value, aux), got {type(output).__name__}"
        )
    value, aux = output if has_aux else (output, None)
    if not isinstance(value, Tensor) or value.ndim != 0:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        hint = "" if has_aux else ". Perhaps it returns aux as well: has_aux=True"
        raise ValueError(
            f"only a scalar tensor has a gradient, but the function gave {found}{hint}"
        )
    return value, aux


_own_grad_and_value = grad_and_value


def accumulate(
    loss_fn: LossFn,
    params: Params,
    microbatches: Sequence[Microbatch],
    *,
    weight_fn: WeightFn | None = label_weights,
    num_tokens: Tensor | None = None,
    num_microbatches: Tensor | None = None,
    grad_and_value: GradAndValue = grad_and_value,
    accum_dtype: torch.dtype | None = None,
    out: Sequence[Tensor] | None = None,
    ready: Callable[[int], None] | None = None,
) -> tuple[Tree, Tensor, Tree]:
    """Forward and backward over a group of microbatches: its part of ∇L and of L, without an optimizer.

        loss  = Σₘ ( Σᵢ wᵢ ℓᵢ(θ) / num_tokens  +  [m has tokens] · term(θ) / num_microbatches )
        grads = ∇ loss

    Gradients are added to the sums leaf by leaf, while the backward pass still runs: one tree of them is
    alive, not two. (Under a transform they are added when the pass is done.) No rank hears of any other
    here: ``psum`` what comes out, once.

    Args:
        loss_fn: one loss per token, or ``LossTerms``.
        params: a tree of floating point tensors.
        microbatches: a sequence of microbatches, of any shapes. An empty one gives exact zeros.
        weight_fn: one weight per token; None when ``LossTerms.weights`` brings them.
        num_tokens: the global N; None leaves loss and gradients as plain sums, for you to divide.
        num_microbatches: the global number of non-empty microbatches, for ``LossTerms.microbatch``.
        grad_and_value: anything with the signature of ``torch.func.grad_and_value``. Another one than
            ``ps.grad_and_value`` is free to do what it likes with its inputs (clip per example, say),
            and its gradients are added when they are returned. It differentiates a function of
            ``(leaves, microbatch)``, the params' leaves as a list.
        accum_dtype: the dtype of the sums; None: float32 for half precision, else the params' own.
        out: buffers to add up in, in their own dtype, one for each leaf of params, whatever they hold; not
            under a transform.
        ready: called with a leaf's position when its sum in ``out`` is final, where that is known during
            the last backward pass: communication may begin.

    Returns:
        ``(grads, loss, aux)``; ``aux`` is the sum of ``LossTerms.aux``, or ``()``.

    >>> group = [{"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([6.0])}]
    >>> grads, loss, aux = accumulate(
    ...     lambda w, m: w * m["x"],
    ...     torch.tensor(1.0),
    ...     group,
    ...     weight_fn=lambda m: torch.ones_like(m["x"]),
    ...     num_tokens=torch.tensor(3),
    ... )
    >>> grads, loss
    (tensor(3.), tensor(3.))
    """
    run = microbatch_pass(partial_loss(loss_fn, weight_fn), grad_and_value)
    totals = num_tokens, num_microbatches
    grads, loss, carried = accumulate_passes(
        run, params, microbatches, totals, accum_dtype=accum_dtype, out=out, ready=ready
    )
    return grads, loss, carried[1] if carried else ()


class MicrobatchPass(NamedTuple):
    """What is run for each microbatch: its part of the objective, and that part with its gradients."""

    part: Part
    differentiated: Callable[..., tuple[list[Tensor], Tensor, Tree]]
    in_place: bool


def microbatch_pass(
    part: Part, grad_and_value: GradAndValue, *, compile: bool = False
) -> MicrobatchPass:
    """Made once, so that a compiler compiles it once: for every number of microbatches, and all of their shapes."""

    def differentiated(
        params: Params, microbatch: Microbatch, *totals: Tensor | None
    ) -> tuple[list[Tensor], Tensor, Tree]:
        leaves, structure = tree.flatten(params)
        aux_structure: tree.Structure = None

        def over_leaves(leaves: list[Tensor], microbatch: Microbatch) -> Any:
            nonlocal aux_structure
            loss, aux = part(tree.unflatten(structure, leaves), microbatch, *totals)
            aux_leaves, aux_structure = tree.flatten(aux)
            return loss, aux_leaves

        differentiate = grad_and_value(over_leaves, has_aux=True)
        grads, (loss, aux_leaves) = differentiate(leaves, microbatch)
        return list(grads), loss, tree.unflatten(aux_structure, aux_leaves)

    own = grad_and_value is _own_grad_and_value
    if not compile:
        return MicrobatchPass(part, differentiated, own)
    from purestep.products import compiled

    # Our own reverse mode returns gradients only under transforms, which compile what they like themselves.
    return MicrobatchPass(compiled(part), differentiated if own else compiled(differentiated), own)


Totals: TypeAlias = tuple[Tensor | None, Tensor | None]
"""The global ``num_tokens`` and ``num_microbatches``, where they are known."""


def accumulate_passes(
    run: MicrobatchPass,
    params: Params,
    microbatches: Sequence[Microbatch],
    totals: Totals = (None, None),
    *,
    accum_dtype: torch.dtype | None = None,
    out: Sequence[Tensor] | None = None,
    ready: Callable[[int], None] | None = None,
) -> tuple[Tree, Tensor, Tree]:
    """``accumulate``, of a pass that is made already; beside the aux it carries the count."""
    leaves, structure = tree.flatten(params)
    dtypes = sum_dtypes(leaves, accum_dtype) if out is None else [buffer.dtype for buffer in out]

    accumulated = None
    if run.in_place and tree.eager(params, totals) and not _inference(leaves):
        accumulated = _accumulate_in_place(
            run.part, params, dtypes, microbatches, totals, out, ready
        )
    if accumulated is None:
        accumulated = _accumulate_returned(run, params, dtypes, microbatches, totals)
    sums, total = accumulated
    loss, carried = total or (no_loss(params), ())
    for index, (leaf, dtype) in enumerate(zip(leaves, dtypes, strict=True)):
        if out is None:
            sums[index] = (
                torch.zeros_like(leaf, dtype=dtype) if sums[index] is None else sums[index]
            )
        elif sums[index] is not out[index]:
            if sums[index] is not None and sums[index].requires_grad:
                raise ValueError(
                    "the gradients depend on a tensor beside params that requires grad, and buffers given as "
                    "out= (gradient buckets of ranks, say) cannot record it: detach it, or compute it under "
                    "torch.no_grad()"
                )
            out[index].zero_() if sums[index] is None else out[index].copy_(sums[index])
            sums[index] = out[index]
    return tree.unflatten(structure, sums), loss, carried


Accumulated: TypeAlias = tuple[list[Any], tuple[Tensor, Tree] | None]
"""The sum of each leaf's gradients, or None where there is none; and the sum of losses and of what they carry."""


def _accumulate_in_place(
    part: Part,
    params: Params,
    dtypes: list[torch.dtype],
    microbatches: Sequence[Microbatch],
    totals: Totals,
    out: Sequence[Tensor] | None,
    ready: Callable[[int], None] | None,
) -> Accumulated | None:
    """Where nobody transforms: autograd's own accumulation, into the ``.grad`` of leaves of our own.

    None where the loss depends on something else that requires grad: somebody is going to differentiate
    what we compute, and autograd must record it.
    """
    own_params = tree.map(lambda leaf: leaf.detach().requires_grad_(), params)
    own = tree.leaves_of(own_params)
    known = {id(leaf) for leaf in own}
    accumulators: set[Any] = set()
    sums: list[Tensor | None] = [None] * len(own)
    remaining = len(microbatches)
    notify: Callable[[int], None] | None = None
    announced: set[int] = set()

    def first(index: int, grad: Tensor) -> Tensor:
        grad = grad.to_dense() if grad.is_sparse else grad
        return _unshared(grad.to(dtypes[index])) if out is None else out[index].copy_(grad)

    def take(index: int, leaf: Tensor) -> None:
        grad, so_far = leaf.grad, sums[index]
        if grad is None:
            return
        if so_far is None:
            so_far = first(index, grad)
        elif so_far is not grad:
            so_far.add_(grad)
        sums[index] = so_far
        # Where autograd can add to the sum itself, it does.
        leaf.grad = so_far if index in alike else None
        if notify is not None:
            if index in announced:
                raise RuntimeError(
                    f"{tree.paths(params, 'params')[index]} was given a gradient twice in one backward pass, and the "
                    "first was on its way to the other ranks already: a checkpoint that runs a backward pass "
                    "of its own does that; call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
            announced.add(index)
            notify(index)

    def hook(index: int) -> Any:
        return own[index].register_post_accumulate_grad_hook(functools.partial(take, index))

    # Autograd adds to what has the leaf's dtype and order in memory.
    alike = [
        index
        for index, leaf in enumerate(own)
        if leaf.dtype == dtypes[index] and (out is None or out[index].stride() == leaf.stride())
    ]
    for index in set(range(len(own))) - set(alike):
        hook(index)

    total: tuple[Tensor, Tree] | None = None
    for microbatch in microbatches:
        notify = ready if remaining == 1 else None
        announced.clear()
        # A leaf whose sum lies where it belongs needs no hook of ours until somebody waits for it.
        begins = out is not None and remaining == len(microbatches)
        hooks = [hook(index) for index in alike] if begins or notify else []
        with torch.enable_grad():
            loss, aux = part(own_params, microbatch, *totals)
        if loss.requires_grad:
            if _requires_others(loss, known, accumulators):
                return None
            loss.backward()
        total = plus(total, tree.map(Tensor.detach, (loss, aux)))
        del loss, aux
        for handle in hooks:
            handle.remove()
        for index in alike:
            if sums[index] is None and own[index].grad is not None:
                sums[index] = own[index].grad = first(index, own[index].grad)
        remaining -= 1
    return sums, total


def _inference(leaves: Sequence[Tensor]) -> bool:
    """Whether autograd would record nothing, where ``torch.func`` does."""
    return torch.is_inference_mode_enabled() or any(leaf.is_inference() for leaf in leaves)


def _unshared(grad: Tensor) -> Tensor:
    """The gradient in memory that is nobody else's, so that it can be added to.

    Autograd adds to the first gradient that a leaf was given, which may be a view of what other leaves
    were given too: of the gradient of ``torch.stack(leaves).sum(0)``, say.
    """
    if is_traceable_wrapper_subclass(grad):
        return grad.clone()  # Who shares the memory of the tensors inside of it cannot be seen.
    owners: int = torch._C._storage_Use_Count(grad.untyped_storage()._cdata)
    return grad.clone() if owners > 2 else grad  # its own, and the one that we ask


def _requires_others(loss: Tensor, known: set[int], accumulators: set[Any]) -> bool:
    """Whether the loss depends on a tensor that requires grad and is none of the known ones.

    ``accumulators`` are the ends of the graph that were found to be theirs, for the next microbatch too.
    """
    seen = set(accumulators)
    stack: list[Any] = [((loss.grad_fn, 0),)]
    while stack:
        for node, _ in stack.pop():
            if node is None or node in seen:
                continue
            seen.add(node)
            behind = node.next_functions
            if behind:
                stack.append(behind)
            elif id(getattr(node, "variable", None)) in known:
                accumulators.add(node)
            else:
                return True
    return False


def _accumulate_returned(
    run: MicrobatchPass,
    params: Params,
    dtypes: list[torch.dtype],
    microbatches: Sequence[Microbatch],
    totals: Totals,
) -> Accumulated:
    """Under a transform, or with a reverse mode of the user's: gradients added when they are returned."""
    sums: list[Tensor | None] = [None] * len(dtypes)
    total: tuple[Tensor, Tree] | None = None
    for microbatch in microbatches:
        grads, loss, aux = run.differentiated(params, microbatch, *totals)
        while grads:
            grad, index = grads.pop(), len(grads)
            so_far = sums[index]
            # What somebody else's reverse mode returns may be a buffer of theirs, and sums are written to.
            grad = grad.to(dtypes[index], copy=so_far is None and not run.in_place)
            sums[index] = grad if so_far is None else so_far + grad
            del so_far, grad
        total = plus(total, (loss, aux))
    return sums, total


def sum_dtypes(leaves: Sequence[Tensor], accum_dtype: torch.dtype | None) -> list[torch.dtype]:
    """The dtype in which each leaf's gradients are summed."""
    return [accum_dtype or accumulation_dtype(leaf.dtype) for leaf in leaves]
