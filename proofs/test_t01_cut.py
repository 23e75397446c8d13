"""T1, cut. Any partition of the group into microbatches gives the step of the single large batch.

    update_step(θ, s, [B₁, ..., B_K]) = spec(θ, s, B₁ ∪ ... ∪ B_K)      for every cut, also into empty parts

Loss, count, norm and aux are those of the large batch too, and evaluation gives the same loss. What is a
statement about microbatches, ``LossTerms.microbatch``, is not invariant, but averaged over the non-empty.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

import purestep as ps
from proofs import models
from proofs.programs import CLOSED_OVER, PROGRAMS, module_loss
from proofs.strategies import (
    Batch,
    Case,
    RealCase,
    assert_same,
    capture,
    cases,
    cut,
    outcome,
    real_cases,
    weights_of,
)
from proofs.theorem import System, theorem
from purestep import tree
from purestep.testing.bounds import gamma
from purestep.testing.specification import spec
from purestep.testing.strategies import Cut, cuts


@st.composite
def cut_cases(draw: st.DrawFn) -> tuple[Case, list[Batch]]:
    """A case and a cut of it."""
    case = draw(cases())
    return case, cut(case.batch, draw(cuts(case.rows)))


@theorem("T1", cut_cases())
def cut_invariance(system: System, drawn: tuple[Case, list[Batch]]) -> None:
    """The state, the loss, the count and the norm are those of the one big batch, to the bit."""
    case, microbatches = drawn
    step = system.make_update_step(models.integer_loss, case.optimizer, weight_fn=weights_of)
    state, grads, loss = spec(
        models.integer_loss, case.optimizer.update, case.params, case.opt_state, case.batch
    )
    *actual, metrics = step(case.params, case.opt_state, microbatches)
    assert_same(tuple(actual), state)
    assert_same(metrics.loss, loss, "loss")
    assert metrics.num_tokens == case.batch["w"].sum()
    squares = torch.stack([leaf.square().sum() for leaf in tree.leaves_of(grads)])
    roundings = gamma(4 * squares.numel() + 64, torch.float64)
    assert (metrics.grad_norm - squares.sum().sqrt()).abs() <= roundings * metrics.grad_norm
    assert metrics.applied
    evaluate = system.make_eval_step(models.integer_loss, weight_fn=weights_of)
    assert_same(evaluate(case.params, microbatches).loss, loss, "evaluation loss")


def loss_with_terms(params: Any, batch: Batch) -> ps.LossTerms:
    """A loss with an auxiliary term for the microbatch, and sums for the metrics."""
    losses = models.integer_loss(params, batch)
    term = (batch["x"].sum((0, 1)) @ params["hidden"]["weight"]).sum().square()
    aux = {"large": (losses > 8).sum(), "sum": losses.sum()}
    return ps.LossTerms(losses, microbatch=term, aux=aux)


@st.composite
def term_cases(draw: st.DrawFn) -> tuple[Case, list[Batch]]:
    """A cut into 1, 2 or 4 microbatches with tokens, so that their mean is exact too."""
    case = draw(cases())
    parts = draw(cuts(case.rows))
    while _with_tokens(case, parts).bit_count() != 1:
        parts = [parts[0] + parts[1], *parts[2:]]
    return case, cut(case.batch, parts)


def _with_tokens(case: Case, parts: Cut) -> int:
    return sum(bool(case.batch["w"][rows].sum() > 0) for rows in parts)


@theorem("T1", term_cases())
def terms(system: System, drawn: tuple[Case, list[Batch]]) -> None:
    """∇[L + (1/M) Σₘ termₘ] over the M non-empty microbatches, and aux summed over all."""
    case, microbatches = drawn
    present = [microbatch for microbatch in microbatches if microbatch["w"].sum() > 0]

    def loss_of(params: Any) -> torch.Tensor:
        weights = case.batch["w"].to(torch.float64)
        loss = (weights / weights.sum() * models.integer_loss(params, case.batch)).sum()
        auxiliary = [loss_with_terms(params, microbatch).microbatch for microbatch in present]
        return (
            loss
            + torch.stack([term / len(present) for term in auxiliary if term is not None]).sum()
        )

    grads, loss = torch.func.grad_and_value(loss_of)(case.params)
    step = system.make_update_step(loss_with_terms, capture(), weight_fn=weights_of)
    _, actual, metrics = step(case.params, tree.zeros_like(case.params), microbatches)
    assert_same((actual, metrics.loss), (grads, loss), "(grads, loss)")
    assert metrics.num_microbatches == len(present)
    assert_same(metrics.aux, loss_with_terms(case.params, case.batch).aux, "aux")


@st.composite
def real_cut_cases(draw: st.DrawFn) -> tuple[RealCase, list[Batch]]:
    """Real text and a cut of it."""
    case = draw(real_cases([torch.float64, torch.float32, torch.bfloat16]))
    return case, cut(case.batch, draw(cuts(case.rows)))


@theorem("T1", real_cut_cases())
def cut_within_bound(system: System, drawn: tuple[RealCase, list[Batch]]) -> None:
    """For the transformer, in float64, float32 and bfloat16: the exact gradient, but for rounding."""
    case, microbatches = drawn
    step = system.make_update_step(models.transformer_loss, capture())
    _, grads, metrics = step(case.params, tree.zeros_like(case.params), microbatches)
    case.assert_within_bound(grads)
    case.assert_loss_within_bound(metrics.loss)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"normalize": "grads"},
    {"on_nonfinite": "skip"},
    {"accum_dtype": torch.float64},
]
Drawn = tuple[Case, list[Batch], str, dict[str, Any]]


@st.composite
def program_cases(draw: st.DrawFn) -> Drawn:
    """A case, a cut of it, a loss as others write them, and settings."""
    case, microbatches = draw(cut_cases())
    return (
        case,
        microbatches,
        draw(st.sampled_from(list(PROGRAMS))),
        draw(st.sampled_from(SETTINGS)),
    )


@theorem("T1", program_cases())
def programs(system: System, drawn: Drawn) -> None:
    """Whatever a loss does besides computing: the step of the one big batch, with nothing recorded or left behind."""
    case, microbatches, name, settings = drawn
    make, plain = PROGRAMS[name]
    CLOSED_OVER.grad = None
    step = system.make_update_step(make(), case.optimizer, weight_fn=weights_of, **settings)
    state, _, loss = spec(plain, case.optimizer.update, case.params, case.opt_state, case.batch)
    *actual, metrics = step(case.params, case.opt_state, microbatches)
    assert_same(tuple(actual), state)
    assert_same(metrics.loss, loss, "loss")
    assert not any(leaf.requires_grad for leaf in tree.leaves_of(actual)), "a graph came out"
    assert CLOSED_OVER.grad is None, ".grad of what the loss closes over was written"


@theorem("T1", st.tuples(cut_cases(), st.booleans(), st.sampled_from(SETTINGS)))
def recomputation(
    system: System, drawn: tuple[tuple[Case, list[Batch]], bool, dict[str, Any]]
) -> None:
    """A checkpoint in a module computes with the parameters of its forward pass again, or is refused."""
    (case, microbatches), frozen, settings = drawn
    generator = case.generator
    params = {name: models.integers((3, 3), generator) for name in ("first", "second")}
    state, _, _ = spec(
        module_loss(False, frozen), capture().update, params, tree.zeros_like(params), case.batch
    )
    step = system.make_update_step(
        module_loss(True, frozen), capture(), weight_fn=weights_of, **settings
    )
    result, refused = outcome(lambda: step(params, tree.zeros_like(params), microbatches))
    if result is None:
        assert "functional_call" in refused
    else:
        assert_same(result[:2], state)


@theorem("T1", cut_cases())
def unreached(system: System, drawn: tuple[Case, list[Batch]]) -> None:
    """A loss that does not depend on params is an error, whatever the cut, and weight decay does not move them."""
    case, microbatches = drawn

    def detached(params: Any, batch: Batch) -> torch.Tensor:
        return models.integer_loss(params, batch).detach()

    step = system.make_update_step(detached, case.optimizer, weight_fn=weights_of)
    _, refused = outcome(lambda: step(case.params, case.opt_state, microbatches))
    assert "do not depend on params" in refused


HALF_PRECISION = [("loss", torch.bfloat16), ("grads", torch.bfloat16), ("grads", torch.float16)]


@theorem("T1", st.sampled_from(HALF_PRECISION))
def many_microbatches(system: System, drawn: tuple[str, torch.dtype]) -> None:
    """A thousand microbatches in half precision sum within the bound of float32."""
    normalize, dtype = drawn
    count = 1000
    group = [{"x": torch.tensor([1e-3], dtype=dtype)}] * count

    def loss_fn(w: torch.Tensor, batch: Batch) -> torch.Tensor:
        return w * batch["x"]

    step = system.make_update_step(
        loss_fn, capture(), weight_fn=lambda m: torch.ones(1), normalize=normalize
    )
    w = torch.ones((), dtype=dtype)
    _, grad, _ = step(w, tree.zeros_like(w), group)
    exact = float(group[0]["x"])
    # A seed, and its product with x, are rounded to half precision; the sum of a thousand is not.
    bound = (gamma(2, dtype) + gamma(count + 1, torch.float32)) * exact
    assert abs(float(grad) - exact) <= bound, f"{float(grad)} is not {exact} within {bound}"


test_cut_invariance = cut_invariance.test()
test_terms = terms.test()
test_cut_within_bound = cut_within_bound.test()
test_many_microbatches = many_microbatches.test()
test_programs = programs.test()
test_recomputation = recomputation.test()
test_unreached = unreached.test()
