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
from proofs.programs import CLOSED_OVER, PROGRAMS, make_module_loss
from purestep import tree
from purestep.testing.bounds import rounding_bound
from purestep.testing.specification import spec
from support import models
from support.optimizers import CAPTURE
from support.ranks import (
    check_step,
    check_within_bound,
    loss_with_aux,
    take_step,
    without_tokens,
)
from support.strategies import (
    AXES,
    BRIDGES,
    Batch,
    Chooser,
    Setup,
    StepCase,
    assert_same,
    builds,
    get_weights,
    steps,
    try_call,
)
from support.texts import RealStepCase, real_steps
from support.theorem import System, as_tests, theorem

CUT: dict[str, Any] = {"ranks": [1], "shuffled": False, "padded": False}
EXACT: dict[str, Any] = {**CUT, "dtypes": [torch.float64], "trees": True}


@theorem("T1", steps(**CUT, bridges=BRIDGES))
def cut_invariance(system: System, drawn: StepCase) -> None:
    """Checks that state, loss and count are the big batch's to the bit.

    The norm is the same but for rounding.
    """
    case, setup, groups = drawn
    *_, metrics = check_step(system, setup, case, groups)
    evaluate = system.make_eval_step(case.loss_fn, weight_fn=get_weights)
    evaluation = evaluate(case.params, groups[0])
    assert_same(evaluation.loss, metrics.loss, "evaluation loss")


def loss_with_terms(params: Any, batch: Batch) -> ps.LossOutput:
    """Computes losses, their sum as a term of the microbatch, and sums for the metrics."""
    terms = loss_with_aux(params, batch)
    return terms._replace(microbatch_loss=terms.aux["sum"][0])


@theorem("T1", steps(**EXACT, axes=["one"], normalize="loss"))
def terms(system: System, drawn: StepCase) -> None:
    """Checks ∇[L + (1/M) Σₘ termₘ] over all ranks' M non-empty microbatches, and the summed aux.

    Gradients and loss are compared where M is a power of two: then the mean is exact, too.
    """
    case, setup, groups = drawn
    ignored = without_tokens(case.batch)
    groups = [group or [ignored] for group in groups]
    present = [part for group in groups for part in group if part["w"].any()]

    def total_loss(params: Any) -> torch.Tensor:
        weights = case.batch["w"].to(torch.float64)
        losses = models.integer_loss(params, case.batch)
        loss = (weights / weights.sum() * losses).sum()
        for part in present:
            term: Any = loss_with_terms(params, part).microbatch_loss
            loss = loss + term / len(present)
        return loss

    grads, loss = torch.func.grad_and_value(total_loss)(case.params)
    state = case.params, tree.zeros_like(case.params)

    _, actual, metrics = take_step(
        system, setup, state, groups, loss_with_terms, CAPTURE
    )

    if len(present).bit_count() == 1:
        actual = tree.map(lambda grad: grad.to(torch.float64), actual)
        assert_same((actual, metrics.loss), (grads, loss), "(grads, loss)")
    assert metrics.num_microbatches == len(present)
    assert_same(metrics.aux, loss_with_terms(case.params, case.batch).aux, "aux")


SCALES = st.just(1.0) | st.floats(0.01, 100)


@theorem("T1", st.tuples(real_steps(ranks=[1]), SCALES))
def cut_within_bound(system: System, drawn: tuple[RealStepCase, float]) -> None:
    """For the transformer, with weights of any scale: the exact gradient, but for rounding."""
    step, scale = drawn
    case, _, _ = step

    def weight_fn(batch: Batch) -> torch.Tensor:
        if scale == 1.0:
            return batch["w"]
        return batch["w"].to(case.dtype) * scale

    check_within_bound(system, step, weight_fn=weight_fn)


UNTRANSFORMED: dict[str, Any] = {
    "grad_and_value": ps.grad_and_value,
    "axes": ["one", "threads"],
    "gathers": [""],
    "bridges": [""],  # What a loss does to a module's own parameters stays.
}
"""Settings in which no transform surrounds a loss, which may then do to its leaves what autograd allows."""
PROGRAM_STEPS = steps(dtypes=[torch.float64], trees=True, **UNTRANSFORMED)


@theorem("T1", st.tuples(PROGRAM_STEPS, builds(Chooser.sample, [*PROGRAMS], 3)))
def programs(system: System, drawn: tuple[StepCase, list[str]]) -> None:
    """Losses with hooks, backward passes or views take the big batch's step, and record nothing."""
    (case, setup, groups), names = drawn
    for name in names:
        program = PROGRAMS[name]
        CLOSED_OVER.grad = None

        *state, _ = check_step(
            system, setup, case, groups, program.make(), program.plain
        )

        for leaf in tree.leaves((state, groups)):
            assert not leaf.requires_grad, "a graph came out, or a mark stayed"
        assert CLOSED_OVER.grad is None, ".grad of a closed-over parameter was written"


@theorem("T1", st.tuples(steps(**EXACT, **UNTRANSFORMED), st.booleans()))
def recomputation(system: System, drawn: tuple[StepCase, bool]) -> None:
    """A checkpoint in a module computes with its forward pass's parameters, or is refused."""
    (case, setup, groups), frozen = drawn
    generator = case.generator
    params = {name: models.integers((3, 3), generator) for name in ("first", "second")}
    state = params, tree.zeros_like(params)
    plain = make_module_loss(recomputes=False, frozen=frozen)
    expected, _, _ = spec(plain, CAPTURE.update, *state, case.batch)
    loss_fn = make_module_loss(recomputes=True, frozen=frozen)

    result, message = try_call(
        lambda: take_step(system, setup, state, groups, loss_fn, CAPTURE)
    )

    if result is None:
        assert "own parameter, of shape (3, 3)" in message
        assert "ps.from_module(module)" in message
    else:
        assert_same(result[:2], expected)


@theorem("T1", st.tuples(steps(**EXACT), st.booleans()))
def unreached(system: System, drawn: tuple[StepCase, bool]) -> None:
    """Checks that a loss that does not depend on params is an error."""
    (case, setup, groups), no_grad = drawn

    def detached(params: Any, batch: Batch) -> torch.Tensor:
        with torch.set_grad_enabled(not no_grad):
            return models.integer_loss(params, batch).detach()

    state = case.params, case.opt_state
    _, message = try_call(
        lambda: take_step(system, setup, state, groups, detached, case.recipe)
    )
    assert "do not depend on params" in message


HALF_PRECISION_SETUPS = [
    (Setup(axis, {"normalize": normalize, "on_nonfinite": "skip"}), dtype)
    for axis in AXES[::2]
    for normalize in ("loss", "grads")
    for dtype in (torch.bfloat16, torch.float16)
]


@theorem("T1", st.sampled_from(HALF_PRECISION_SETUPS))
def many_microbatches(system: System, drawn: tuple[Setup, torch.dtype]) -> None:
    """Checks that a thousand gradients in half precision sum as in float32, over ranks too.

    Each of them may round twice in half precision. With ``normalize="grads"`` the sum is beyond
    the range of float16.
    """
    setup, dtype = drawn
    count = 1000
    generator = torch.Generator().manual_seed(0)
    size = 100.0 if setup.settings["normalize"] == "grads" else 1.0
    x = size * (0.5 + torch.rand(count, 4, generator=generator))
    x = x.to(dtype)
    group = [{"x": row[None], "w": torch.ones(1)} for row in x]
    groups = [group[:600], [], group[600:610], group[610:]]
    w = torch.ones(4, dtype=dtype)
    state = w, tree.zeros_like(w)

    def loss_fn(w: Any, batch: Batch) -> torch.Tensor:
        return batch["x"] @ w

    _, grad, _ = take_step(system, setup, state, groups, loss_fn, CAPTURE)

    exact = x.to(torch.float64).mean(0)
    # A seed, and its product with x, are rounded to half precision; the sum of a thousand is not.
    roundings = rounding_bound(2, dtype) + rounding_bound(count + 4, torch.float32)
    error = (grad - exact).abs()
    assert (error <= roundings * exact).all(), f"{grad} is not {exact}, off by {error}"


globals().update(as_tests(globals()))
# torch warns of it once, where a sparse gradient meets a leaf that lies in columns.
ignore_strides = pytest.mark.filterwarnings("ignore:grad and param do not obey")
test_programs = ignore_strides(programs.test())
