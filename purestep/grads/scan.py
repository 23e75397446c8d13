"""Gradients of a stacked group where a compiler traces: one body for any number of microbatches.

    totals, losses = scan((totals, m) ↦ (totals + ∇Lₘ(θ), Lₘ(θ)), 0, microbatches)

The loop of ``accumulate_group`` would be unrolled: compiled anew for each number of microbatches,
in a time that grows with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from purestep import tree, validation
from purestep.counts import WeightedMicrobatches, compute_weights, sum_weights
from purestep.grads.backends import GradBackends
from purestep.grads.microbatch import GradAccumulator, MicrobatchInputs
from purestep.stacked import Stacked
from purestep.torch_private import count_nonzero, scan
from purestep.tree import accumulation_dtype
from purestep.types import GradSums, TokenCounts, WeightFn


def is_scanned(group: WeightedMicrobatches, leaves: Sequence[Tensor]) -> bool:
    """Returns whether a compiler would trace a group as one loop body, instead of unrolling it.

    It does not ask whether a compiler is tracing. False unless the group is ``Stacked``, of two
    microbatches at least. False, too, where autograd or a transform may differentiate params or
    batch. In a trace, any transform counts, a ``vmap`` too.
    """
    microbatches = group.microbatches
    if not isinstance(microbatches, Stacked) or len(microbatches) < 2:
        return False
    return not tree.may_be_differentiated(tree.leaves((leaves, microbatches.batch)))


def scan_group(
    backends: GradBackends,
    leaves: list[Tensor],
    spec: tree.TreeSpec,
    group: WeightedMicrobatches,
    weight_fn: WeightFn | None,
    divisors: TokenCounts | None,
    accum_dtype: torch.dtype | None,
) -> GradSums:
    """Sums loss and gradients of a stacked group by one ``scan``, as ``accumulate_group`` does.

    It is for a compiler's trace. Raises ``ValueError`` if the losses do not depend on params,
    with or without tokens.
    """
    dtypes = [accum_dtype or accumulation_dtype(leaf.dtype) for leaf in leaves]
    microbatches: Any = group.microbatches
    weights: Any = group.weights
    counts = group.counts
    # Where the step counts, the weights of all microbatches are there, stacked like these.
    # Not by ``if weights``: torch 2.11's compiler takes a stacked group for empty.
    has_weights = weights is not None
    rows = microbatches.batch, weights.batch if has_weights else ()
    row_leaves, row_spec = tree.flatten(rows)

    def add_microbatch(totals: list[Tensor], row: list[Tensor]) -> tuple[Any, Any]:
        microbatch, row_weights = tree.unflatten(row_spec, row)
        if not has_weights:
            row_weights = weight_fn and compute_weights(weight_fn, microbatch)
        data = tree.leaves(microbatch)
        inputs = MicrobatchInputs(leaves, spec, microbatch, data, row_weights, divisors)
        accumulator = GradAccumulator([*totals], dtypes)
        result = backends.scanned(inputs, accumulator, None)
        if not result.depends_on_params:
            raise validation.no_dependence_error()
        # Known counts are no output: each output is stacked over all microbatches.
        num_tokens: Any = ()
        if counts is None:
            num_tokens = sum_weights([result.weights]).num_tokens
        # What a body returns must share no memory with what it takes.
        outputs = tree.map(torch.clone, (result.loss, num_tokens, result.aux))
        return accumulator.values, outputs

    zeros = []
    for leaf, dtype in zip(leaves, dtypes, strict=True):
        zeros.append(torch.zeros_like(leaf, dtype=dtype))
    _let_body_enter_modes()
    totals, (losses, num_tokens, aux) = scan(add_microbatch, zeros, row_leaves)
    if counts is None:
        counts = TokenCounts(num_tokens.sum(), count_nonzero(num_tokens))
    return GradSums(
        grads=tree.unflatten(spec, totals),
        loss=losses.sum(0, dtype=torch.float64).to(losses.dtype),
        counts=counts,
        aux=tree.map(sum_rows, aux),
    )


def _let_body_enter_modes() -> None:
    """Lets the body of the next loop in a trace enter function modes, such as dropout by keys.

    The compiler refuses the first change of the modes in a trace if it happens in a body:
        apply(params, microbatch["x"], key=microbatch["keys"])
    After one change outside, it allows them. This one does nothing.
    """
    with TorchFunctionMode():
        pass


def sum_rows(rows: Tensor) -> Tensor:
    """Sums over dimension 0, the microbatches, in the dtype in which ``LossOutput.aux`` is summed.

    That is int64 for bools and integers, and at least float32 for the others.

    >>> sum_rows(torch.tensor([[True, False], [True, True]]))
    tensor([2, 1])
    """
    return rows.sum(0, dtype=accumulation_dtype(rows.dtype))
