"""Counts of a step: weights of every dtype, however large, and which are refused."""

from collections import deque
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep.step import needs_checks
from tests.line_problem import MICROBATCH, PARAMS, SGD, loss_fn, run_step, weight_fn


def identity(microbatch: Tensor) -> Tensor:
    """Takes microbatches that are their own weights."""
    return microbatch


def test_none_in_params_comes_back() -> None:
    params = {**PARAMS, "bias": None}
    step = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn)

    new, _, _ = step(params, SGD.init(params), [MICROBATCH])

    assert new["bias"] is None
    assert new["w"] != 1


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_weights_beyond_the_losses_dtype(scale: float) -> None:
    """Only their ratio to N matters, so it is what is rounded."""

    def scaled_ones(m: Any) -> Tensor:
        return torch.full_like(m["x"], scale, dtype=torch.float64)

    scaled, *_ = run_step(weight_fn=scaled_ones)
    plain, *_ = run_step()
    assert torch.equal(scaled["w"], plain["w"])


def test_an_overflowing_count_is_not_applied_where_it_cannot_be_read() -> None:
    """Under a transform it is the identity, for the member that it concerns."""

    def weight_from_data(m: Any) -> Tensor:
        return m["w"].expand(2)

    step = ps.make_update_step(loss_fn, SGD, weight_fn=weight_from_data)

    def step_with_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
        microbatch = {**MICROBATCH, "w": weight}
        new, _, metrics = step(PARAMS, SGD.init(PARAMS), [microbatch])
        return new["w"], metrics.applied

    weights = torch.tensor([1.0, 1e308], dtype=torch.float64)
    w, applied = torch.vmap(step_with_weight)(weights)

    assert applied.tolist() == [True, False]
    assert w[0] != PARAMS["w"]
    assert w[1] == PARAMS["w"]


def test_sums_in_float16_are_divided_by_more_tokens_than_it_holds() -> None:
    """N = 70,000 is infinite in float16, in which sums of 0.1 are not."""

    def mean_of_small(w: Tensor, m: Tensor) -> Tensor:
        return w.sum() * m

    step = ps.make_update_step(
        mean_of_small,
        SGD,
        weight_fn=lambda m: m > 0,
        normalize="grads",
        accum_dtype=torch.float16,
    )

    def new_params(w: Tensor, m: Tensor) -> Tensor:
        return step(w, SGD.init(w), [m])[0]

    w = torch.ones(1, 2)
    m = torch.full((1, 70_000), 0.1)
    expected = new_params(w[0], m[0])
    assert not torch.equal(expected, w[0])
    recorded = torch.vmap(new_params)(w, m)
    torch.testing.assert_close(recorded[0], expected)


def test_a_structure_that_cannot_be_compared_is_a_new_one() -> None:
    """A node class of the user's may keep an array."""
    seen_specs: Any = {(0, frozenset()): deque([numpy.ones(2)])}
    assert needs_checks(seen_specs, 0, ps.tree.flatten(PARAMS)[1])


@pytest.mark.parametrize(
    ("dtype", "dtype_of_count"),
    [
        (torch.bool, torch.int64),
        (torch.uint8, torch.int64),
        (torch.int32, torch.int64),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float64),
    ],
)
def test_counts_exactly(dtype: torch.dtype, dtype_of_count: torch.dtype) -> None:
    """Also where the weights' own dtype could not hold the count; no gradient flows."""
    weights = torch.ones(1000, dtype=dtype)
    weights.requires_grad_(dtype.is_floating_point)
    matrix = torch.ones(3, 5, dtype=dtype)

    count = ps.count_tokens([weights, matrix], identity).num_tokens

    assert count == 1015
    assert count.dtype == dtype_of_count
    assert not count.requires_grad


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_labels_that_are_nested() -> None:
    texts = [torch.tensor([1, -100]), torch.tensor([1, 2, 3])]
    labels = torch.nested.nested_tensor(texts, layout=torch.jagged)
    assert ps.count_tokens([{"labels": labels}]).num_tokens == 4


def test_labels_that_are_unsigned() -> None:
    """-100 would wrap around to a label like any other."""
    labels = torch.arange(256, dtype=torch.uint8)
    assert ps.count_tokens([{"labels": labels}]).num_tokens == 256


def test_weights_that_are_sparse() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    assert ps.count_tokens([mask, mask.to_sparse()], identity).num_tokens == 6


def test_weights_of_two_dtypes_and_of_no_microbatch() -> None:
    bools = torch.tensor([True])
    floats = torch.tensor([0.5])
    assert ps.count_tokens([bools, floats], identity).num_tokens == 1.5
    assert ps.count_tokens([]).num_tokens == 0


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), -2])
def test_bad_weights(bad: float) -> None:
    message = f"must be finite and not negative, but one is {bad}"
    with pytest.raises(ValueError, match=message):
        ps.count_tokens([torch.tensor([1, bad])], identity)

    count_in_vmap = torch.vmap(lambda w: ps.count_tokens([w], identity).num_tokens)
    with pytest.raises(ValueError, match=f"one is {bad}"):
        count_in_vmap(torch.tensor([[1], [bad]]))


@pytest.mark.parametrize(
    ("weights", "shown"),
    [
        ([1, 2], "list"),
        (torch.ones(2, dtype=torch.complex64), "complex64"),
    ],
)
def test_what_is_no_weights_is_refused(weights: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=f"one per token; got .*{shown}"):
        ps.count_tokens([weights], identity)


@pytest.mark.parametrize(
    "microbatch", [{"target": torch.ones(2)}, {1: 2, "x": 3}, torch.ones(2)]
)
def test_microbatches_without_labels_are_refused(microbatch: Any) -> None:
    message = r"reads microbatch\['labels'\], but .* weight_fn="
    with pytest.raises(ValueError, match=message):
        ps.label_weights(microbatch)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_weights_count_and_multiply(dtype: torch.dtype) -> None:
    """Few of torch's functions take them; a step does."""
    new, _, metrics = run_step(weight_fn=lambda m: m["x"].to(dtype))
    expected, *_ = run_step(weight_fn=lambda m: m["x"])

    assert metrics.num_tokens == 3
    assert metrics.num_tokens.dtype == torch.int64
    assert torch.equal(new["w"], expected["w"])


def test_losses_of_a_class_of_tensors() -> None:
    """As a loss of ``torchvision``'s tensors is: the host reads no value of them."""

    class Image(Tensor):
        pass

    def loss_of_images(params: Any, m: Any) -> Tensor:
        return loss_fn(params, m).as_subclass(Image)

    step = ps.make_update_step(loss_of_images, SGD, weight_fn=weight_fn)
    actual = step(PARAMS, SGD.init(PARAMS), [MICROBATCH])
    expected = run_step()
    assert torch.equal(actual[0]["w"], expected[0]["w"])
    assert torch.equal(torch.Tensor(actual[2].loss), expected[2].loss)
