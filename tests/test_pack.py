"""Tests ``pack``, ``pack_documents`` and ``balance``: few, short and even microbatches.

Also what examples are padded with, and which examples cannot be packed together. T14 proves
the rest.
"""

import math
from collections import UserDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import purestep as ps
from purestep import data
from support.strategies import assert_same
from tests.packing_examples import SMALL_LENGTHS, make_examples, partitions


@given(SMALL_LENGTHS, st.integers(0, 12), st.integers(1, 3))
def test_no_partition_needs_fewer_microbatches(
    lengths: list[int], slack: int, multiple_of: int
) -> None:
    """Compares with every partition within the budget.

    Of those with as few microbatches, none has a smaller largest one.
    """
    padded = []
    for length in lengths:
        padded.append(math.ceil(length / multiple_of) * multiple_of)
    max_tokens = max([1, *padded]) + slack

    def largest(parts: list[list[int]]) -> int:
        tokens = [0]
        for part in parts:
            longest = max(padded[i] for i in part)
            tokens.append(len(part) * longest)
        return max(tokens)

    parts = data.pack_indices(lengths, max_tokens=max_tokens, multiple_of=multiple_of)
    packed = ps.pack(
        make_examples(lengths), max_tokens=max_tokens, multiple_of=multiple_of
    )

    for microbatch in packed:
        assert microbatch["tokens"].shape[1] % multiple_of == 0
    not_empty = [i for i, length in enumerate(lengths) if length]
    assert sorted(i for part in parts for i in part) == not_empty
    for other in partitions(not_empty):
        if largest(other) <= max_tokens:
            assert len(parts) <= len(other)
            if len(other) == len(parts):
                assert largest(parts) <= largest(other)
    assert largest(parts) <= max_tokens


def test_pack_lowers_its_budget() -> None:
    """Where one example overflows, it is not left alone in the last microbatch."""
    parts = data.pack_indices([8] * 9, max_tokens=64)
    assert [len(part) for part in parts] == [5, 4]


PADDED_BY_ZERO = [
    "attention_mask",
    "decoder_attention_mask",
    "decoder_input_ids",
    "input_ids",
    "key",
    "position_ids",
    "token_type_ids",
    "tokens",
]


@pytest.mark.parametrize("name", [*PADDED_BY_ZERO, "labels"])
def test_usual_names_are_padded_by_what_weighs_nothing(name: str) -> None:
    """The second row is one token shorter."""
    examples = [{name: torch.ones(n, dtype=torch.int64)} for n in (2, 1)]
    (microbatch,) = ps.pack(examples, max_tokens=4)
    padding = 0 if name in PADDED_BY_ZERO else -100
    assert microbatch[name].tolist() == [[1, 1], [1, padding]]


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=20)


@given(LENGTHS, st.integers(12, 20))
def test_documents_are_whole_and_fill_half_of_the_rows(
    lengths: list[int], row_tokens: int
) -> None:
    """Holds every example exactly once, with its positions and its segment."""
    packed = ps.pack_documents(make_examples(lengths), row_tokens=row_tokens)

    labels = packed["labels"]
    segments = packed["segments"]
    positions = packed["positions"]
    is_token = segments > 0
    assert labels.shape[1] == row_tokens
    fewest_rows = math.ceil(sum(lengths) / row_tokens)
    assert len(labels) <= 2 * fewest_rows
    assert_same(labels == -100, ~is_token)
    assert segments.amax(1).sum() == len(lengths)
    assert_same(packed["tokens"][is_token], labels[is_token])
    for number, length in enumerate(lengths):
        is_example = labels == number
        assert positions[is_example].tolist() == list(range(length))
        assert segments[is_example].unique().numel() == 1
        assert is_example.any(1).sum() == 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 9])
def test_segment_mask_of_each_pair(causal: bool, window: int | None) -> None:
    rows = [
        [1, 1, 1, 2, 2, 0, 0],
        [1, 2, 2, 2, 2, 2, 2],
    ]
    segments = torch.tensor(rows)
    query = torch.arange(7)[:, None]
    key = torch.arange(7)
    distance = (query - key).abs()

    mask = ps.segment_mask(segments, causal=causal, window=window)

    of_query = segments[:, None, :, None]
    of_key = segments[:, None, None, :]
    expected = of_query == of_key
    if causal:
        expected = expected & (key <= query)
    if window is not None:
        expected = expected & (distance < window)
    assert_same(mask, expected)


@pytest.mark.parametrize("name", ["positions", "segments"])
def test_documents_keep_nested_leaves_of_their_names(name: str) -> None:
    """``positions`` and ``segments`` of examples are refused at the top alone."""
    plain = {"tokens": torch.ones(2)}
    example = {**plain, name: torch.tensor([7, 8])}
    message = rf"examples\[1\] is \['tokens', '{name}'\]: .*: rename them"
    with pytest.raises(ValueError, match=message):
        ps.pack_documents([plain, example], row_tokens=4)

    packed = ps.pack_documents([{"below": example}], row_tokens=3, pad=-1)

    assert packed["below"][name].tolist() == [[7, 8, -1]]
    assert packed["positions"].tolist() == [[0, 1, 0]]
    assert packed["segments"].tolist() == [[1, 1, 0]]


@given(SMALL_LENGTHS, st.integers(1, 4))
def test_balance_is_within_a_third_of_the_best(costs: list[int], ranks: int) -> None:
    """Keeps the order of the examples."""

    def costliest(parts: Any) -> int:
        totals = [0]
        for part in parts:
            totals.append(sum(costs[i] for i in part))
        return max(totals)

    shares = data.balance_indices(costs, ranks)

    all_examples = list(range(len(costs)))
    for parts in partitions(all_examples):
        if len(parts) <= ranks:
            assert 3 * costliest(shares) <= 4 * costliest(parts)
    for share in shares:
        assert list(share) == sorted(share)


def test_balance_by_the_users_cost() -> None:
    examples = make_examples([4, 2, 2, 2, 2])

    def square_length(example: Any) -> int:
        return len(example["tokens"]) ** 2

    shares = ps.balance(examples, 2, cost=square_length)

    sizes = [len(share) for share in shares]
    assert sorted(sizes) == [1, 4]


# Padding


PADS: list[tuple[torch.dtype, float]] = [
    (torch.bool, 1),
    (torch.float16, 0.1),
    (torch.bfloat16, -torch.inf),
    (torch.float8_e5m2, -96),
]
PADS_OUT_OF_RANGE: list[tuple[torch.dtype, float]] = [
    (torch.bool, 2),
    (torch.uint8, -100),
    (torch.uint16, 70000),
    (torch.int16, 0.5),
    (torch.int64, 2**53 + 1),
    (torch.float16, 7e4),
    (torch.float32, 1e39),
    (torch.float8_e4m3fn, -100),
    (torch.float8_e5m2, -100),
]


def two_examples(dtype: torch.dtype) -> list[Any]:
    """Makes two examples of two tokens, whose one leaf lies deep."""
    example = {"a": {"labels": [torch.zeros(2).to(dtype)]}}
    return [example, example]


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(("dtype", "value"), PADS)
def test_padding_has_the_requested_value(
    dtype: torch.dtype, value: float, by_name: bool
) -> None:
    examples = two_examples(dtype)
    pad: Any = {"labels": value} if by_name else value
    expected = torch.tensor(value).to(dtype).double()

    (microbatch,) = ps.pack(examples, max_tokens=99, multiple_of=5, pad=pad)
    documents = ps.pack_documents(examples, row_tokens=13, pad=pad)

    for packed in (microbatch, documents):
        (labels,) = packed["a"]["labels"]
        last_column = labels[:, -1]
        assert (last_column.double() == expected).all()
    is_padding = documents["segments"] == 0
    assert not documents["positions"][is_padding].any()


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(("dtype", "value"), PADS_OUT_OF_RANGE)
def test_padding_that_a_dtype_cannot_hold_is_refused(
    dtype: torch.dtype, value: float, by_name: bool
) -> None:
    """Names the leaf, and is refused where nothing has to be padded or it would be rounded."""
    examples = two_examples(dtype)
    pad: Any = {"labels": value} if by_name else value
    leaf = r"\['a'\]\['labels'\]\[0\]"
    message = rf"{leaf} would be padded with .*, which {dtype} cannot hold"

    with pytest.raises(ValueError, match=message):
        ps.pack(examples, max_tokens=99, multiple_of=5, pad=pad)
    with pytest.raises(ValueError, match=message):
        ps.pack_documents(examples, row_tokens=13, pad=pad)


ROWS = [{"x": torch.ones(2, 3)}, {"x": torch.ones(1, 3)}]
UNEVEN = [{"x": torch.ones(2), "y": torch.ones(3)}]
NOT_MAPPINGS: list[Any] = [torch.ones(2)]
THREE = make_examples([3, 9, 2])
Call = Callable[[], Any]
REFUSED: list[tuple[Call, str]] = [
    (
        lambda: ps.pack(THREE, max_tokens=10, multiple_of=4),
        r"examples\[1\] has 9 tokens \(12 padded .* of 4\).*max_tokens=10",
    ),
    (
        lambda: ps.pack_documents(THREE, row_tokens=8),
        r"examples\[1\] has 9 tokens, more than row_tokens=8",
    ),
    (
        lambda: ps.pack(ROWS, max_tokens=8),
        r"no pad value for example\['x'\]: pass pad= with a value for each leaf",
    ),
    (
        lambda: ps.pack([{"x": [1]}], max_tokens=8),
        r"\['x'\]\[0\] int.*make tensors of them",
    ),
    (
        lambda: ps.pack(UNEVEN, max_tokens=8),
        r"examples\[0\] need one common first dimension",
    ),
    (
        lambda: ps.pack(ROWS, max_tokens=0),
        "max_tokens=0 and .* must be at least 1",
    ),
    (
        lambda: ps.segment_mask(torch.tensor([[1]]), window=0),
        "window=0 must be at least 1",
    ),
    (
        lambda: ps.pack_documents([], row_tokens=8),
        "no examples",
    ),
    (
        lambda: ps.pack_documents(NOT_MAPPINGS, row_tokens=8),
        r"examples\[0\] is Tensor: documents are mappings, ",
    ),
    (
        lambda: ps.balance(make_examples([4]) + UNEVEN, 2),
        r"leaves of examples\[1\] need one common first dim",
    ),
    (
        lambda: ps.balance(ROWS, 0),
        "ranks=0 must be at least 1",
    ),
    (
        lambda: data.balance_indices([1.0, -1.0], 2),
        r"examples\[1\] costs -1.0: it must be finite",
    ),
    (
        lambda: data.balance_indices([1.0, math.nan], 2),
        r"examples\[1\] costs nan: it must be finite",
    ),
    (
        lambda: data.balance_indices([1.0, math.inf], 2),
        r"examples\[1\] costs inf: it must be finite",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_packing_refuses(call: Call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_rows_are_padded() -> None:
    (packed,) = ps.pack(ROWS, max_tokens=8, pad=-1.0)

    row = [1.0, 1.0, 1.0]
    padding = [-1.0, -1.0, -1.0]
    assert packed["x"].tolist() == [[row, row], [row, padding]]


HUGGING_FACE_INPUTS = [
    "input_ids",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "decoder_input_ids",
    "decoder_attention_mask",
]


def test_inputs_of_hugging_face_models_have_a_pad_value() -> None:
    texts = []
    for length in (3, 2):
        tokens = torch.ones(length, dtype=torch.int64)
        texts.append(dict.fromkeys(HUGGING_FACE_INPUTS, tokens))

    (packed,) = ps.pack(texts, max_tokens=6)

    for name in HUGGING_FACE_INPUTS:
        assert packed[name].tolist() == [[1, 1, 1], [1, 1, 0]]


# Trees

TOKENS = torch.ones(2, dtype=torch.int64)
MORE = torch.ones(2, 2)
DIFFERENT_STRUCTURE = "differs in structure"


class Odd:
    """An example unlike ``{"tokens": TOKENS, "more": [MORE]}``, and what is said of it."""

    def __init__(self, message: str, **example: Any) -> None:
        self.message = message
        self.example = example


ODD = {
    "different names": Odd(DIFFERENT_STRUCTURE, ids=TOKENS, more=[MORE]),
    "fewer": Odd(DIFFERENT_STRUCTURE, tokens=TOKENS),
    "deeper": Odd(DIFFERENT_STRUCTURE, tokens=[TOKENS], more=[MORE]),
    "no tensor": Odd(DIFFERENT_STRUCTURE, tokens=TOKENS, more=[None]),
    "dtype": Odd(
        r"\['tokens'\] is torch.int32 .*int64",
        tokens=TOKENS.int(),
        more=[MORE],
    ),
    "dtype below": Odd(
        r"\['more'\]\[0\] is torch.float16",
        tokens=TOKENS,
        more=[MORE.half()],
    ),
    "shape": Odd(
        r"\['more'\]\[0\] .*shape \(2, 1\)",
        tokens=TOKENS,
        more=[MORE[:, :1]],
    ),
    "rank": Odd(
        r"\['more'\]\[0\] .*shape \(2,\)",
        tokens=TOKENS,
        more=[MORE[:, 0]],
    ),
}
COMBINE: dict[str, Any] = {
    "pack": partial(ps.pack, max_tokens=6, pad=0),
    "pack into several": partial(ps.pack, max_tokens=4, pad=0),
    "pack_documents": partial(ps.pack_documents, row_tokens=6, pad=0),
    "stack": lambda examples: data.stack_examples(examples, 6, 0),
    "merge": ps.merge,
}


def test_an_example_that_is_too_long_is_not_cut() -> None:
    with pytest.raises(ValueError, match=r"example\['x'\] of length 3.*length=2"):
        data.stack_examples([{"x": torch.ones(2)}, {"x": torch.ones(3)}], 2, 0)


@pytest.mark.parametrize("position", [0, 2, 4])
@pytest.mark.parametrize("name", COMBINE)
@pytest.mark.parametrize("difference", ODD)
def test_examples_that_are_not_alike_are_refused(
    difference: str, name: str, position: int
) -> None:
    """Wherever the odd one stands."""
    odd = ODD[difference]
    usual = {"tokens": TOKENS, "more": [MORE]}
    examples: list[Any] = [usual] * 4
    examples.insert(position, odd.example)
    message = rf"(examples|microbatches)\[{position}\].*{odd.message}"
    if position == 0:
        # The first is the one that others are compared with: they are named.
        message = r"(examples|microbatches)\[1\]"

    with pytest.raises(ValueError, match=message):
        COMBINE[name](examples)


EMPTY: dict[str, Any] = {
    "tokens": torch.tensor([]),
    "labels": torch.tensor([]),
}


@pytest.mark.parametrize("lengths", [[2], [3, 1, 3, 2]])
@pytest.mark.parametrize("position", [0, 1])
def test_examples_of_length_0_cost_nothing(lengths: list[int], position: int) -> None:
    """Also where the dtype of an empty leaf is that of any empty list."""
    examples = make_examples(lengths)
    with_empty: list[Any] = examples.copy()
    with_empty.insert(position, EMPTY)
    with_empty.append(EMPTY)

    microbatches = ps.pack(with_empty, max_tokens=6)
    documents = ps.pack_documents(with_empty, row_tokens=6)
    shares = ps.balance(with_empty, 2)

    expected = ps.pack(examples, max_tokens=6)
    assert str(microbatches) == str(expected)
    expected_documents = ps.pack_documents(examples, row_tokens=6)
    assert str(documents) == str(expected_documents)
    assert sum(len(share) for share in shares) == len(with_empty)


def test_examples_of_length_0_alone() -> None:
    documents = ps.pack_documents([EMPTY, EMPTY], row_tokens=6)

    assert list(documents) == ["tokens", "labels", "positions", "segments"]
    for leaf in documents.values():
        assert leaf.shape == (0, 6)
    assert ps.count_tokens([documents]).num_tokens == 0
    of_one = ps.pack_documents([EMPTY], row_tokens=6)
    assert str(of_one) == str(documents)
    assert ps.pack([EMPTY], max_tokens=1) == []
    assert ps.pack([EMPTY, EMPTY], max_tokens=6) == []
    assert ps.pack([], max_tokens=6) == []
    shares = ps.balance([EMPTY, EMPTY], 2)
    assert sum(len(share) for share in shares) == 2


def nest(example: Any, mapping: Any) -> Any:
    """Puts an example into mappings of this class, inside of lists and of each other."""
    tokens = mapping(tokens=example["tokens"])
    more = mapping(labels=example["labels"], none=None)
    return mapping(text=[tokens], more=more)


@pytest.mark.parametrize("name", COMBINE)
def test_mappings_of_any_class_are_trees(name: str) -> None:
    """Such as a tokenizer of transformers returns; results are dicts."""
    combine = COMBINE[name]
    examples = make_examples([4, 4])
    user_dicts = [nest(example, UserDict) for example in examples]
    dicts = [nest(example, dict) for example in examples]

    combined = combine(user_dicts)
    parts = ps.split(user_dicts[0], 2)
    shares = ps.balance(user_dicts, 2)

    assert str(combined) == str(combine(dicts))
    assert str(parts) == str(ps.split(dicts[0], 2))
    assert len(shares) == 2
    for (example,), original in zip(shares, user_dicts, strict=True):
        assert example is original
