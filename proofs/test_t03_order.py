"""T3, order. No permutation of sequences, microbatches or ranks changes the step."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from proofs import models
from proofs.ranks import ShareCase, check_ranks, share_cases, shuffled
from proofs.strategies import (
    Batch,
    Case,
    RealCase,
    assert_same,
    assignments,
    capture,
    cases,
    cut,
    real_cases,
    simulate,
    weights_of,
)
from proofs.test_t02_ranks import on_ranks
from proofs.theorem import System, theorem
from proofs.worlds import on_threads
from purestep import tree
from purestep.testing.strategies import Cut, cuts


@st.composite
def order_cases(draw: st.DrawFn) -> tuple[Case, list[Cut], list[Cut]]:
    """An assignment to ranks, and the same with ranks, their microbatches and the rows in them shuffled."""
    case = draw(cases())
    assignment = draw(assignments(case.rows))
    shuffled = [
        [draw(st.permutations(rows)) for rows in draw(st.permutations(rank))]
        for rank in draw(st.permutations(assignment))
    ]
    return case, assignment, shuffled


@theorem("T3", order_cases())
def order_invariance(system: System, drawn: tuple[Case, list[Cut], list[Cut]]) -> None:
    """Rows, microbatches and ranks in another order: the same state and metrics, to the bit."""
    case, *orders = drawn
    results = [
        on_ranks(
            system, len(order), case.params, case.opt_state, simulate(case, order),
            models.integer_loss, case.optimizer, weight_fn=weights_of,
        )
        for order in orders
    ]  # fmt: skip
    assert_same(results[1][:2], results[0][:2])
    assert_same(results[1][2], results[0][2], "metrics")


@st.composite
def real_order_cases(draw: st.DrawFn) -> tuple[RealCase, list[Batch]]:
    """Real text, its rows permuted and cut."""
    case = draw(real_cases([torch.float64, torch.float32, torch.bfloat16]))
    order = draw(st.permutations(range(case.rows)))
    parts = draw(cuts(case.rows))
    return case, cut(case.batch, [[order[i] for i in rows] for rows in parts])


@theorem("T3", real_order_cases())
def order_within_bound(system: System, drawn: tuple[RealCase, list[Batch]]) -> None:
    """For the transformer: the exact gradient, but for rounding."""
    case, microbatches = drawn
    step = system.make_update_step(models.transformer_loss, capture())
    _, grads, _ = step(case.params, tree.zeros_like(case.params), microbatches)
    case.assert_within_bound(grads)


@theorem("T3", st.tuples(share_cases(), st.integers(0, 99)))
def order_of_separate_ranks(system: System, drawn: tuple[ShareCase, int]) -> None:
    """The same where every rank has its own program."""
    (case, share, bucket_bytes, settings), seed = drawn
    groups = shuffled(case, share, seed)
    check_ranks(on_threads, system, case, groups, bucket_bytes, settings)


test_order_invariance = order_invariance.test()
test_order_within_bound = order_within_bound.test()
test_order_of_separate_ranks = order_of_separate_ranks.test()
