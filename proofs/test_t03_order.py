"""T3, order. No permutation of sequences, microbatches or ranks changes the step."""

from support.ranks import check_step, take_step
from support.strategies import (
    Chooser,
    Groups,
    StepCase,
    assert_same,
    builds,
    make_groups,
    make_step_case,
)
from support.theorem import System, as_tests, theorem


def make_reordered_case(choose: Chooser) -> tuple[StepCase, Groups]:
    """Makes a group on ranks, and its rows in another order, over other ranks and microbatches."""
    step = make_step_case(choose, padded=False)
    case, _, _ = step
    return step, make_groups(choose, case, padded=False)


@theorem("T3", builds(make_reordered_case))
def order_invariance(system: System, drawn: tuple[StepCase, Groups]) -> None:
    """Checks that rows in another order, cut and share give the same state and metrics, to the bit.

    The number of microbatches may differ.
    """
    (case, setup, groups), reordered = drawn
    *expected, metrics = check_step(system, setup, case, groups)
    state = case.params, case.opt_state
    *actual, reordered_metrics = take_step(
        system, setup, state, reordered, case.loss_fn, case.recipe
    )
    assert_same(actual, expected)
    # The number of microbatches is what another cut changes.
    same_cut = reordered_metrics._replace(num_microbatches=metrics.num_microbatches)
    assert_same(same_cut, metrics, "metrics")


globals().update(as_tests(globals()))
