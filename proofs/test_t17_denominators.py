"""T17, denominators. ``normalize="loss"`` and ``normalize="grads"`` agree.

    ∇ (Σ wᵢ ℓᵢ / N) = (∇ Σ wᵢ ℓᵢ) / N

1/N may enter as the seed of the backward pass or where the optimizer reads the gradients, and the
weights may come from data or from the forward pass: it is the same step.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import purestep as ps
from purestep import tree
from purestep.testing.specification import spec
from support.optimizers import OPTIMIZERS
from support.ranks import take_step
from support.strategies import (
    BRIDGES,
    WEIGHTS,
    Batch,
    Case,
    Chooser,
    Setup,
    StepCase,
    assert_near,
    assert_same,
    builds,
    choose_setup,
    get_weights,
    make_case,
    make_groups,
    make_opt_state,
    steps,
)
from support.theorem import System, as_tests, theorem


class Normalization(NamedTuple):
    """A way to divide by N: with weights that are counted, or that the loss returns."""

    loss_fn: Callable[..., Any]
    weight_fn: Any
    normalize: str

    def setup_of(self, setup: Setup) -> Setup:
        """Returns the setup with this way to divide."""
        return setup.with_settings(normalize=self.normalize)


def normalizations_of(case: Case) -> list[Normalization]:
    """Returns each way to divide the case's loss."""

    def weighted_loss(params: Any, batch: Batch) -> ps.LossOutput:
        return ps.LossOutput(case.loss_fn(params, batch), weights=batch["w"])

    return [
        Normalization(case.loss_fn, get_weights, "loss"),
        Normalization(case.loss_fn, get_weights, "grads"),
        Normalization(weighted_loss, None, "grads"),
    ]


@theorem("T17", steps(bridges=BRIDGES))
def denominators(system: System, drawn: StepCase) -> None:
    """Seeded, divided afterwards, or weighted by the loss: the same state and metrics."""
    case, setup, groups = drawn
    state = case.params, case.opt_state
    results = []
    evaluations = []
    for way in normalizations_of(case):
        result = take_step(
            system,
            way.setup_of(setup),
            state,
            groups,
            way.loss_fn,
            case.recipe,
            way.weight_fn,
        )
        evaluate = system.make_eval_step(way.loss_fn, weight_fn=way.weight_fn)
        results.append(result)
        evaluations.append(evaluate(case.params, [case.batch]))

    *expected, expected_metrics = results[0]
    for *actual, metrics in results[1:]:
        assert_same(actual, expected)
        assert_same(metrics, expected_metrics, "metrics")
    for evaluation in evaluations[1:]:
        assert_same(evaluation, evaluations[0], "evaluation")


def make_any_count(choose: Chooser) -> StepCase:
    """Makes positive inputs and params, and any number of tokens, with weights of any dtype."""
    case = make_case(choose)
    shape = case.batch["w"].shape
    # The first weight is positive, so that there are tokens.
    counts = [choose.randint(1, 3)]
    counts += [choose.randint(0, 3) for _ in range(shape.numel() - 1)]
    weights = torch.tensor(counts).view(shape).to(choose.choice(WEIGHTS))
    if weights.dtype.is_floating_point:
        weights = weights * choose.choice([0.1, 1 / 3, 0.75])
    batch = {**case.batch, "x": case.batch["x"].abs() + 1, "w": weights}
    params = tree.map(lambda leaf: leaf.abs() + 1, case.params)
    # A mean of params is off by as much as they are, which may be more than it moved by.
    recipe = choose.choice([name for name in OPTIMIZERS if name != "ema"])
    opt_state = make_opt_state(recipe, params, case.generator)
    case = replace(case, params=params, batch=batch, recipe=recipe, opt_state=opt_state)
    setup = choose_setup(choose, axes=["one"], accum_dtype=None)
    return case, setup, make_groups(choose, case, ranks=[1], padded=False)


@theorem("T17", builds(make_any_count))
def any_denominator(system: System, drawn: StepCase) -> None:
    """Checks that each way to divide by any N gives the equation's step, but for rounding.

    Params, inputs and residuals are positive. So relative errors stay what they are through sums,
    products, quotients, roots and norms, and signs are certain. A parameter is off by so many
    roundings of what it was and of what it moved by.
    """
    case, setup, groups = drawn
    state = case.params, case.opt_state
    expected, _, _ = spec(case.loss_fn, case.optimizer.update, *state, case.batch)
    # Sums over tokens, in addition to what a step rounds.
    roundings = 2 * case.batch["w"].numel()
    for way in normalizations_of(case):
        params, opt_state, _ = take_step(
            system,
            way.setup_of(setup),
            state,
            groups,
            way.loss_fn,
            case.recipe,
            way.weight_fn,
        )
        assert_near((params, opt_state), expected, state, roundings)


globals().update(as_tests(globals()))
