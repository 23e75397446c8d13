"""T2, ranks. Any assignment of the group to ranks gives the step of the single large batch.

Ranks may be uneven or hold nothing at all. What comes out is the same on every rank, metrics included, and
the number of collectives does not depend on the number of microbatches.
"""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import purestep as ps
from proofs import models
from proofs.ranks import (
    check_context_parallel,
    check_metrics,
    check_step,
    check_within_bound,
    loss_with_aux,
    number_with_tokens,
    step_of,
)
from proofs.strategies import (
    CAPTURE,
    Batch,
    Case,
    Drawn,
    RealDrawn,
    assert_same,
    case_of,
    drawn,
    ignored_like,
    real_steps,
    steps,
    weights_of,
)
from proofs.theorem import System, theorem
from proofs.worlds import on_threads
from purestep import tree
from purestep.testing.strategies import taken

RANKS: Any = {"axes": ("simulated", "threads"), "ranks": (2, 3, 4)}
GRID: Any = {
    "axes": ["threads"],
    "ranks": [2],
    "padded": False,
    "scalars": False,
    "accum_dtype": None,
}
"""Two rows, whose ranks share out what a row holds."""


@theorem("T2", steps(**RANKS))
def rank_invariance(system: System, drawn: Drawn) -> None:
    """The state, the loss, the norm and the counts are those of the one big batch, to the bit."""
    case, how, groups = drawn
    check_step(system, how, case, groups)


def loss_with_terms(params: Any, batch: Batch) -> ps.LossTerms:
    """The losses of the microbatch are a term of it, too."""
    made = loss_with_aux(params, batch)
    return ps.LossTerms(made.tokens, microbatch=made.aux["sum"][0], aux=made.aux)


@theorem("T2", steps(**RANKS, dtypes=[torch.float64], grids=[(0, 1)], normalize="loss"))
def rank_terms(system: System, drawn: Drawn) -> None:
    """A term of the microbatch is averaged over the group's non-empty microbatches, whoever holds them."""
    case, how, groups = drawn
    ignored = ignored_like(case, taken(case.batch, [0]))
    groups = [group or [ignored] for group in groups]
    flat = [part for group in groups for part in group]
    state = case.params, tree.zeros_like(case.params)
    _, grads, metrics = step_of(system, how, state, groups, loss_with_terms, CAPTURE)
    one = system.make_update_step(loss_with_terms, CAPTURE, weight_fn=weights_of)
    _, expected, alone = one(*state, flat)
    assert metrics.num_microbatches == number_with_tokens(groups)
    assert_same(metrics.aux, alone.aux, "aux")
    if int(metrics.num_microbatches).bit_count() == 1:
        assert_same((grads, metrics.loss), (expected, alone.loss), "(grads, loss)")


@theorem("T2", real_steps(**RANKS))
def ranks_within_bound(system: System, drawn: RealDrawn) -> None:
    """For the transformer: the exact gradient, but for rounding."""
    check_within_bound(system, drawn)


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


@theorem("T2", st.tuples(drawn(case_of), st.integers(2, 9)))
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


OWN: Any = {"axes": ["threads"], "ranks": (2, 3, 4), "gathers": [""]}


@theorem("T2", steps(**OWN, grad_and_value=ps.grad_and_value))
def separate_ranks(system: System, drawn: Drawn) -> None:
    """Ranks that run programs of their own, whose sums leave in buckets: all metrics, and evaluation, on each."""
    check_metrics(system, drawn)


@theorem("T2", steps(**GRID, dtypes=[torch.float64]))
def context_parallel(system: System, drawn: Drawn) -> None:
    """Sequences split over a second dimension of the mesh: their tokens count there too."""
    check_context_parallel(on_threads, drawn)


test_rank_invariance = rank_invariance.test()
test_rank_terms = rank_terms.test()
test_ranks_within_bound = ranks_within_bound.test()
test_traffic = traffic.test()
test_separate_ranks = separate_ranks.test()
test_context_parallel = context_parallel.test()
