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
from purestep.counts import (
    WeightedMicrobatches,
    compute_weights,
    has_tokens,
    label_weights,
    sum_weights,
)
from purestep.grads.backends import GradBackends, make_backends
from purestep.grads.grad_and_value import grad_and_value
from purestep.grads.inplace import zeros_for_missing
from purestep.grads.microbatch import GradAccumulator as Gradients, MicrobatchInputs
from purestep.objective import denominators
from purestep.torch_private import is_profiling
from purestep.tree import accumulation_dtype
from purestep.tree.opaque import detach_opaque, has_graph
from purestep.types import (
    GradAndValue,
    GradHook,
    GradSums,
    LossFn,
    Microbatch,
    Params,
    TokenCounts,
    Tree,
    WeightFn,
)

_NOTHING = nullcontext()


def accumulate(
    loss_fn: LossFn,
    params: Params,
    microbatches: WeightedMicrobatches | Sequence[Microbatch],
    *,
    weight_fn: WeightFn | None = label_weights,
    total: TokenCounts | None = None,
    grad_and_value: GradAndValue = grad_and_value,
    accum_dtype: torch.dtype | None = None,
    ready: GradHook | None = None,
    modes: GradBackends | None = None,
    check: bool = True,
) -> GradSums:
    """Computes this rank's part of loss and gradients, over a group of microbatches.

        loss  = Σₘ ( Σᵢ wᵢ ℓᵢ(θ) / num_tokens  +  [m has tokens] · term(θ) / num_microbatches )
        grads = ∇ loss

    ``psum`` the result over the ranks once. Gradients are added in place during the backward pass,
    so only one tree of them is alive. The loss may do what it may do in ``make_update_step``.

    Args:
        loss_fn: returns one loss per token, or ``LossOutput``.
        params: a tree of floating-point tensors. The loss sees a ``Shard`` as it is.
        microbatches: a sequence of microbatches, of any shapes. An empty one gives exact zeros.
        weight_fn: returns one weight per token. None: ``LossOutput.weights`` brings them.
        total: the global ``count``, which divides loss and gradients. None: plain sums.
        grad_and_value: any function with the signature of ``torch.func.grad_and_value``. It
            differentiates a function of the list of the params' leaves.
        accum_dtype: the dtype of the sums. None: float32 for half precision, else the params'
            dtype.
        ready: called during the last backward pass with a leaf's index and its final sum. It
            returns where the sum lies from then on.
        modes: the ``make_backends`` of this loss, if you made them before.
        check: whether to look for a loss that writes to params, or that recomputes with other
            params.

    Returns:
        ``GradSums(grads, loss, counted, aux)``. ``counted`` counts these microbatches only.

    >>> group = [{"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([6.0])}]
    >>> from purestep import count_tokens
    >>> def ones(m):
    ...     return torch.ones_like(m["x"])
    >>> total = count(group, ones)
    >>> w = torch.tensor(1.0)
    >>> sums = accumulate(lambda w, m: w * m["x"], w, group, weight_fn=ones, total=total)
    >>> sums.grads, sums.loss
    (tensor(3.), tensor(3.))
    """
    modes = modes or make_backends(loss_fn, grad_and_value)
    leaves, structure = tree.flatten(params)
    dtypes = []
    for leaf in leaves:
        dtypes.append(accum_dtype or accumulation_dtype(leaf.dtype))
    sums = Gradients([None] * len(leaves), dtypes)
    divisors = total and denominators(total)
    recorded = not tree.is_plain_eager() or tree.leaves_require_grad(
        [*leaves, *(total or ())]
    )
    if recorded:
        validation.check_no_grad_leaves(params, leaves)
    versions = (
        validation.version_counters(leaves) if check and tree.is_plain_eager() else []
    )
    losses: list[Tensor] = []
    asked: list[Tensor] = []
    aux: Tree = ()
    reached = False

    group = (
        microbatches
        if isinstance(microbatches, WeightedMicrobatches)
        else WeightedMicrobatches(microbatches, None, None)
    )
    last = len(group.microbatches)
    given: Sequence[Tensor | None] = group.weights or [None] * last
    pairs = zip(group.microbatches, given, strict=True)
    for position, (microbatch, weights) in enumerate(pairs, 1):
        if weights is None and weight_fn is not None:
            weights = compute_weights(weight_fn, microbatch)
        data, kind = tree.flatten(microbatch)
        others = []
        for leaf in data:
            if type(leaf) is not Tensor or leaf.requires_grad:
                others.append(leaf)
        recorded = recorded or any(map(has_graph, others))
        if not recorded:
            # A loss that marks its data, by requires_grad_() say, does not mark the caller's.
            data = [*map(detach_opaque if others else Tensor.detach, data)]
            microbatch = tree.unflatten(kind, data)
        inputs = MicrobatchInputs(
            leaves, structure, microbatch, weights, divisors, check
        )
        run = modes.recorded if recorded else modes.plain
        with profiler_range("purestep.microbatch"):
            beside = run(inputs, sums, ready if position == last else None)
        losses.append(beside.loss)
        if group.counts is None:
            asked.append(beside.weights)
        if not tree.is_empty(beside.aux):
            aux = add_aux(aux, beside.aux)
        reached = reached or beside.reached
        del microbatch, weights, data, inputs, beside  # before the next one is made

    counted = group.counts or sum_weights(asked)
    if losses and not reached and has_tokens(counted):
        raise validation.no_dependence_error()
    if versions:
        validation.check_not_mutated(params, leaves, versions)
    grads = zeros_for_missing(sums, leaves)
    if recorded and tree.is_plain_eager(grads):
        # Nothing is recorded after all: they may be written to, whatever a Function returned.
        grads = [grad.clone() for grad in grads]
    loss = sum_losses(losses, leaves[0] if leaves else torch.zeros(()))
    return GradSums(tree.unflatten(structure, grads), loss, counted, aux)


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


def add_aux(so_far: Tree, aux: Tree) -> Tree:
    """The sum of ``LossOutput.aux``, in memory that a loss does not share.

    >>> add_aux({"correct": torch.tensor(2)}, {"correct": torch.tensor(3)})
    {'correct': tensor(5)}
    """
    own = tree.map(lambda leaf: leaf.to(accumulation_dtype(leaf.dtype), copy=True), aux)
    return own if tree.is_empty(so_far) else tree.map(_add_aux_leaf, so_far, own)


def _add_aux_leaf(one: Tensor, other: Tensor) -> Tensor:
    if one.shape != other.shape:
        raise ValueError(
            f"LossOutput.aux has a leaf of shape {tuple(one.shape)} in one microbatch and "
            f"{tuple(other.shape)} in another: it is summed, so return sums over the tokens"
        )
    return one + other


def sum_losses(losses: list[Tensor], like: Tensor) -> Tensor:
    """The sum of all microbatches' losses, added in float64; without any, a zero like a param.

    >>> sum_losses([torch.tensor(1.0), torch.tensor(2.0)], torch.tensor(0.0))
    tensor(3.)
    """
    if not losses:
        return like.new_zeros((), dtype=accumulation_dtype(like.dtype))
    if len(losses) == 1:
        return losses[0]
    together = torch.stack(losses)
    return together.sum(0, dtype=torch.float64).to(together.dtype)
