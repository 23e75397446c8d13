"""``pack``, ``pack_documents`` and ``balance``: as few, as short, as even as can be. T14: the rest.

What examples are filled up with, and that those are alike which are put together.
"""

import contextlib
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
from tests.examples import SMALL, examples_of, partitions


@given(SMALL, st.integers(0, 12), st.integers(1, 3))
def test_no_cut_needs_fewer_microbatches(
    lengths: list[int], slack: int, multiple_of: int
) -> None:
    """Of all within the budget; and of those with as few, none has a smaller largest one."""
    padded = [-(-n // multiple_of) * multiple_of for n in lengths]

    def largest(parts: list[list[int]]) -> int:
        return max(
            (len(part) * max(padded[i] for i in part) for part in parts), default=0
        )

    budget = max([1, *padded]) + slack
    ours = data.packing(lengths, max_tokens=budget, multiple_of=multiple_of)
    packed = ps.pack(examples_of(lengths), max_tokens=budget, multiple_of=multiple_of)
    assert all(part["tokens"].shape[1] % multiple_of == 0 for part in packed)
    held = [i for i, length in enumerate(lengths) if length]
    assert sorted(i for part in ours for i in part) == held
    others = [parts for parts in partitions(held) if largest(parts) <= budget]
    assert len(ours) == min(map(len, others))
    assert largest(ours) == min(
        largest(parts) for parts in others if len(parts) == len(ours)
    )


def test_pack_lowers_its_budget() -> None:
    """Where one example overflows, it is not left alone in the last microbatch."""
    assert [len(part) for part in data.packing([8] * 9, max_tokens=64)] == [5, 4]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(12, 20))
def test_documents_are_whole_and_fill_half_of_the_rows(
    lengths: list[int], row_tokens: int
) -> None:
    """Every example exactly once, with its positions and its segment."""
    packed = ps.pack_documents(examples_of(lengths), row_tokens=row_tokens)
    labels, segments, positions = (
        packed[key] for key in ("labels", "segments", "positions")
    )
    assert labels.shape[1] == row_tokens
    assert len(labels) <= 2 * -(-sum(lengths) // row_tokens)
    assert torch.equal(labels == -100, segments == 0)
    assert segments.amax(1).sum() == len(lengths)
    assert torch.equal(packed["tokens"][segments > 0], labels[segments > 0])
    for number, length in enumerate(lengths):
        at = labels == number
        assert positions[at].tolist() == list(range(length))
        assert segments[at].unique().numel() == at.any(1).sum() == 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 9])
def test_segment_mask_place_by_place(causal: bool, window: int | None) -> None:
    segments = torch.tensor([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 2, 2]])
    at, to = torch.arange(7)[:, None], torch.arange(7)
    wanted = segments[:, None, :, None] == segments[:, None, None, :]
    wanted = wanted & ((to <= at) | (not causal)) & ((at - to).abs() < (window or 99))
    assert torch.equal(ps.segment_mask(segments, causal=causal, window=window), wanted)


@pytest.mark.parametrize("name", ["positions", "segments"])
def test_documents_keep_what_an_example_has_by_their_names(name: str) -> None:
    """Below the top; there, it is refused."""
    own = {"tokens": torch.ones(2), name: torch.tensor([7, 8])}
    message = rf"examples\[1\] is \['tokens', '{name}'\]: .*: rename them"
    with pytest.raises(ValueError, match=message):
        ps.pack_documents([{"tokens": torch.ones(2)}, own], row_tokens=4)
    below = ps.pack_documents([{"below": own}], row_tokens=3, pad=-1)
    assert below["below"][name].tolist() == [[7, 8, -1]]
    assert below["positions"].tolist() == [[0, 1, 0]]
    assert below["segments"].tolist() == [[1, 1, 0]]


@given(SMALL, st.integers(1, 4))
def test_balance_is_within_a_third_of_the_best(costs: list[int], ranks: int) -> None:
    """And keeps the order of the examples."""
    best = min(
        max(sum(costs[i] for i in part) for part in [*parts, []])
        for parts in partitions(list(range(len(costs))))
        if len(parts) <= ranks
    )
    shares = data.balancing(costs, ranks)
    assert 3 * max(sum(costs[i] for i in share) for share in shares) <= 4 * best
    assert [*map(sorted, shares)] == [*map(list, shares)]


def test_balance_by_a_cost_of_ones_own() -> None:
    examples = examples_of([4, 2, 2, 2, 2])
    shares = ps.balance(examples, 2, cost=lambda example: len(example["tokens"]) ** 2)
    assert sorted(len(share) for share in shares) == [1, 4]


# Padding


PADDINGS = [
    (torch.bool, 1, True), (torch.bool, 2, False), (torch.uint8, -100, False),
    (torch.uint16, 70000, False), (torch.int16, 0.5, False), (torch.int64, 2**53 + 1, False),
    (torch.float16, 0.1, True), (torch.float16, 7e4, False), (torch.bfloat16, -torch.inf, True), (torch.float32, 1e39, False),
    (torch.float8_e4m3fn, -100, False), (torch.float8_e5m2, -100, False), (torch.float8_e5m2, -96, True),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "value", "held"), PADDINGS)
def test_padding_is_what_was_asked_for(
    dtype: torch.dtype, value: float, held: bool
) -> None:
    """Or it is refused by the leaf's name, even where nothing has to be padded today, or where it would be rounded."""
    examples = [{"a": {"labels": [torch.zeros(n).to(dtype)]}} for n in (2, 2)]
    wanted = torch.tensor(value).to(dtype).double()
    for pad in (value, {"labels": value}):
        message = rf"\['a'\]\['labels'\]\[0\] would be padded with .*, which {dtype} cannot hold"
        refused = pytest.raises(ValueError, match=message)
        with contextlib.nullcontext() if held else refused:
            (packed,) = ps.pack(examples, max_tokens=99, multiple_of=5, pad=pad)
            assert (packed["a"]["labels"][0][:, -1].double() == wanted).all()
        with contextlib.nullcontext() if held else refused:
            packed = ps.pack_documents(examples, row_tokens=13, pad=pad)
            assert (packed["a"]["labels"][0][:, -1].double() == wanted).all()
            assert not packed["positions"][packed["segments"] == 0].any()


ROWS = [{"x": torch.ones(2, 3)}, {"x": torch.ones(1, 3)}]
UNEVEN = [{"x": torch.ones(2), "y": torch.ones(3)}]
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: ps.pack(examples_of([3, 9, 2]), max_tokens=10, multiple_of=4), r"examples\[1\] has 9 tokens \(12 padded .* of 4\).*max_tokens=10"),
    (lambda: ps.pack_documents(examples_of([3, 9, 2]), row_tokens=8), r"examples\[1\] has 9 tokens, more than row_tokens=8"),
    (lambda: ps.pack(ROWS, max_tokens=8), r"no pad value for example\['x'\]: add it to"),
    (lambda: ps.pack([{"x": [1]}], max_tokens=8), r"\['x'\]\[0\] int.*make tensors of them"),
    (lambda: ps.pack(UNEVEN, max_tokens=8), r"examples\[0\] need one common first dimension"),
    (lambda: ps.pack(ROWS, max_tokens=0), "max_tokens=0 and .* must be at least 1"),
    (lambda: ps.segment_mask(torch.tensor([[1]]), window=0), "window=0 must be at least 1"),
    (lambda: ps.pack_documents([], row_tokens=8), "no examples"),
    (lambda: ps.pack_documents([torch.ones(2)], row_tokens=8), r"examples\[0\] is Tensor: documents are mappings, "),  # type: ignore[list-item]
    (lambda: ps.balance(examples_of([4]) + UNEVEN, 2), r"leaves of examples\[1\] need one common first dim"),
    (lambda: ps.balance(ROWS, 0), "ranks=0 must be at least 1"),
    *((partial(data.balancing, [1.0, cost], 2), rf"examples\[1\] costs {cost}: it must be finite") for cost in (-1.0, math.nan, math.inf)),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_what_is_padded() -> None:
    (packed,) = ps.pack(ROWS, max_tokens=8, pad=-1.0)
    assert packed["x"].tolist() == [[[1.0] * 3] * 2, [[1.0] * 3, [-1.0] * 3]]


def test_what_hugging_face_models_take_is_padded() -> None:
    names = ["input_ids", "attention_mask", "position_ids", "token_type_ids"]
    names += ["decoder_input_ids", "decoder_attention_mask"]
    texts = [{name: torch.ones(n, dtype=torch.int64) for name in names} for n in (3, 2)]
    (packed,) = ps.pack(texts, max_tokens=6)
    assert all(packed[name].tolist() == [[1, 1, 1], [1, 1, 0]] for name in names)


# Trees

TOKENS, MORE = torch.ones(2, dtype=torch.int64), torch.ones(2, 2)
STRUCTURE = "differs in structure"
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "different names": ({"ids": TOKENS, "more": [MORE]}, STRUCTURE),
    "fewer": ({"tokens": TOKENS}, STRUCTURE),
    "deeper": ({"tokens": [TOKENS], "more": [MORE]}, STRUCTURE),
    "no tensor": ({"tokens": TOKENS, "more": [None]}, STRUCTURE),
    "dtype": (
        {"tokens": TOKENS.int(), "more": [MORE]},
        r"\['tokens'\] is torch.int32 .*int64",
    ),
    "dtype below": (
        {"tokens": TOKENS, "more": [MORE.half()]},
        r"\['more'\]\[0\] is torch.float16",
    ),
    "shape": (
        {"tokens": TOKENS, "more": [MORE[:, :1]]},
        r"\['more'\]\[0\] .*shape \(2, 1\)",
    ),
    "rank": (
        {"tokens": TOKENS, "more": [MORE[:, 0]]},
        r"\['more'\]\[0\] .*shape \(2,\)",
    ),
}
TOGETHER: dict[str, Any] = {
    "pack": lambda examples: ps.pack(examples, max_tokens=6, pad=0),
    "pack into several": lambda examples: ps.pack(examples, max_tokens=4, pad=0),
    "pack_documents": lambda examples: ps.pack_documents(examples, row_tokens=6, pad=0),
    "stack": lambda examples: data.stack(examples, 6, 0),
    "merge": ps.merge,
}


@pytest.mark.parametrize("at", [0, 2, 4])
@pytest.mark.parametrize("how", TOGETHER)
@pytest.mark.parametrize("kind", ODD)
def test_examples_that_are_not_alike_are_refused(kind: str, how: str, at: int) -> None:
    """Wherever the odd one stands."""
    odd, message = ODD[kind]
    examples: list[Any] = [{"tokens": TOKENS, "more": [MORE]}] * 4
    examples.insert(at, odd)
    where = rf"(examples|microbatches)\[{at or 1}\]"
    with pytest.raises(ValueError, match=where + (".*" + message if at else "")):
        TOGETHER[how](examples)


EMPTY: dict[str, Any] = {"tokens": torch.tensor([]), "labels": torch.tensor([])}


@pytest.mark.parametrize("lengths", [[], [2], [3, 1, 3, 2]])
@pytest.mark.parametrize("at", [0, 1])
def test_examples_of_length_0_cost_nothing(lengths: list[int], at: int) -> None:
    """Though the dtype of what is empty is that of any other list."""
    examples = examples_of(lengths)
    more: list[Any] = [*examples[:at], EMPTY, *examples[at:], EMPTY]
    assert str(ps.pack(more, max_tokens=6)) == str(ps.pack(examples, max_tokens=6))
    documents = ps.pack_documents(more, row_tokens=6)
    if examples:
        assert str(documents) == str(ps.pack_documents(examples, row_tokens=6))
    else:
        assert [*documents] == ["tokens", "labels", "positions", "segments"]
        assert {leaf.shape for leaf in documents.values()} == {(0, 6)}
        assert ps.count_tokens([documents]).num_tokens == 0
        assert str(ps.pack_documents([EMPTY], row_tokens=6)) == str(documents)
        assert ps.pack([EMPTY], max_tokens=1) == []
    assert sum(map(len, ps.balance(more, 2))) == len(more)


def encoded(example: Any, mapping: Any) -> Any:
    """The same example as such mappings, also inside of lists and of each other."""
    more = mapping(labels=example["labels"], none=None)
    return mapping(text=[mapping(tokens=example["tokens"])], more=more)


@pytest.mark.parametrize("how", TOGETHER)
def test_mappings_of_any_kind_are_trees(how: str) -> None:
    """Such as a tokenizer of transformers returns; what is made of them is made of dicts."""
    examples = examples_of([4, 4])
    ours, theirs = (
        [encoded(e, mapping) for e in examples] for mapping in (UserDict, dict)
    )
    assert str(TOGETHER[how](ours)) == str(TOGETHER[how](theirs))
    assert str(ps.split(ours[0], 2)) == str(ps.split(theirs[0], 2))
    assert [[id(e) for e in share] for share in ps.balance(ours, 2)] == [
        [id(e)] for e in ours
    ]
