"""Reverse mode, summed over a group of microbatches.

    grads = Σₘ Σᵢ (wᵢ/N) ∇ℓᵢ(θ)        over tokens i of microbatches m

1/N enters as the seed of the backward pass: ``weights / N`` is the cotangent of the losses. So there
is no pass over the gradients to scale them, and nothing to forget.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from purestep import tree
from purestep.compiler import Compiler
from purestep.form import Form, flat, once
from purestep.gathering import Gathering
from purestep.objective import (
    Worth,
    denominators,
    partial_loss,
    plus,
    sums_of,
)
from purestep.passes import (
    Ready,
    Task,
    compiled_pass,
    in_place_pass,
    recorded_pass,
    returning_pass,
)
from purestep.pieces import Spread
from purestep.reverse_mode import grad_and_value as plain_grad_and_value, inference
from purestep.tokens import (
    Group,
    Weighed,
    grouped,
    has_tokens,
    label_weights,
)
from purestep.tree import accumulation_dtype
from purestep.types import (
    Count,
    GradAndValue,
    LossFn,
    Microbatch,
    Params,
    ReverseMode,
    Sums,
    WeightFn,
)


def accumulate(
    loss_fn: LossFn,
    params: Params,
    microbatches: Sequence[Microbatch],
    *,
    weight_fn: WeightFn | None = label_weights,
    total: Count | None = None,
    grad_and_value: GradAndValue = plain_grad_and_value,
    accum_dtype: torch.dtype | None = None,
    out: Sequence[Tensor] | None = None,
    ready: Ready | None = None,
) -> Sums:
    """Forward and backward over a group of microbatches: its part of ∇L and of L, without an optimizer.

        loss  = Σₘ ( Σᵢ wᵢ ℓᵢ(θ) / num_tokens  +  [m has tokens] · term(θ) / num_microbatches )
        grads = ∇ loss

    Gradients are added to the sums leaf by leaf, while the backward pass still runs: one tree of them is
    alive, not two. (Under a transform they are added when the pass is done.) What a loss may do, and what
    is recorded, is told by ``make_update_step``. No rank hears of any other here: ``psum`` what comes out, once.

    Args:
        loss_fn: one loss per token, or ``LossTerms``.
        params: a tree of floating point tensors. Of a ``Shard``, the loss is given the piece, whatever its axis is.
        microbatches: a sequence of microbatches, of any shapes. An empty one gives exact zeros.
        weight_fn: one weight per token; None when ``LossTerms.weights`` brings them.
        total: the global ``count``, by which loss and gradients are divided; None leaves them as plain sums, for you
            to divide.
        grad_and_value: anything with the signature of ``torch.func.grad_and_value``. Another one than
            ``ps.grad_and_value`` is free to do what it likes with its inputs (clip per example, say),
            and its gradients are added when they are returned. It differentiates a function of
            ``(leaves, microbatch)``, the params' leaves as a list, to ``(loss, Tally)``; where it hands over pieces
            of the microbatch, ``weight_fn`` is asked for the weights of each piece. A ``ReverseMode`` needs plain
            sums; what it does to the sum over all ranks is for you to do: pass its ``grad_and_value`` here, and
            do ``begin`` once.
        accum_dtype: the dtype of the sums; None: float32 for half precision, else the params' own.
        out: buffers to add up in, in their own dtype and memory order, one for each leaf of params, whatever
            they hold; not under a transform.
        ready: called with a leaf's position when its sum in ``out`` is final, where that is known during
            the last backward pass: communication may begin.

    Returns:
        ``Sums(grads, loss, counted, aux)``; ``counted`` are the tokens of these microbatches alone, and ``aux`` is
        the sum of ``LossTerms.aux``, or ``()``.

    >>> group = [{"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([6.0])}]
    >>> from purestep import count
    >>> ones = lambda m: torch.ones_like(m["x"])
    >>> total = count(group, ones)
    >>> sums = accumulate(lambda w, m: w * m["x"], torch.tensor(1.0), group, weight_fn=ones, total=total)
    >>> sums.grads, sums.loss
    (tensor(3.), tensor(3.))
    """
    check_undivided(grad_and_value, divided=total is not None)
    if isinstance(grad_and_value, ReverseMode) and grad_and_value.begin is not None:
        raise ValueError(
            "accumulate adds up the microbatches of one rank, and this grad_and_value does something to the sum over all "
            "ranks, once: pass its .grad_and_value here, psum what comes out, and hand the list of gradients to "
            "_, of_sum = grad_and_value.begin()"
        )
    add_up = accumulator(loss_fn, weight_fn=weight_fn, grad_and_value=grad_and_value)
    given = flat(params)
    check_whole(grad_and_value, given.form.spread)
    group = grouped(microbatches, weight_fn, total is not None, given.leaves[0].device)
    dtypes = tuple([each.dtype for each in out]) if out else sum_dtypes(given.form, accum_dtype)
    sums = add_up(Gathering(given, None, "step", dtypes, out, ready), group, total)
    return sums._replace(grads=given.tree(sums.grads))


def check_undivided(grad_and_value: GradAndValue, *, divided: bool) -> None:
    """Refuses a ``ReverseMode`` where what it differentiates would be divided by N already."""
    if divided and isinstance(grad_and_value, ReverseMode):
        raise ValueError(
            "this grad_and_value looks at how long gradients are (a clip, a norm), which means something else where they are "
            'divided by N already: pass normalize="grads" to a step, and no total= to accumulate'
        )


def check_whole(grad_and_value: GradAndValue, spread: Spread) -> None:
    """Refuses a ``ReverseMode`` of leaves that are pieces."""
    if spread and isinstance(grad_and_value, ReverseMode):
        axis = next(place.axis for place in spread if place)
        raise ValueError(
            "this grad_and_value is a ReverseMode, which sees the leaves of params as a list, without the axes that they are "
            f"spread over: a norm that it takes would be that of one rank's pieces over {axis}. Pass params without "
            "Shard, or the default grad_and_value"
        )


class Accumulate(Protocol):
    """``accumulate``, of a loss that is given already, with gradients as a list of leaves."""

    def __call__(self, gathering: Gathering, group: Group, total: Count | None, /) -> Sums: ...


def accumulator(
    loss_fn: LossFn,
    *,
    weight_fn: WeightFn | None,
    grad_and_value: GradAndValue,
    compile: bool | Compiler = False,
) -> Accumulate:
    """Made once, so that a compiler compiles it once: for every number of microbatches, and all of their shapes."""
    own = grad_and_value is plain_grad_and_value
    part_of = partial_loss(loss_fn, as_counted=compile is not False)
    if own:
        in_place = in_place_pass(part_of) if compile is False else compiled_pass(part_of, compile)
        # Whoever transforms or differentiates the step compiles what they like themselves.
        returned = recorded_pass(part_of)
    else:
        in_place = returned = returning_pass(part_of, grad_and_value, weight_fn, compile)

    def add_up(gathering: Gathering, group: Group, total: Count | None, /) -> Sums:
        params = gathering.given
        like = params.leaves[0]
        # Whoever transforms or differentiates the step needs gradients that are returned, with their graph.
        recorded = (
            not (own and tree.eager())
            or params.form.requires_grad
            or tree.any_requires_grad(total or ())
            or inference(params.leaves)
        )
        given: Worth | None = None
        total = denominators(total) if total and compile is False else total
        reached = False

        for position, (microbatch, weights) in enumerate(_casts_forgotten(group.weighed, like), 1):
            data, kind = tree.flatten(microbatch)
            if group.check is not None:
                group.check(position - 1, microbatch, data)
            recorded = recorded or tree.any_requires_grad(data)
            with gathering as (seen, sums):
                if recorded:
                    differentiated = tree.differentiated([*seen.leaves, *(total or ()), *data])
                else:
                    # What the loss does to its data is not done to the caller's.
                    microbatch, differentiated = tree.unflatten(kind, tree.cut_off(data)), False
                task = Task(
                    *(seen.leaves, seen.structure, microbatch, weights, total),
                    *(gathering.loss_gathers, differentiated),
                )
                last = gathering.each_microbatch or position == group.length
                ready = gathering.ready if last else None
                told = (returned if recorded else in_place)(task, sums, ready)
                del seen, sums, task
            reached = reached or told.reached
            given = plus(given, *told[:3])
            del told, data, microbatch, weights

        here = sums_of(gathering.gradients(), given, group.counted, like)
        if given and not reached and has_tokens(here.counted):
            raise ValueError(
                "loss_fn gives losses that do not depend on params: no gradient reaches any of their leaves. Perhaps "
                "it calls a module itself instead of what ps.from_module(module) or torch.func.functional_call make of it, "
                "detaches what it returns, computes under torch.no_grad(), or checkpoints with use_reentrant=True"
            )
        return here

    return add_up


def _casts_forgotten(group: Iterable[Weighed], like: Tensor) -> Iterable[Weighed]:
    """The same group. Autocast keeps what it casts of leaves until its own end: of ours, nothing is asked for again."""
    where = like.device.type
    # Of a device that autocast does not know, it cannot be asked.
    known = not torch.compiler.is_dynamo_compiling() and torch.amp.is_autocast_available(where)
    return _forgetting(group) if known and torch.is_autocast_enabled(where) else group


def _forgetting(group: Iterable[Weighed]) -> Iterator[Weighed]:
    try:
        for each in group:
            yield each
            torch.clear_autocast_cache()
    finally:
        torch.clear_autocast_cache()


@once
def sum_dtypes(form: Form, accum_dtype: torch.dtype | None) -> tuple[torch.dtype, ...]:
    """The dtype in which each leaf's gradients are summed."""
    return tuple([accum_dtype or accumulation_dtype(dtype) for dtype in form.dtypes])
