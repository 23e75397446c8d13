"""T4, padding. Ignored tokens, ignored sequences and ignored microbatches change nothing.

Data at a weight of zero may be anything; a loss may even be NaN there without reaching the total.
"""

from typing import Any

import torch

from support.ranks import check_metrics, check_step
from support.strategies import Batch, StepCase, steps
from support.theorem import System, as_tests, theorem


@theorem("T4", steps())
def padding_invariance(system: System, drawn: StepCase) -> None:
    """Checks that padding changes no bit of the state, the loss, the counts, aux and evaluation.

    The norm is the same but for rounding.
    """
    check_metrics(system, drawn)


@theorem("T4", steps())
def nan_at_weight_zero(system: System, drawn: StepCase) -> None:
    """A loss that is NaN where no weight counts changes neither the loss nor the gradients."""
    case, setup, groups = drawn

    def loss_fn(params: Any, batch: Batch) -> torch.Tensor:
        losses = case.loss_fn(params, batch)
        return losses.masked_fill(batch["w"] == 0, float("nan"))

    check_step(system, setup, case, groups, loss_fn, case.loss_fn)


globals().update(as_tests(globals()))
