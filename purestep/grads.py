"""Reverse mode, summed over a group of microbatches.

    grads = Σₘ Σᵢ (wᵢ/N) ∇ℓᵢ(θ)        over tokens i of microbatches m

1/N enters as the seed of the backward pass: ``weights / N`` is the cotangent of the losses. So there
is no pass over the gradients to scale them, and nothing to forget.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.backward import GradientSums, OwnLeaves, backward
from purestep.compiler import Compiler, compiled
from purestep.objective import (
    GroupTotal,
    Part,
    add_part,
    check_untouched,
    of_group,
    partial_loss,
    versions_of,
)
from purestep.tokens import Weighed, checked_weights, has_tokens, label_weights, weighed
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
    alive, not two. (Under a transform they are added when the pass is done.) What a loss may do, and what
    is recorded, is told by ``make_update_step``. No rank hears of any other here: ``psum`` what comes out, once.

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
            ``(leaves, microbatch)``, the params' leaves as a list; where it hands over pieces of the
            microbatch, ``weight_fn`` is asked for the weights of each piece.
        accum_dtype: the dtype of the sums; None: float32 for half precision, else the params' own.
        out: buffers to add up in, in their own dtype and memory order, one for each leaf of params, whatever
            they hold; not under a transform.
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
    run = microbatch_pass(partial_loss(loss_fn), grad_and_value, weight_fn)
    group = Group(weighed(microbatches, weight_fn), len(microbatches))
    totals = num_tokens, num_microbatches
    grads, loss, carried = accumulate_passes(
        run, params, group, totals, accum_dtype=accum_dtype, out=out, ready=ready
    )
    return grads, loss, carried[1] if carried else ()


class MicrobatchPass(NamedTuple):
    """What is run for each microbatch: its part of the objective, and that part with its gradients."""

    part: Part
    differentiated: Callable[..., tuple[list[Tensor], Tensor, Tree, bool]]
    in_place: bool


def microbatch_pass(
    part: Part,
    grad_and_value: GradAndValue,
    weight_fn: WeightFn | None,
    *,
    compile: bool | Compiler = False,
) -> MicrobatchPass:
    """Made once, so that a compiler compiles it once: for every number of microbatches, and all of their shapes."""

    def differentiated(
        params: Params, microbatch: Microbatch, weights: Tensor | None, *totals: Tensor | None
    ) -> tuple[list[Tensor], Tensor, Tree, bool]:
        leaves, structure = tree.flatten(params)
        aux_structure: tree.Structure = None
        reached = True

        def over_leaves(leaves: list[Tensor], given: Microbatch) -> Any:
            nonlocal aux_structure, reached
            here = weights
            if weight_fn is not None and not tree.same(given, microbatch):
                # A piece of the microbatch, from a reverse mode that looks at examples one by one.
                here = checked_weights(weight_fn(given))
            loss, aux = part(tree.unflatten(structure, leaves), given, here, *totals)
            # Where the leaves are not tracked, this reverse mode has a way of its own.
            tracked = any(leaf.requires_grad for leaf in leaves)
            reached = loss.requires_grad or not tracked
            aux_leaves, aux_structure = tree.flatten(aux)
            return loss, aux_leaves

        differentiate = grad_and_value(over_leaves, has_aux=True)
        grads, (loss, aux_leaves) = differentiate(leaves, microbatch)
        return list(grads), loss, tree.unflatten(aux_structure, aux_leaves), reached

    own = grad_and_value is _own_grad_and_value
    # Our own reverse mode returns gradients only under transforms, which compile what they like themselves.
    returned = differentiated if own else compiled(differentiated, compile)
    return MicrobatchPass(compiled(part, compile), returned, own)


class Group(NamedTuple):
    """Microbatches with their weights, each of them once, and how many there are."""

    weighed: Iterable[Weighed]
    length: int


Totals: TypeAlias = tuple[Tensor | None, Tensor | None]
"""The global ``num_tokens`` and ``num_microbatches``, where they are known."""


def accumulate_passes(
    run: MicrobatchPass,
    params: Params,
    group: Group,
    totals: Totals = (None, None),
    *,
    accum_dtype: torch.dtype | None = None,
    out: Sequence[Tensor] | None = None,
    ready: Callable[[int], None] | None = None,
) -> tuple[Tree, Tensor, Tree]:
    """``accumulate``, of a pass that is made already; beside the aux it carries the count."""
    leaves, structure = tree.flatten(params)
    dtypes = sum_dtypes(leaves, accum_dtype) if out is None else [buffer.dtype for buffer in out]
    sums = GradientSums(leaves, dtypes, out)
    in_place = run.in_place and tree.eager(params, totals) and not _inference(leaves)
    own_leaves = OwnLeaves(leaves)
    versions = versions_of(params)
    total: GroupTotal | None = None
    reached = False

    for position, (microbatch, weights) in enumerate(_casts_forgotten(group.weighed, leaves), 1):
        # Whoever transforms or differentiates the step needs gradients that are returned, with their graph.
        in_place = in_place and not tree.requires_grad(microbatch)
        if in_place:
            own = own_leaves()
            given = tree.unflatten(structure, own), tree.detached(microbatch), weights
            with torch.enable_grad():
                loss, carried = run.part(*given, *totals)
            if loss.requires_grad:
                backward(loss, own, sums, ready if position == group.length else None)
            here = any(value is not None for value in sums.values)
            loss, carried = tree.map(Tensor.detach, (loss, carried))
            del own, given
        else:
            grads, loss, carried, here = run.differentiated(params, microbatch, weights, *totals)
            if not tree.differentiated(params, totals, microbatch):
                # What the loss closes over is a constant, whether it requires grad or not.
                grads, loss, carried = tree.map(Tensor.detach, (grads, loss, carried))
            _add_returned(sums, grads, copy=not run.in_place)
        reached = reached or here
        total = add_part(total, loss, carried)
        del loss, carried, microbatch, weights

    check_untouched(params, versions)
    loss, carried = of_group(total, params)
    if carried and not reached and has_tokens(carried[0]):
        raise ValueError(
            "loss_fn gives losses that do not depend on params: no gradient reaches any of their leaves. Perhaps "
            "it calls a module without torch.func.functional_call(module, params, ...), detaches what it "
            "returns, or computes under torch.no_grad()"
        )
    return tree.unflatten(structure, _filled(sums, leaves)), loss, carried


def _add_returned(sums: GradientSums, grads: list[Tensor], *, copy: bool) -> None:
    """Adds gradients that a reverse mode has returned, and lets go of each at once."""
    while grads:
        grad, index = grads.pop(), len(grads)
        so_far = sums.values[index]
        # What a reverse mode of the user's returns may be a buffer of theirs, and sums are written to.
        grad = grad.to_dense() if grad.is_sparse else grad
        grad = grad.to(sums.dtypes[index], copy=so_far is None and copy)
        sums.values[index] = grad if so_far is None else so_far + grad
        del so_far, grad


def _filled(sums: GradientSums, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The sums, with zeros where no gradient came, in the buffers that they belong into."""
    filled = []
    for index, (value, leaf) in enumerate(zip(sums.values, leaves, strict=True)):
        if sums.out is None:
            filled.append(
                torch.zeros_like(leaf, dtype=sums.dtypes[index]) if value is None else value
            )
            continue
        place = sums.out[index]
        if value is None:
            place.zero_()
        elif value is not place:
            if value.requires_grad:
                raise ValueError(
                    "params or a microbatch require grad, and buffers given as out= (gradient buckets of ranks, "
                    "say) cannot record the gradients: detach them"
                )
            place.copy_(value)
        filled.append(place)
    return filled


def _casts_forgotten(group: Iterable[Weighed], leaves: Sequence[Tensor]) -> Iterator[Weighed]:
    """The same group. Autocast keeps what it casts of leaves until its own end: of ours, nothing is asked for again."""
    compiling = torch.compiler.is_dynamo_compiling()
    where = leaves[0].device.type
    # Of a device that autocast does not know, it cannot be asked.
    known = not compiling and torch.amp.is_autocast_available(where)
    casts = known and torch.is_autocast_enabled(where)
    try:
        for each in group:
            yield each
            if casts:
                torch.clear_autocast_cache()
    finally:
        if casts:
            torch.clear_autocast_cache()


def _inference(leaves: Sequence[Tensor]) -> bool:
    """Whether autograd would record nothing, where ``torch.func`` does."""
    return torch.is_inference_mode_enabled() or any(leaf.is_inference() for leaf in leaves)


def sum_dtypes(leaves: Sequence[Tensor], accum_dtype: torch.dtype | None) -> list[torch.dtype]:
    """The dtype in which each leaf's gradients are summed."""
    return [accum_dtype or accumulation_dtype(leaf.dtype) for leaf in leaves]
