"""T3, order. No permutation of sequences, microbatches or ranks changes the step."""

from __future__ import annotations

from hypothesis import strategies as st

from proofs.strategies import (
    DTYPES,
    Batch,
    Case,
    How,
    assert_same,
    cases,
    check_step,
    groups_of,
    hows,
    step_of,
)
from proofs.theorem import System, theorem

Groups = list[list[Batch]]


@st.composite
def order_cases(draw: st.DrawFn) -> tuple[Case, How, Groups, Groups]:
    """A group on ranks, and the same with ranks, their microbatches and the rows shuffled."""
    case = draw(cases(dtypes=DTYPES))
    groups = draw(groups_of(case, padded=False))
    other = [draw(st.permutations(group)) for group in draw(st.permutations(groups))]
    for group in other:
        for number, part in enumerate(group):
            if part["w"].ndim:
                rows = draw(st.permutations(range(len(part["w"]))))
                group[number] = {key: leaf[rows] for key, leaf in part.items()}
    return case, draw(hows()), groups, other


@theorem("T3", order_cases())
def order_invariance(system: System, drawn: tuple[Case, How, Groups, Groups]) -> None:
    """Rows, microbatches and ranks in another order: the same state and metrics, to the bit."""
    case, how, groups, other = drawn
    expected = check_step(system, how, case, groups)
    state = case.params, case.opt_state
    actual = step_of(system, how, state, other, case.loss_fn, case.optimizer)
    assert_same(actual[:2], expected[:2])
    assert_same(actual[2], expected[2], "metrics")


test_order_invariance = order_invariance.test()
