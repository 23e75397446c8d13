"""T1, cut. Any partition of the group into microbatches gives the step of the single large batch.

    update_step(θ, s, [B₁, ..., B_K]) = spec(θ, s, B₁ ∪ ... ∪ B_K)      for every cut, also into empty parts

Loss, count, norm and aux are those of the large batch too, and evaluation gives the same loss. A
statement about microbatches, ``LossTerms.microbatch``, is not invariant, but averaged over the
non-empty ones.
"""

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import purestep as ps
from proofs import models
from proofs.programs import CLOSED_OVER, PROGRAMS, module_loss
from proofs.strategies import (
    AXES,
    Batch,
    Drawn,
    How,
    RealCase,
    assert_same,
    capture,
    check_step,
    cut,
    outcome,
    real_cases,
    settings_of_steps,
    step_of,
    steps,
    weights_of,
)
from proofs.theorem import System, theorem
from proofs.writings import cuts, taken
from purestep import tree
from purestep.testing.bounds import gamma
from purestep.testing.specification import spec

ONE_RANK: dict[str, Any] = {"ranks": 1, "shuffled": False, "padded": False}
EXACT: dict[str, Any] = {**ONE_RANK, "dtypes": [torch.float64]}


@theorem("T1", steps(**ONE_RANK))
def cut_invariance(system: System, drawn: Drawn) -> None:
    """The state, the loss, the count and the norm are those of the one big batch, to the bit."""
    case, how, groups = drawn
    *_, metrics = check_step(system, how, case, groups)
    evaluate = system.make_eval_step(case.loss_fn, weight_fn=weights_of)
    assert_same(evaluate(case.params, groups[0]).loss, metrics.loss, "evaluation loss")


def loss_with_terms(params: Any, batch: Batch) -> ps.LossTerms:
    """A loss with an auxiliary term for the microbatch, and sums for the metrics."""
    losses = models.integer_loss(params, batch)
    x = batch["x"].reshape(-1, models.FEATURES)
    term = (x.sum(0) @ params["hidden"]["weight"]).sum().square()
    aux = {"large": (losses > 8).sum(), "sum": losses.sum()}
    return ps.LossTerms(losses, microbatch=term, aux=aux)


def number_with_tokens(group: list[Batch]) -> int:
    """How many microbatches have tokens."""
    return sum(bool(microbatch["w"].any()) for microbatch in group)


# Into 1, 2 or 4 microbatches with tokens, so that their mean is exact too.
TERMS = steps(**EXACT, axes=["one"], normalize="loss").filter(
    lambda drawn: number_with_tokens(drawn[2][0]).bit_count() == 1
)


@theorem("T1", TERMS)
def terms(system: System, drawn: Drawn) -> None:
    """∇[L + (1/M) Σₘ termₘ] over the M non-empty microbatches, and aux summed over all."""
    case, how, (group,) = drawn
    present = [microbatch for microbatch in group if microbatch["w"].any()]

    def loss_of(params: Any) -> torch.Tensor:
        weights = case.batch["w"].to(torch.float64)
        loss = (weights / weights.sum() * models.integer_loss(params, case.batch)).sum()
        extra: list[Any] = [loss_with_terms(params, part).microbatch for part in present]
        return loss + torch.stack([term / len(present) for term in extra]).sum()

    grads, loss = torch.func.grad_and_value(loss_of)(case.params)
    state = case.params, tree.zeros_like(case.params)
    _, actual, metrics = step_of(system, how, state, [group], loss_with_terms, capture())
    assert_same((actual, metrics.loss), (grads, loss), "(grads, loss)")
    assert metrics.num_microbatches == len(present)
    assert_same(metrics.aux, loss_with_terms(case.params, case.batch).aux, "aux")


RealDrawn = tuple[RealCase, list[Batch], float, dict[str, Any]]


@st.composite
def real_cut_cases(draw: st.DrawFn) -> RealDrawn:
    """Real text in any order and cut, or each row alone without its padding; a scale; settings."""
    case = draw(real_cases([torch.float64, torch.float32, torch.bfloat16]))
    order, settings = draw(st.permutations(range(case.rows))), draw(settings_of_steps())
    group = cut(case.batch, [[order[i] for i in rows] for rows in draw(cuts(case.rows))])
    if draw(st.booleans()):
        group = [taken(case.batch, [row]) for row in order]
        group = [{k: x[:, : int(m["w"].sum())] for k, x in m.items()} for m in group]
    scale = draw(st.just(1.0) | st.floats(0.01, 100))
    return case, [part for part in group if part["w"].numel()], scale, settings


@theorem("T1", real_cut_cases())
def cut_within_bound(system: System, drawn: RealDrawn) -> None:
    """For the transformer, with weights of any scale: the exact gradient, but for rounding."""
    case, group, scale, settings = drawn

    def weight_fn(batch: Batch) -> torch.Tensor:
        return batch["w"] if scale == 1.0 else batch["w"].to(case.dtype) * scale

    step = system.make_update_step(
        models.transformer_loss, capture(), weight_fn=weight_fn, **settings
    )
    state = tree.map(torch.clone, (case.params, tree.zeros_like(case.params)))
    _, grads, metrics = step(*state, group)
    # Each weight, their sum and their quotient round as well.
    case.assert_within_bound(grads, extra_roundings=3)
    case.assert_loss_within_bound(metrics.loss)


OWN: dict[str, Any] = {"grad_and_value": ps.grad_and_value, "axes": ["one", "threads"]}
"""What a loss may do to its leaves without a transform around it."""


@theorem(
    "T1",
    st.tuples(
        steps(dtypes=[torch.float64], pieces=False, **OWN),
        st.sampled_from([*PROGRAMS]),
    ),
)
def programs(system: System, drawn: tuple[Drawn, str]) -> None:
    """Whatever a loss does beside computing: the step of the big batch, and nothing is recorded."""
    (case, how, groups), name = drawn
    make, plain = PROGRAMS[name]
    CLOSED_OVER.grad = None
    *actual, _ = check_step(system, how, case, groups, make(), plain)
    leaves = tree.leaves_of((actual, groups))
    assert not any(leaf.requires_grad for leaf in leaves), "a graph came out, or a mark stayed"
    assert CLOSED_OVER.grad is None, ".grad of what the loss closes over was written"


@theorem("T1", st.tuples(steps(**EXACT, **OWN, pieces=False), st.booleans()))
def recomputation(system: System, drawn: tuple[Drawn, bool]) -> None:
    """A checkpoint in a module computes with its forward pass's parameters, or is refused."""
    (case, how, groups), frozen = drawn
    generator = case.generator
    params = {name: models.integers((3, 3), generator) for name in ("first", "second")}
    state = params, tree.zeros_like(params)
    expected, _, _ = spec(module_loss(False, frozen), capture().update, *state, case.batch)
    result, refused = outcome(
        lambda: step_of(system, how, state, groups, module_loss(True, frozen), capture())
    )
    if result is None:
        assert "functional_call" in refused
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
    _, refused = outcome(lambda: step_of(system, how, state, groups, detached, case.optimizer))
    assert "do not depend on params" in refused


HALVES = [
    (How(axis, False, 8, {"normalize": normalize, "on_nonfinite": "skip"}), dtype)
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
        lambda w, m: m["x"] @ w, capture(),
    )  # fmt: skip
    exact = x.to(torch.float64).mean(0)
    # A seed, and its product with x, are rounded to half precision; the sum of a thousand is not.
    bound = (gamma(2, dtype) + gamma(count + 4, torch.float32)) * exact
    assert ((grad - exact).abs() <= bound).all(), f"{grad} is not {exact} within {bound}"


test_cut_invariance = cut_invariance.test()
test_terms = terms.test()
test_cut_within_bound = cut_within_bound.test()
test_many_microbatches = many_microbatches.test()
# torch warns of it once, where a sparse gradient meets a leaf that lies in columns.
test_programs = pytest.mark.filterwarnings("ignore:grad and param do not obey")(programs.test())
test_recomputation = recomputation.test()
test_unreached = unreached.test()
