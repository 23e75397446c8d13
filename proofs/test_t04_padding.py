"""T4, padding. Ignored tokens, ignored sequences and ignored microbatches change nothing.

What stands at a weight of zero may be anything; its loss may even be NaN without reaching the loss.
"""

from typing import Any

import torch

from proofs.ranks import check_metrics, check_step
from proofs.strategies import Batch, Drawn, steps
from proofs.theorem import System, as_tests, theorem


@theorem("T4", steps())
def padding_invariance(system: System, drawn: Drawn) -> None:
    """State and metrics with padding are those without, to the bit; so are aux and evaluation."""
    check_metrics(system, drawn)


@theorem("T4", steps())
def nan_at_weight_zero(system: System, drawn: Drawn) -> None:
    """A loss that is NaN where nothing counts changes neither the loss nor the gradients."""
    case, how, groups = drawn

    def loss_fn(params: Any, batch: Batch) -> torch.Tensor:
        return case.loss_fn(params, batch).masked_fill(batch["w"] == 0, float("nan"))

    check_step(system, how, case, groups, loss_fn, case.loss_fn)


globals().update(as_tests(globals()))
