"""T5, weights. Scaling every weight by c > 0 changes nothing; weight k is the token k times."""

from typing import Any

import torch
from hypothesis import strategies as st

import purestep as ps
from proofs.ranks import check_step, step_of
from proofs.strategies import Batch, Drawn, assert_same, steps
from proofs.theorem import System, as_tests, theorem
from purestep import tree

# Integer weights.
CASES = steps(fractional=False)


@theorem("T5", st.tuples(CASES, st.integers(-12, 6).filter(bool)))
def scale_invariance(system: System, drawn: tuple[Drawn, int]) -> None:
    """c·w for w: the same state and loss, to the bit, also where they sum to less than 1."""
    (case, how, groups), power = drawn
    scale = 2.0**power

    def weight_fn(batch: Batch) -> torch.Tensor:
        return batch["w"].to(torch.float64) * scale

    *expected, metrics = check_step(system, how, case, groups)
    state = case.params, case.opt_state
    *actual, scaled = step_of(
        system, how, state, groups, case.loss_fn, case.recipe, weight_fn
    )
    assert_same(actual, expected)
    assert_same(scaled.loss, metrics.loss, "loss")
    assert scaled.num_tokens == scale * metrics.num_tokens


@theorem("T5", CASES)
def repetition(system: System, drawn: Drawn) -> None:
    """The token k times at weight 1: state and metrics of the batch in which it has weight k, to the bit."""
    case, how, _ = drawn
    times = case.batch["w"].flatten().long()
    repeated = {
        key: value.flatten(0, 1).repeat_interleave(times, dim=0).unsqueeze(1)
        for key, value in case.batch.items()
    }
    repeated["w"] = torch.ones_like(repeated["w"])
    check_step(system, how, case, [[repeated]])


@theorem("T5", steps(fractional=False, axes=["one"]))
def counted_once(system: System, drawn: Drawn) -> None:
    """Weights that are drawn when they are asked for: those that are counted multiply.

    The loss, which may write to them then, runs once for each microbatch, too.
    """
    case, how, groups = drawn
    asked: list[str] = []
    buffers: dict[Any, Any] = {}
    number = sum(map(len, groups))

    def weight_fn(batch: Batch) -> Any:
        asked.append("weights")
        # One buffer for each shape, as programs have it that avoid allocations.
        buffer = buffers.setdefault(batch["w"].shape, torch.empty_like(batch["w"]))
        return buffer.copy_(
            batch["w"] + 1 if asked.count("weights") > number else batch["w"]
        )

    def loss_fn(params: Any, batch: Batch) -> torch.Tensor:
        asked.append("losses")
        losses = case.loss_fn(params, batch)
        if (
            how.settings["grad_and_value"] is ps.grad_and_value
        ):  # torch.func lets nobody write.
            batch["w"].zero_()
        return losses

    step = (system, how, (case.params, case.opt_state))
    expected = step_of(*step, groups, case.loss_fn, case.recipe)
    own = tree.map(torch.clone, groups)
    actual = step_of(*step, own, loss_fn, case.recipe, weight_fn)
    assert_same(actual, expected)
    assert sorted(asked) == ["losses"] * number + ["weights"] * number, "more than once"
    asked.clear()
    parts = [part for group in groups for part in group]
    system.make_eval_step(case.loss_fn, weight_fn=weight_fn)(case.params, parts)
    assert len(asked) == number, "more than once in evaluation"


globals().update(as_tests(globals()))
