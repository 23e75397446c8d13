"""Tests what ``accumulate`` sums, in which dtype, and which loss terms it refuses."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep.grads.functional import add_grads
from purestep.grads.microbatch import GradAccumulator

Batch = dict[str, Tensor]
ONE = torch.tensor(1.0)


def linear(w: Tensor, m: Tensor) -> Tensor:
    return w * m


TWO_MICROBATCHES = [torch.ones(2), torch.ones(2)]


def test_a_first_gradient_becomes_the_sum_itself() -> None:
    """A copy for each leaf would cost a pass over the params."""
    for settings in ({}, {"copy": True}):
        accumulator = GradAccumulator([None], [torch.float32])
        add_grads(accumulator, [ONE], **settings)
        (total,) = accumulator.values
        assert (total is ONE) == (not settings)


@pytest.mark.parametrize("group", [TWO_MICROBATCHES, []])
@pytest.mark.parametrize("accum_dtype", [None, torch.float32, torch.float64])
def test_accum_dtype(accum_dtype: torch.dtype | None, group: list[Tensor]) -> None:
    """Also sums leaves that the loss does not reach, and a group without tokens, to zeros."""
    dtypes = [torch.bfloat16, torch.float32, torch.float64, torch.bfloat16]
    wide = [torch.float32, torch.float32, torch.float64, torch.float32]
    params = [torch.ones(2, dtype=dtype) for dtype in dtypes]

    def loss_fn(p: list[Tensor], m: Tensor) -> Any:
        return sum(p[:3]) * m

    grads, loss, *_ = ps.accumulate(
        loss_fn, params, group, weight_fn=torch.ones_like, accum_dtype=accum_dtype
    )
    assert [grad.dtype for grad in grads] == [accum_dtype or dtype for dtype in wide]
    *reached, unreached = [grad.tolist() for grad in grads]
    assert reached == [[len(group)] * 2] * 3
    assert unreached == [0, 0]
    assert loss.dtype == (torch.float64 if group else torch.float32)


def test_aux_sums_wide() -> None:
    """Counts flags, and sums half precision in float32; None is no aux."""

    def loss_fn(w: Tensor, m: Tensor) -> ps.LossOutput:
        if len(m) != 1:
            return ps.LossOutput(w * m, aux=None)
        aux = {
            "flag": m[0] > 0,
            "half": m[0].to(torch.float16),
        }
        return ps.LossOutput(w * m, aux=aux)

    def sum_aux(group: list[Tensor]) -> Any:
        sums = ps.accumulate(loss_fn, ONE, group, weight_fn=torch.ones_like)
        return sums.aux

    flagged = [torch.ones(1)] * 2049
    assert sum_aux(flagged) == {"flag": 2049, "half": 2049}
    assert sum_aux([torch.ones(2)]) == ()


def test_a_number_is_no_total() -> None:
    numbers: list[Any] = [5, torch.tensor(5)]
    for total in numbers:
        with pytest.raises(TypeError, match=r"pass TokenCounts, as count_tokens"):
            ps.accumulate(torch.mul, ONE, [ONE], weight_fn=torch.ones_like, total=total)


@pytest.mark.parametrize("num_tokens", [-1, float("inf"), float("nan")])
def test_a_total_that_overflows_runs_no_loss(num_tokens: float) -> None:
    number = torch.tensor(num_tokens)
    total = ps.TokenCounts(
        num_tokens=number,
        num_microbatches=torch.tensor(1),
    )

    def loss_fn(w: Tensor, m: Tensor) -> Tensor:
        raise AssertionError("the loss ran")

    with pytest.raises(ValueError, match="the sum of all weights, overflows"):
        ps.accumulate(
            loss_fn,
            ONE,
            [ONE],
            weight_fn=torch.ones_like,
            total=total,
        )


TERMS: list[tuple[dict[str, Any], Any, str]] = [
    (
        {"aux": {"n": 3}},
        TypeError,
        r"LossOutput\.aux\['n'\] must be a tensor, got int; wrap it",
    ),
    (
        {"microbatch_loss": ONE[None]},
        ValueError,
        r"a real scalar tensor, got torch.float32 of shape \(1,\)",
    ),
    (
        {"microbatch_loss": torch.tensor(1j)},
        ValueError,
        "a real scalar tensor, got torch.complex64",
    ),
    (
        {"microbatch_loss": ONE},
        ValueError,
        'known before the backward pass: use normalize="loss"',
    ),
    (
        {"weights": torch.ones(2)},
        ValueError,
        "the weights come twice",
    ),
    (
        {"weight_fn": None},
        ValueError,
        "weight_fn=None needs a loss_fn that returns LossOutput",
    ),
]


@pytest.mark.parametrize(("terms", "error", "message"), TERMS)
def test_loss_terms_that_are_refused(terms: Any, error: Any, message: str) -> None:
    weight_fn = terms.pop("weight_fn", torch.ones_like)
    two = torch.ones(2)

    def loss_fn(w: Tensor, m: Tensor) -> ps.LossOutput:
        return ps.LossOutput(two, **terms)

    with pytest.raises(error, match=message):
        ps.accumulate(loss_fn, two, [two], weight_fn=weight_fn)


@pytest.mark.parametrize("way", ["own", "vmap", "grad"])
def test_a_loss_that_does_not_reach_params(way: str) -> None:
    """Refuses it where the group has tokens; single leaves and microbatches need not be reached."""
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    group = [
        torch.tensor([1.0, 2.0]),
        torch.tensor([[3.0, 4.0]]),
    ]

    def gradients(loss_fn: Any, weight: float = 1.0) -> Any:
        weight_fn = partial(torch.full_like, fill_value=weight)

        def run(params: Any) -> Any:
            sums = ps.accumulate(loss_fn, params, group, weight_fn=weight_fn)
            return sums.grads

        def sum_of_grads(params: Any) -> Any:
            grads = run(params)
            return sum(leaf.sum() for leaf in grads.values())

        if way == "vmap":
            ensemble = {name: leaf.expand(3, 2) for name, leaf in params.items()}
            return torch.vmap(run)(ensemble)
        if way == "grad":
            return torch.func.grad(sum_of_grads)(params)
        return run(params)

    def detached(p: Any, m: Tensor) -> Tensor:
        return (p["a"] * m).detach()

    def without_params(p: Any, m: Tensor) -> Tensor:
        return m * 1

    def of_one_leaf_and_microbatch(p: Any, m: Tensor) -> Tensor:
        if m.ndim == 2:
            return p["a"] ** 2 * m
        return m * 1

    for loss_fn in (detached, without_params):
        with pytest.raises(ValueError, match="losses that do not depend on params"):
            gradients(loss_fn)
        gradients(loss_fn, weight=0.0)
    gradients(of_one_leaf_and_microbatch)


def test_inference_mode_is_refused() -> None:
    """It records nothing, so that no gradient arrives."""
    w = torch.ones(2)
    group = [torch.ones(2)]
    with torch.inference_mode():
        inference_tensor = torch.ones(2)
        with pytest.raises(
            ValueError, match=r"all of it runs under torch\.inference_mode"
        ):
            ps.accumulate(linear, w, group, weight_fn=torch.ones_like)
    with pytest.raises(RuntimeError, match="inference tensor outside InferenceMode"):
        ps.accumulate(linear, inference_tensor, group, weight_fn=torch.ones_like)


def test_a_tangent_that_is_not_finite_is_taken_away_with_its_loss() -> None:
    """At weight 0 also in forward mode, where the loss itself is finite."""

    def loss_fn(w: Tensor, m: Batch) -> Tensor:
        return w + m["z"].sqrt()

    def weight_fn(m: Batch) -> Tensor:
        return m["w"]

    def sum_losses(z: Tensor) -> Tensor:
        microbatch = {"z": z, "w": torch.tensor([1.0, 1.0, 0.0])}
        sums = ps.accumulate(loss_fn, ONE, [microbatch], weight_fn=weight_fn)
        return sums.loss

    z = torch.tensor([1.0, 4.0, 0.0])
    direction = torch.ones(3)
    tangent = torch.func.jvp(sum_losses, (z,), (direction,))[1]
    assert tangent == 0.5 + 0.25


@pytest.mark.parametrize("order", [1, -1])
def test_losses_are_summed_in_float64(order: int) -> None:
    """Sums 2²⁴ and ones in any order, which float32 would lose one by one; evaluation, too."""
    one = torch.tensor([1.0])
    large = torch.tensor([2.0**24])
    evaluate = ps.make_eval_step(linear, weight_fn=torch.ones_like)
    single = [large, *[one] * 256]
    double = [one, large.double() + 1]
    for group, total, dtype in (
        (single, 2**24 + 256, torch.float32),
        (double, 2**24 + 2, torch.float64),
    ):
        ordered = group[::order]
        loss = ps.accumulate(linear, ONE, ordered, weight_fn=torch.ones_like).loss
        mean = evaluate(ONE, ordered).loss
        assert loss == torch.tensor(total, dtype=dtype)
        assert mean == torch.tensor(total / len(group), dtype=dtype)
        assert loss.dtype == mean.dtype == dtype


def test_half_precision_is_summed_wide_under_vmap() -> None:
    """256 + 1 + 1 is 256 in bfloat16."""
    group = [torch.tensor([x]).bfloat16() for x in (256.0, 1.0, 1.0)]

    def sum_grads(w: Tensor) -> Any:
        sums = ps.accumulate(linear, w, group, weight_fn=torch.ones_like)
        return sums.grads

    ensemble = torch.ones(2, 1, dtype=torch.bfloat16)
    grads = torch.vmap(sum_grads)(ensemble)
    assert grads.dtype == torch.float32
    assert grads.flatten().tolist() == [258, 258]


def test_a_term_of_a_microbatch_without_tokens_may_be_anything() -> None:
    """Such as a mean over its tokens, also where another member of an ensemble has some."""

    def loss_fn(w: Tensor, m: Batch) -> ps.LossOutput:
        losses = w * m["x"]
        mean = (m["w"] * losses).sum() / m["w"].sum()
        return ps.LossOutput(losses, microbatch_loss=mean)

    sgd = ps.optim.sgd(0.5)
    step = ps.make_update_step(loss_fn, sgd, weight_fn=lambda m: m["w"])
    full = {"x": torch.ones(2), "w": torch.ones(2)}
    empty = {"x": torch.ones(2), "w": torch.zeros(2)}
    state = sgd.init(ONE)
    new, _, metrics = step(ONE, state, [full, empty])
    assert metrics.num_microbatches == 1
    assert new == 0

    # The second member of the ensemble has tokens in both microbatches.
    of_both = [
        {key: torch.stack([microbatch[key], full[key]]) for key in full}
        for microbatch in (full, empty)
    ]
    over_groups = torch.vmap(step, (None, None, 0))
    _, _, metrics = over_groups(ONE, state, of_both)
    assert metrics.loss.tolist() == [2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_tokens", [3, 2**24 - 1, 2**24 + 1, 2**53 - 1])
@pytest.mark.parametrize("weight_dtype", [torch.bool, torch.int64, torch.float64])
def test_a_cotangent_is_the_nearest_number_to_the_quotient(
    dtype: torch.dtype, num_tokens: int, weight_dtype: torch.dtype
) -> None:
    """In float32, 2²⁴ + 1 would be rounded; and 1/3 in float32 is not 1/3 in float64."""
    total = ps.TokenCounts(torch.tensor(num_tokens), torch.tensor(1))
    w = torch.ones((), dtype=dtype)
    weights = torch.ones(1, dtype=weight_dtype)

    sums = ps.accumulate(
        linear, w, [weights.to(dtype)], weight_fn=lambda m: weights, total=total
    )

    nearest = torch.tensor(1 / num_tokens, dtype=torch.float64).to(dtype)
    assert torch.equal(sums.grads, nearest)


@pytest.mark.parametrize("weights", [[2**53, 1], [2**53 + 2], [2**62, 2**62]])
def test_whole_weights_beyond_those_that_are_exact(weights: list[int]) -> None:
    """In float64, 2⁵³ + 1 is 2⁵³; in int64, 2⁶² + 2⁶² is negative."""
    group = [torch.ones(len(weights))]
    with pytest.raises(ValueError, match="sum to more than MAX_EXACT_INT"):
        ps.accumulate(linear, ONE, group, weight_fn=lambda m: torch.tensor(weights))
