"""``pack_documents``: several documents in a row, and the mask that keeps them apart."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, strategies as st

import purestep as ps
from tests.examples import examples_of


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(12, 20))
def test_documents_laws(lengths: list[int], row_tokens: int) -> None:
    """Every example exactly once, whole, with its own positions and segment; rows are not over full."""
    examples = [
        {**example, "tokens": torch.arange(n) + 100 * number}
        for number, (n, example) in enumerate(zip(lengths, examples_of(lengths), strict=True))
    ]
    packed = ps.pack_documents(examples, row_tokens=row_tokens)
    assert packed["tokens"].shape[1] == row_tokens
    found = []
    for row in range(len(packed["tokens"])):
        segments = packed["segments"][row]
        for segment in range(1, int(segments.max()) + 1):
            at = segments == segment
            number = packed["labels"][row][at].unique().item()
            found.append(number)
            assert torch.equal(packed["tokens"][row][at], examples[int(number)]["tokens"])
            assert packed["positions"][row][at].tolist() == list(range(lengths[int(number)]))
        assert (packed["labels"][row][segments == 0] == -100).all()
        assert segments.max() >= 1
    assert sorted(found) == list(range(len(lengths)))
    assert len(packed["tokens"]) <= 2 * -(-sum(lengths) // row_tokens)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 9])
def test_segment_mask_place_by_place(causal: bool, window: int | None) -> None:
    segments = torch.tensor([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 2, 2]])
    mask = ps.segment_mask(segments, causal=causal, window=window)
    assert mask.shape == (2, 1, 7, 7)
    for row, own in enumerate(segments.tolist()):
        for at, to in itertools.product(range(7), range(7)):
            near = window is None or abs(at - to) < window
            wanted = own[at] == own[to] and (to <= at or not causal) and near
            assert mask[row, 0, at, to] == wanted


def test_segment_mask_refuses_a_window_without_itself() -> None:
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        ps.segment_mask(torch.tensor([[1]]), window=0)


def test_documents_refuse_nothing_at_all() -> None:
    with pytest.raises(ValueError, match="no examples"):
        ps.pack_documents([], row_tokens=8)
    with pytest.raises(ValueError, match=r"examples\[0\] is Tensor: documents are mappings, "):
        ps.pack_documents([torch.ones(2)], row_tokens=8)  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["positions", "segments"])
def test_documents_keep_what_is_the_examples_own(name: str) -> None:
    own = {"tokens": torch.ones(2), name: torch.tensor([7, 8])}
    with pytest.raises(
        ValueError, match=rf"examples\[1\] is \['tokens', '{name}'\]: .*: rename them"
    ):
        ps.pack_documents([{"tokens": torch.ones(2)}, own], row_tokens=4)
    below = ps.pack_documents([{"below": own}], row_tokens=3, pad=-1)
    assert below["below"][name].tolist() == [[7, 8, -1]]
    assert below["positions"].tolist() == [[0, 1, 0]]
    assert below["segments"].tolist() == [[1, 1, 0]]
