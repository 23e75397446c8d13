"""Labels, and what belongs to an example as a whole: from a data set to an update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import purestep as ps

# shift_labels

INTEGERS = [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32]


def shifted(ids: list[int], mask: list[int]) -> list[int]:
    """Token by token: what comes next, where both are tokens."""
    return [
        ids[t + 1] if t + 1 < len(ids) and mask[t] and mask[t + 1] else -100
        for t in range(len(ids))
    ]


@given(
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 6),
    st.sampled_from([*INTEGERS, torch.int64]),
    st.sampled_from([None, torch.bool, *INTEGERS, torch.int64]),
    st.randoms(use_true_random=False),
)
def test_labels_are_the_next_tokens(
    leading: list[int], length: int, dtype: torch.dtype, mask_dtype: torch.dtype | None, random: Any
) -> None:
    """Of every text of a batch, wherever there is padding; as a whole, one by one, and mapped."""
    shape = [*leading, length]
    size = torch.Size(shape).numel()
    ids = torch.tensor([random.randint(0, 100) for _ in range(size)]).view(shape)
    mask = torch.tensor([random.randint(0, 1) for _ in range(size)]).view(shape)
    if mask_dtype is None:
        mask = torch.ones_like(mask)
    texts = zip(ids.reshape(-1, length or 1), mask.reshape(-1, length or 1), strict=True)
    expected = [shifted(text.tolist(), one.tolist()) for text, one in texts]
    given_mask = mask.to(mask_dtype) if mask_dtype else None
    labels = ps.shift_labels(ids.to(dtype), given_mask)
    assert labels.dtype == torch.int64
    assert list(labels.shape) == shape
    assert labels.reshape(-1).tolist() == [label for text in expected for label in text]
    if leading and leading[0] and dtype == torch.int64:
        assert torch.equal(torch.vmap(ps.shift_labels)(ids, mask), labels)
        unmapped = torch.vmap(ps.shift_labels, in_dims=(0, None))(ids, mask[0])
        assert torch.equal(unmapped, ps.shift_labels(ids, mask[:1].expand_as(mask)))


def test_labels_do_not_write_to_their_text() -> None:
    ids, mask = torch.tensor([5, 6]), torch.tensor([1, 1])
    labels = ps.shift_labels(ids, mask)
    labels.fill_(0)
    assert (ids.tolist(), mask.tolist()) == ([5, 6], [1, 1])


def test_labels_are_made_where_the_text_is() -> None:
    ids = torch.ones(2, 3, dtype=torch.int32, device="meta")
    for mask in (None, ids):
        labels = ps.shift_labels(ids, mask)
        assert (labels.device, labels.dtype, labels.shape) == (ids.device, torch.int64, ids.shape)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([5, 6],), TypeError, r"input_ids is a list, not a tensor: .*torch.as_tensor\(input_ids\)"),
        ((torch.ones(2),), TypeError, "input_ids is torch.float32, where integers are needed"),
        ((torch.tensor(5),), ValueError, r"input_ids is a single token, torch.int64 of shape \(\)"),
        (
            (torch.ones(2, 3).long(), torch.ones(3).long()),
            ValueError,
            r"attention_mask has the shape \(3,\), but input_ids \(2, 3\)",
        ),
        (
            (torch.tensor([5, 6]), torch.zeros(2)),
            TypeError,
            "attention_mask is torch.float32, where integers are needed .*0 for padding",
        ),
    ],
)  # fmt: skip
def test_shift_labels_refuses(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match="shift_labels: " + message):
        ps.shift_labels(*arguments)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.sampled_from(["left", "right"]))
def test_labels_of_padded_texts_are_those_of_the_texts(lengths: list[int], side: str) -> None:
    """On whichever side the padding is: nothing is predicted from it."""
    texts = [torch.arange(1, n + 1) for n in lengths]
    longest = max(lengths)

    def row(text: Tensor) -> Tensor:
        padding = torch.zeros(longest - len(text), dtype=torch.int64)
        return torch.cat([padding, text] if side == "left" else [text, padding])

    ids = torch.stack([row(text) for text in texts])
    labels = ps.shift_labels(ids, ids != 0)
    for text, one, found in zip(texts, ids, labels, strict=True):
        assert torch.equal(found[one != 0], ps.shift_labels(text))
        assert (found[one == 0] == -100).all()
