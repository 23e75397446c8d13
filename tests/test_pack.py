"""``pack``, ``pack_documents`` and ``balance``: as few, as short, as even as can be. T14: the rest."""

import itertools

import pytest
import torch
from hypothesis import given, strategies as st

import purestep as ps
from purestep import data
from tests.examples import LENGTHS, SMALL, examples_of, partitions


@given(LENGTHS, st.integers(0, 60), st.integers(1, 8))
def test_pack_keeps_the_budget(lengths: list[int], slack: int, multiple_of: int) -> None:
    padded = [-(-n // multiple_of) * multiple_of for n in lengths]
    budget = max([1, *padded]) + slack
    packed = ps.pack(examples_of(lengths), max_tokens=budget, multiple_of=multiple_of)
    assert sum(int((part["labels"] != -100).sum()) for part in packed) == sum(lengths)
    for part in packed:
        rows, length = part["tokens"].shape
        assert 0 < rows * length <= budget
        assert length % multiple_of == 0
        assert (part["tokens"][part["labels"] == -100] == 0).all()


@given(SMALL, st.integers(0, 12), st.integers(1, 3))
def test_no_cut_needs_fewer_microbatches(lengths: list[int], slack: int, multiple_of: int) -> None:
    """Of all within the budget; and of those with as few, none has a smaller largest one."""
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
    """Where one example overflows, it is not left alone in the last microbatch."""
    assert [len(part) for part in data.packing([8] * 9, max_tokens=64)] == [5, 4]


def test_pack_names_an_example_that_is_too_long() -> None:
    with pytest.raises(
        ValueError, match=r"examples\[1\] has 9 tokens \(12 padded .* of 4\).*max_tokens=10"
    ):
        ps.pack(examples_of([3, 9, 2]), max_tokens=10, multiple_of=4)
    with pytest.raises(ValueError, match=r"examples\[1\] has 9 tokens, more than row_tokens=8"):
        ps.pack_documents(examples_of([3, 9, 2]), row_tokens=8)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(12, 20))
def test_documents_are_whole_and_fill_half_of_the_rows(lengths: list[int], row_tokens: int) -> None:
    """Every example exactly once, with its positions and its segment."""
    packed = ps.pack_documents(examples_of(lengths), row_tokens=row_tokens)
    labels, segments, positions = (packed[key] for key in ("labels", "segments", "positions"))
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
    mask = ps.segment_mask(segments, causal=causal, window=window)
    assert mask.shape == (2, 1, 7, 7)
    for row, own in enumerate(segments.tolist()):
        for at, to in itertools.product(range(7), range(7)):
            near = window is None or abs(at - to) < window
            wanted = own[at] == own[to] and (to <= at or not causal) and near
            assert mask[row, 0, at, to] == wanted


def test_documents_refuse() -> None:
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        ps.segment_mask(torch.tensor([[1]]), window=0)
    with pytest.raises(ValueError, match="no examples"):
        ps.pack_documents([], row_tokens=8)
    with pytest.raises(ValueError, match=r"examples\[0\] is Tensor: documents are mappings, "):
        ps.pack_documents([torch.ones(2)], row_tokens=8)  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["positions", "segments"])
def test_documents_keep_what_an_example_has_by_their_names(name: str) -> None:
    """Below the top; there, it is refused."""
    own = {"tokens": torch.ones(2), name: torch.tensor([7, 8])}
    with pytest.raises(
        ValueError, match=rf"examples\[1\] is \['tokens', '{name}'\]: .*: rename them"
    ):
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
    with pytest.raises(ValueError, match=r"leaves of examples\[1\] need one common first dim"):
        ps.balance([examples[0], {"tokens": torch.ones(2), "labels": torch.ones(3)}], 2)
    with pytest.raises(ValueError, match="ranks=0 must be at least 1"):
        ps.balance(examples, 0)
    for cost in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"examples\[1\] costs {cost}: it must be finite"):
            data.balancing([1.0, cost], 2)
