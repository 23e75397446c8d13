"""Weights and their count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import purestep as ps


def ones(microbatch: Tensor) -> Tensor:
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
    """Also where the weights' own dtype could not hold the count."""
    count = ps.count_tokens([torch.ones(1000, dtype=dtype), torch.ones(3, 5, dtype=dtype)], ones)
    assert count == 1015
    assert count.dtype == count_dtype


def test_no_microbatch_has_no_tokens() -> None:
    assert ps.count_tokens([]) == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_labels_in_rows_of_different_lengths() -> None:
    """Nested tensors, for which torch has fewer operations, are counted like others, and so are sparse ones."""
    labels = torch.nested.nested_tensor(
        [torch.tensor([1, -100]), torch.tensor([1, 2, 3])], layout=torch.jagged
    )
    assert ps.count_tokens([{"labels": labels}]) == 4
    some = torch.tensor([[True, False], [True, True]])
    assert ps.count_tokens([some, some.to_sparse()], ones) == 6


def test_mixed_weights() -> None:
    assert ps.count_tokens([torch.tensor([True]), torch.tensor([0.5])], ones) == 1.5


def test_weights_are_data() -> None:
    """No gradient flows through a count."""
    weights = torch.ones(3, requires_grad=True)
    assert not ps.count_tokens([weights], ones).requires_grad


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_refuses_bad_weights(bad: float) -> None:
    with pytest.raises(ValueError, match=f"must be finite and not negative, but one is {bad}"):
        ps.count_tokens([torch.tensor([1.0, bad])], ones)
    under_vmap = torch.vmap(lambda w: ps.count_tokens([w], ones))
    with pytest.raises(ValueError, match=f"one is {bad}"):
        under_vmap(torch.tensor([[1.0], [bad]]))


def test_refuses_negative_integers() -> None:
    with pytest.raises(ValueError, match="one is -2"):
        ps.count_tokens([torch.tensor([1, -2])], ones)


def test_refuses_what_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="one per token; got list"):
        ps.count_tokens([[1, 2]], lambda microbatch: microbatch)
    with pytest.raises(TypeError, match=r"got torch\.complex64"):
        ps.count_tokens([torch.ones(2, dtype=torch.complex64)], ones)


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


def test_unsigned_labels_all_count() -> None:
    """-100 would wrap around to 156, which is a label like any other there."""
    assert ps.count_tokens([{"labels": torch.arange(256, dtype=torch.uint8)}]) == 256
