"""T4, padding. Ignored tokens, ignored sequences and ignored microbatches change nothing.

What stands at a weight of zero may be anything; its loss may even be NaN without reaching the loss.
"""

from typing import Any

import torch

import purestep as ps
from proofs.strategies import Batch, Drawn, assert_same, check_step, step_of, steps, weights_of
from proofs.theorem import System, theorem


@theorem("T4", steps())
def padding_invariance(system: System, drawn: Drawn) -> None:
    """State and metrics with padding are those without, to the bit."""
    case, how, groups = drawn
    check_step(system, how, case, groups)


@theorem("T4", steps())
def counts_of_tokens(system: System, drawn: Drawn) -> None:
    """So are an aux that looks at the tokens that count, and evaluation."""
    case, how, groups = drawn
    groups = [group or [{k: 0 * leaf for k, leaf in case.batch.items()}] for group in groups]

    def loss_fn(params: Any, batch: Batch) -> ps.LossTerms:
        losses = case.loss_fn(params, batch)
        return ps.LossTerms(losses, aux={"correct": ((losses == 0) & (batch["w"] > 0)).sum()})

    state = case.params, case.opt_state
    *_, metrics = step_of(system, how, state, groups, loss_fn, case.optimizer)
    evaluate = system.make_eval_step(loss_fn, weight_fn=weights_of)
    parts = [part for group in groups for part in group]
    expected = evaluate(case.params, [case.batch])
    assert_same(metrics.aux, expected.aux, "aux")
    held = evaluate(case.params, parts)._replace(num_microbatches=expected.num_microbatches)
    assert_same(held, expected, "evaluation")


@theorem("T4", steps())
def nan_at_weight_zero(system: System, drawn: Drawn) -> None:
    """A loss that is NaN where nothing counts changes neither the loss nor the gradients."""
    case, how, groups = drawn

    def loss_fn(params: Any, batch: Batch) -> torch.Tensor:
        return case.loss_fn(params, batch).masked_fill(batch["w"] == 0, float("nan"))

    check_step(system, how, case, groups, loss_fn, case.loss_fn)


test_padding_invariance = padding_invariance.test()
test_counts_of_tokens = counts_of_tokens.test()
test_nan_at_weight_zero = nan_at_weight_zero.test()
