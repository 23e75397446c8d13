"""T4, padding. Ignored tokens, ignored sequences and ignored microbatches change nothing.

What stands at a weight of zero may be anything; its loss may even be NaN without reaching the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

import purestep as ps
from proofs import models
from proofs.ranks import ShareCase, check_ranks, padded, share_cases
from proofs.strategies import (
    Batch,
    Case,
    RealCase,
    assert_same,
    capture,
    cases,
    cut,
    integer_batch,
    real_cases,
    weights_of,
)
from proofs.theorem import System, theorem
from proofs.worlds import on_threads
from purestep import tree
from purestep.testing.strategies import cuts


@st.composite
def padding_cases(draw: st.DrawFn) -> tuple[Case, list[Batch], list[Batch]]:
    """A cut, and the same with ignored columns, rows and microbatches put in."""
    case = draw(cases())
    plain = cut(case.batch, draw(cuts(case.rows, 3)))
    generator = case.generator
    padded = []
    for microbatch in plain:
        rows, length = microbatch["w"].shape
        more_rows, more_columns = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        ignored = microbatch["w"].new_zeros(rows + more_rows, length + more_columns)
        larger = integer_batch(ignored, generator)
        for key, value in microbatch.items():
            larger[key][:rows, :length] = value
        padded.append(larger)
        if draw(st.booleans()):
            padded.append(integer_batch(torch.zeros_like(microbatch["w"]), generator))
    return case, plain, padded


def loss_with_counts(params: Any, batch: Batch) -> ps.LossTerms:
    """A loss whose aux looks at the tokens that count."""
    losses = models.integer_loss(params, batch)
    return ps.LossTerms(losses, aux={"correct": ((losses == 0) & (batch["w"] > 0)).sum()})


@theorem("T4", padding_cases())
def padding_invariance(system: System, drawn: tuple[Case, list[Batch], list[Batch]]) -> None:
    """State and metrics with padding are those without, to the bit; in evaluation too."""
    case, plain, padded = drawn
    step = system.make_update_step(loss_with_counts, case.optimizer, weight_fn=weights_of)
    expected = step(case.params, case.opt_state, plain)
    actual = step(case.params, case.opt_state, padded)
    assert_same(actual[:2], expected[:2])
    assert_same(actual[2], expected[2], "metrics")
    assert actual[2].num_tokens == case.batch["w"].sum()
    evaluate = system.make_eval_step(loss_with_counts, weight_fn=weights_of)
    assert_same(evaluate(case.params, padded), evaluate(case.params, plain), "evaluation")


@theorem("T4", padding_cases())
def nan_at_weight_zero(system: System, drawn: tuple[Case, list[Batch], list[Batch]]) -> None:
    """A loss that is NaN where nothing counts changes neither the loss nor the gradients."""
    case, plain, padded = drawn

    def loss_fn(params: Any, batch: Batch) -> torch.Tensor:
        losses = models.integer_loss(params, batch)
        return losses.masked_fill(batch["w"] == 0, float("nan"))

    expected = system.make_update_step(models.integer_loss, case.optimizer, weight_fn=weights_of)(
        case.params, case.opt_state, plain
    )
    actual = system.make_update_step(loss_fn, case.optimizer, weight_fn=weights_of)(
        case.params, case.opt_state, padded
    )
    assert_same(actual[:2], expected[:2])
    assert_same(actual[2], expected[2], "metrics")


@theorem("T4", real_cases([torch.float64, torch.float32, torch.bfloat16]))
def padding_within_bound(system: System, case: RealCase) -> None:
    """For the transformer: each sequence alone and unpadded gives the exact gradient, but for rounding."""
    step = system.make_update_step(models.transformer_loss, capture())
    group = []
    for row in range(case.rows):
        length = int(case.batch["w"][row].sum())
        group.append({key: value[row : row + 1, :length] for key, value in case.batch.items()})
    zeros = tree.zeros_like(case.params)
    _, grads, metrics = step(case.params, zeros, [part for part in group if part["w"].numel()])
    case.assert_within_bound(grads)
    case.assert_loss_within_bound(metrics.loss)


@theorem("T4", st.tuples(share_cases(), st.integers(0, 99)))
def padding_on_separate_ranks(system: System, drawn: tuple[ShareCase, int]) -> None:
    """Ignored microbatches on some ranks, of which each has its own program."""
    (case, share, bucket_bytes, settings), seed = drawn
    check_ranks(on_threads, system, case, padded(case, share, seed), bucket_bytes, settings)


test_padding_invariance = padding_invariance.test()
test_nan_at_weight_zero = nan_at_weight_zero.test()
test_padding_within_bound = padding_within_bound.test()
test_padding_on_separate_ranks = padding_on_separate_ranks.test()
