"""T1, cut. Any partition of the group into microbatches gives the step of the single large batch.

    update_step(θ, s, [B₁, ..., B_K]) = spec(θ, s, B₁ ∪ ... ∪ B_K)      for every cut, also into empty parts

Loss, count, norm and aux are those of the large batch too, and evaluation gives the same loss. A
statement about microbatches, ``LossOutput.microbatch_loss``, is not invariant, but averaged over the
non-empty ones.
"""

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import purestep as ps
from proofs import models
from proofs.programs import CLOSED_OVER, PROGRAMS, module_loss
from proofs.ranks import check_step, check_within_bound, loss_with_aux, step_of
from proofs.strategies import (
    AXES,
    CAPTURE,
    Batch,
    Chooser,
    Drawn,
    How,
    RealDrawn,
    assert_same,
    drawn,
    outcome,
    real_steps,
    steps,
    weights_of,
)
from proofs.theorem import System, as_tests, theorem
from purestep import tree
from purestep.testing.bounds import gamma
from purestep.testing.specification import spec

CUT: dict[str, Any] = {"ranks": [1], "shuffled": False, "padded": False}
EXACT: dict[str, Any] = {**CUT, "dtypes": [torch.float64], "trees": True}


@theorem("T1", steps(**CUT))
def cut_invariance(system: System, drawn: Drawn) -> None:
    """The state, the loss, the count and the norm are those of the one big batch, to the bit."""
    case, how, groups = drawn
    *_, metrics = check_step(system, how, case, groups)
    evaluate = system.make_eval_step(case.loss_fn, weight_fn=weights_of)
    assert_same(evaluate(case.params, groups[0]).loss, metrics.loss, "evaluation loss")


def loss_with_terms(params: Any, batch: Batch) -> ps.LossOutput:
    """The losses of the microbatch, their sum as a term of it, and sums for the metrics."""
    made = loss_with_aux(params, batch)
    return made._replace(microbatch_loss=made.aux["sum"][0])


@theorem("T1", steps(**EXACT, axes=["one"], normalize="loss"))
def terms(system: System, drawn: Drawn) -> None:
    """∇[L + (1/M) Σₘ termₘ] over the M non-empty microbatches, whoever holds them, and aux summed over all.

    To the bit where M is a power of two, of which the mean is exact, too.
    """
    case, how, groups = drawn
    ignored = {key: torch.zeros_like(leaf) for key, leaf in case.batch.items()}
    groups = [group or [ignored] for group in groups]
    present = [part for group in groups for part in group if part["w"].any()]

    def loss_of(params: Any) -> torch.Tensor:
        weights = case.batch["w"].to(torch.float64)
        loss = (weights / weights.sum() * models.integer_loss(params, case.batch)).sum()
        extra: list[Any] = [
            loss_with_terms(params, part).microbatch_loss for part in present
        ]
        return loss + torch.stack([term / len(present) for term in extra]).sum()

    grads, loss = torch.func.grad_and_value(loss_of)(case.params)
    state = case.params, tree.zeros_like(case.params)
    _, actual, metrics = step_of(system, how, state, groups, loss_with_terms, CAPTURE)
    if len(present).bit_count() == 1:
        actual = tree.map(lambda grad: grad.to(torch.float64), actual)
        assert_same((actual, metrics.loss), (grads, loss), "(grads, loss)")
    assert metrics.num_microbatches == len(present)
    assert_same(metrics.aux, loss_with_terms(case.params, case.batch).aux, "aux")


SCALES = st.just(1.0) | st.floats(0.01, 100)


@theorem("T1", st.tuples(real_steps(ranks=[1]), SCALES))
def cut_within_bound(system: System, drawn: tuple[RealDrawn, float]) -> None:
    """For the transformer, with weights of any scale: the exact gradient, but for rounding."""
    step, scale = drawn

    def weight_fn(batch: Batch) -> torch.Tensor:
        return batch["w"] if scale == 1.0 else batch["w"].to(step[0].dtype) * scale

    check_within_bound(system, step, weight_fn=weight_fn)


OWN: dict[str, Any] = {
    "grad_and_value": ps.grad_and_value, "axes": ["one", "threads"], "gathers": [""],
}  # fmt: skip
"""What a loss may do to its leaves without a transform around it."""
PROGRAMMED = steps(dtypes=[torch.float64], trees=True, **OWN)


@theorem("T1", st.tuples(PROGRAMMED, drawn(Chooser.sample, [*PROGRAMS], 3)))
def programs(system: System, drawn: tuple[Drawn, list[str]]) -> None:
    """Whatever a loss does beside computing: the step of the big batch, and nothing is recorded."""
    (case, how, groups), names = drawn
    for make, plain in map(PROGRAMS.__getitem__, names):
        CLOSED_OVER.grad = None
        *actual, _ = check_step(system, how, case, groups, make(), plain)
        leaves = tree.leaves((actual, groups))
        assert not any(leaf.requires_grad for leaf in leaves), (
            "a graph came out, or a mark stayed"
        )
        assert CLOSED_OVER.grad is None, (
            ".grad of what the loss closes over was written"
        )


@theorem("T1", st.tuples(steps(**EXACT, **OWN), st.booleans()))
def recomputation(system: System, drawn: tuple[Drawn, bool]) -> None:
    """A checkpoint in a module computes with its forward pass's parameters, or is refused."""
    (case, how, groups), frozen = drawn
    generator = case.generator
    params = {name: models.integers((3, 3), generator) for name in ("first", "second")}
    state = params, tree.zeros_like(params)
    expected, _, _ = spec(
        module_loss(False, frozen), CAPTURE.update, *state, case.batch
    )
    result, refused = outcome(
        lambda: step_of(system, how, state, groups, module_loss(True, frozen), CAPTURE)
    )
    if result is None:
        assert "own parameter, of shape (3, 3)" in refused
        assert "ps.from_module(module)" in refused
    else:
        assert_same(result[:2], expected)


@theorem("T1", st.tuples(steps(**EXACT), st.booleans()))
def unreached(system: System, drawn: tuple[Drawn, bool]) -> None:
    """A loss that does not depend on params is an error, and weight decay does not move them."""
    (case, how, groups), without = drawn

    def detached(params: Any, batch: Batch) -> torch.Tensor:
        with torch.set_grad_enabled(not without):
            return models.integer_loss(params, batch).detach()

    state = case.params, case.opt_state
    _, refused = outcome(
        lambda: step_of(system, how, state, groups, detached, case.recipe)
    )
    assert "do not depend on params" in refused


HALVES = [
    (How(axis, {"normalize": normalize, "on_nonfinite": "skip"}), dtype)
    for axis in AXES[::2]
    for normalize in ("loss", "grads")
    for dtype in (torch.bfloat16, torch.float16)
]


@theorem("T1", st.sampled_from(HALVES))
def many_microbatches(system: System, drawn: tuple[How, torch.dtype]) -> None:
    """A thousand microbatches in half precision sum within the bound of float32, over ranks too.

    With ``normalize="grads"`` the sum is beyond the range of float16.
    """
    how, dtype = drawn
    count, generator = 1000, torch.Generator().manual_seed(0)
    size = 100.0 if how.settings["normalize"] == "grads" else 1.0
    x = (size * (0.5 + torch.rand(count, 4, generator=generator))).to(dtype)
    group = [{"x": row[None], "w": torch.ones(1)} for row in x]
    w = torch.ones(4, dtype=dtype)
    _, grad, _ = step_of(
        system, how, (w, tree.zeros_like(w)), [group[:600], [], group[600:610], group[610:]],
        lambda w, m: m["x"] @ w, CAPTURE,
    )  # fmt: skip
    exact = x.to(torch.float64).mean(0)
    # A seed, and its product with x, are rounded to half precision; the sum of a thousand is not.
    bound = (gamma(2, dtype) + gamma(count + 4, torch.float32)) * exact
    assert ((grad - exact).abs() <= bound).all(), (
        f"{grad} is not {exact} within {bound}"
    )


globals().update(as_tests(globals()))
# torch warns of it once, where a sparse gradient meets a leaf that lies in columns.
test_programs = pytest.mark.filterwarnings("ignore:grad and param do not obey")(
    programs.test()
)
