"""T2, ranks. Any assignment of the group to ranks gives the step of the single large batch.

Ranks may be uneven or hold nothing at all. What comes out is the same on every rank, metrics included, and
the number of collectives does not depend on the number of microbatches.
"""

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import purestep as ps
from proofs import models
from proofs.ranks import (
    ShareCase,
    check_context_parallel,
    check_ranks,
    loss_with_aux,
    share_cases,
)
from proofs.strategies import (
    DTYPES,
    Batch,
    Case,
    How,
    RealCase,
    assert_same,
    capture,
    cases,
    check_step,
    cut,
    groups_of,
    hows,
    ignored_like,
    real_cases,
    shares,
    step_of,
    weights_of,
)
from proofs.theorem import System, theorem
from proofs.worlds import on_threads
from proofs.writings import taken
from purestep import tree

Groups = list[list[Batch]]
RANKS: Any = {"axes": ("simulated", "threads")}


@st.composite
def group_cases(
    draw: st.DrawFn, /, dtypes: Sequence[torch.dtype] = DTYPES, **fixed: Any
) -> tuple[Case, How, Groups]:
    """A case, on simulated ranks or threads, in pieces or not, and what each rank holds of it."""
    case = draw(cases(dtypes=dtypes))
    return case, draw(hows(**RANKS, **fixed)), draw(groups_of(case))


@theorem("T2", group_cases())
def rank_invariance(system: System, drawn: tuple[Case, How, Groups]) -> None:
    """The state, the loss, the norm and the counts are those of the one big batch, to the bit."""
    case, how, groups = drawn
    check_step(system, how, case, groups)


def loss_with_terms(params: Any, batch: Batch) -> ps.LossTerms:
    """The losses of the microbatch are a term of it, too."""
    made = loss_with_aux(params, batch)
    return ps.LossTerms(made.tokens, microbatch=made.aux["sum"][0], aux=made.aux)


@theorem("T2", group_cases([torch.float64], normalize="loss"))
def rank_terms(system: System, drawn: tuple[Case, How, Groups]) -> None:
    """A term of the microbatch is averaged over the group's non-empty microbatches, whoever holds them."""
    case, how, groups = drawn
    ignored = ignored_like(case, taken(case.batch, [0]))
    groups = [group or [ignored] for group in groups]
    flat = [part for group in groups for part in group]
    state = case.params, tree.zeros_like(case.params)
    _, grads, metrics = step_of(system, how, state, groups, loss_with_terms, capture())
    one = system.make_update_step(loss_with_terms, capture(), weight_fn=weights_of)
    _, expected, alone = one(*state, flat)
    assert metrics.num_microbatches == sum(bool(part["w"].any()) for part in flat)
    assert_same(metrics.aux, alone.aux, "aux")
    if int(metrics.num_microbatches).bit_count() == 1:
        assert_same((grads, metrics.loss), (expected, alone.loss), "(grads, loss)")


@st.composite
def real_group_cases(draw: st.DrawFn) -> tuple[RealCase, How, Groups]:
    """Real text over up to four ranks."""
    case = draw(real_cases([torch.float64, torch.float32]))
    share = [[rows for rows in rank if rows] for rank in draw(shares(case.rows))]
    return case, draw(hows(**RANKS)), [cut(case.batch, rank) for rank in share]


@theorem("T2", real_group_cases())
def ranks_within_bound(system: System, drawn: tuple[RealCase, How, Groups]) -> None:
    """For the transformer: the exact gradient, but for rounding."""
    case, how, groups = drawn
    state = case.params, tree.zeros_like(case.params)
    _, grads, metrics = step_of(system, how, state, groups, models.transformer_loss, capture())
    case.assert_within_bound(grads, extra_roundings=sum(map(len, groups)))
    case.assert_loss_within_bound(metrics.loss)


class CountingAxis(ps.LocalAxis):
    """One rank that counts the calls of each collective, with their sizes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def apply(self, law: str, x: Tensor) -> Tensor:
        """The law, counted with its size."""
        if law != "pvary":
            self.calls.append((law, x.numel()))
        return super().apply(law, x)

    def apply_tree(self, law: str, x: Any) -> Any:
        """The law of each leaf."""
        return tree.map(lambda leaf: self.apply(law, leaf), x)


@theorem("T2", st.tuples(cases(), st.integers(1, 8)))
def traffic(system: System, drawn: tuple[Case, int]) -> None:
    """Whatever the number of microbatches, the same collectives run, and each gradient in one of them."""
    case, repeats = drawn
    calls = []
    for group in [[case.batch], [case.batch] * repeats]:
        axis = CountingAxis()
        step = system.make_update_step(
            models.integer_loss, case.optimizer, weight_fn=weights_of, axis=axis
        )
        step(case.params, case.opt_state, group)
        calls.append(axis.calls)
    assert calls[0] == calls[1], "the collectives follow the number of microbatches"
    elements = sum(numel for _, numel in calls[0])
    assert elements == sum(leaf.numel() for leaf in tree.leaves_of(case.params)) + 5


@theorem("T2", share_cases())
def separate_ranks(system: System, drawn: ShareCase) -> None:
    """Ranks that run programs of their own: all metrics, evaluation and the order in memory, too, on each."""
    case, share, *_ = drawn
    groups = [cut(case.batch, rank) for rank in share]
    check_ranks(on_threads, system, case, groups, *drawn[2:])


@theorem("T2", share_cases())
def context_parallel(system: System, drawn: ShareCase) -> None:
    """Sequences split over a second dimension of the mesh: their tokens count there too."""
    check_context_parallel(on_threads, system, drawn)


test_rank_invariance = rank_invariance.test()
test_rank_terms = rank_terms.test()
test_ranks_within_bound = ranks_within_bound.test()
test_traffic = traffic.test()
test_separate_ranks = separate_ranks.test()
test_context_parallel = context_parallel.test()
