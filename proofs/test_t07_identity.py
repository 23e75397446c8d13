"""T7, identity. Without tokens, or where a non-finite step is skipped, the state comes back bitwise.

Parameters, moments and step counter alike; ``applied`` says so, on every rank the same.
"""

import torch
from hypothesis import strategies as st

from proofs.ranks import step_of
from proofs.strategies import Drawn, Groups, assert_same, stack, steps, weights_of
from proofs.theorem import System, as_tests, theorem
from purestep import tree


def times(groups: Groups, name: str, factor: float) -> Groups:
    """The same groups, all values of this name multiplied; 0 stands for none at all."""

    def multiplied(leaf: torch.Tensor) -> torch.Tensor:
        return leaf * factor if factor else torch.zeros_like(leaf)

    return [
        [{**part, name: multiplied(part[name])} for part in group] for group in groups
    ]


def with_floats(groups: Groups) -> Groups:
    """The same, with targets that can be infinite; copies, which may be written to."""
    return [
        [{**m, "y": m["y"].to(m["x"].dtype, copy=True)} for m in group]
        for group in groups
    ]


@theorem("T7", st.tuples(steps(), st.booleans()))
def no_tokens(system: System, drawn: tuple[Drawn, bool]) -> None:
    """N = 0, with ignored microbatches or with none at all, is the identity."""
    (case, how, groups), none = drawn
    state = case.params, case.opt_state
    groups = (
        [[] for _ in groups]
        if none and how.axis != "simulated"
        else times(groups, "w", 0)
    )
    *new, metrics = step_of(system, how, state, groups, case.loss_fn, case.recipe)
    assert_same(tuple(new), state)
    assert not metrics.applied
    assert metrics.loss == metrics.num_tokens == metrics.num_microbatches == 0


BAD = st.sampled_from([float("nan"), float("inf")])


@theorem("T7", st.tuples(steps(), BAD))
def nonfinite(system: System, drawn: tuple[Drawn, float]) -> None:
    """One non-finite gradient on one rank: every rank skips the step, or none does."""
    (case, how, groups), bad = drawn
    state = case.params, case.opt_state
    groups = with_floats(groups)
    part = next(part for group in groups for part in group if part["w"].any())
    part["y"].view(-1)[int(part["w"].flatten().nonzero()[0])] = bad
    *new, metrics = step_of(system, how, state, groups, case.loss_fn, case.recipe)
    assert not metrics.grad_norm.isfinite()
    skipped = how.settings["on_nonfinite"] == "skip"
    assert metrics.applied == (not skipped)
    if skipped:
        assert_same(tuple(new), state)
    else:
        assert not all(bool(leaf.isfinite().all()) for leaf in tree.leaves(new[0]))


@theorem("T7", st.tuples(steps(axes=["one"], on_nonfinite="skip"), st.just(0.0) | BAD))
def ensembles(system: System, drawn: tuple[Drawn, float]) -> None:
    """Of an ensemble, those members alone step whose group says so; 0 stands for no tokens."""
    (case, how, _), bad = drawn
    step = system.make_update_step(
        case.loss_fn,
        case.optimizer,
        weight_fn=weights_of,
        **{**how.settings, "donate": False},
    )
    ((batch,),) = with_floats([[case.batch]])
    ((idle,),) = times([[batch]], "y" if bad else "w", bad)
    state = case.params, case.opt_state
    both = tree.map(lambda leaf: torch.stack([leaf, leaf]), state)
    try:
        *together, metrics = torch.vmap(step)(*both, [stack([batch, idle])])
        *alone, metrics_alone = step(*state, [batch])
    except RuntimeError as error:
        raise AssertionError("the step keeps something of an earlier call") from error
    assert_same(tree.map(lambda leaf: leaf[0], tuple(together)), tuple(alone))
    assert_same(tree.map(lambda leaf: leaf[1], tuple(together)), state)
    assert metrics.applied.tolist() == [bool(metrics_alone.applied), False]


globals().update(as_tests(globals()))
