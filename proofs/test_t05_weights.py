"""T5, weights. Scaling every weight by c > 0 changes nothing; weight k is the token k times."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from proofs import models
from proofs.strategies import (
    Batch,
    Case,
    RealCase,
    assert_same,
    capture,
    cases,
    cut,
    real_cases,
    weights_of,
)
from proofs.theorem import System, theorem
from purestep import tree
from purestep.testing.strategies import cuts


@st.composite
def weight_cases(draw: st.DrawFn) -> tuple[Case, list[Batch], float]:
    """A cut of integer weights, and a scale that is a power of two."""
    case = draw(cases(fractional=False))
    return case, cut(case.batch, draw(cuts(case.rows))), 2.0 ** draw(st.integers(-12, 6))


@theorem("T5", weight_cases())
def scale_invariance(system: System, drawn: tuple[Case, list[Batch], float]) -> None:
    """c·w for w: the same state and loss, to the bit, also where the scaled weights sum to less than 1."""
    case, microbatches, scale = drawn
    scaled = [{**part, "w": part["w"].to(torch.float64) * scale} for part in microbatches]
    step = system.make_update_step(models.integer_loss, case.optimizer, weight_fn=weights_of)
    expected = step(case.params, case.opt_state, microbatches)
    actual = step(case.params, case.opt_state, scaled)
    assert_same(actual[:2], expected[:2])
    assert_same(actual[2].loss, expected[2].loss, "loss")
    assert actual[2].num_tokens == scale * expected[2].num_tokens


@theorem("T5", weight_cases())
def repetition(system: System, drawn: tuple[Case, list[Batch], float]) -> None:
    """Weight k, and the token k times at weight 1: the same state and metrics, to the bit."""
    case, microbatches, _ = drawn
    step = system.make_update_step(models.integer_loss, case.optimizer, weight_fn=weights_of)
    times = case.batch["w"].flatten().long()
    repeated = {
        key: value.flatten(0, 1).repeat_interleave(times, dim=0).unsqueeze(1)
        for key, value in case.batch.items()
    }
    repeated["w"] = torch.ones_like(repeated["w"])
    expected = step(case.params, case.opt_state, [repeated])
    actual = step(case.params, case.opt_state, microbatches)
    assert_same(actual[:2], expected[:2])
    assert_same(actual[2].loss, expected[2].loss, "loss")
    assert_same(actual[2].num_tokens, expected[2].num_tokens, "num_tokens")


@theorem("T5", st.tuples(weight_cases(), st.sampled_from(["loss", "grads"])))
def counted_once(system: System, drawn: tuple[tuple[Case, list[Batch], float], str]) -> None:
    """Weights that are drawn when they are asked for: those that are counted are those that multiply."""
    (case, microbatches, _), normalize = drawn
    asked: list[int] = []
    buffers: dict[Any, Any] = {}

    def weight_fn(batch: Batch) -> Any:
        asked.append(1)
        again = len(asked) > len(microbatches)
        # One buffer for each shape, as programs have it that avoid allocations.
        buffer = buffers.setdefault(batch["w"].shape, torch.empty_like(batch["w"]))
        return buffer.copy_(batch["w"] + 1 if again else batch["w"])

    step = system.make_update_step(
        models.integer_loss, case.optimizer, weight_fn=weight_fn, normalize=normalize
    )
    plain = system.make_update_step(
        models.integer_loss, case.optimizer, weight_fn=weights_of, normalize=normalize
    )
    expected = plain(case.params, case.opt_state, microbatches)
    assert_same(step(case.params, case.opt_state, microbatches), expected)
    assert len(asked) == len(microbatches), "weight_fn was asked more than once for a microbatch"


@theorem(
    "T5",
    st.tuples(real_cases([torch.float64, torch.float32]), st.floats(0.01, 100)),
)
def scale_within_bound(system: System, drawn: tuple[RealCase, float]) -> None:
    """For the transformer and any scale: the exact gradient, but for rounding."""
    case, scale = drawn

    def weight_fn(batch: Batch) -> Any:
        return batch["w"].to(case.dtype) * scale

    step = system.make_update_step(models.transformer_loss, capture(), weight_fn=weight_fn)
    _, grads, metrics = step(case.params, tree.zeros_like(case.params), [case.batch])
    # Each weight, their sum and their quotient round as well.
    case.assert_within_bound(grads, extra_roundings=3)
    case.assert_loss_within_bound(metrics.loss)


test_scale_invariance = scale_invariance.test()
test_repetition = repetition.test()
test_counted_once = counted_once.test()
test_scale_within_bound = scale_within_bound.test()
