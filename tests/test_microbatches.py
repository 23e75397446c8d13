"""``group``, ``split``, ``plan``, and where microbatches come from. T14 and T16 have their laws."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.utils import data

import purestep as ps
from support.strategies import assert_same
from tests.line_problem import MICROBATCH, PARAMS, SGD, loss_fn, run_step
from tests.packing_examples import make_examples

# Groups


class Grouping(NamedTuple):
    """Groups of four from range(10): those that are full, and the rest."""

    start: int
    full: list[list[int]]
    rest: list[int]


@pytest.mark.parametrize(
    "case",
    [
        Grouping(start=0, full=[[0, 1, 2, 3], [4, 5, 6, 7]], rest=[8, 9]),
        Grouping(start=3, full=[[3, 4, 5, 6]], rest=[7, 8, 9]),
        Grouping(start=12, full=[], rest=[]),
    ],
)
@pytest.mark.parametrize("last", ["keep", "drop", "raise"])
def test_group_ends_as_last_says(last: Any, case: Grouping) -> None:
    """Every microbatch from ``start`` on, in order; the rest, once."""
    k: Any = np.int64(4)
    groups = ps.group(iter(range(10)), k, last, start=case.start)

    for expected in case.full:
        assert next(groups) == expected
        assert groups.position == expected[-1] + 1

    if last == "raise" and case.rest:
        message = f"after {len(case.rest)} of 4 microbatches"
        with pytest.raises(ps.DataExhausted, match=message) as event:
            next(groups)
        assert event.value.num_found == len(case.rest)
        assert event.value.num_expected == 4
    elif last == "keep" and case.rest:
        assert next(groups) == case.rest
    assert next(groups, "end") == "end"


def test_group_loses_nothing_to_an_error() -> None:
    """What was taken before the source failed is part of the next group."""
    source: Iterator[int | OSError] = iter([0, 1, OSError("disk"), 2, 3, 4])

    class Flaky(Iterator[int]):
        def __next__(self) -> int:
            value = next(source)
            if isinstance(value, OSError):
                raise value
            return value

    groups = ps.group(Flaky(), 3)
    with pytest.raises(OSError, match="disk"):
        next(groups)
    assert list(groups) == [[0, 1, 2], [3, 4]]


def test_group_inside_a_generator_ends_it_quietly() -> None:
    def train() -> Iterator[int]:
        for group in ps.group(range(3), 2):
            yield len(group)

    assert list(train()) == [2, 1]


DATA: Any = torch.arange(8)
ROWS = range(8)


@pytest.mark.parametrize(
    "settings",
    [
        {"shuffle": True},
        {"shuffle": True, "batch_size": None},
        {"sampler": data.RandomSampler(ROWS), "generator": torch.Generator()},
        {"sampler": data.SubsetRandomSampler(ROWS)},
        {"sampler": data.WeightedRandomSampler([1.0] * 8, 8)},
        {
            "batch_sampler": data.BatchSampler(
                data.RandomSampler(ROWS), 2, drop_last=False
            ),
        },
    ],
)
def test_group_resumes_no_order_of_the_global_generator(settings: Any) -> None:
    """It is another one by then; nothing is refused where nothing is resumed."""
    loader: Any = data.DataLoader(DATA, **settings)

    num_microbatches = sum(len(group) for group in ps.group(loader, 2))
    assert num_microbatches == len(loader)

    message = r"start=2 .* global generator: .*manual_seed\(epoch\)"
    with pytest.raises(ValueError, match=message):
        ps.group(loader, 2, start=2)


def seed_loader() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {"shuffle": True, "generator": generator}


def seed_sampler() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    sampler = data.WeightedRandomSampler([1.0] * 8, 8, generator=generator)
    return {"sampler": sampler}


@pytest.mark.parametrize(
    "make_settings",
    [
        seed_loader,
        seed_sampler,
        lambda: {"shuffle": False},
        lambda: {"sampler": [3, 1, 2]},
    ],
    ids=["loader", "sampler", "in order", "a list"],
)
def test_group_resumes_an_order_that_is_seeded(make_settings: Any) -> None:
    def read_from(start: int) -> list[Any]:
        loader = data.DataLoader(DATA, **make_settings())
        groups = ps.group(loader, 1, start=start)
        return [microbatch.tolist() for (microbatch,) in groups]

    resumed = read_from(2)
    assert resumed == read_from(0)[2:]
    assert resumed != []


# Splits, merges and plans


@given(st.integers(1, 5), st.integers(0, 4))
def test_split_and_merge_are_inverse(k: int, size: int) -> None:
    batch: dict[str, Any] = {
        "x": torch.arange(k * size * 2).view(k * size, 2),
        "nested": [torch.arange(k * size)],
        "none": None,
    }
    microbatches = ps.split(batch, k)
    merged = ps.merge(microbatches)

    sizes = [len(microbatch["x"]) for microbatch in microbatches]
    assert sizes == [size] * k
    assert_same(merged, batch)
    assert_same(ps.split(merged, k), microbatches)


def test_a_position_that_a_checkpoint_returns_as_a_tensor_stays() -> None:
    start = torch.tensor(2)
    groups = ps.group(range(6), 2, start=start)  # type: ignore[arg-type]
    assert [*groups] == [[2, 3], [4, 5]]
    assert groups.position == 6
    assert start == 2


COMMON = "one common first dimension"
SIX = {"x": torch.arange(6)}
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: ps.group([], 0),
        "k=0 microbatches make no group",
    ),
    (
        lambda: ps.group([], 1, "pad"),  # type: ignore[arg-type]
        "last='pad' must be one of 'keep', 'drop', 'raise'",
    ),
    (
        lambda: ps.group([], 1, start=-1),
        "start=-1 is no position",
    ),
    (
        lambda: ps.group([], 1, start=2.5),  # type: ignore[arg-type]
        "start=2.5 is no position",
    ),
    (
        lambda: ps.group([], 1, start=None),  # type: ignore[arg-type]
        "start=None is no position",
    ),
    (
        lambda: ps.split(SIX, 4),
        r"batch of 6 .* k=4 .*divisible by 1, 2, 3, 6",
    ),
    (
        lambda: ps.split(SIX, 0),
        r"batch of 6 .* k=0 .*divisible by",
    ),
    (
        lambda: ps.split({"x": torch.ones(4), "y": torch.ones(2)}, 2),
        COMMON,
    ),
    (
        lambda: ps.split({"x": torch.ones(4), "y": torch.tensor(1)}, 2),
        COMMON,
    ),
    (
        lambda: ps.split({"x": 3}, 2),
        COMMON,
    ),
    (
        lambda: ps.split({}, 2),
        COMMON,
    ),
    (
        lambda: ps.merge([]),
        "no microbatches",
    ),
    (
        lambda: ps.merge([{"x": torch.ones(1)}, {"x": torch.ones(2)}]),
        r"one length, these have \[1, 2\]",
    ),
    (
        lambda: ps.plan(),
        "given neither",
    ),
    (
        lambda: ps.plan(global_batch_size=4),
        r"given \['global_batch_size'\]",
    ),
    (
        lambda: ps.plan(global_batch_size=4, local_tokens=2),
        "given",
    ),
    (
        lambda: ps.plan(global_batch_size=4, local_batch_size=0),
        "local_batch_size=0 must be at least 1",
    ),
    (
        lambda: ps.plan(global_tokens=4, local_tokens=2, axis_size=0),
        "axis_size=0 must be at least 1",
    ),
    (
        lambda: ps.plan(global_batch_size=100, local_batch_size=8, axis_size=5),
        r"global_batch_size=100 .* 8 \* 5 = 40\. "
        r".*global_batch_size=80 or 120; local_batch_size=5 or 10",
    ),
    (
        lambda: ps.plan(global_tokens=100, local_tokens=4, axis_size=8),
        r"global_tokens=100 .*Nearest that work: global_tokens=96 or 128$",
    ),
    (
        lambda: ps.plan(global_batch_size=20, local_batch_size=4, axis_size=10),
        "global_batch_size=40; local_batch_size=1 or 2",
    ),
    (
        lambda: ps.plan(global_tokens=6_000_034, local_tokens=3_000_000),
        r"local_tokens=2 or 3000017$",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_group_split_merge_and_plan_refuse(
    call: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_plan_takes_no_floats() -> None:
    sizes: dict[str, Any] = {"global_batch_size": 64.0, "local_batch_size": 4}
    with pytest.raises(TypeError, match=r"global_batch_size=64.0 must be a whole"):
        ps.plan(**sizes)


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 50))
def test_plan_multiplies_up(local: int, size: int, steps: int) -> None:
    total = local * size * steps
    expected = ps.BatchPlan(total, local, size, steps)

    by_examples = ps.plan(
        global_batch_size=total, local_batch_size=local, axis_size=size
    )
    by_tokens = ps.plan(global_tokens=total, local_tokens=local, axis_size=size)

    assert by_examples == expected
    assert by_tokens == expected


def read_offers(message: str) -> dict[str, list[int]]:
    """Parses "... work: global_tokens=96 or 128; local_tokens=5" by name."""
    offers = {}
    _, listed = message.split("work: ")
    for offer in listed.split("; "):
        name, sizes = offer.split("=")
        offers[name] = [int(size) for size in sizes.split(" or ")]
    return offers


@given(st.integers(1, 200), st.integers(1, 30), st.integers(1, 4))
def test_plan_offers_the_nearest_that_work(total: int, local: int, ranks: int) -> None:
    """Of either size, and all that it offers works; the nearest is the first or the second."""

    def works(total: int, local: int) -> bool:
        return total % (local * ranks) == 0

    if works(total, local):
        ps.plan(global_tokens=total, local_tokens=local, axis_size=ranks)
        return
    with pytest.raises(ValueError, match="work: ") as info:
        ps.plan(global_tokens=total, local_tokens=local, axis_size=ranks)

    offers = read_offers(str(info.value))
    assert all(works(size, local) for size in offers["global_tokens"])
    nearest_offered = min(abs(size - total) for size in offers["global_tokens"])
    totals_that_work = [size for size in range(1, 400) if works(size, local)]
    assert nearest_offered == min(abs(size - total) for size in totals_that_work)

    locals_that_work = [size for size in range(1, 201) if works(total, size)]
    locals_that_work.sort(key=lambda size: abs(size - local))
    assert offers.get("local_tokens", []) == sorted(locals_that_work[:2])


def test_plan_of_very_many_tokens_offers_no_divisors() -> None:
    """At once: the divisors of a number above 10¹² would take seconds."""
    with pytest.raises(ValueError, match="work: ") as info:
        ps.plan(global_tokens=10**12 + 4, local_tokens=3, axis_size=2)
    assert set(read_offers(str(info.value))) == {"global_tokens"}
    with pytest.raises(ValueError, match="work: ") as info:
        ps.plan(global_tokens=10**12, local_tokens=3, axis_size=2)
    assert set(read_offers(str(info.value))) == {"global_tokens", "local_tokens"}


# Sources of microbatches


def collate(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Packs examples into one microbatch as they come."""
    (packed,) = ps.pack(examples, max_tokens=10**6)
    return packed


EXAMPLES = make_examples([3, 1, 4, 1, 5, 9])
TABLE: Any = datasets.Dataset.from_dict(
    {
        "tokens": [example["tokens"].tolist() for example in EXAMPLES],
        "labels": [example["labels"].tolist() for example in EXAMPLES],
    }
)


def in_pairs(examples: Any) -> list[Any]:
    """Collates examples two by two."""
    return [collate(examples[i : i + 2]) for i in (0, 2, 4)]


def load_pairs(source: Any, **settings: Any) -> Any:
    return data.DataLoader(source, batch_size=2, collate_fn=collate, **settings)


def load_group_of_pairs() -> Any:
    """Makes all microbatches of a group in one call of ``collate_fn``."""
    loader = data.DataLoader(TABLE.with_format("torch"), 6, collate_fn=in_pairs)
    return next(iter(loader))


def stream_rows() -> Any:
    return TABLE.to_iterable_dataset().with_format("torch")


SOURCES: dict[str, Callable[[], Any]] = {
    "a list": lambda: in_pairs(EXAMPLES),
    "a generator": lambda: (collate(EXAMPLES[i : i + 2]) for i in (0, 2, 4)),
    "a loader with workers": lambda: load_pairs(EXAMPLES, num_workers=1),
    "rows of a table": lambda: load_pairs(TABLE.with_format("torch")),
    "a stream of rows": lambda: load_pairs(stream_rows()),
    "groups of a loader's worker": load_group_of_pairs,
}


def weigh_labels(m: Any) -> torch.Tensor:
    """Calls the default under another name: these labels are the tokens."""
    return ps.label_weights(m)


@pytest.mark.parametrize("source", SOURCES)
def test_sources_of_every_kind(source: str) -> None:
    """The tokens of each update, of four and two examples."""

    def scaled_labels(w: Tensor, m: Any) -> Tensor:
        return w * m["labels"]

    step = ps.make_update_step(scaled_labels, SGD, weight_fn=weigh_labels)
    w = torch.tensor(1.0)

    counts = []
    for group in ps.prefetch(ps.group(SOURCES[source](), 2), "cpu"):
        _, _, metrics = step(w, SGD.init(w), group)
        counts.append(int(metrics.num_tokens))
    assert counts == [9, 14]


def test_microbatches_in_any_container() -> None:
    first_token = {key: value[:1] for key, value in MICROBATCH.items()}
    as_tuple = run_step(group=(first_token, MICROBATCH))
    as_list = run_step(group=[first_token, MICROBATCH])
    assert_same(as_tuple, as_list)


class Anew(Sequence[Any]):
    """Makes its microbatches whenever they are read, with masks drawn anew, as for masked models."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError
        mask = torch.randint(0, 2, (8,), generator=self.generator)
        return {"x": mask.float(), "y": torch.zeros(8), "mask": mask}


@pytest.mark.parametrize("normalize", ["loss", "grads"])
def test_a_sequence_that_makes_its_microbatches_anew(normalize: Any) -> None:
    """What is counted is what is computed: the loss of every counted token is w² = 1."""

    def mask_of(m: Any) -> Tensor:
        return m["mask"]

    *_, metrics = run_step(group=Anew(), normalize=normalize, weight_fn=mask_of)
    evaluate = ps.make_eval_step(loss_fn, weight_fn=mask_of)

    assert metrics.loss == 1
    assert evaluate(PARAMS, Anew()).loss == 1


class Understated(Sequence[Tensor]):
    """Says that it holds one microbatch, and yields two."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        return [torch.ones(2), torch.ones(2)][index]


class Overstated(Sequence[Any]):
    """Says that it has two microbatches, but yields one."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        return [torch.ones(2)][index]


def test_another_number_of_microbatches_than_the_length_is_refused() -> None:
    """Where the loss returns the weights, a sequence is read as it goes."""

    def loss_fn(w: Tensor, x: Tensor) -> ps.LossOutput:
        return ps.LossOutput(w * x, weights=torch.ones(2))

    sgd = ps.optim.sgd(0.1)
    w = torch.tensor(1.0)
    step = ps.make_update_step(loss_fn, sgd, weight_fn=None, normalize="grads")
    evaluate = ps.make_eval_step(loss_fn, weight_fn=None)
    with pytest.raises(ValueError, match="yields more than the 1 microbatches"):
        step(w, sgd.init(w), Understated())
    with pytest.raises(ValueError, match="yields more than the 1 microbatches"):
        evaluate(w, Understated())
    with pytest.raises(ValueError, match="yields fewer than the 2 microbatches"):
        step(w, sgd.init(w), Overstated())
    with pytest.raises(ValueError, match="yields fewer than the 2 microbatches"):
        evaluate(w, Overstated())
