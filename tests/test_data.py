"""Labels, and what belongs to an example as a whole."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, strategies as st
from torch import Tensor

import purestep as ps

# shift_labels

INTEGERS = [
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
]
INTEGERS += [torch.uint64, torch.int64]


def shifted(ids: list[int], mask: list[int]) -> list[int]:
    """Token by token: what comes next, where both are tokens."""
    following = zip(ids[1:], mask, mask[1:], strict=False)
    labels = [label if both and other else -100 for label, both, other in following]
    return [*labels, -100][: len(ids)]


@given(
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 6),
    st.sampled_from(INTEGERS),
    st.sampled_from([None, torch.bool, *INTEGERS]),
    st.integers(0, 999),
)
@example([2], 3, torch.int32, torch.bool, 0)
def test_labels_are_the_next_tokens(
    leading: list[int],
    length: int,
    dtype: torch.dtype,
    mask_dtype: torch.dtype | None,
    seed: int,
) -> None:
    """Of every text of a batch, wherever there is padding; as a whole, one by one, and mapped."""
    generator, shape = torch.Generator().manual_seed(seed), [*leading, length]
    ids, mask = (torch.randint(most, shape, generator=generator) for most in (101, 2))
    mask = torch.ones_like(mask) if mask_dtype is None else mask
    texts = (each.reshape(-1, length or 1).tolist() for each in (ids, mask))
    expected = [label for text in zip(*texts, strict=True) for label in shifted(*text)]
    given_ids, given_mask = ids.to(dtype), mask.to(mask_dtype) if mask_dtype else None
    labels = ps.shift_labels(given_ids, given_mask)
    assert labels.dtype == torch.int64
    assert list(labels.shape) == shape
    assert labels.reshape(-1).tolist() == expected
    if leading and leading[0] and dtype == torch.int64:
        assert torch.equal(torch.vmap(ps.shift_labels)(ids, mask), labels)
        unmapped = torch.vmap(ps.shift_labels, in_dims=(0, None))(ids, mask[0])
        assert torch.equal(unmapped, ps.shift_labels(ids, mask[:1].expand_as(mask)))
    labels.fill_(-7)
    assert torch.equal(given_ids.to(torch.int64), ids), (
        "labels share no memory with their text"
    )


@pytest.mark.parametrize("masked", [False, True])
def test_labels_of_an_empty_text_and_of_one_on_a_device(masked: bool) -> None:
    """An empty list has the dtype of any other; labels are made where the text is."""
    for ids in (torch.tensor([]), torch.ones(2, 3, dtype=torch.int32, device="meta")):
        labels = ps.shift_labels(ids, ids if masked else None)
        assert (labels.device, labels.dtype, labels.shape) == (
            ids.device,
            torch.int64,
            ids.shape,
        )


TWO = torch.tensor([5, 6])
NO_LABELS: dict[str, tuple[Any, ...]] = {
    "input_ids is list, no tensor, where a tensor of integers": ([5, 6],),
    "input_ids is torch.float32 of shape": (torch.tensor(5.0),),
    "input_ids is torch.float32 .*, where a tensor of integers": (torch.ones(2),),
    "input_ids is torch.bool .*, where a tensor of int": (torch.tensor([True]),),
    r"input_ids is a single token, torch.int64 of shape \(\)": (torch.tensor(5),),
    r"attention_mask has the shape \(3,\), but input_ids \(2,\)": (
        TWO,
        torch.ones(3).long(),
    ),
    "attention_mask is torch.float32 .*, where a tensor of integers": (
        TWO,
        torch.zeros(2),
    ),
}


@pytest.mark.parametrize("message", NO_LABELS)
def test_shift_labels_refuses(message: str) -> None:
    with pytest.raises((TypeError, ValueError), match="shift_labels: " + message):
        ps.shift_labels(*NO_LABELS[message])


# What belongs to an example as a whole

CLASSES = 3
FILLING = {"tokens": 0, "labels": -100, "id": -1, "weights": 0}


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(6, 20))
def test_what_belongs_to_an_example_stays_with_it(
    lengths: list[int], budget: int
) -> None:
    """In rows and in documents: beside its tokens; nothing but padding beside the rest."""
    examples: list[dict[str, Any]] = []
    for i, n in enumerate(lengths):
        more = {"id": torch.tensor(i), "weights": torch.tensor([[i], [n]])}
        labels = torch.tensor(i % CLASSES)
        examples.append(
            {"tokens": torch.full((n,), i + 1), "labels": labels, "more": more}
        )

    def check(part: Any, row: int, own: Tensor, *place: int) -> int:
        """What belongs to the example that has these tokens of a row."""
        number = int(part["more"]["id"][place])
        assert torch.equal(part["tokens"][row][own], examples[number]["tokens"])
        assert part["labels"][place] == number % CLASSES
        assert part["more"]["weights"][place].tolist() == [[number], [lengths[number]]]
        return number

    rows = ps.pack(examples, max_tokens=budget, pad=FILLING, whole=["weights"])
    packed = ps.pack_documents(
        examples, row_tokens=budget, pad=FILLING, whole=["weights"]
    )
    found = [
        check(m, i, m["tokens"][i] > 0, i)
        for m in rows
        for i in range(len(m["labels"]))
    ]
    assert sorted(found) == [*range(len(lengths))]
    ids, segments = packed["more"]["id"], packed["segments"]
    assert ids.shape[1] == segments.max()
    assert (packed["labels"][ids < 0] == -100).all()
    held = (ids >= 0).nonzero().tolist()
    found = [check(packed, row, segments[row] == at + 1, row, at) for row, at in held]
    assert sorted(found) == [*range(len(lengths))]


def test_balance_by_length_alone() -> None:
    tokens, image = [torch.ones(n) for n in (5, 4, 3, 3, 3)], torch.ones(9, 2)
    examples = [
        {"tokens": t, "labels": torch.tensor(len(t)), "image": image} for t in tokens
    ]
    shares = ps.balance(examples, 2, whole=["image"])
    assert [[int(one["labels"]) for one in share] for share in shares] == [
        [5, 3],
        [4, 3, 3],
    ]


ONE = {"tokens": torch.ones(2), "class": torch.tensor(1)}
EMPTY = {"tokens": torch.ones(0), "class": torch.tensor(1)}
PICTURE = {"tokens": torch.ones(2), "image": torch.ones(2, 3)}
BARE = {**PICTURE, "tokens": torch.ones(0)}
TWO_CLASSES = {**ONE, "class": torch.tensor([1, 2])}
NOT_PACKED: dict[str, tuple[list[Any], list[str]]] = {
    r"^examples\[1\] has length 0, but examples\[1\]\['class'\] belongs to it.*leave the example out": ([ONE, EMPTY], []),
    r"^examples\[0\] has length 0": ([EMPTY], []),
    r"\['class'\] is torch.float32 of shape \(\)": ([ONE, {**ONE, "class": torch.tensor(1.0)}], []),
    r"\['class'\] is torch.int64 of shape \(2,\)": ([ONE, TWO_CLASSES], []),
    r"\['class'\] is torch.int64 of shape \(\)": ([TWO_CLASSES, ONE], []),
    "common first dimension": ([{"class": torch.tensor(1)}], []),
    "make tensors of them": ([{**ONE, "class": 1}], []),
    r"examples\[1\]\['image'\] is torch.float32 of shape \(3, 3\)": ([PICTURE, {**PICTURE, "image": torch.ones(3, 3)}], ["image"]),
    r"whole=\['picture'\] names 'picture'.*\['image'\]": ([PICTURE], ["picture"]),
    r"examples\[0\]\['image'\].* belongs to it as a whole": ([BARE], ["image"]),
}  # fmt: skip


@pytest.mark.parametrize("message", NOT_PACKED)
def test_what_no_example_can_hold_is_refused(message: str) -> None:
    """In rows and in documents: left out or padded, it would be missing from N."""
    examples, whole = NOT_PACKED[message]
    for pack in (
        partial(ps.pack, max_tokens=9),
        partial(ps.pack_documents, row_tokens=9),
    ):
        with pytest.raises(ValueError, match=message):
            pack(examples, pad=0, whole=whole)


def test_what_belongs_to_an_example_is_stacked() -> None:
    assert ps.pack([ONE, ONE], max_tokens=4)[0]["class"].tolist() == [1, 1]
    pictures = ps.pack([PICTURE] * 2, max_tokens=4, pad=0, whole=["image"])
    assert pictures[0]["image"].shape == (2, 2, 3)
    with pytest.raises(
        ValueError, match=r"no pad value for example\['class'\]: add it to pad="
    ):
        ps.pack_documents([ONE, ONE], row_tokens=4)


def test_a_mask_that_is_added() -> None:
    """By attention that adds it, and by torch's own, to the same result; a dtype that scores cannot have is refused."""
    segments = torch.tensor([[1, 1, 2, 2, 2, 0]])
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(
        3, 1, 2, 6, 4, generator=generator, dtype=torch.float64
    ).unbind()
    scores = q @ k.mT / 2 + ps.segment_mask(segments, torch.float64)
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    expected = attend(q, k, v, attn_mask=ps.segment_mask(segments))
    # Four products in a score, six in what is attended to, and the exponentials of six scores, each way.
    roundings = 2 * (4 + 6 + 3 * 6) * torch.finfo(torch.float64).eps
    assert (
        (scores.softmax(-1) @ v - expected).abs() <= roundings * v.abs().max()
    ).all()
    with pytest.raises(TypeError, match="floating point dtype of the scores"):
        ps.segment_mask(segments, torch.int64)
