"""T7, identity. Without tokens, or where a non-finite step is skipped, the state comes back bitwise.

    N = 0, or ∇L not finite and skipped:      step(θ, s, B) = (θ, s)

Parameters, moments and step counter alike; ``applied`` says so, on every rank the same.
"""

from typing import Any

import torch
from hypothesis import strategies as st

from proofs.test_t06_purity import make_step
from purestep import tree
from support.ranks import take_step
from support.strategies import Batch, Groups, StepCase, assert_same, stack_trees, steps
from support.theorem import System, as_tests, theorem


def without_weights(batch: Batch) -> Batch:
    """Sets all weights to zero."""
    return {**batch, "w": torch.zeros_like(batch["w"])}


def with_float_targets(batch: Batch) -> Batch:
    """Copies targets to a dtype that can be infinite."""
    return {**batch, "y": batch["y"].to(batch["x"].dtype, copy=True)}


def is_finite(values: Any) -> bool:
    """Returns whether all elements are finite."""
    return all(bool(leaf.isfinite().all()) for leaf in tree.leaves(values))


@theorem("T7", st.tuples(steps(), st.booleans()))
def no_tokens(system: System, drawn: tuple[StepCase, bool]) -> None:
    """N = 0, with ignored microbatches or with none at all, is the identity."""
    (case, setup, groups), without_microbatches = drawn
    state = case.params, case.opt_state
    empty: Groups = []
    for group in groups:
        if without_microbatches and setup.axis != "simulated":
            empty.append([])
        else:
            empty.append([without_weights(part) for part in group])

    params, opt_state, metrics = take_step(
        system, setup, state, empty, case.loss_fn, case.recipe
    )

    assert_same((params, opt_state), state)
    assert not metrics.applied
    assert metrics.loss == metrics.num_tokens == metrics.num_microbatches == 0


NONFINITE = st.sampled_from([float("nan"), float("inf")])


@theorem("T7", st.tuples(steps(), NONFINITE))
def nonfinite(system: System, drawn: tuple[StepCase, float]) -> None:
    """One non-finite gradient on one rank: every rank skips the step, or none does."""
    (case, setup, groups), bad = drawn
    state = case.params, case.opt_state
    groups = [[with_float_targets(part) for part in group] for group in groups]
    microbatches = [part for group in groups for part in group]
    part = next(part for part in microbatches if part["w"].any())
    token = int(part["w"].flatten().nonzero()[0])
    part["y"].view(-1)[token] = bad

    params, opt_state, metrics = take_step(
        system, setup, state, groups, case.loss_fn, case.recipe
    )

    skipped = setup.settings["on_nonfinite"] == "skip"
    assert not metrics.grad_norm.isfinite()
    assert metrics.applied == (not skipped)
    if skipped:
        assert_same((params, opt_state), state)
    else:
        assert not is_finite(params)


NO_TOKENS = st.just(0.0)
ENSEMBLES = steps(axes=["one"], on_nonfinite="skip", donate=False)


@theorem("T7", st.tuples(ENSEMBLES, NO_TOKENS | NONFINITE))
def ensembles_that_skip(system: System, drawn: tuple[StepCase, float]) -> None:
    """Of an ensemble, those members alone step whose group says so; 0 stands for no tokens."""
    step_case, bad = drawn
    case, _, _ = step_case
    step = make_step(system, step_case)
    batch = with_float_targets(case.batch)
    idle = {**batch, "y": batch["y"] * bad} if bad else without_weights(batch)
    state = case.params, case.opt_state
    states = stack_trees([state, state])

    try:
        *ensemble, metrics = torch.vmap(step)(*states, [stack_trees([batch, idle])])
        *alone, metrics_alone = step(*state, [batch])
    except RuntimeError as error:
        raise AssertionError("the step keeps something of an earlier call") from error

    first = tree.map(lambda leaf: leaf[0], ensemble)
    second = tree.map(lambda leaf: leaf[1], ensemble)
    assert_same(first, alone)
    assert_same(second, [*state])
    assert metrics.applied.tolist() == [bool(metrics_alone.applied), False]


globals().update(as_tests(globals()))
