"""``group``: every microbatch once and in order, the tail as asked, from any position on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import purestep as ps


@given(
    st.integers(0, 20),
    st.integers(1, 6),
    st.sampled_from(["keep", "drop", "raise"]),
    st.integers(0, 25),
)
def test_group_keeps_order_and_tail(count: int, k: int, last: Any, start: int) -> None:
    """Every batch from ``start`` on, once, in order; the tail as asked."""
    groups = ps.group(iter(range(count)), k, last, start=start)
    wanted = list(range(start, count))
    full = len(wanted) - len(wanted) % k
    seen = []
    for _ in range(full // k):
        one = next(groups)
        assert len(one) == k
        seen += one
        assert groups.position == start + len(seen)
    assert seen == wanted[:full]
    if full == len(wanted) or last == "drop":
        assert next(groups, "end") == "end"
    elif last == "keep":
        assert next(groups) == wanted[full:]
    else:
        with pytest.raises(
            ps.DataExhausted, match=f"after {len(wanted) - full} of {k} microbatches"
        ) as event:
            next(groups)
        assert (event.value.found, event.value.wanted) == (len(wanted) - full, k)
    assert next(groups, "end") == "end"


@given(st.integers(0, 20), st.integers(1, 6), st.integers(0, 10))
def test_group_resumes_where_it_was(count: int, k: int, steps: int) -> None:
    groups = ps.group(range(count), k)
    before = [one for _, one in zip(range(steps), groups, strict=False)]
    after = list(ps.group(range(count), k, start=groups.position))
    assert [*before, *after] == list(ps.group(range(count), k))


def test_group_loses_nothing_to_an_error() -> None:
    """What was taken before the source failed is part of the next group."""

    class Flaky:
        """Fails once, at the third batch."""

        def __init__(self) -> None:
            self.count = -1
            self.failed = False

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            if self.count == 1 and not self.failed:
                self.failed = True
                raise OSError("disk")
            if self.count == 4:
                raise StopIteration
            self.count += 1
            return self.count

    groups = ps.group(Flaky(), 3)
    with pytest.raises(OSError, match="disk"):
        next(groups)
    assert list(groups) == [[0, 1, 2], [3, 4]]


def test_group_inside_a_generator_ends_it_quietly() -> None:
    def training() -> Iterator[int]:
        for one in ps.group(range(3), 2):
            yield len(one)

    assert list(training()) == [2, 1]


def test_group_refuses() -> None:
    with pytest.raises(ValueError, match="k=0 microbatches make no group"):
        ps.group([], 0)
    with pytest.raises(ValueError, match="last='pad' must be one of 'keep', 'drop', 'raise'"):
        ps.group([], 1, "pad")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="start=-1 is no position"):
        ps.group([], 1, start=-1)


DATA: Any = torch.arange(8)
ROWS = range(8)


@pytest.mark.parametrize(
    "how",
    [
        {"shuffle": True},
        {"shuffle": True, "batch_size": None},
        {"sampler": RandomSampler(ROWS), "generator": torch.Generator()},
        {"sampler": SubsetRandomSampler(ROWS)},
        {"sampler": WeightedRandomSampler([1.0] * 8, 8)},
        {"batch_sampler": BatchSampler(RandomSampler(ROWS), 2, drop_last=False)},
    ],
)
def test_group_resumes_no_order_of_the_global_generator(how: Any) -> None:
    """Which is another one by then; nothing is asked where nothing is resumed."""
    loader: Any = DataLoader(DATA, **how)
    assert sum(map(len, ps.group(loader, 2))) == len(loader)
    with pytest.raises(ValueError, match=r"start=2 .* global generator: .*manual_seed\(epoch\)"):
        ps.group(loader, 2, start=2)


def test_group_resumes_an_order_that_is_seeded() -> None:
    """By a generator of the loader, or not shuffled at all, or by a sampler of another kind."""

    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(3)

    for how in (
        lambda: {"shuffle": True, "generator": seeded()},
        lambda: {"sampler": WeightedRandomSampler([1.0] * 8, 8, generator=seeded())},
        lambda: {"shuffle": False},
        lambda: {"sampler": [3, 1, 2]},
    ):
        whole, rest = (
            [
                part.tolist()
                for one in ps.group(DataLoader(DATA, **how()), 1, start=n)
                for part in one
            ]
            for n in (0, 2)
        )
        assert rest == whole[2:]
        assert len(rest) > 0
