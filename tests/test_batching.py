"""From examples to groups: every example exactly once, budgets kept, tails where they belong."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import weakref
from collections import UserDict
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


# What is put together is alike


def odd_ones() -> dict[str, Any]:
    """What is not like ``{"tokens": int64, "more": [float32 of (n, 2)]}``, and what a refusal of it says."""
    tokens, more = torch.ones(2, dtype=torch.int64), torch.ones(2, 2)
    return {
        "different names": ({"ids": tokens, "more": [more]}, "differs in structure"),
        "fewer": ({"tokens": tokens}, "differs in structure"),
        "deeper": ({"tokens": [tokens], "more": [more]}, "differs in structure"),
        "no tensor": ({"tokens": tokens, "more": [None]}, "differs in structure"),
        "dtype": ({"tokens": tokens.int(), "more": [more]}, r"\['tokens'\] is torch.int32 .*int64"),
        "dtype below": (
            {"tokens": tokens, "more": [more.half()]},
            r"\['more'\]\[0\] is torch.float16",
        ),
        "shape": ({"tokens": tokens, "more": [more[:, :1]]}, r"\['more'\]\[0\] .*shape \(2, 1\)"),
        "rank": ({"tokens": tokens, "more": [more[:, 0]]}, r"\['more'\]\[0\] .*shape \(2,\)"),
    }


TOGETHER: dict[str, Any] = {
    "pack": lambda examples, budget: ps.pack(examples, max_tokens=budget, pad=0),
    "pack_documents": lambda examples, budget: ps.pack_documents(
        examples, row_tokens=budget, pad=0
    ),
    "stack": lambda examples, budget: batching.stack(examples, budget, 0),
    "merge": lambda examples, _: ps.merge(examples),
}


@given(
    st.sampled_from(sorted(odd_ones())),
    st.sampled_from(sorted(TOGETHER)),
    st.integers(0, 4),
    st.integers(2, 20),
)
def test_examples_that_are_not_alike_are_refused(kind: str, how: str, at: int, budget: int) -> None:
    """Whatever the budget, and wherever the odd one stands."""
    example = {"tokens": torch.ones(2, dtype=torch.int64), "more": [torch.ones(2, 2)]}
    odd, message = odd_ones()[kind]
    examples: list[Any] = [example] * 4
    examples.insert(at, odd)
    told = rf"(examples|microbatches)\[{at or 1}\]"
    with pytest.raises(ValueError, match=told + (".*" if at == 0 else ".*" + message)):
        TOGETHER[how](examples, budget)


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64]


@given(
    st.sampled_from([torch.bool, *INTEGERS, torch.float16, torch.bfloat16, torch.float32]),
    st.sampled_from([-100, 0, 1, True, 255, 256, -129, 0.5, 70000, 2**40, 1e39])
    | st.sampled_from([float("inf"), float("nan"), 2**53 + 1]),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_padding_is_what_was_asked_for(
    dtype: torch.dtype, value: float, lengths: list[int]
) -> None:
    """Or it is refused by the leaf's name, even where nothing has to be padded today."""
    examples = [{"a": {"labels": [torch.zeros(n).to(dtype)]}} for n in lengths]
    wanted = torch.tensor(value, dtype=torch.float64)
    if dtype.is_floating_point:
        held = bool(wanted.to(dtype).isfinite() | ~wanted.isfinite())
    else:
        held = float(value).is_integer() and fits(dtype, int(value))
    for pad in (value, {"labels": value}):
        for together in (
            lambda pad=pad: ps.pack(examples, max_tokens=99, multiple_of=5, pad=pad)[0],
            lambda pad=pad: ps.pack_documents(examples, row_tokens=13, pad=pad),
        ):
            if not held:
                with pytest.raises(ValueError, match=r"\['a'\]\['labels'\]\[0\] would be"):
                    together()
                continue
            filled = together()["a"]["labels"][0][:, -1].double()
            expected = wanted.to(dtype).double().expand_as(filled)
            assert torch.equal(filled.nan_to_num(7.0), expected.nan_to_num(7.0))


def fits(dtype: torch.dtype, value: int) -> bool:
    """Whether a tensor of integers, or bools, has this value, and a float64 too."""
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return low <= value <= high and int(float(value)) == value


EMPTY: dict[str, Any] = {"tokens": torch.tensor([]), "labels": torch.tensor([])}


@given(st.lists(st.integers(0, 3), max_size=6), st.integers(0, 6))
def test_examples_of_length_0_cost_nothing(lengths: list[int], at: int) -> None:
    """Wherever they stand, and though the dtype of what is empty is that of any other list."""
    examples = examples_of([length for length in lengths if length])
    more: list[Any] = [*examples[:at], EMPTY, *examples[at:], EMPTY]
    same = ps.pack(examples, max_tokens=6)
    assert str(ps.pack(more, max_tokens=6)) == str(same)
    documents = ps.pack_documents(more, row_tokens=6)
    if examples:
        assert str(documents) == str(ps.pack_documents(examples, row_tokens=6))
    else:
        assert {name: tuple(leaf.shape) for name, leaf in documents.items()} == dict.fromkeys(
            ["tokens", "labels", "positions", "segments"], (0, 6)
        )
        assert same == []
        assert ps.count_tokens([documents]) == 0
    assert sum(map(len, ps.balance(more, 2))) == len(more)


class Encoding(UserDict[str, Any]):
    """As a tokenizer of transformers returns it: a mapping that optree does not know."""


def encoded(example: Any) -> Any:
    """The same example as such mappings, also inside of lists and of each other."""
    return Encoding(
        text=[Encoding(tokens=example["tokens"])],
        more=Encoding(labels=example["labels"], none=None),
    )


def decoded(example: Any) -> Any:
    """The same as dicts."""
    return {
        "text": [{"tokens": example["tokens"]}],
        "more": {"labels": example["labels"], "none": None},
    }


def test_mappings_of_any_kind_are_trees() -> None:
    """What is made of them is made of dicts."""
    plain, batches = examples_of([3, 1, 2]), examples_of([4, 4])
    ours, theirs = [encoded(e) for e in plain], [decoded(e) for e in plain]
    for how in ("pack", "pack_documents"):
        assert str(TOGETHER[how](ours, 6)) == str(TOGETHER[how](theirs, 6))
    assert [[id(e) for e in share] for share in ps.balance(ours, 2)] == [
        [id(ours[0])],
        [id(ours[1]), id(ours[2])],
    ]
    assert str(ps.split(encoded(batches[0]), 2)) == str(ps.split(decoded(batches[0]), 2))
    assert str(ps.merge(list(map(encoded, batches)))) == str(ps.merge(list(map(decoded, batches))))


@pytest.mark.parametrize("normalize", ["loss", "grads"])
def test_mappings_of_any_kind_are_microbatches(normalize: Any) -> None:
    """Of an update as they are, and prefetched."""

    def loss_fn(w: Tensor, microbatch: Any) -> Tensor:
        return (w - microbatch["text"][0]["tokens"]) ** 2

    def weight_fn(microbatch: Any) -> Tensor:
        return ps.label_weights(microbatch["more"])

    optimizer, w = ps.optim.sgd(0.1), torch.tensor(0.5)
    step = ps.make_update_step(loss_fn, optimizer, weight_fn=weight_fn, normalize=normalize)
    group = ps.pack(examples_of([3, 1, 2]), max_tokens=4)
    expected = step(w, optimizer.init(w), list(map(decoded, group)))
    ours = list(map(encoded, group))
    groups = ps.prefetch([ours], "cpu", weight_fn=weight_fn)
    fetched = next(groups)
    for microbatches in (ours, fetched):
        assert step(w, optimizer.init(w), microbatches)[0] == expected[0]
    assert all(type(m) is type(m["text"][0]) is type(m["more"]) is dict for m in fetched)


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


@given(st.integers(1, 200), st.integers(1, 30), st.integers(1, 4))
def test_plan_offers_the_nearest_that_work(total: int, local: int, ranks: int) -> None:
    """Of either size, and all that it offers works; the nearest is the first or the second."""

    def works(total: int, local: int) -> bool:
        try:
            return bool(ps.plan(global_tokens=total, local_tokens=local, axis_size=ranks))
        except ValueError:
            return False

    try:
        ps.plan(global_tokens=total, local_tokens=local, axis_size=ranks)
    except ValueError as error:
        offers = dict(offer.split("=") for offer in str(error).split("work: ")[1].split("; "))
        sizes = {name: list(map(int, text.split(" or "))) for name, text in offers.items()}
        assert all(works(size, local) for size in sizes["global_tokens"])
        assert min(abs(size - total) for size in sizes["global_tokens"]) == min(
            abs(size - total) for size in range(1, 400) if works(size, local)
        )
        locals_ = [size for size in range(1, 201) if works(total, size)]
        closest = sorted(locals_, key=lambda size: abs(size - local))[:2]
        assert sizes.get("local_tokens", []) == sorted(closest)


def test_plan_knows_large_sizes() -> None:
    with pytest.raises(ValueError, match=r"local_tokens=2 or 3000017$"):
        ps.plan(global_tokens=6_000_034, local_tokens=3_000_000)


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


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to put these into parts."""
    if not items:
        yield []
        return
    for parts in partitions(items[1:]):
        yield [[items[0]], *parts]
        for i in range(len(parts)):
            yield [*parts[:i], [items[0], *parts[i]], *parts[i + 1 :]]


SMALL = st.lists(st.integers(0, 9), max_size=6)


@given(SMALL, st.integers(0, 12), st.integers(1, 3))
def test_no_cut_needs_fewer_microbatches(lengths: list[int], slack: int, multiple_of: int) -> None:
    """Among all cuts within the budget; and among those with as few, none has a smaller largest microbatch."""
    padded = [-(-n // multiple_of) * multiple_of for n in lengths]

    def largest(parts: list[list[int]]) -> int:
        return max((len(part) * max(padded[i] for i in part) for part in parts), default=0)

    budget = max([1, *padded]) + slack
    ours = batching.packing(lengths, max_tokens=budget, multiple_of=multiple_of)
    held = [i for i, length in enumerate(lengths) if length]
    assert sorted(i for part in ours for i in part) == held
    others = [parts for parts in partitions(held) if largest(parts) <= budget]
    assert len(ours) == min(map(len, others))
    assert largest(ours) == min(largest(parts) for parts in others if len(parts) == len(ours))


def test_pack_lowers_its_budget() -> None:
    """A budget that one example of the last microbatch overflows is not left with a microbatch of one."""
    assert [len(part) for part in batching.packing([8] * 9, max_tokens=64)] == [5, 4]


def test_pack_names_an_example_that_is_too_long() -> None:
    with pytest.raises(
        ValueError, match=r"examples\[1\] has 9 tokens \(12 padded .* of 4\).*max_tokens=10"
    ):
        ps.pack(examples_of([3, 9, 2]), max_tokens=10, multiple_of=4)
    with pytest.raises(ValueError, match=r"examples\[1\] has 9 tokens, more than row_tokens=8"):
        ps.pack_documents(examples_of([3, 9, 2]), row_tokens=8)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_padding_that_rounds(dtype: torch.dtype) -> None:
    """-100 is -96 in eight bits, which is a label like any other."""
    examples = [{"labels": torch.ones(n).to(dtype)} for n in (3, 1)]
    with pytest.raises(ValueError, match=r"padded with -100, which torch.float8.* cannot hold"):
        ps.pack(examples, max_tokens=8)
    (packed,) = ps.pack(examples, max_tokens=8, pad={"labels": -96})
    assert packed["labels"].double().tolist() == [[1, 1, 1], [1, -96, -96]]


def test_pack_refuses_to_guess_a_padding() -> None:
    examples = [{"x": torch.ones(2, 3)}, {"x": torch.ones(1, 3)}]
    with pytest.raises(ValueError, match=r"no pad value for example\['x'\]: add it to pad="):
        ps.pack(examples, max_tokens=8)
    (packed,) = ps.pack(examples, max_tokens=8, pad=-1.0)
    assert packed["x"].tolist() == [[[1.0] * 3] * 2, [[1.0] * 3, [-1.0] * 3]]
    with pytest.raises(ValueError, match=r"\['x'\]\[0\] int.*make tensors of them"):
        ps.pack([{"x": [1, 2]}], max_tokens=8)
    with pytest.raises(ValueError, match=r"examples\[0\] need one common first dimension"):
        ps.pack([{"x": torch.ones(2), "y": torch.ones(3)}], max_tokens=8)
    with pytest.raises(ValueError, match="max_tokens=0 and multiple_of=1 must be at least 1"):
        ps.pack(examples, max_tokens=0)


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
    slowest = max(sum(costs[i] for i in part) for part in batching.balancing(costs, ranks))
    assert 3 * slowest <= 4 * best


def test_balance_tries_no_more_than_it_says() -> None:
    """Where nothing but a search of everything with everything would find what is left to gain."""
    tried = 0

    class Cost(float):
        """A cost that tells when an exchange of it is tried."""

        def __sub__(self, other: float) -> float:
            nonlocal tried
            tried += 1
            return float(self) - other

    generator = torch.Generator().manual_seed(0)
    costs = torch.randint(900, 1100, (4500,), generator=generator).tolist()
    batching.balancing(list(map(Cost, costs)), 2000)
    # An exchange is compared with a few others.
    assert 250_000 <= tried <= 5 * 250_000


def test_balance_by_a_cost_of_ones_own() -> None:
    examples = examples_of([4, 2, 2, 2, 2])
    shares = ps.balance(examples, 2, cost=lambda example: len(example["tokens"]) ** 2)
    assert sorted(len(share) for share in shares) == [1, 4]
    with pytest.raises(ValueError, match="ranks=0 must be at least 1"):
        ps.balance(examples, 0)
    for cost in (-1.0, float("nan"), float("inf")):
        with pytest.raises(
            ValueError, match=r"examples\[1\] costs (-1.0|nan|inf); a cost is finite"
        ):
            batching.balancing([1.0, cost], 2)


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


def test_what_hugging_face_models_take_is_padded() -> None:
    names = ["input_ids", "attention_mask", "position_ids", "token_type_ids"]
    names += ["decoder_input_ids", "decoder_attention_mask"]
    texts = [{name: torch.ones(n, dtype=torch.int64) for name in names} for n in (3, 2)]
    (packed,) = ps.pack(texts, max_tokens=6)
    assert all(packed[name].tolist() == [[1, 1, 1], [1, 1, 0]] for name in names)


def test_segment_mask_never_crosses_a_border() -> None:
    mask = ps.segment_mask(torch.tensor([[1, 1, 2, 0]]))[0, 0]
    assert mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_documents_refuse_nothing_at_all() -> None:
    with pytest.raises(ValueError, match="no examples"):
        ps.pack_documents([], row_tokens=8)
    with pytest.raises(TypeError, match=r"examples\[0\] is Tensor: documents are mappings"):
        ps.pack_documents([torch.ones(2)], row_tokens=8)  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["positions", "segments"])
def test_documents_keep_what_is_the_examples_own(name: str) -> None:
    own = {"tokens": torch.ones(2), name: torch.tensor([7, 8])}
    with pytest.raises(ValueError, match=rf"puts '{name}' .*examples\[1\] has '{name}' of its own"):
        ps.pack_documents([{"tokens": torch.ones(2)}, own], row_tokens=4)
    below = ps.pack_documents([{"below": own}], row_tokens=3, pad=-1)
    assert below["below"][name].tolist() == [[7, 8, -1]]
    assert below["positions"].tolist() == [[0, 1, 0]]
    assert below["segments"].tolist() == [[1, 1, 0]]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(5, 20))
def test_documents_with_a_number_as_pad(lengths: list[int], row_tokens: int) -> None:
    """One number for every leaf, nested ones too, and for none of what is added."""
    examples = [{"a": {"x": torch.ones(n, 2)}, "b": [torch.ones(n)]} for n in lengths]
    packed = ps.pack_documents(examples, row_tokens=row_tokens, pad=-7)
    padding = packed["segments"] == 0
    assert torch.equal(packed["a"]["x"] == -7, padding[..., None].expand(-1, -1, 2))
    assert torch.equal(packed["b"][0] == -7, padding)
    assert (packed["positions"][padding] == 0).all()
    assert (~padding).sum() == sum(lengths)


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
    """Copies are made ahead; with the one in use, which is the consumer's, ``depth`` of them live and no more."""
    copies: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    made = threading.Semaphore(0)

    class Original(Tensor):
        """A tensor whose copies are counted while they live."""

        def to(self, *args: Any, **kwargs: Any) -> Any:
            copy = self.as_subclass(Tensor).clone()
            copies.append(weakref.ref(copy))
            alive.append(sum(ref() is not None for ref in copies))
            made.release()
            return copy

    def weight_fn(microbatch: dict[str, Tensor]) -> Tensor:
        return microbatch["labels"].as_subclass(Tensor) == 0

    groups = [[{"labels": torch.zeros(2).as_subclass(Original)} for _ in range(3)] for _ in "abc"]
    seen = 0
    for group in ps.prefetch(groups, "cpu", depth, weight_fn=weight_fn):
        for microbatch in group:
            seen += 1
            # So many are made while nothing more is asked for.
            for _ in range(depth if seen == 1 else seen + depth - 1 <= 9):
                assert made.acquire(timeout=60)
            del microbatch
    assert seen == len(alive) == 9
    assert max(alive) == depth


def test_prefetch_copies_again_one_at_a_time() -> None:
    """A group that is iterated again is not brought to the device as a whole."""
    copied = []

    class Original(Tensor):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            copied.append(self)
            return self.as_subclass(Tensor)

    groups = ps.prefetch(
        [[{"x": torch.ones(1).as_subclass(Original)} for _ in range(3)]],
        "cpu",
        weight_fn=lambda m: m["x"].as_subclass(Tensor),
    )
    group = next(groups)
    assert len(list(group)) == len(copied) == 3
    next(iter(group))
    assert len(copied) == 4


def raising(error: BaseException) -> type[Tensor]:
    """Tensors that cannot be brought to a device."""

    class Stuck(Tensor):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            raise error

    return Stuck


ERRORS: list[BaseException] = [OSError("disk"), KeyboardInterrupt(), SystemExit(2)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_prefetch_raises_what_went_wrong_in_its_turn(error: BaseException) -> None:
    """Of the source and of counting where the group is due, of copying where the microbatch is; then it is over."""

    def source(fails: bool) -> Iterator[list[Any]]:
        yield labelled(2)
        if fails:
            raise error
        yield [*labelled(1), {"labels": torch.ones(1).as_subclass(raising(error))}]

    def weight_fn(microbatch: dict[str, Tensor]) -> Tensor:
        return microbatch["labels"].as_subclass(Tensor) >= 0

    def failing(microbatch: dict[str, Tensor]) -> Tensor:
        if int(microbatch["labels"][0]) == 1:
            raise error
        return weight_fn(microbatch)

    groups = ps.prefetch(source(True), "cpu")
    assert len(list(next(groups))) == 2
    with pytest.raises(type(error)) as raised:
        next(groups)
    assert raised.value is error
    assert any(entry.name == "source" for entry in raised.traceback)
    assert list(groups) == []

    with pytest.raises(type(error)) as raised:
        next(ps.prefetch(source(False), "cpu", weight_fn=failing))
    assert raised.value is error

    groups = ps.prefetch(source(False), "cpu", 3, weight_fn=weight_fn)
    assert len(list(next(groups))) == 2
    second = iter(next(groups))
    assert int(next(second)["labels"][0]) == 0
    with pytest.raises(type(error)) as raised:
        next(second)
    assert raised.value is error
    with pytest.raises(type(error)) as raised:
        next(groups)
    assert raised.value is error, "the data have not run out"
    assert list(groups) == []


def test_prefetch_takes_no_error_for_the_end() -> None:
    """StopIteration of anything but the source is an error."""

    def weight_fn(microbatch: Any) -> Tensor:
        return next(iter([]))

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        next(ps.prefetch([labelled(1)], "cpu", weight_fn=weight_fn))
    with pytest.raises(ValueError, match=r"reads microbatch\['labels'\]"):
        next(ps.prefetch([[torch.ones(1)]], "cpu"))
    with pytest.raises(ValueError, match="depth=0 leaves no room"):
        ps.prefetch([], "cpu", 0)


def test_prefetch_leaves_alone_what_is_no_tensor() -> None:
    name, array = "a string", object()
    groups = ps.prefetch([[{**labelled(1)[0], "name": name, "more": [array, None]}]], "cpu")
    (microbatch,) = next(groups)
    assert microbatch["name"] is name
    assert microbatch["more"] == [array, None]


class Positioned:
    """Groups from an object that counts for itself what its iterator has given."""

    def __init__(self, count: int) -> None:
        self.position, self.count, self.closed = 5, count, False

    def __iter__(self) -> Iterator[list[Any]]:
        for _ in range(self.count):
            self.position += 2
            yield labelled(2)

    def close(self) -> None:
        self.closed = True


def test_prefetch_tells_its_position() -> None:
    """Of what was handed over, where the source tells its own; None where it tells none."""
    groups = ps.prefetch(ps.group(labelled(10), 4, start=1), "cpu", 3)
    assert groups.position == 1
    assert [(len(list(group)), groups.position) for group in groups] == [(4, 5), (4, 9), (1, 10)]
    assert groups.position == 10
    chained = ps.prefetch(ps.prefetch(Positioned(2), "cpu"), "cpu")
    assert chained.position == 5
    assert [chained.position for _ in chained] == [7, 9]
    unknown = ps.prefetch([labelled(1)], "cpu")
    assert [unknown.position, *(unknown.position for _ in unknown)] == [None, None]


def test_prefetch_abandoned_leaves_no_thread() -> None:
    """Also in the middle of a group, and with a source that never ends; a generator is closed."""
    closed = threading.Event()

    def endless() -> Iterator[list[Any]]:
        try:
            while True:
                yield labelled(3)
        finally:
            closed.set()

    groups = ps.prefetch(endless(), "cpu", 2)
    group = next(groups)
    microbatches = iter(group)
    next(microbatches)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "prefetch")
    del groups
    assert closed.wait(timeout=60)
    thread.join(timeout=60)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="its iterator was closed"):
        next(microbatches)
    assert len(list(group)) == 3, "again, from the host"


@pytest.mark.timeout(30)
def test_prefetch_waits_for_no_source() -> None:
    """Sources that have stalled are left where they are, and asked for nothing when they come back."""
    go_on, asked = threading.Event(), []

    def stalled() -> Iterator[list[Any]]:
        yield labelled(1)
        asked.append("second")
        go_on.wait()
        yield labelled(1)
        asked.append("third")

    before = set(threading.enumerate())
    for _ in range(5):
        groups = ps.prefetch(stalled(), "cpu")
        assert len(list(next(groups))) == 1
        groups.close()
        assert list(groups) == []
    threads = set(threading.enumerate()) - before
    assert len(threads) == 5
    go_on.set()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert set(asked) <= {"second"}


def test_prefetch_of_a_source_that_fails_to_close() -> None:
    """Whoever closes the stream hears of it, and nobody waits."""

    def source() -> Iterator[list[Any]]:
        try:
            while True:
                yield labelled(5)
        finally:
            raise OSError("cannot close the file")

    groups = ps.prefetch(source(), "cpu", 1)
    microbatches = iter(next(groups))
    next(microbatches)
    with pytest.raises(OSError, match="cannot close the file"):
        groups.close()
    groups.close()
    with pytest.raises(RuntimeError, match="its iterator was closed"):
        next(microbatches)
    assert list(groups) == []


def test_prefetch_tells_the_cause_before_what_closing_says() -> None:
    def source() -> Iterator[list[Any]]:
        try:
            yield [torch.ones(1)]
        finally:
            raise OSError("cannot close the file")

    groups = ps.prefetch(source(), "cpu")
    with pytest.raises(ValueError, match=r"reads microbatch\['labels'\]"):
        next(groups)
    with pytest.raises(OSError, match="cannot close the file"):
        groups.close()


def test_prefetch_closes_nothing_of_the_users() -> None:
    """A data set, or an iterator of a class of one's own, is as it was."""
    data, threads = Positioned(9), set(threading.enumerate())
    for source in (data, Stream()):
        groups = ps.prefetch(source, "cpu")
        next(groups)
        groups.close()
        for thread in set(threading.enumerate()) - threads:
            thread.join(timeout=60)
        assert not source.closed


class Stream(Iterator[list[Any]]):
    """An endless iterator that can be closed."""

    closed = False

    def __next__(self) -> list[Any]:
        return labelled(1)

    def close(self) -> None:
        self.closed = True


def test_prefetch_never_asked_never_begins() -> None:
    groups = ps.prefetch(ps.group(labelled(3), 2), "cpu")
    assert "prefetch" not in {thread.name for thread in threading.enumerate()}
    groups.close()
    assert next(groups, "end") == "end"


def test_prefetch_of_groups_that_are_left_early() -> None:
    """A group that was left makes room for the next, even at depth 1, and says so when it is asked again."""
    for depth in (1, 2, 3):
        groups = ps.prefetch([labelled(3)] * 9, "cpu", depth)
        for _ in range(6):
            first = iter(next(groups))
            next(first)
        next(groups)
        second = next(groups)
        assert len(list(second)) == 3
        with pytest.raises(RuntimeError, match="this group was left for a later one"):
            next(first)
        groups.close()
        assert list(groups) == []


class Slow(Tensor):
    """What arrives when it is told to."""

    begun: threading.Event
    go_on: threading.Event

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.begun.set()
        assert self.go_on.wait(timeout=60)
        return self.as_subclass(Tensor)


def slow() -> tuple[Any, threading.Event, threading.Event]:
    """A microbatch of it, what tells that its copy has begun, and what lets it go on."""
    labels: Any = torch.zeros(1).as_subclass(Slow)
    labels.begun, labels.go_on = threading.Event(), threading.Event()
    return {"labels": labels}, labels.begun, labels.go_on


def weights_of_slow(microbatch: Any) -> Tensor:
    return microbatch["labels"].as_subclass(Tensor) >= 0


def test_prefetch_of_a_group_that_is_left_while_it_is_copied() -> None:
    """What is on its way then is let go, and its place is free again."""
    last, begun, go_on = slow()
    source = [[*labelled(1), last], labelled(3)]
    groups = ps.prefetch(source, "cpu", weight_fn=weights_of_slow)
    next(iter(next(groups)))
    assert begun.wait(timeout=60)
    threading.Timer(0.05, go_on.set).start()
    assert [int(m["labels"][0]) for m in next(groups)] == [0, 1, 2]
    groups.close()


def test_prefetch_closed_while_the_next_group_is_copied() -> None:
    """Which was announced already, and is not handed over any more."""
    first, begun, go_on = slow()
    groups = ps.prefetch([labelled(1), [first]], "cpu", weight_fn=weights_of_slow)
    assert len(list(next(groups))) == 1
    assert begun.wait(timeout=60)
    groups.close()
    assert list(groups) == []
    go_on.set()


LEFT = """
import sys, threading, torch
import purestep as ps

def groups():
    while True:
        yield [{"labels": torch.tensor([1])}] * 3
        if sys.argv[1] == "stalled":
            threading.Event().wait()
        for _ in range(8):
            torch.randn(1200, 1200) @ torch.randn(1200, 1200)

ahead = ps.prefetch(groups(), "cpu")
list(next(ahead))
if sys.argv[2] == "closed":
    ahead.close()
"""


@pytest.mark.parametrize("source", ["stalled", "at work"])
@pytest.mark.parametrize("how", ["closed", "in use"])
def test_prefetch_lets_the_program_end(source: str, how: str) -> None:
    """In good order: also with a source that would never answer, or that is inside of torch."""
    subprocess.run([sys.executable, "-c", LEFT, source, how], check=True, timeout=120)


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


def test_prefetch_asks_for_weights_once() -> None:
    """Of a bound method too, which is a new object wherever it is named."""

    class Counting:
        asked = 0

        def weights(self, microbatch: Any) -> Tensor:
            self.asked += 1
            return torch.ones_like(microbatch["x"])

    counting = Counting()
    groups = [[{"x": torch.ones(2)}] * 3]
    sgd = ps.optim.sgd(0.1)
    step = ps.make_update_step(lambda w, m: w * m["x"], sgd, weight_fn=counting.weights)
    w = torch.ones(())
    ahead = ps.prefetch(groups, "cpu", weight_fn=counting.weights)
    moved, _, metrics = step(w, sgd.init(w), next(ahead))
    assert counting.asked == 3
    assert metrics.num_tokens == 6
    assert moved == w - torch.tensor(0.1)


def test_one_document_alone() -> None:
    """A row of its own, filled up."""
    one = {"tokens": torch.tensor([5, 6, 7]), "labels": torch.tensor([6, 7, 8])}
    packed = ps.pack_documents([one], row_tokens=4, pad=0)
    assert packed["tokens"].tolist() == [[5, 6, 7, 0]]
    assert packed["labels"].tolist() == [[6, 7, 8, 0]]
    assert packed["positions"].tolist()[0][:3] == [0, 1, 2]
    assert len(set(packed["segments"].tolist()[0][:3])) == 1
    assert packed["segments"][0, 3] != packed["segments"][0, 0]
