"""``pack``: every example exactly once, within the budget, in as few microbatches as can be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

import purestep as ps
from purestep import data
from tests.examples import LENGTHS, SMALL, examples_of, partitions


@given(LENGTHS, st.integers(0, 60), st.integers(1, 8))
def test_pack_laws(lengths: list[int], slack: int, multiple_of: int) -> None:
    """Every example that holds anything exactly once and unharmed; the budget kept."""
    examples = examples_of(lengths)
    padded = [-(-n // multiple_of) * multiple_of for n in lengths]
    budget = max([1, *padded]) + slack
    packed = ps.pack(examples, max_tokens=budget, multiple_of=multiple_of)
    found = []
    for part in packed:
        rows, length = part["tokens"].shape
        assert 0 < rows * length <= budget
        assert length % multiple_of == 0
        for tokens, labels in zip(part["tokens"], part["labels"], strict=True):
            used = int((labels != -100).sum())
            number = int(labels[0])
            assert (labels[:used] == number).all()
            assert (tokens[:used] == number).all()
            assert (labels[used:] == -100).all()
            assert (tokens[used:] == 0).all()
            found.append(used)
    assert sorted(found) == sorted(filter(None, lengths))
    again = ps.pack(examples, max_tokens=budget, multiple_of=multiple_of)
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(packed, again, strict=True))


@given(SMALL, st.integers(0, 12), st.integers(1, 3))
def test_no_cut_needs_fewer_microbatches(lengths: list[int], slack: int, multiple_of: int) -> None:
    """Among all cuts within the budget; and among those with as few, none has a smaller largest microbatch."""
    padded = [-(-n // multiple_of) * multiple_of for n in lengths]

    def largest(parts: list[list[int]]) -> int:
        return max((len(part) * max(padded[i] for i in part) for part in parts), default=0)

    budget = max([1, *padded]) + slack
    ours = data.packing(lengths, max_tokens=budget, multiple_of=multiple_of)
    held = [i for i, length in enumerate(lengths) if length]
    assert sorted(i for part in ours for i in part) == held
    others = [parts for parts in partitions(held) if largest(parts) <= budget]
    assert len(ours) == min(map(len, others))
    assert largest(ours) == min(largest(parts) for parts in others if len(parts) == len(ours))


def test_pack_lowers_its_budget() -> None:
    """A budget that one example of the last microbatch overflows is not left with a microbatch of one."""
    assert [len(part) for part in data.packing([8] * 9, max_tokens=64)] == [5, 4]


def test_pack_names_an_example_that_is_too_long() -> None:
    with pytest.raises(
        ValueError, match=r"examples\[1\] has 9 tokens \(12 padded .* of 4\).*max_tokens=10"
    ):
        ps.pack(examples_of([3, 9, 2]), max_tokens=10, multiple_of=4)
    with pytest.raises(ValueError, match=r"examples\[1\] has 9 tokens, more than row_tokens=8"):
        ps.pack_documents(examples_of([3, 9, 2]), row_tokens=8)
