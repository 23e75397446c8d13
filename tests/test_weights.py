"""Weights and their count."""

from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps


def given(microbatch: Tensor) -> Tensor:
    return microbatch


@pytest.mark.parametrize(
    ("dtype", "count_dtype"),
    [
        (torch.bool, torch.int64),
        (torch.uint8, torch.int64),
        (torch.int32, torch.int64),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float64),
    ],
)
def test_counts_exactly(dtype: torch.dtype, count_dtype: torch.dtype) -> None:
    """Also where the weights' own dtype could not hold the count; no gradient flows."""
    weights = torch.ones(1000, dtype=dtype).requires_grad_(dtype.is_floating_point)
    count = ps.count_tokens([weights, torch.ones(3, 5, dtype=dtype)], given)
    assert count == 1015
    assert count.dtype == count_dtype
    assert not count.requires_grad


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_labels_of_other_layouts_and_dtypes() -> None:
    """Nested, sparse, and unsigned, where -100 would wrap around to a label like any other."""
    labels = torch.nested.nested_tensor(
        [torch.tensor([1, -100]), torch.tensor([1, 2, 3])], layout=torch.jagged
    )
    assert ps.count_tokens([{"labels": labels}]) == 4
    some = torch.tensor([[True, False], [True, True]])
    assert ps.count_tokens([some, some.to_sparse()], given) == 6
    assert ps.count_tokens([{"labels": torch.arange(256, dtype=torch.uint8)}]) == 256
    assert ps.count_tokens([]) == 0
    assert ps.count_tokens([torch.tensor([True]), torch.tensor([0.5])], given) == 1.5


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), -2])
def test_bad_weights(bad: float) -> None:
    with pytest.raises(ValueError, match=f"must be finite and not negative, but one is {bad}"):
        ps.count_tokens([torch.tensor([1, bad])], given)
    under_vmap = torch.vmap(lambda w: ps.count_tokens([w], given))
    with pytest.raises(ValueError, match=f"one is {bad}"):
        under_vmap(torch.tensor([[1], [bad]]))


@pytest.mark.parametrize(
    ("weights", "found"), [([1, 2], "list"), (torch.ones(2, dtype=torch.complex64), "complex64")]
)
def test_weights_that_are_no_tensor(weights: Any, found: str) -> None:
    with pytest.raises(TypeError, match=f"one per token; got .*{found}"):
        ps.count_tokens([weights], given)


@pytest.mark.parametrize("microbatch", [{"target": torch.ones(2)}, torch.ones(2)])
def test_label_weights_says_what_it_needs(microbatch: object) -> None:
    with pytest.raises(ValueError, match=r"reads microbatch\['labels'\], but .* pass weight_fn="):
        ps.label_weights(microbatch)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_weights_count_and_multiply(dtype: torch.dtype) -> None:
    """Few of torch's functions take them; a step does."""
    sgd, w = ps.optim.sgd(0.5), torch.zeros(())
    step = ps.make_update_step(lambda w, x: w * x, sgd, weight_fn=lambda x: x.to(dtype))
    new, _, metrics = step(w, sgd.init(w), [torch.tensor([1.0, 3.0])])
    assert metrics.num_tokens == 4
    assert metrics.num_tokens.dtype == torch.int64
    assert new == -0.5 * (1 + 9) / 4
