"""What a step counts: weights of every dtype, however large, and which are refused."""

from collections import deque
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep.step import needs_checks
from tests.line import MICROBATCH, PARAMS, SGD, loss_fn, step_with, weight_fn


def test_none_in_params_comes_back() -> None:
    params = {**PARAMS, "bias": None}
    step = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn)
    new, _, _ = step(params, SGD.init(params), [MICROBATCH])
    assert new["bias"] is None
    assert new["w"] != 1


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_weights_beyond_the_losses_dtype(scale: float) -> None:
    """Only their ratio to N matters, so it is what is rounded."""
    scaled = step_with(
        weight_fn=lambda m: torch.full_like(m["x"], scale, dtype=torch.float64)
    )
    assert torch.equal(scaled[0]["w"], step_with()[0]["w"])


def test_an_overflowing_count_is_not_applied_where_it_cannot_be_read() -> None:
    """Under a transform it is the identity, for the member that it concerns."""
    step = ps.make_update_step(loss_fn, SGD, weight_fn=lambda m: m["w"].expand(2))

    def stepped(weight: Tensor) -> tuple[Tensor, Tensor]:
        new, _, metrics = step(PARAMS, SGD.init(PARAMS), [{**MICROBATCH, "w": weight}])
        return new["w"], metrics.applied

    w, applied = torch.vmap(stepped)(torch.tensor([1.0, 1e308], dtype=torch.float64))
    assert applied.tolist() == [True, False]
    assert w[1] == PARAMS["w"] != w[0]


def given(microbatch: Tensor) -> Tensor:
    return microbatch


def test_a_structure_that_cannot_be_compared_is_a_new_one() -> None:
    """A node class of the user's may keep an array."""
    assert needs_checks({0: deque([numpy.ones(2)])}, 0, PARAMS)


def test_counts_exactly() -> None:
    """Also where the weights' own dtype could not hold the count; no gradient flows."""
    for dtype in (torch.bool, torch.uint8, torch.int32, torch.float32, torch.bfloat16):
        weights = torch.ones(1000, dtype=dtype).requires_grad_(dtype.is_floating_point)
        count = ps.count_tokens(
            [weights, torch.ones(3, 5, dtype=dtype)], given
        ).num_tokens
        assert count == 1015
        assert count.dtype == (
            torch.float64 if dtype.is_floating_point else torch.int64
        )
        assert not count.requires_grad


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_labels_of_other_layouts_and_dtypes() -> None:
    """Nested, sparse, and unsigned, where -100 would wrap around to a label like any other."""
    texts = [torch.tensor([1, -100]), torch.tensor([1, 2, 3])]
    labels = torch.nested.nested_tensor(texts, layout=torch.jagged)
    assert ps.count_tokens([{"labels": labels}]).num_tokens == 4
    some = torch.tensor([[True, False], [True, True]])
    assert ps.count_tokens([some, some.to_sparse()], given).num_tokens == 6
    assert (
        ps.count_tokens([{"labels": torch.arange(256, dtype=torch.uint8)}]).num_tokens
        == 256
    )
    assert ps.count_tokens([]).num_tokens == 0
    assert (
        ps.count_tokens([torch.tensor([True]), torch.tensor([0.5])], given).num_tokens
        == 1.5
    )


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), -2])
def test_bad_weights(bad: float) -> None:
    with pytest.raises(
        ValueError, match=f"must be finite and not negative, but one is {bad}"
    ):
        ps.count_tokens([torch.tensor([1, bad])], given)
    under_vmap = torch.vmap(lambda w: ps.count_tokens([w], given).num_tokens)
    with pytest.raises(ValueError, match=f"one is {bad}"):
        under_vmap(torch.tensor([[1], [bad]]))


def test_weights_that_are_none() -> None:
    none: Any = {"list": [1, 2], "complex64": torch.ones(2, dtype=torch.complex64)}
    for found, weights in none.items():
        with pytest.raises(TypeError, match=f"one per token; got .*{found}"):
            ps.count_tokens([weights], given)
    for microbatch in ({"target": torch.ones(2)}, torch.ones(2)):
        with pytest.raises(
            ValueError, match=r"reads microbatch\['labels'\], but .* weight_fn="
        ):
            ps.label_weights(microbatch)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_weights_count_and_multiply(dtype: torch.dtype) -> None:
    """Few of torch's functions take them; a step does."""
    new, _, metrics = step_with(weight_fn=lambda m: m["x"].to(dtype))
    assert (int(metrics.num_tokens), metrics.num_tokens.dtype) == (3, torch.int64)
    assert torch.equal(new["w"], step_with(weight_fn=lambda m: m["x"])[0]["w"])
