"""Loss and gradients, summed over a group of microbatches.

    grads = Σₘ Σᵢ (wᵢ/N) ∇ℓᵢ(θ)        over tokens i of microbatches m

1/N enters as the seed of the backward pass: ``weights / N`` is the cotangent of the losses. So
there is no pass over the gradients to scale them, and nothing to forget.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from purestep import hints, tree, validation
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
from purestep.grads.microbatch import GradAccumulator, MicrobatchInputs
from purestep.grads.scan import is_scanned, scan_group
from purestep.objective import denominators
from purestep.torch_private import TRACES_COPY, is_profiling
from purestep.tree import accumulation_dtype
from purestep.tree.opaque import copy_opaque, detach_opaque, has_graph
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
_MISSING: Any = object()


def accumulate(
    loss_fn: LossFn,
    params: Params,
    microbatches: WeightedMicrobatches | Sequence[Microbatch],
    *,
    weight_fn: WeightFn | None = label_weights,
    total: TokenCounts | None = None,
    grad_and_value: GradAndValue = grad_and_value,
    accum_dtype: torch.dtype | None = None,
) -> GradSums:
    """Computes this rank's part of loss and gradients, over a group of microbatches.

        loss  = Σₘ ( Σᵢ wᵢ ℓᵢ(θ) / num_tokens  +  [m has tokens] · term(θ) / num_microbatches )
        grads = ∇ loss

    Here term(θ) is ``LossOutput.microbatch_loss``. ``psum`` the result over the ranks once. In
    plain eager mode with the default ``grad_and_value``, gradients are added in place during the
    backward pass. So only one tree of them is alive. The loss may do what it may do in
    ``make_update_step``.

    Raises ``ValueError`` if there are tokens, but no loss depends on params; in a compiler's trace,
    also without tokens. It also does so if the sequence yields more or fewer microbatches than its
    length. Outside of transforms and traces, a loss that writes to params raises it, or torch's
    ``RuntimeError``. A write through ``.data`` is not seen.

    Raises ``TypeError`` if ``total`` is a number, or if a param is an ``nn.Parameter`` that
    requires grad. Outside of transforms and traces, any leaf of autograd that requires grad raises
    it.

    Args:
        loss_fn: returns one loss per token, or ``LossOutput``.
        params: a tree of floating-point tensors. The loss sees a ``Shard`` as it is.
        microbatches: a sequence of microbatches, of any shapes. An empty one gives exact zeros. Of
            ``WeightedMicrobatches``, weights and counts that are not None are not computed again.
        weight_fn: returns one weight per token. None: ``LossOutput.weights`` brings them.
        total: the global ``count_tokens``, which divides loss and gradients. None: plain sums, for
            which ``LossOutput.microbatch_loss`` raises ``ValueError``.
        grad_and_value: any function with the signature of ``torch.func.grad_and_value``. It
            differentiates a function of the list of the params' leaves.
        accum_dtype: the dtype of the sums, a floating-point one; others raise ``ValueError``. None:
            float32 for half precision, else the params' dtype.

    Returns:
        ``GradSums(grads, loss, counts, aux)``, with ``grads`` a tree like params. ``counts`` are
        those of these microbatches only, and ``aux`` is the sum of theirs.

    >>> group = [{"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([6.0])}]
    >>> from purestep import count_tokens
    >>> def ones(m):
    ...     return torch.ones_like(m["x"])
    >>> total = count_tokens(group, ones)
    >>> w = torch.tensor(1.0)
    >>> sums = accumulate(lambda w, m: w * m["x"], w, group, weight_fn=ones, total=total)
    >>> sums.grads, sums.loss
    (tensor(3.), tensor(3.))
    """
    if total is not None and not isinstance(total, TokenCounts):
        raise TypeError(
            f"total is {type(total).__name__}: pass TokenCounts, as count_tokens(microbatches, "
            "weight_fn) returns them, summed over the ranks by axis.psum"
        )
    validation.check_accum_dtype(accum_dtype)
    group = microbatches
    if not isinstance(group, WeightedMicrobatches):
        group = WeightedMicrobatches(group, None, None)
    leaves, spec = tree.flatten(params)
    return accumulate_group(
        make_backends(loss_fn, grad_and_value),
        leaves,
        spec,
        group,
        weight_fn=weight_fn,
        divisors=None if total is None else denominators(total),
        accum_dtype=accum_dtype,
    )


def accumulate_group(
    backends: GradBackends,
    leaves: list[Tensor],
    spec: tree.TreeSpec,
    group: WeightedMicrobatches,
    *,
    weight_fn: WeightFn | None,
    divisors: TokenCounts | None,
    accum_dtype: torch.dtype | None = None,
    on_grad_ready: GradHook | None = None,
    needs_checks: bool = True,
) -> GradSums:
    """Sums loss and gradients of a group by the backends of its loss, as ``accumulate`` says.

    Params are the tree of ``spec`` with these leaves. ``divisors`` are the ``denominators`` of the
    counts of all ranks; None: plain sums. In the last backward pass, a backend may replace each
    leaf's sum by what ``on_grad_ready`` returns for it. With ``needs_checks``, in plain eager mode,
    ``ValueError`` is raised for a loss that recomputes with other parameters. A loss that writes to
    params raises it, or torch's ``RuntimeError``. A write through ``.data`` is not seen. Likely
    mistakes then get hints. In a compiler's trace, a group that ``is_scanned`` goes to
    ``scan_group``, which ignores ``on_grad_ready`` and ``needs_checks``.

    Raises ``ValueError`` if there are tokens, but no loss depends on params; in a trace, also
    without tokens. It also does so if the group yields more or fewer microbatches than its length.
    Raises ``TypeError`` if a param is an ``nn.Parameter`` that requires grad. Outside of transforms
    and traces, any leaf of autograd that requires grad raises it.
    """
    if torch.compiler.is_dynamo_compiling() and is_scanned(group, leaves):
        return scan_group(
            backends, leaves, spec, group, weight_fn, divisors, accum_dtype
        )
    dtypes = []
    for leaf in leaves:
        dtypes.append(accum_dtype or accumulation_dtype(leaf.dtype))
    accumulator = GradAccumulator([None] * len(leaves), dtypes)
    is_recorded = not tree.is_plain_eager() or tree.leaves_require_grad(
        [*leaves, *(divisors or ())]
    )
    if is_recorded:
        validation.check_no_grad_leaves(leaves, spec)
    watch = (
        _watch_group(leaves, spec, group.microbatches)
        if needs_checks
        else nullcontext()
    )

    losses: list[Tensor] = []
    used_weights: list[Tensor] = []
    aux: Tree = ()
    depends_on_params = False
    # Not by zip, whose tuple would keep a microbatch alive while the next one is made.
    microbatches = iter(group.microbatches)
    with watch:
        for index, weights in enumerate(
            group.weights or [None] * len(group.microbatches)
        ):
            microbatch = next(microbatches, _MISSING)
            if microbatch is _MISSING:
                raise validation.wrong_length_error(group.microbatches, "fewer")
            if weights is None and weight_fn is not None:
                weights = compute_weights(weight_fn, microbatch)
            microbatch, data, is_recorded = detach_data(microbatch, is_recorded)
            grad_fn = backends.recorded if is_recorded else backends.plain
            with profiler_range("purestep.microbatch"):
                result = grad_fn(
                    MicrobatchInputs(
                        leaves, spec, microbatch, data, weights, divisors, needs_checks
                    ),
                    accumulator,
                    on_grad_ready if index + 1 == len(group.microbatches) else None,
                )
            losses.append(result.loss)
            used_weights.append(result.weights)
            if not tree.is_empty(result.aux):
                aux = add_aux(aux, result.aux)
            depends_on_params = depends_on_params or result.depends_on_params
            # Its memory is free before the sequence makes the next one.
            del microbatch, weights, data, result

    if next(microbatches, _MISSING) is not _MISSING:
        raise validation.wrong_length_error(group.microbatches, "more")
    counts = group.counts or sum_weights(used_weights)
    if losses and not depends_on_params and has_tokens(counts):
        raise validation.no_dependence_error()
    return GradSums(
        grads=tree.unflatten(
            spec, zeros_for_missing(accumulator, leaves, clone=is_recorded)
        ),
        loss=sum_losses(losses, leaves[0] if leaves else torch.zeros(())),
        counts=counts,
        aux=aux,
    )


@contextmanager
def _watch_group(
    leaves: Sequence[Tensor], spec: tree.TreeSpec, microbatches: Sequence[Microbatch]
) -> Iterator[None]:
    """Raises as ``validation.forbid_writes``; adds a note to an error if the group is one batch."""
    with (
        hints.annotate_single_batch(microbatches),
        validation.forbid_writes(leaves, spec),
    ):
        yield


def detach_data(
    microbatch: Microbatch, is_recorded: bool
) -> tuple[Microbatch, list[Any], bool]:
    """Returns the microbatch that a loss gets, its leaves, and whether this part is recorded.

    The microbatch has new containers, since a loss may write ``m["x"] = m["x"] / 2``. An object
    that ``map_tensors`` does not copy stays as it is, with its tensors. If the step is recorded, or
    data have a graph, other tensors are the same, and the last result is True. Else they are
    detached, and it is False: ``requires_grad_()`` in a loss spares the original. A detached tensor
    requires grad if the original does. In a trace of torch 2.11, leaves that are no tensors stay as
    they are.
    """
    leaves, spec = tree.flatten(microbatch)
    detach: Callable[[Any], Any] = Tensor.detach
    for leaf in leaves:
        if type(leaf) is not Tensor or leaf.requires_grad:
            detach = detach_opaque  # It also looks into dataclasses and mappings.
            is_recorded = is_recorded or has_graph(leaf)
    if is_recorded:
        detach = copy_opaque
    if TRACES_COPY or not is_recorded or not torch.compiler.is_dynamo_compiling():
        leaves = [*map(detach, leaves)]  # by map: at each step
    return tree.unflatten(spec, leaves), leaves, is_recorded


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """Names what runs in the returned context, for ``torch.profiler``.

    Without a profiler, or in a compiler's trace, the context does nothing.

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


def add_aux(total: Tree, aux: Tree) -> Tree:
    """Returns the sum of two trees in new memory; a copy of ``aux`` if ``total`` is ``()``.

    Half precision is summed in float32, integers in int64. Raises ``ValueError`` if structures or
    shapes differ.

    >>> add_aux({"correct": torch.tensor(2)}, {"correct": torch.tensor(3)})
    {'correct': tensor(5)}
    """
    copies = tree.map(
        lambda leaf: leaf.to(accumulation_dtype(leaf.dtype), copy=True), aux
    )
    return copies if tree.is_empty(total) else tree.map(_add_aux_leaf, total, copies)


def _add_aux_leaf(total: Tensor, leaf: Tensor) -> Tensor:
    """Returns the sum of two leaves; raises ``ValueError`` if their shapes differ.

    Shapes differ between microbatches if the loss returns values per token.
    """
    if total.shape != leaf.shape:
        raise ValueError(
            f"LossOutput.aux has a leaf of shape {tuple(total.shape)} in one microbatch and "
            f"{tuple(leaf.shape)} in another: it is summed, so return sums over the tokens"
        )
    return total + leaf


def sum_losses(losses: list[Tensor], like: Tensor) -> Tensor:
    """Returns the sum of scalar losses in their dtype, added in float64; a single one as it is.

    Without any, returns a scalar zero on the device of ``like``, in float32 at least.

    >>> sum_losses([torch.tensor(1.0), torch.tensor(2.0)], torch.tensor(0.0))
    tensor(3.)
    """
    if not losses:
        return like.new_zeros((), dtype=accumulation_dtype(like.dtype))
    if len(losses) == 1:
        return losses[0]
    stacked = torch.stack(losses)
    return stacked.sum(0, dtype=torch.float64).to(stacked.dtype)
