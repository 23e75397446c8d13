"""T2, ranks. Any assignment of the group to ranks gives the step of the single large batch.

Ranks may be uneven or hold nothing at all. What comes out is the same on every rank, metrics included, and
the number of collectives does not depend on the number of microbatches.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import purestep as ps
from proofs import models
from proofs.ranks import ShareCase, check_context_parallel, check_ranks, share_cases
from proofs.strategies import (
    DTYPES,
    Batch,
    Case,
    How,
    RealCase,
    assert_same,
    assignments,
    capture,
    cases,
    check_step,
    cut,
    groups_of,
    hows,
    real_cases,
    simulate,
    stack,
    weights_of,
)
from proofs.theorem import System, theorem
from proofs.worlds import on_threads
from purestep import tree
from purestep.testing.strategies import cuts


@st.composite
def rank_cases(draw: st.DrawFn) -> tuple[Case, int, list[Batch]]:
    """A case, a number of ranks, and microbatches with a leading dimension of ranks."""
    case = draw(cases())
    assignment = draw(assignments(case.rows))
    return case, len(assignment), simulate(case, assignment)


def on_ranks(
    system: System,
    size: int,
    params: Any,
    opt_state: Any,
    group: list[Batch],
    *how: Any,
    **settings: Any,
) -> Any:
    """One step on ``size`` simulated ranks; ranks that disagree are a failure of the claim."""
    axis = ps.VmapAxis(size)
    step = system.make_update_step(*how, axis=axis, **settings)
    try:
        return axis.map(step, in_dims=(None, None, 0), out_dims=None)(params, opt_state, group)
    except ValueError as error:
        raise AssertionError("the ranks end up in different states") from error


@st.composite
def group_cases(draw: st.DrawFn) -> tuple[Case, How, list[list[Batch]]]:
    """A case in any dtype, on simulated ranks or threads, in pieces or not, and what each rank holds."""
    case = draw(cases(dtypes=DTYPES))
    return case, draw(hows(axes=("simulated", "threads"))), draw(groups_of(case))


@theorem("T2", group_cases())
def rank_invariance(system: System, drawn: tuple[Case, How, list[list[Batch]]]) -> None:
    """The state, the loss, the norm and the counts are those of the one big batch, to the bit."""
    case, how, groups = drawn
    check_step(system, how, case, groups)


@theorem("T2", rank_cases())
def rank_terms(system: System, drawn: tuple[Case, int, list[Batch]]) -> None:
    """A term of the microbatch is averaged over the group's non-empty microbatches, whoever holds them."""
    case, size, group = drawn

    def loss_fn(params: Any, batch: Batch) -> ps.LossTerms:
        losses = models.integer_loss(params, batch)
        return ps.LossTerms(losses, microbatch=losses.sum(), aux={"sum": losses.sum()})

    how, weights = (loss_fn, capture()), {"weight_fn": weights_of}
    flat = [tree.map(lambda x, r=rank: x[r], part) for part in group for rank in range(size)]
    state = case.params, tree.zeros_like(case.params)
    _, grads, metrics = on_ranks(system, size, *state, group, *how, **weights)
    _, expected, alone = system.make_update_step(*how, **weights)(*state, flat)
    assert metrics.num_microbatches == sum(bool(part["w"].sum() > 0) for part in flat)
    assert_same(metrics.aux, alone.aux, "aux")
    if int(metrics.num_microbatches).bit_count() == 1:
        assert_same((grads, metrics.loss), (expected, alone.loss), "(grads, loss)")


@st.composite
def real_rank_cases(draw: st.DrawFn) -> tuple[RealCase, int, list[Batch]]:
    """Real text over up to four ranks, each with the same rows but its own share of the weights."""
    case = draw(real_cases([torch.float64, torch.float32]))
    size = draw(st.integers(1, 4))
    owner = draw(st.lists(st.integers(0, size - 1), min_size=case.rows, max_size=case.rows))
    mine = torch.tensor(owner)
    parts = [
        {**case.batch, "labels": case.batch["labels"].masked_fill((mine != rank)[:, None], -100)}
        for rank in range(size)
    ]
    cut_ = draw(cuts(case.rows, 3))
    per_rank = [cut(part, cut_) for part in parts]
    return case, size, [stack([rank[k] for rank in per_rank]) for k in range(len(cut_))]


@theorem("T2", real_rank_cases())
def ranks_within_bound(system: System, drawn: tuple[RealCase, int, list[Batch]]) -> None:
    """For the transformer: the exact gradient, but for rounding."""
    case, size, group = drawn
    _, grads, metrics = on_ranks(
        system, size, case.params, tree.zeros_like(case.params), group,
        models.transformer_loss, capture(),
    )  # fmt: skip
    case.assert_within_bound(grads, extra_roundings=size * len(group))
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
    """Ranks that run programs of their own, with microbatches as they come: the same, to the bit, on each."""
    case, share, bucket_bytes, settings = drawn
    groups = [cut(case.batch, rank) for rank in share]
    check_ranks(on_threads, system, case, groups, bucket_bytes, settings)


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
