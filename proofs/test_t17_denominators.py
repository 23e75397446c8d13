"""T17, denominators. ``normalize="loss"`` and ``normalize="grads"`` agree.

1/N may enter as the seed of the backward pass or where the optimizer reads the gradients, and the
weights may come from data or from the forward pass: it is the same step.
"""

from dataclasses import replace
from typing import Any

import torch

import purestep as ps
from proofs.ranks import step_of
from proofs.strategies import (
    OPTIMIZERS,
    WEIGHTS,
    Batch,
    Case,
    Chooser,
    Drawn,
    assert_near,
    assert_same,
    case_of,
    drawn,
    groups_of,
    how_of,
    some_opt_state,
    steps,
    weights_of,
)
from proofs.theorem import System, as_tests, theorem
from purestep import tree
from purestep.testing.specification import spec


def ways_of(case: Case) -> list[tuple[Any, Any, str]]:
    """Weights that are counted before or afterwards, or that the loss brings: in each setting."""

    def weighing(params: Any, batch: Batch) -> ps.LossOutput:
        return ps.LossOutput(case.loss_fn(params, batch), weights=batch["w"])

    plain = [(case.loss_fn, weights_of, normalize) for normalize in ("loss", "grads")]
    return [*plain, (weighing, None, "grads")]


@theorem("T17", steps())
def denominators(system: System, drawn: Drawn) -> None:
    """Seeded, divided afterwards, or weighed by the loss: the same state and metrics."""
    case, how, groups = drawn
    state = case.params, case.opt_state
    results = []
    for loss_fn, weight_fn, normalize in ways_of(case):
        here = how._replace(settings={**how.settings, "normalize": normalize})
        results.append(
            step_of(system, here, state, groups, loss_fn, case.recipe, weight_fn)
        )
    for other in results[1:]:
        assert_same(other[:2], results[0][:2])
        assert_same(other[2], results[0][2], "metrics")
    counted, _, weighed = (
        system.make_eval_step(loss_fn, weight_fn=weight_fn)(case.params, [case.batch])
        for loss_fn, weight_fn, _ in ways_of(case)
    )
    assert_same(weighed, counted, "evaluation")


def any_count(choose: Chooser) -> Drawn:
    """Positive integers and any number of tokens, with weights of any dtype."""
    case = case_of(choose)
    flat = [choose.randint(place == 0, 3) for place in range(case.batch["w"].numel())]
    weights = torch.tensor(flat).view_as(case.batch["w"]).to(choose.choice(WEIGHTS))
    if weights.dtype.is_floating_point:
        weights = weights * choose.choice([0.1, 1 / 3, 0.75])
    batch = {**case.batch, "x": case.batch["x"].abs() + 1, "w": weights}
    params = tree.map(lambda leaf: leaf.abs() + 1, case.params)
    # A mean of params is off by as much as they are, which may be more than it moved by.
    recipe = choose.choice([name for name in OPTIMIZERS if name != "ema"])
    opt_state = some_opt_state(recipe, params, case.generator)
    case = replace(case, params=params, batch=batch, recipe=recipe, opt_state=opt_state)
    how = how_of(choose, axes=["one"], accum_dtype=None)
    return case, how, groups_of(choose, case, ranks=[1], padded=False)


@theorem("T17", drawn(any_count))
def any_denominator(system: System, drawn: Drawn) -> None:
    """N need not be a power of two: each way is one division, in float64, from the equation.

    Everything is positive, so that relative errors stay what they are through sums, products,
    quotients, roots and norms, and signs are certain: a parameter is off by so many roundings of
    what it was and of what it moved by.
    """
    case, how, groups = drawn
    state = case.params, case.opt_state
    expected, _, _ = spec(case.loss_fn, case.optimizer.update, *state, case.batch)
    # Sums over tokens, beside what a step rounds.
    roundings = 2 * case.batch["w"].numel()
    for loss_fn, weight_fn, normalize in ways_of(case):
        here = how._replace(settings={**how.settings, "normalize": normalize})
        *actual, _ = step_of(
            system, here, state, groups, loss_fn, case.recipe, weight_fn
        )
        assert_near(tuple(actual), expected, state, roundings)


globals().update(as_tests(globals()))
