"""Reverse mode, summed over a group of microbatches.

    grads = Σₘ Σᵢ (wᵢ/N) ∇ℓᵢ(θ)        over tokens i of microbatches m

1/N enters as the seed of the backward pass: ``weights / N`` is the cotangent of the losses. So
there is no pass over the gradients to scale them, and nothing to forget.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from purestep import tree, validation
from purestep.counts import Group, count_of, has_tokens, label_weights, weights_of
from purestep.grads.backends import ReverseModes, reverse_modes
from purestep.grads.grad_and_value import grad_and_value
from purestep.grads.inplace import filled
from purestep.grads.microbatch import Inputs, Sums as Gradients
from purestep.objective import divisors_of
from purestep.torch_private import is_profiling
from purestep.tree import accumulation_dtype
from purestep.tree.opaque import detach, has_graph
from purestep.types import (
    Count,
    GradAndValue,
    LossFn,
    Microbatch,
    Params,
    Ready,
    Sums,
    Tree,
    WeightFn,
)

_NOTHING = nullcontext()


def accumulate(
    loss_fn: LossFn,
    params: Params,
    microbatches: Group | Sequence[Microbatch],
    *,
    weight_fn: WeightFn | None = label_weights,
    total: Count | None = None,
    grad_and_value: GradAndValue = grad_and_value,
    accum_dtype: torch.dtype | None = None,
    ready: Ready | None = None,
    modes: ReverseModes | None = None,
    check: bool = True,
) -> Sums:
    """Computes this rank's part of loss and gradients, over a group of microbatches.

        loss  = Σₘ ( Σᵢ wᵢ ℓᵢ(θ) / num_tokens  +  [m has tokens] · term(θ) / num_microbatches )
        grads = ∇ loss

    ``psum`` the result over the ranks once. Gradients are added in place during the backward pass,
    so only one tree of them is alive. The loss may do what it may do in ``make_update_step``.

    Args:
        loss_fn: returns one loss per token, or ``LossTerms``.
        params: a tree of floating-point tensors. The loss sees a ``Shard`` as it is.
        microbatches: a sequence of microbatches, of any shapes. An empty one gives exact zeros.
        weight_fn: returns one weight per token. None: ``LossTerms.weights`` brings them.
        total: the global ``count``, which divides loss and gradients. None: plain sums.
        grad_and_value: any function with the signature of ``torch.func.grad_and_value``. It
            differentiates a function of the list of the params' leaves.
        accum_dtype: the dtype of the sums. None: float32 for half precision, else the params'
            dtype.
        ready: called during the last backward pass with a leaf's index and its final sum. It
            returns where the sum lies from then on.
        modes: the ``reverse_modes`` of this loss, if you made them before.
        check: whether to look for a loss that writes to params, or that recomputes with other
            params.

    Returns:
        ``Sums(grads, loss, counted, aux)``. ``counted`` counts these microbatches only.

    >>> group = [{"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([6.0])}]
    >>> from purestep import count
    >>> def ones(m):
    ...     return torch.ones_like(m["x"])
    >>> total = count(group, ones)
    >>> w = torch.tensor(1.0)
    >>> sums = accumulate(lambda w, m: w * m["x"], w, group, weight_fn=ones, total=total)
    >>> sums.grads, sums.loss
    (tensor(3.), tensor(3.))
    """
    modes = modes or reverse_modes(loss_fn, grad_and_value)
    leaves, structure = tree.flatten(params)
    dtypes = []
    for leaf in leaves:
        dtypes.append(accum_dtype or accumulation_dtype(leaf.dtype))
    sums = Gradients([None] * len(leaves), dtypes)
    divisors = total and divisors_of(total)
    recorded = not tree.eager() or tree.any_requires_grad([*leaves, *(total or ())])
    if recorded:
        validation.check_no_graphless(params, leaves)
    versions = validation.versions_of(leaves) if check and tree.eager() else []
    losses: list[Tensor] = []
    asked: list[Tensor] = []
    aux: Tree = ()
    reached = False

    group = (
        microbatches
        if isinstance(microbatches, Group)
        else Group(microbatches, None, None)
    )
    last = len(group.microbatches)
    given: Sequence[Tensor | None] = group.weights or [None] * last
    pairs = zip(group.microbatches, given, strict=True)
    for position, (microbatch, weights) in enumerate(pairs, 1):
        if weights is None and weight_fn is not None:
            weights = weights_of(weight_fn, microbatch)
        data, kind = tree.flatten(microbatch)
        others = []
        for leaf in data:
            if type(leaf) is not Tensor or leaf.requires_grad:
                others.append(leaf)
        recorded = recorded or any(map(has_graph, others))
        if not recorded:
            # A loss that marks its data, by requires_grad_() say, does not mark the caller's.
            data = [*map(detach if others else Tensor.detach, data)]
            microbatch = tree.unflatten(kind, data)
        inputs = Inputs(leaves, structure, microbatch, weights, divisors, check)
        run = modes.recorded if recorded else modes.plain
        with profiler_range("purestep.microbatch"):
            beside = run(inputs, sums, ready if position == last else None)
        losses.append(beside.loss)
        if group.counted is None:
            asked.append(beside.weights)
        if not tree.is_empty(beside.aux):
            aux = plus(aux, beside.aux)
        reached = reached or beside.reached
        del microbatch, weights, data, inputs, beside  # before the next one is made

    counted = group.counted or count_of(asked)
    if losses and not reached and has_tokens(counted):
        raise validation.unreached()
    if versions:
        validation.check_untouched(params, leaves, versions)
    grads = filled(sums, leaves)
    if recorded and tree.eager(grads):
        # Nothing is recorded after all: they may be written to, whatever a Function returned.
        grads = [grad.clone() for grad in grads]
    loss = total_loss(losses, leaves[0] if leaves else torch.zeros(()))
    return Sums(tree.unflatten(structure, grads), loss, counted, aux)


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """Names what runs in the context, for ``torch.profiler``. Where none runs, it does nothing.

    >>> from torch.profiler import profile
    >>> with profile() as prof, profiler_range("purestep.example"):
    ...     pass
    >>> "purestep.example" in {event.key for event in prof.key_averages()}
    True
    """
    # A range takes as long as a small operation, so none is opened in vain.
    if torch.compiler.is_dynamo_compiling() or not is_profiling():
        return _NOTHING
    return record_function(name)


def plus(so_far: Tree, aux: Tree) -> Tree:
    """The sum of ``LossTerms.aux``, in memory that a loss does not share.

    >>> plus({"correct": torch.tensor(2)}, {"correct": torch.tensor(3)})
    {'correct': tensor(5)}
    """
    own = tree.map(lambda leaf: leaf.to(accumulation_dtype(leaf.dtype), copy=True), aux)
    return own if tree.is_empty(so_far) else tree.map(_added, so_far, own)


def _added(one: Tensor, other: Tensor) -> Tensor:
    if one.shape != other.shape:
        raise ValueError(
            f"LossTerms.aux has a leaf of shape {tuple(one.shape)} in one microbatch and "
            f"{tuple(other.shape)} in another: it is summed, so return sums over the tokens"
        )
    return one + other


def total_loss(losses: list[Tensor], like: Tensor) -> Tensor:
    """The sum of all microbatches' losses, added in float64; without any, a zero like a param.

    >>> total_loss([torch.tensor(1.0), torch.tensor(2.0)], torch.tensor(0.0))
    tensor(3.)
    """
    if not losses:
        return like.new_zeros((), dtype=accumulation_dtype(like.dtype))
    if len(losses) == 1:
        return losses[0]
    together = torch.stack(losses)
    return together.sum(0, dtype=torch.float64).to(together.dtype)
