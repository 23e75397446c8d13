"""Tests labels, and leaves that belong to an example as a whole."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, strategies as st
from torch import Tensor

import purestep as ps
from support.strategies import assert_same

# shift_labels

INTEGERS = [
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
]


def shift_by_hand(ids: list[int], mask: list[int]) -> list[int]:
    """Labels each token by the next one, where both are tokens."""
    labels = []
    for i in range(len(ids)):
        label = -100
        if i + 1 < len(ids) and mask[i] and mask[i + 1]:
            label = ids[i + 1]
        labels.append(label)
    return labels


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
    """Of every text of a batch, wherever there is padding; batched and mapped."""
    generator = torch.Generator().manual_seed(seed)
    shape = [*leading, length]
    ids = torch.randint(101, shape, generator=generator)
    mask = torch.randint(2, shape, generator=generator)
    converted = ids.to(dtype)
    converted_mask = None
    if mask_dtype is None:
        mask = torch.ones_like(mask)
    else:
        converted_mask = mask.to(mask_dtype)

    labels = ps.shift_labels(converted, attention_mask=converted_mask)

    row_length = length or 1
    rows = ids.reshape(-1, row_length).tolist()
    mask_rows = mask.reshape(-1, row_length).tolist()
    expected = []
    for row, mask_row in zip(rows, mask_rows, strict=True):
        expected += shift_by_hand(row, mask_row)
    assert labels.dtype == torch.int64
    assert list(labels.shape) == shape
    assert labels.reshape(-1).tolist() == expected
    if leading and leading[0] and dtype == torch.int64:
        mapped = torch.vmap(shift_with_mask)(ids, mask)
        assert_same(mapped, labels)
        map_ids = torch.vmap(shift_with_mask, in_dims=(0, None))
        same_mask = mask[:1].expand_as(mask)
        expected_labels = shift_with_mask(ids, same_mask)
        assert_same(map_ids(ids, mask[0]), expected_labels)
    labels.fill_(-7)
    unchanged = converted.to(torch.int64)
    assert torch.equal(unchanged, ids), "labels share memory with their text"


TEXTS = [
    torch.tensor([]),
    torch.ones(2, 3, dtype=torch.int32, device="meta"),
]


def shift_with_mask(ids: Tensor, mask: Tensor) -> Tensor:
    return ps.shift_labels(ids, attention_mask=mask)


@pytest.mark.parametrize("ids", TEXTS)
@pytest.mark.parametrize("masked", [False, True])
def test_labels_of_an_empty_text_and_of_one_on_a_device(
    masked: bool, ids: Tensor
) -> None:
    """torch gives an empty list any dtype; labels are on the device of the text."""
    mask = ids if masked else None

    labels = ps.shift_labels(ids, attention_mask=mask, answer_mask=mask)

    assert labels.device == ids.device
    assert labels.dtype == torch.int64
    assert labels.shape == ids.shape


IDS = torch.tensor([5, 6])
NO_INTEGERS: list[tuple[Any, str]] = [
    ([5, 6], "is list, no tensor, where a tensor of integers"),
    (torch.tensor(5.0), "is torch.float32 of shape"),
    (torch.ones(2), "is torch.float32 .*, where a tensor of integers"),
    (torch.tensor([True]), "is torch.bool .*, where a tensor of int"),
    (torch.tensor(5), r"is a single token, torch.int64 of shape \(\)"),
]
NO_MASKS: list[tuple[Any, str]] = [
    (torch.ones(3).long(), r"has the shape \(3,\), but input_ids \(2,\)"),
    (torch.zeros(2), "is torch.float32 .*, where a tensor of integers"),
]


@pytest.mark.parametrize(("ids", "message"), NO_INTEGERS)
def test_shift_labels_refuses_ids(ids: Any, message: str) -> None:
    message = "shift_labels: input_ids " + message
    with pytest.raises((TypeError, ValueError), match=message):
        ps.shift_labels(ids)


@pytest.mark.parametrize("name", ["attention_mask", "answer_mask"])
@pytest.mark.parametrize(("mask", "message"), NO_MASKS)
def test_shift_labels_refuses_masks(name: str, mask: Any, message: str) -> None:
    message = f"shift_labels: {name} {message}"
    with pytest.raises((TypeError, ValueError), match=message):
        ps.shift_labels(IDS, **{name: mask})


def test_shift_labels_takes_masks_by_name() -> None:
    """By position, either could be meant, and they keep different labels."""
    shift: Any = ps.shift_labels
    with pytest.raises(TypeError, match=r"attention_mask= .*or as answer_mask="):
        shift(IDS, torch.ones_like(IDS))


def test_labels_of_answers_keep_their_first_token() -> None:
    """Of two answers in a chat, of which one begins the text, and with padding on the left."""
    ids = torch.tensor([0, 0, 5, 6, 7, 8, 9, 4])
    padding = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1])
    answers = torch.tensor([0, 0, 1, 0, 0, 1, 1, 0])
    labels = ps.shift_labels(ids, attention_mask=padding, answer_mask=answers)
    # 5 begins the text, so nothing predicts it.
    assert labels.tolist() == [-100, -100, -100, -100, 8, 9, -100, -100]


# Leaves that belong to an example as a whole

CLASSES = 3
PAD = {
    "tokens": 0,
    "labels": -100,
    "id": -1,
    "weights": 0,
}


def make_examples(lengths: list[int]) -> list[dict[str, Any]]:
    """Makes examples with leaves for the whole example, below the top too."""
    examples: list[dict[str, Any]] = []
    for number, length in enumerate(lengths):
        more = {
            "id": torch.tensor(number),
            "weights": torch.tensor([[number], [length]]),
        }
        example = {
            "tokens": torch.full((length,), number + 1),
            "labels": torch.tensor(number % CLASSES),
            "more": more,
        }
        examples.append(example)
    return examples


def check_example(
    microbatch: Any,
    index: tuple[int, ...],
    tokens: Tensor,
    lengths: list[int],
) -> int:
    """Checks the leaves at this index, and returns the number of their example."""
    more = microbatch["more"]
    number = int(more["id"][index])
    length = lengths[number]
    assert_same(tokens, torch.full((length,), number + 1))
    label = microbatch["labels"][index]
    assert label == number % CLASSES
    weights = more["weights"][index]
    assert weights.tolist() == [[number], [length]]
    return number


LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=8)


@given(LENGTHS, st.integers(6, 20))
def test_leaves_of_an_example_stay_with_it_in_rows(
    lengths: list[int], max_tokens: int
) -> None:
    examples = make_examples(lengths)

    microbatches = ps.pack(
        examples, max_tokens=max_tokens, pad=PAD, per_example=["weights"]
    )

    numbers = []
    for microbatch in microbatches:
        for row, padded in enumerate(microbatch["tokens"]):
            tokens = padded[padded > 0]
            numbers.append(check_example(microbatch, (row,), tokens, lengths))
    assert sorted(numbers) == list(range(len(lengths)))


@given(LENGTHS, st.integers(6, 20))
def test_leaves_of_an_example_stay_with_it_in_documents(
    lengths: list[int], row_tokens: int
) -> None:
    """The other entries of a row are padding."""
    examples = make_examples(lengths)

    packed = ps.pack_documents(
        examples, row_tokens=row_tokens, pad=PAD, per_example=["weights"]
    )

    segments = packed["segments"]
    ids = packed["more"]["id"]
    is_example = ids >= 0
    assert ids.shape[1] == segments.max()
    assert (packed["labels"][~is_example] == -100).all()
    numbers = []
    for row, column in is_example.nonzero().tolist():
        in_segment = segments[row] == column + 1
        tokens = packed["tokens"][row][in_segment]
        numbers.append(check_example(packed, (row, column), tokens, lengths))
    assert sorted(numbers) == list(range(len(lengths)))


def list_labels(examples: Any) -> list[int]:
    return [int(example["labels"]) for example in examples]


def test_balance_by_length_alone() -> None:
    image = torch.ones(9, 2)
    examples = []
    for length in (5, 4, 3, 3, 3):
        example = {
            "tokens": torch.ones(length),
            "labels": torch.tensor(length),
            "image": image,
        }
        examples.append(example)

    first, second = ps.balance(examples, 2, per_example=["image"])

    assert list_labels(first) == [5, 3]
    assert list_labels(second) == [4, 3, 3]


TOKENS = torch.ones(2)
NO_TOKENS = torch.ones(0)
CLASS = torch.tensor(1)
IMAGE = torch.ones(2, 3)
ONE = {"tokens": TOKENS, "class": CLASS}
FLOAT_CLASS = {"tokens": TOKENS, "class": CLASS.float()}
INT_CLASS = {"tokens": TOKENS, "class": 1}
TWO_CLASSES = {"tokens": TOKENS, "class": torch.tensor([1, 2])}
EMPTY = {"tokens": NO_TOKENS, "class": CLASS}
PICTURE = {"tokens": TOKENS, "image": IMAGE}
LARGER_PICTURE = {"tokens": TOKENS, "image": torch.ones(3, 3)}
EMPTY_PICTURE = {"tokens": NO_TOKENS, "image": IMAGE}


class NotPacked(NamedTuple):
    """Examples that cannot be packed, and the message that says so."""

    examples: list[Any]
    message: str
    per_example: tuple[str, ...] = ()


NOT_PACKED = [
    NotPacked(
        [ONE, EMPTY],
        r"^examples\[1\] has length 0, but examples\[1\]\['class'\] belongs to it.*leave the example out",
    ),
    NotPacked([EMPTY], r"^examples\[0\] has length 0"),
    NotPacked([ONE, FLOAT_CLASS], r"\['class'\] is torch.float32 of shape \(\)"),
    NotPacked([ONE, TWO_CLASSES], r"\['class'\] is torch.int64 of shape \(2,\)"),
    NotPacked([TWO_CLASSES, ONE], r"\['class'\] is torch.int64 of shape \(\)"),
    NotPacked([{"class": CLASS}], "common first dimension"),
    NotPacked([INT_CLASS], "make tensors of them"),
    NotPacked(
        [PICTURE, LARGER_PICTURE],
        r"examples\[1\]\['image'\] is torch.float32 of shape \(3, 3\)",
        per_example=("image",),
    ),
    NotPacked(
        [PICTURE],
        r"per_example=\['picture'\] names 'picture'.*\['image'\]",
        per_example=("picture",),
    ),
    NotPacked(
        [EMPTY_PICTURE],
        r"examples\[0\]\['image'\].* belongs to it as a whole",
        per_example=("image",),
    ),
]


@pytest.mark.parametrize("case", NOT_PACKED)
def test_leaves_that_no_example_can_hold_are_refused(case: NotPacked) -> None:
    """In rows and in documents: left out or padded, they would be missing from N."""
    with pytest.raises(ValueError, match=case.message):
        ps.pack(case.examples, max_tokens=9, pad=0, per_example=case.per_example)
    with pytest.raises(ValueError, match=case.message):
        ps.pack_documents(
            case.examples, row_tokens=9, pad=0, per_example=case.per_example
        )


def test_leaves_of_whole_examples_are_stacked() -> None:
    (classes,) = ps.pack([ONE, ONE], max_tokens=4)
    (pictures,) = ps.pack([PICTURE] * 2, max_tokens=4, pad=0, per_example=["image"])

    assert classes["class"].tolist() == [1, 1]
    assert pictures["image"].shape == (2, 2, 3)
    message = r"no pad value for example\['class'\]: pass pad= with"
    with pytest.raises(ValueError, match=message):
        ps.pack_documents([ONE, ONE], row_tokens=4)


def test_a_mask_that_is_added() -> None:
    """Attention that adds the mask gives the result of torch's own with a bool mask.

    A dtype that scores cannot have is refused.
    """
    segments = torch.tensor([[1, 1, 2, 2, 2, 0]])
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 1, 2, 6, 4, generator=generator, dtype=torch.float64)
    query, key, value = qkv
    attend: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention

    added_mask = ps.segment_mask(segments, torch.float64)
    scores = query @ key.mT / 2 + added_mask
    mixed = scores.softmax(-1) @ value

    bool_mask = ps.segment_mask(segments)
    expected = attend(query, key, value, attn_mask=bool_mask)
    # Four products in a score, six in what is attended to, and the exponentials of six
    # scores, in both computations.
    roundings = 2 * (4 + 6 + 3 * 6)
    bound = roundings * torch.finfo(torch.float64).eps * value.abs().max()
    assert ((mixed - expected).abs() <= bound).all()
    with pytest.raises(TypeError, match="floating point dtype of the scores"):
        ps.segment_mask(segments, torch.int64)
