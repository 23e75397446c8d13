"""T5, weights. Scaling every weight by c > 0 changes nothing; weight k is the token k times.

step(θ, s, B, c·w) = step(θ, s, B, w)
"""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import purestep as ps
from purestep import tree
from support.ranks import check_step, take_step
from support.strategies import Batch, StepCase, assert_same, steps
from support.theorem import System, as_tests, theorem

INTEGER_WEIGHTS = steps(fractional=False)


@theorem("T5", st.tuples(INTEGER_WEIGHTS, st.integers(-12, 6).filter(bool)))
def scale_invariance(system: System, drawn: tuple[StepCase, int]) -> None:
    """Checks that weights times a power of two give the same state and loss, to the bit.

    They may then sum to less than 1.
    """
    (case, setup, groups), power = drawn
    scale = 2.0**power

    def weight_fn(batch: Batch) -> Tensor:
        return batch["w"].to(torch.float64) * scale

    *expected, metrics = check_step(system, setup, case, groups)
    state = case.params, case.opt_state
    *actual, scaled_metrics = take_step(
        system, setup, state, groups, case.loss_fn, case.recipe, weight_fn
    )
    assert_same(actual, expected)
    assert_same(scaled_metrics.loss, metrics.loss, "loss")
    assert scaled_metrics.num_tokens == scale * metrics.num_tokens


@theorem("T5", INTEGER_WEIGHTS)
def repetition(system: System, drawn: StepCase) -> None:
    """Checks that a token k times at weight 1 gives the state and loss of weight k, to the bit.

    The norm is the same but for rounding.
    """
    case, setup, _ = drawn
    repeats = case.batch["w"].flatten().long()
    repeated = {}
    for key, value in case.batch.items():
        tokens = value.flatten(0, 1).repeat_interleave(repeats, dim=0)
        repeated[key] = tokens.unsqueeze(1)
    repeated["w"] = torch.ones_like(repeated["w"])
    check_step(system, setup, case, [[repeated]])


class ChangingWeights:
    """Weights that are one more after the first ``num_calls`` calls."""

    def __init__(self, num_calls: int) -> None:
        self.num_calls = num_calls
        self.calls = 0
        self.buffers: dict[torch.Size, Tensor] = {}

    def __call__(self, batch: Batch) -> Tensor:
        """Writes the weights to one buffer for each shape, as programs do that avoid allocations."""
        self.calls += 1
        weights = batch["w"]
        if self.calls > self.num_calls:
            weights = weights + 1
        buffer = self.buffers.setdefault(weights.shape, torch.empty_like(batch["w"]))
        return buffer.copy_(weights)


@theorem("T5", steps(fractional=False, axes=["one"]))
def counted_once(system: System, drawn: StepCase) -> None:
    """Checks that weights are computed once for each microbatch, in a step and in evaluation.

    The loss, which may write to them then, runs once for each microbatch, too.
    """
    case, setup, groups = drawn
    microbatches = [part for group in groups for part in group]
    number = len(microbatches)
    weight_fn = ChangingWeights(number)
    # torch.func does not let a loss write to its inputs.
    writes = setup.settings["grad_and_value"] is ps.grad_and_value
    loss_calls = 0

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        nonlocal loss_calls
        loss_calls += 1
        losses = case.loss_fn(params, batch)
        if writes:
            batch["w"].zero_()
        return losses

    state = case.params, case.opt_state
    expected = take_step(system, setup, state, groups, case.loss_fn, case.recipe)
    copies = tree.map(torch.clone, groups)

    actual = take_step(system, setup, state, copies, loss_fn, case.recipe, weight_fn)

    assert_same(actual, expected)
    assert loss_calls == number, "the loss is computed more than once"
    assert weight_fn.calls == number, "weights are computed more than once"

    weight_fn = ChangingWeights(number)
    evaluate = system.make_eval_step(case.loss_fn, weight_fn=weight_fn)
    evaluate(case.params, microbatches)
    assert weight_fn.calls == number, "more than once in evaluation"


globals().update(as_tests(globals()))
