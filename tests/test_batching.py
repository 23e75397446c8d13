"""From examples to groups: every example exactly once, budgets kept, tails where they belong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

import purestep as ps
from purestep import batching

LENGTHS = st.lists(st.integers(0, 40), max_size=30)


def examples_of(lengths: list[int]) -> list[dict[str, Tensor]]:
    """Examples that know their own number."""
    return [
        {"tokens": torch.full((n,), i), "labels": torch.full((n,), i)}
        for i, n in enumerate(lengths)
    ]


# split and merge


@given(st.integers(1, 5), st.integers(0, 4))
def test_split_and_merge_are_inverse(k: int, size: int) -> None:
    batch: dict[str, Any] = {
        "x": torch.arange(k * size * 2).view(k * size, 2),
        "nested": [torch.arange(k * size)],
        "none": None,
    }
    parts = ps.split(batch, k)
    assert len(parts) == k
    assert {len(part["x"]) for part in parts} == {size}
    merged = ps.merge(parts)
    assert torch.equal(merged["x"], batch["x"])
    assert torch.equal(merged["nested"][0], batch["nested"][0])
    again = ps.split(merged, k)
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize("k", [0, 4, 12])
def test_split_refuses_uneven_cuts(k: int) -> None:
    with pytest.raises(ValueError, match=rf"batch of 6 .* k={k} .*divisible by 1, 2, 3, 6"):
        ps.split({"x": torch.arange(6)}, k)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(4), "y": torch.ones(2)},
        {"x": torch.ones(4), "y": torch.tensor(1)},
        {"x": 3},
        {},
    ],
)
def test_split_refuses_what_has_no_common_length(batch: object) -> None:
    with pytest.raises(ValueError, match="one common first dimension"):
        ps.split(batch, 2)


def test_merge_refuses() -> None:
    with pytest.raises(ValueError, match="no microbatches"):
        ps.merge([])
    with pytest.raises(ValueError, match=r"same length, but these have \[1, 2\]"):
        ps.merge([{"x": torch.ones(1)}, {"x": torch.ones(2)}])


# plan


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 50))
def test_plan_multiplies_up(local: int, size: int, steps: int) -> None:
    total = local * size * steps
    for how in (
        {"global_batch_size": total, "local_batch_size": local},
        {"global_tokens": total, "local_tokens": local},
    ):
        assert ps.plan(**how, axis_size=size) == ps.BatchPlan(total, local, size, steps)


def test_plan_names_the_numbers_and_the_nearest_that_work() -> None:
    with pytest.raises(
        ValueError,
        match=r"global_batch_size=100 .* 8 \* 5 = 40\. .*global_batch_size=80 or 120; local_batch_size=5 or 10",
    ):
        ps.plan(global_batch_size=100, local_batch_size=8, axis_size=5)
    with pytest.raises(
        ValueError, match=r"global_tokens=100 .*Nearest that work: global_tokens=96 or 128$"
    ):
        ps.plan(global_tokens=100, local_tokens=4, axis_size=8)
    with pytest.raises(ValueError, match="global_batch_size=40; local_batch_size=1 or 2"):
        ps.plan(global_batch_size=20, local_batch_size=4, axis_size=10)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "given neither"),
        ({"global_batch_size": 4}, r"given \['global_batch_size'\]"),
        ({"global_batch_size": 4, "local_tokens": 2}, "given"),
        ({"global_batch_size": 4, "local_batch_size": 0}, "local_batch_size=0 must be at least 1"),
        ({"global_tokens": 4, "local_tokens": 2, "axis_size": 0}, "axis_size=0 must be at least 1"),
    ],
)
def test_plan_refuses(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ps.plan(**sizes)


# group


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


# pack and balance


@given(LENGTHS, st.integers(0, 60), st.integers(1, 8))
def test_pack_laws(lengths: list[int], slack: int, multiple_of: int) -> None:
    """Every example exactly once and unharmed; the budget kept; as few microbatches as the budget allows."""
    examples = examples_of(lengths)
    padded = [max(1, -(-n // multiple_of) * multiple_of) for n in lengths]
    budget = max([1, *padded]) + slack
    packed = ps.pack(examples, max_tokens=budget, multiple_of=multiple_of)
    found = []
    for part in packed:
        rows, length = part["tokens"].shape
        assert rows > 0
        assert rows * max(1, length) <= budget
        assert length % multiple_of == 0
        for tokens, labels in zip(part["tokens"], part["labels"], strict=True):
            used = int((labels != -100).sum())
            number = int(labels[0]) if used else lengths.index(0)
            assert (labels[:used] == number).all()
            assert (tokens[:used] == number).all()
            assert (labels[used:] == -100).all()
            assert (tokens[used:] == 0).all()
            found.append(used)
    assert sorted(found) == sorted(lengths)
    assert len(packed) == fewest(sorted(padded, reverse=True), budget)
    again = ps.pack(examples, max_tokens=budget, multiple_of=multiple_of)
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(packed, again, strict=True))


def fewest(padded: list[int], budget: int) -> int:
    """Filling every microbatch, longest first, needs the fewest."""
    count = 0
    while padded:
        padded = padded[budget // padded[0] :]
        count += 1
    return count


def test_pack_evens_the_costs_out() -> None:
    """A budget that one example of the last microbatch overflows is not left with a microbatch of one."""
    assert [len(part) for part in batching.packing([8] * 9, max_tokens=64)] == [5, 4]


def test_pack_names_an_example_that_is_too_long() -> None:
    with pytest.raises(
        ValueError, match=r"examples\[1\] has 9 tokens \(12 padded .* of 4\).*max_tokens=10"
    ):
        ps.pack(examples_of([3, 9, 2]), max_tokens=10, multiple_of=4)
    with pytest.raises(ValueError, match=r"examples\[1\] has 9 tokens, more than row_tokens=8"):
        ps.pack_documents(examples_of([3, 9, 2]), row_tokens=8)


def test_pack_refuses_to_guess_a_padding() -> None:
    examples = [{"x": torch.ones(2, 3)}, {"x": torch.ones(1, 3)}]
    with pytest.raises(ValueError, match=r"no pad value for example\['x'\]: add it to pad="):
        ps.pack(examples, max_tokens=8)
    (packed,) = ps.pack(examples, max_tokens=8, pad=-1.0)
    assert packed["x"].tolist() == [[[1.0] * 3] * 2, [[1.0] * 3, [-1.0] * 3]]
    with pytest.raises(ValueError, match=r"examples\[0\] need one common first dimension"):
        ps.pack([{"x": torch.ones(2), "y": torch.ones(3)}], max_tokens=8)
    with pytest.raises(ValueError, match="max_tokens=0 and multiple_of=1 must be at least 1"):
        ps.pack(examples, max_tokens=0)


@given(LENGTHS, st.integers(1, 8))
def test_balance_laws(lengths: list[int], ranks: int) -> None:
    """Every example exactly once; the slowest rank within the longest example of the mean."""
    shares = ps.balance(examples_of(lengths), ranks)
    assert len(shares) == ranks
    numbers = sorted(int(e["tokens"][0]) for share in shares for e in share if len(e["tokens"]))
    assert numbers == [i for i, n in enumerate(lengths) if n]
    assert sum(map(len, shares)) == len(lengths)
    loads = [sum(len(e["tokens"]) for e in share) for share in shares]
    mean = sum(lengths) / ranks
    assert max(loads) <= max([mean, *lengths]) * (4 / 3)
    assert max(loads) - mean <= max([0, *lengths])


def test_balance_by_a_cost_of_ones_own() -> None:
    examples = examples_of([4, 2, 2, 2, 2])
    shares = ps.balance(examples, 2, cost=lambda example: len(example["tokens"]) ** 2)
    assert sorted(len(share) for share in shares) == [1, 4]
    with pytest.raises(ValueError, match="ranks=0 must be at least 1"):
        ps.balance(examples, 0)


def test_balance_swaps_where_greedy_stops() -> None:
    assert sorted(
        sum([5, 4, 3, 3, 3][i] for i in part) for part in batching.balancing([5, 4, 3, 3, 3], 2)
    ) == [9, 9]


# several documents in a row


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(12, 20))
def test_documents_laws(lengths: list[int], row_tokens: int) -> None:
    """Every example exactly once, whole, with its own positions and segment; rows are not over full."""
    packed = ps.pack_documents(examples_of(lengths), row_tokens=row_tokens)
    assert packed["tokens"].shape[1] == row_tokens
    found = []
    for row in range(len(packed["tokens"])):
        segments = packed["segments"][row]
        for segment in range(1, int(segments.max()) + 1):
            at = segments == segment
            number = packed["labels"][row][at].unique().item()
            found.append(number)
            assert packed["positions"][row][at].tolist() == list(range(lengths[int(number)]))
        assert (packed["labels"][row][segments == 0] == -100).all()
        assert segments.max() >= 1
    assert sorted(found) == list(range(len(lengths)))
    assert len(packed["tokens"]) <= 2 * -(-sum(lengths) // row_tokens)


def test_segment_mask_never_crosses_a_border() -> None:
    mask = ps.segment_mask(torch.tensor([[1, 1, 2, 0]]))[0, 0]
    assert mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_documents_refuse_nothing_at_all() -> None:
    with pytest.raises(ValueError, match="no examples"):
        ps.pack_documents([], row_tokens=8)


# prefetch


def labelled(count: int) -> list[dict[str, Tensor]]:
    """Microbatches that know their own number."""
    return [{"labels": torch.tensor([i, -100])} for i in range(count)]


@given(st.lists(st.integers(0, 4), max_size=5), st.integers(1, 4))
def test_prefetch_changes_nothing(sizes: list[int], depth: int) -> None:
    groups = [labelled(size) for size in sizes]
    found = []
    for group in ps.prefetch(groups, "cpu", depth):
        counted = ps.count_tokens(group)
        found.append([int(microbatch["labels"][0]) for microbatch in group])
        assert counted == len(found[-1]) == len(group)
        assert [int(m["labels"][0]) for m in group] == found[-1], "again, from the host"
        assert ps.count_tokens(group, lambda m: m["labels"] == 0) == min(1, len(group))
    assert found == [list(range(size)) for size in sizes]
    assert "prefetch" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prefetch_keeps_to_its_depth(depth: int) -> None:
    """Copies are made ahead, but never more than ``depth`` that were not used up."""
    made = used = 0
    highest = 0
    arrived = threading.Event()

    class Copied(Tensor):
        """A tensor that tells when it is brought to a device."""

        def to(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal made, highest
            made += 1
            highest = max(highest, made - used)
            if made >= depth:
                arrived.set()
            return self.as_subclass(Tensor)

    def weight_fn(microbatch: dict[str, Tensor]) -> Tensor:
        return microbatch["labels"].as_subclass(Tensor) == 0

    groups = [[{"labels": torch.zeros(2).as_subclass(Copied)} for _ in range(3)] for _ in range(3)]
    for group in ps.prefetch(groups, "cpu", depth, weight_fn=weight_fn):
        for _ in group:
            assert arrived.wait(timeout=10)
            used += 1
    assert made == used == 9
    assert highest == depth


def test_prefetch_raises_where_the_source_did() -> None:
    def source() -> Iterator[list[Any]]:
        yield labelled(2)
        raise OSError("disk")

    groups = ps.prefetch(source(), "cpu")
    assert len(list(next(groups))) == 2
    with pytest.raises(OSError, match="disk") as error:
        next(groups)
    assert any(entry.name == "source" for entry in error.traceback)
    with pytest.raises(ValueError, match=r"reads microbatch\['labels'\]"):
        next(ps.prefetch([[torch.ones(1)]], "cpu"))
    with pytest.raises(ValueError, match="depth=0 leaves no room"):
        ps.prefetch([], "cpu", 0)


def test_prefetch_abandoned_leaves_no_thread() -> None:
    """Also in the middle of a group, and with a source that never ends; which is closed."""
    closed = threading.Event()

    def endless() -> Iterator[list[Any]]:
        try:
            while True:
                yield labelled(3)
        finally:
            closed.set()

    groups = ps.prefetch(endless(), "cpu", 2)
    next(iter(next(groups)))
    assert "prefetch" in {thread.name for thread in threading.enumerate()}
    del groups
    assert "prefetch" not in {thread.name for thread in threading.enumerate()}
    assert closed.wait(timeout=10)


def test_prefetch_of_groups_that_are_left_early() -> None:
    """A group that was left makes room for the next, even at depth 1, and says so when it is asked again."""
    groups = ps.prefetch([labelled(3)] * 3, "cpu", 1)
    first = iter(next(groups))
    next(first)
    second = next(groups)
    assert len(list(second)) == 3
    with pytest.raises(RuntimeError, match="this group was left for a later one"):
        next(first)
    groups.close()


# sources


def collate(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One microbatch of examples as they come."""
    (packed,) = ps.pack(examples, max_tokens=10**6)
    return packed


def counts_of(source: Any) -> list[int]:
    """The tokens of each update, from a source of microbatches."""

    def loss_fn(w: Tensor, microbatch: dict[str, Tensor]) -> Tensor:
        return w * microbatch["labels"]

    step = ps.make_update_step(loss_fn, ps.optim.sgd(0.0))
    w = torch.tensor(1.0)
    counts = []
    for group in ps.prefetch(ps.group(source, 2), "cpu"):
        w, _, metrics = step(w, ps.optim.sgd(0.0).init(w), group)
        counts.append(int(metrics.num_tokens))
    return counts


SOURCE_LENGTHS = [3, 1, 4, 1, 5, 9]


def test_sources_of_every_kind() -> None:
    """A list, a generator, and a DataLoader with workers, of two examples in each microbatch."""
    examples = examples_of(SOURCE_LENGTHS)
    pairs = [examples[i : i + 2] for i in (0, 2, 4)]
    expected = [9, 14]
    assert counts_of([collate(pair) for pair in pairs]) == expected
    assert counts_of(collate(pair) for pair in pairs) == expected
    loader: Any = DataLoader(examples, batch_size=2, collate_fn=collate, num_workers=2)  # type: ignore[arg-type]
    assert counts_of(loader) == expected


def test_rows_of_a_hugging_face_dataset() -> None:
    """Rows are examples as they are, in torch format."""
    lists = {"tokens": [[i] * n for i, n in enumerate(SOURCE_LENGTHS)]}
    rows = datasets.Dataset.from_dict({**lists, "labels": lists["tokens"]}).with_format("torch")
    packed = ps.pack(list(rows), max_tokens=12)
    assert ps.count_tokens(packed) == sum(SOURCE_LENGTHS)
    assert sum(map(len, ps.balance(list(rows), 2))) == len(SOURCE_LENGTHS)
    loader = DataLoader(rows, batch_size=2, collate_fn=collate)
    assert counts_of(loader) == [9, 14]
