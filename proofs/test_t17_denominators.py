"""T17, denominators. ``normalize="loss"`` and ``normalize="grads"`` agree.

1/N may enter as the seed of the backward pass or where the optimizer reads the gradients, and the weights may
come from data or from the forward pass: it is the same step.
"""

from __future__ import annotations

from typing import Any

import torch

import purestep as ps
from proofs import models
from proofs.strategies import (
    Batch,
    Case,
    RealCase,
    assert_same,
    capture,
    real_cases,
    weights_of,
)
from proofs.test_t02_ranks import on_ranks, rank_cases
from proofs.theorem import System, theorem
from purestep import tree


def weighing_loss(params: Any, batch: Batch) -> ps.LossTerms:
    """A loss that brings its weights, and something to sum."""
    losses = models.integer_loss(params, batch)
    return ps.LossTerms(losses, weights=batch["w"], aux={"rows": (batch["w"] > 0).any(1).sum()})


def plain_loss(params: Any, batch: Batch) -> ps.LossTerms:
    """The same without weights."""
    return weighing_loss(params, batch)._replace(weights=None)


@theorem("T17", rank_cases())
def denominators(system: System, drawn: tuple[Case, int, list[Batch]]) -> None:
    """Seeded, divided afterwards, or weighed by the loss: the same state and metrics, to the bit."""
    case, size, group = drawn
    results = [
        on_ranks(
            system, size, case.params, case.opt_state, group,
            loss_fn, case.optimizer, weight_fn=weight_fn, normalize=normalize,
        )
        for loss_fn, weight_fn, normalize in (
            (plain_loss, weights_of, "loss"),
            (plain_loss, weights_of, "grads"),
            (weighing_loss, None, "grads"),
        )
    ]  # fmt: skip
    for other in results[1:]:
        assert_same(other[:2], results[0][:2])
        assert_same(other[2], results[0][2], "metrics")
    counted = system.make_eval_step(plain_loss, weight_fn=weights_of)(case.params, [case.batch])
    weighed = system.make_eval_step(weighing_loss, weight_fn=None)(case.params, [case.batch])
    assert_same(weighed, counted, "evaluation")


@theorem("T17", real_cases([torch.float64, torch.float32, torch.bfloat16]))
def denominators_within_bound(system: System, case: RealCase) -> None:
    """For the transformer: divided afterwards, the exact gradient, but for rounding."""
    step = system.make_update_step(models.transformer_loss, capture(), normalize="grads")
    _, grads, metrics = step(case.params, tree.zeros_like(case.params), [case.batch])
    case.assert_within_bound(grads)
    case.assert_loss_within_bound(metrics.loss)


test_denominators = denominators.test()
test_denominators_within_bound = denominators_within_bound.test()
