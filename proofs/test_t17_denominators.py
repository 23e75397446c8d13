"""T17, denominators. ``normalize="loss"`` and ``normalize="grads"`` agree.

1/N may enter as the seed of the backward pass or where the optimizer reads the gradients, and the weights may
come from data or from the forward pass: it is the same step.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import strategies as st

import purestep as ps
from proofs import models
from proofs.strategies import (
    RECIPES,
    Batch,
    Case,
    RealCase,
    assert_same,
    capture,
    cut,
    integer_batch,
    real_cases,
    some_opt_state,
    weights_of,
)
from proofs.test_t02_ranks import on_ranks, rank_cases
from proofs.theorem import System, theorem
from purestep import tree
from purestep.testing.bounds import gamma
from purestep.testing.specification import spec
from purestep.testing.strategies import cuts


def weighing_loss(params: Any, batch: Batch) -> ps.LossTerms:
    """A loss that brings its weights, and something to sum."""
    losses = models.integer_loss(params, batch)
    return ps.LossTerms(losses, weights=batch["w"], aux={"rows": (batch["w"] > 0).any(1).sum()})


def plain_loss(params: Any, batch: Batch) -> ps.LossTerms:
    """The same without weights."""
    return weighing_loss(params, batch)._replace(weights=None)


WAYS: list[tuple[Any, Any, Any]] = [
    (plain_loss, weights_of, "loss"),
    (plain_loss, weights_of, "grads"),
    (weighing_loss, None, "grads"),
]


@theorem("T17", rank_cases())
def denominators(system: System, drawn: tuple[Case, int, list[Batch]]) -> None:
    """Seeded, divided afterwards, or weighed by the loss: the same state and metrics, to the bit."""
    case, size, group = drawn
    results = [
        on_ranks(
            system, size, case.params, case.opt_state, group,
            loss_fn, case.optimizer, weight_fn=weight_fn, normalize=normalize,
        )
        for loss_fn, weight_fn, normalize in WAYS
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


DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float32, torch.float64]
Drawn = tuple[list[Case], list[list[int]], bool]


@st.composite
def any_count(draw: st.DrawFn) -> Drawn:
    """Positive integers and any number of tokens, with weights of any dtype: for each optimizer; a cut; whether to donate."""
    seed = draw(st.integers(0, 2**20))
    generator = torch.Generator().manual_seed(seed)
    rows, length = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    size = rows * length
    flat = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size).filter(any))
    weights = torch.tensor(flat).view(rows, length).to(draw(st.sampled_from(DTYPES)))
    if weights.dtype.is_floating_point:
        weights = weights * draw(st.sampled_from([0.1, 1 / 3, 0.75]))
    params = tree.map(lambda leaf: leaf.abs() + 1, models.integer_params(generator))
    batch = integer_batch(weights, generator)
    batch["x"] = batch["x"].abs() + 1
    cases = [
        Case(params, batch, recipe, some_opt_state(recipe, params, generator), seed)
        for recipe in RECIPES
        # A mean of params is off by as much as they are, which may be more than it moved by.
        if recipe != "ema"
    ]
    return cases, draw(cuts(rows)), draw(st.booleans())


@theorem("T17", any_count())
def any_denominator(system: System, drawn: Drawn) -> None:
    """N need not be a power of two: each way is one division, in float64, from the equation on one batch.

    Everything is positive, so that relative errors stay what they are through sums, products, quotients, roots and
    norms, and signs are certain: a parameter is off by so many roundings of what it was and of what it moved by.
    """
    cases, microbatches, donate = drawn
    for case, (loss_fn, weight_fn, normalize) in itertools.product(cases, WAYS):
        state = (case.params, case.opt_state)
        expected, _, _ = spec(models.integer_loss, case.optimizer.update, *state, case.batch)
        step = system.make_update_step(
            loss_fn,
            RECIPES[case.recipe](system.optim),
            weight_fn=weight_fn,
            normalize=normalize,
            donate=donate,
        )
        *actual, _ = step(*tree.map(torch.clone, state), cut(case.batch, microbatches))
        # Sums over tokens, norms over all elements, and the formula of a step with its powers of β: in both.
        elements = sum(leaf.numel() for leaf in tree.leaves_of(case.params))
        roundings = gamma(2 * (case.batch["w"].numel() + elements + 64), torch.float64)
        for path, *leaves in zip(
            tree.paths(state, f"{case.recipe}, {normalize}: state"),
            *map(tree.leaves_of, (tuple(actual), expected, state)),
            strict=True,
        ):
            ours, theirs, old = (leaf.to(torch.float64) for leaf in leaves)
            scale = old.abs() + (theirs - old).abs()
            error = (ours - theirs).abs()
            assert (error <= roundings * scale).all(), f"{path}: off by {error}"


test_any_denominator = any_denominator.test()
test_denominators = denominators.test()
test_denominators_within_bound = denominators_within_bound.test()
