"""T2, ranks. Any assignment of the group to ranks gives the step of the single large batch.

    update_step(θ, s, group of rank r)ᵣ = spec(θ, s, all groups)      on every rank r

Ranks may be uneven or have no tokens at all. The result is the same on every rank, metrics included, and
the number of collectives does not depend on the number of microbatches.
"""

from typing import Any

import torch
from hypothesis import strategies as st

import purestep as ps
from proofs import test_t01_cut as t01
from purestep import tree
from support import models
from support.counting_axis import CountingAxis
from support.ranks import check_context_parallel, check_metrics, check_step
from support.strategies import Case, StepCase, builds, get_weights, make_case, steps
from support.texts import real_steps
from support.theorem import System, as_tests, theorem
from support.worlds import on_threads

RANKS: Any = {"axes": ("simulated", "threads"), "ranks": (2, 3, 4)}
GRID: Any = {
    "axes": ["threads"],
    "ranks": [2],
    "padded": False,
    "scalars": False,
    "accum_dtype": None,
}
"""Two rows, whose ranks split their row's tokens among them."""


@theorem("T2", steps(**RANKS))
def rank_invariance(system: System, drawn: StepCase) -> None:
    """Checks that state, loss and counts are the big batch's to the bit.

    The norm is the same but for rounding.
    """
    case, setup, groups = drawn
    check_step(system, setup, case, groups)


STEPS_WITH_TERMS = steps(
    **RANKS,
    dtypes=[torch.float64],
    grids=[(0, 1)],
    normalize="loss",
)
rank_terms = theorem("T2", STEPS_WITH_TERMS)(t01.terms.claim)


SCALED_TEXTS = st.tuples(real_steps(**RANKS), t01.SCALES)
ranks_within_bound = theorem("T2", SCALED_TEXTS)(t01.cut_within_bound.claim)


@theorem("T2", st.tuples(builds(make_case), st.integers(2, 9)))
def traffic(system: System, drawn: tuple[Case, int]) -> None:
    """Whatever the number of microbatches, the same collectives run, and each gradient in one of them."""
    case, repeats = drawn

    def count_calls(group: list[Any]) -> list[tuple[str, int]]:
        axis = CountingAxis()
        step = system.make_update_step(
            models.integer_loss,
            case.optimizer,
            weight_fn=get_weights,
            axis=axis,
        )
        step(case.params, case.opt_state, group)
        return axis.calls

    calls = count_calls([case.batch])
    assert calls == count_calls([case.batch] * repeats), (
        "the collectives follow the number of microbatches"
    )
    sent = sum(numel for _, numel in calls)
    # The other five are scalars, such as counts and the loss.
    assert sent == sum(leaf.numel() for leaf in tree.leaves(case.params)) + 5


SEPARATE_RANKS: Any = {"axes": ["threads"], "ranks": (2, 3, 4), "gathers": [""]}


@theorem("T2", steps(**SEPARATE_RANKS, grad_and_value=ps.grad_and_value))
def separate_ranks(system: System, drawn: StepCase) -> None:
    """Ranks that run separate programs, and reduce sums in buckets: all metrics, and evaluation, on each."""
    check_metrics(system, drawn)


@theorem("T2", steps(**GRID, dtypes=[torch.float64]))
def context_parallel(system: System, drawn: StepCase) -> None:
    """Sequences split over a second dimension of the mesh: their tokens count there too."""
    check_context_parallel(on_threads, drawn)


globals().update(as_tests(globals()))
