"""``balance``: every example to one rank, and no rank much slower than the others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

import purestep as ps
from purestep import data
from tests.examples import LENGTHS, SMALL, examples_of, partitions


@given(LENGTHS, st.integers(1, 8))
def test_balance_laws(lengths: list[int], ranks: int) -> None:
    """Every example exactly once, in order; the slowest rank less than the longest example above the mean."""
    shares = ps.balance(examples_of(lengths), ranks)
    assert len(shares) == ranks
    assert sum(map(len, shares)) == len(lengths)
    numbers = [[int(e["tokens"][0]) for e in share if len(e["tokens"])] for share in shares]
    assert all(share == sorted(share) for share in numbers)
    assert sorted(i for share in numbers for i in share) == [i for i, n in enumerate(lengths) if n]
    loads = [sum(len(e["tokens"]) for e in share) for share in shares]
    assert max(loads) <= sum(lengths) / ranks + max([0, *lengths])


@given(SMALL, st.integers(1, 4))
def test_balance_is_within_a_third_of_the_best(costs: list[int], ranks: int) -> None:
    best = min(
        max(sum(costs[i] for i in part) for part in [*parts, []])
        for parts in partitions(list(range(len(costs))))
        if len(parts) <= ranks
    )
    slowest = max(sum(costs[i] for i in part) for part in data.balancing(costs, ranks))
    assert 3 * slowest <= 4 * best


def test_balance_by_a_cost_of_ones_own() -> None:
    examples = examples_of([4, 2, 2, 2, 2])
    shares = ps.balance(examples, 2, cost=lambda example: len(example["tokens"]) ** 2)
    assert sorted(len(share) for share in shares) == [1, 4]
    with pytest.raises(ValueError, match=r"leaves of examples\[1\] need one common first dim"):
        ps.balance([examples[0], {"tokens": torch.ones(2), "labels": torch.ones(3)}], 2)
    with pytest.raises(ValueError, match="ranks=0 must be at least 1"):
        ps.balance(examples, 0)
    for cost in (-1.0, float("nan"), float("inf")):
        with pytest.raises(
            ValueError, match=r"examples\[1\] costs (-1.0|nan|inf): it must be finite"
        ):
            data.balancing([1.0, cost], 2)
