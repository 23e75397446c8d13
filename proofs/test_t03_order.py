"""T3, order. No permutation of sequences, microbatches or ranks changes the step."""

from hypothesis import strategies as st

from proofs.strategies import Drawn, Groups, assert_same, check_step, groups_of, steps
from proofs.theorem import System, theorem


@st.composite
def order_cases(draw: st.DrawFn) -> tuple[Drawn, Groups]:
    """A group on ranks, and its rows in another order, over other ranks and microbatches."""
    case, how, groups = draw(steps(padded=False))
    return (case, how, groups), draw(groups_of(case, padded=False))


@theorem("T3", order_cases())
def order_invariance(system: System, drawn: tuple[Drawn, Groups]) -> None:
    """Rows, microbatches and ranks in another order: the same state and metrics, to the bit."""
    (case, how, groups), other = drawn
    *expected, metrics = check_step(system, how, case, groups)
    *actual, others = check_step(system, how, case, other)
    assert_same(actual, expected)
    held = others._replace(num_microbatches=metrics.num_microbatches)
    assert_same(held, metrics, "metrics")


test_order_invariance = order_invariance.test()
