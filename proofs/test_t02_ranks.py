"""T2, ranks. Any assignment of the group to ranks gives the step of the single large batch.

Ranks may be uneven or hold nothing at all. What comes out is the same on every rank, metrics included, and
the number of collectives does not depend on the number of microbatches.
"""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import purestep as ps
from proofs import models, test_t01_cut as t01
from proofs.ranks import check_context_parallel, check_metrics, check_step
from proofs.strategies import Case, Drawn, case_of, drawn, real_steps, steps, weights_of
from proofs.theorem import System, as_tests, theorem
from proofs.worlds import on_threads
from purestep import tree

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


WITH_TERMS = steps(**RANKS, dtypes=[torch.float64], grids=[(0, 1)], normalize="loss")
rank_terms = theorem("T2", WITH_TERMS)(t01.terms.claim)


REAL = st.tuples(real_steps(**RANKS), t01.SCALES)
ranks_within_bound = theorem("T2", REAL)(t01.cut_within_bound.claim)


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
        how: Any = {"weight_fn": weights_of, "axis": axis}
        step = system.make_update_step(models.integer_loss, case.optimizer, **how)
        step(case.params, case.opt_state, group)
        calls.append(axis.calls)
    assert calls[0] == calls[1], "the collectives follow the number of microbatches"
    elements = sum(numel for _, numel in calls[0])
    assert elements == sum(leaf.numel() for leaf in tree.leaves(case.params)) + 5


OWN: Any = {"axes": ["threads"], "ranks": (2, 3, 4), "gathers": [""]}


@theorem("T2", steps(**OWN, grad_and_value=ps.grad_and_value))
def separate_ranks(system: System, drawn: Drawn) -> None:
    """Ranks that run programs of their own, whose sums leave in buckets: all metrics, and evaluation, on each."""
    check_metrics(system, drawn)


@theorem("T2", steps(**GRID, dtypes=[torch.float64]))
def context_parallel(system: System, drawn: Drawn) -> None:
    """Sequences split over a second dimension of the mesh: their tokens count there too."""
    check_context_parallel(on_threads, drawn)


globals().update(as_tests(globals()))
