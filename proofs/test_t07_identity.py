"""T7, identity. Without tokens, or where a non-finite step is skipped, the state comes back bitwise.

Parameters, moments and step counter alike; ``applied`` tells, on every rank the same, and the steps after it
are those of a run in which it never was.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from proofs import models
from proofs.strategies import (
    Batch,
    Case,
    assert_same,
    assignments,
    cases,
    simulate,
    stack,
    weights_of,
)
from proofs.test_t02_ranks import on_ranks
from proofs.theorem import System, theorem
from purestep import tree

Drawn = tuple[Case, int, list[Batch], dict[str, Any]]

SETTINGS: list[dict[str, Any]] = [
    {"normalize": normalize, "on_nonfinite": on_nonfinite}
    for normalize in ("loss", "grads")
    for on_nonfinite in ("propagate", "skip")
]


@st.composite
def identity_cases(draw: st.DrawFn) -> Drawn:
    """A group on ranks, and settings."""
    case = draw(cases())
    assignment = draw(assignments(case.rows))
    return case, len(assignment), simulate(case, assignment), draw(st.sampled_from(SETTINGS))


@theorem("T7", identity_cases())
def no_tokens(system: System, drawn: Drawn) -> None:
    """N = 0, with ignored microbatches or with none at all, is the identity."""
    case, size, group, settings = drawn
    empty = [{**part, "w": torch.zeros_like(part["w"])} for part in group]
    state = (case.params, case.opt_state)
    *new, metrics = on_ranks(
        system, size, *state, empty, models.integer_loss, case.optimizer,
        weight_fn=weights_of, **settings,
    )  # fmt: skip
    assert_same(tuple(new), state)
    assert not metrics.applied
    assert metrics.loss == 0
    assert metrics.num_tokens == metrics.num_microbatches == 0
    step = system.make_update_step(
        models.integer_loss, case.optimizer, weight_fn=weights_of, **settings
    )
    *new, metrics = step(*state, [])
    assert_same(tuple(new), state)
    assert not metrics.applied
    assert metrics.loss == 0


@theorem("T7", st.tuples(identity_cases(), st.sampled_from([float("nan"), float("inf")])))
def nonfinite(system: System, drawn: tuple[Drawn, float]) -> None:
    """One non-finite gradient on one rank: every rank skips the step, or none does."""
    (case, size, group, settings), bad = drawn
    state = (case.params, case.opt_state)
    poisoned = [{**part, "y": part["y"].clone()} for part in group]
    rank, where = next(
        (k, tuple(part["w"].nonzero()[0])) for k, part in enumerate(group) if part["w"].any()
    )
    poisoned[rank]["y"][where] = bad
    *new, metrics = on_ranks(
        system, size, *state, poisoned, models.integer_loss, case.optimizer,
        weight_fn=weights_of, **settings,
    )  # fmt: skip
    finite = bool(torch.isfinite(metrics.grad_norm))
    skipped = settings["on_nonfinite"] == "skip" and not finite
    assert metrics.applied == (not skipped)
    if skipped:
        assert_same(tuple(new), state)
    elif not finite:
        assert not all(bool(leaf.isfinite().all()) for leaf in tree.leaves_of(new[0]))


@theorem("T7", identity_cases())
def as_if_it_never_was(system: System, drawn: Drawn) -> None:
    """good, bad, empty, good: the state of good, good."""
    case, size, group, settings = drawn

    def run(*groups: list[Batch]) -> Any:
        state: Any = (case.params, case.opt_state)
        for one in groups:
            *state_, _ = on_ranks(
                system, size, *state, one, models.integer_loss, case.optimizer,
                weight_fn=weights_of, **{**settings, "on_nonfinite": "skip"},
            )  # fmt: skip
            state = tuple(state_)
        return state

    bad = [{**part, "x": part["x"] * float("nan")} for part in group]
    empty = [{**part, "w": torch.zeros_like(part["w"])} for part in group]
    assert_same(run(group, bad, empty, group), run(group, group))


@theorem(
    "T7",
    st.tuples(
        cases(), st.sampled_from(SETTINGS), st.sampled_from([0.0, float("nan"), float("inf")])
    ),
)
def ensembles(system: System, drawn: tuple[Case, dict[str, Any], float]) -> None:
    """Of an ensemble, those members alone step whose own group says so; 0 stands for no tokens."""
    case, settings, bad = drawn
    step = system.make_update_step(
        models.integer_loss,
        case.optimizer,
        weight_fn=weights_of,
        **{**settings, "on_nonfinite": "skip"},
    )
    good, name = case.batch, "y" if bad else "w"
    idle = {**good, name: good[name] * bad if bad else torch.zeros_like(good[name])}
    state = (case.params, case.opt_state)
    both = tree.map(lambda leaf: torch.stack([leaf, leaf]), state)
    try:
        *together, metrics = torch.vmap(step)(*both, [stack([good, idle])])
        *alone, metrics_alone = step(*state, [good])
    except RuntimeError as error:
        raise AssertionError("the step keeps something of an earlier call") from error
    assert_same(tree.map(lambda leaf: leaf[0], tuple(together)), tuple(alone))
    assert_same(tree.map(lambda leaf: leaf[1], tuple(together)), state)
    assert metrics.applied.tolist() == [bool(metrics_alone.applied), False]


test_ensembles = ensembles.test()
test_no_tokens = no_tokens.test()
test_nonfinite = nonfinite.test()
test_as_if_it_never_was = as_if_it_never_was.test()
