"""T3, order. No permutation of sequences, microbatches or ranks changes the step."""

from proofs.ranks import check_step, step_of
from proofs.strategies import (
    Chooser,
    Drawn,
    Groups,
    assert_same,
    drawn,
    groups_of,
    step_case,
)
from proofs.theorem import System, as_tests, theorem


def order_case(choose: Chooser) -> tuple[Drawn, Groups]:
    """A group on ranks, and its rows in another order, over other ranks and microbatches."""
    step = step_case(choose, padded=False)
    return step, groups_of(choose, step[0], padded=False)


@theorem("T3", drawn(order_case))
def order_invariance(system: System, drawn: tuple[Drawn, Groups]) -> None:
    """Rows, microbatches and ranks in another order: the same state and metrics, to the bit."""
    (case, how, groups), other = drawn
    *expected, metrics = check_step(system, how, case, groups)
    state = case.params, case.opt_state
    *actual, others = step_of(system, how, state, other, case.loss_fn, case.recipe)
    assert_same(actual, expected)
    held = others._replace(num_microbatches=metrics.num_microbatches)
    assert_same(held, metrics, "metrics")


globals().update(as_tests(globals()))
