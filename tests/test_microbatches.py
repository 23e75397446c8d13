"""``group``, ``split``, ``plan``, and where microbatches come from. T14 and T16 have their laws."""

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.utils import data

import purestep as ps
from proofs.strategies import assert_same
from tests.examples import examples_of
from tests.line import MICROBATCH, PARAMS, SGD, loss_fn, step_with


@pytest.mark.parametrize("start", [0, 3, 12])
@pytest.mark.parametrize("last", ["keep", "drop", "raise"])
def test_group_ends_as_it_is_asked(last: Any, start: int) -> None:
    """Every microbatch from ``start`` on, in order; what is left, once."""
    groups = ps.group(iter(range(10)), 4, last, start=start)
    whole = {0: [[0, 1, 2, 3], [4, 5, 6, 7]], 3: [[3, 4, 5, 6]], 12: []}[start]
    rest = {0: [8, 9], 3: [7, 8, 9], 12: []}[start]
    for one in whole:
        assert next(groups) == one
        assert groups.position == one[-1] + 1
    if last == "raise" and rest:
        message = f"after {len(rest)} of 4 microbatches"
        with pytest.raises(ps.DataExhausted, match=message) as event:
            next(groups)
        assert (event.value.found, event.value.wanted) == (len(rest), 4)
    elif last == "keep" and rest:
        assert next(groups) == rest
    assert next(groups, "end") == "end"


def test_group_loses_nothing_to_an_error() -> None:
    """What was taken before the source failed is part of the next group."""
    source: Iterator[Any] = iter([0, 1, OSError("disk"), 2, 3, 4])

    class Flaky(Iterator[int]):
        def __next__(self) -> int:
            found: int | OSError = next(source)
            if isinstance(found, OSError):
                raise found
            return found

    groups = ps.group(Flaky(), 3)
    with pytest.raises(OSError, match="disk"):
        next(groups)
    assert list(groups) == [[0, 1, 2], [3, 4]]


def test_group_inside_a_generator_ends_it_quietly() -> None:
    def training() -> Iterator[int]:
        for one in ps.group(range(3), 2):
            yield len(one)

    assert list(training()) == [2, 1]


DATA: Any = torch.arange(8)
ROWS = range(8)
UNSEEDED: list[dict[str, Any]] = [
    {"shuffle": True}, {"shuffle": True, "batch_size": None},
    {"sampler": data.RandomSampler(ROWS), "generator": torch.Generator()},
    {"sampler": data.SubsetRandomSampler(ROWS)}, {"sampler": data.WeightedRandomSampler([1.0] * 8, 8)},
    {"batch_sampler": data.BatchSampler(data.RandomSampler(ROWS), 2, drop_last=False)},
]  # fmt: skip


@pytest.mark.parametrize("how", UNSEEDED)
def test_group_resumes_no_order_of_the_global_generator(how: Any) -> None:
    """It is another one by then; nothing is asked where nothing is resumed."""
    loader: Any = data.DataLoader(DATA, **how)
    assert sum(map(len, ps.group(loader, 2))) == len(loader)
    with pytest.raises(
        ValueError, match=r"start=2 .* global generator: .*manual_seed\(epoch\)"
    ):
        ps.group(loader, 2, start=2)


@pytest.mark.parametrize("how", ["loader", "sampler", "in order", "a list"])
def test_group_resumes_an_order_that_is_seeded(how: str) -> None:
    def parts(start: int) -> list[Any]:
        seeded = torch.Generator().manual_seed(3)
        hows: dict[str, dict[str, Any]] = {
            "loader": {"shuffle": True, "generator": seeded},
            "sampler": {
                "sampler": data.WeightedRandomSampler([1.0] * 8, 8, generator=seeded)
            },
            "in order": {"shuffle": False},
            "a list": {"sampler": [3, 1, 2]},
        }
        groups = ps.group(data.DataLoader(DATA, **hows[how]), 1, start=start)
        return [part.tolist() for one in groups for part in one]

    assert parts(2) == parts(0)[2:] != []


@given(st.integers(1, 5), st.integers(0, 4))
def test_split_and_merge_are_inverse(k: int, size: int) -> None:
    batch: dict[str, Any] = {
        "x": torch.arange(k * size * 2).view(k * size, 2),
        "nested": [torch.arange(k * size)],
        "none": None,
    }
    parts = ps.split(batch, k)
    assert [len(part["x"]) for part in parts] == [size] * k
    assert_same(ps.merge(parts), batch)
    assert_same(ps.split(ps.merge(parts), k), parts)


COMMON, SIX = "one common first dimension", {"x": torch.arange(6)}
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: ps.group([], 0), "k=0 microbatches make no group"),
    (lambda: ps.group([], 1, "pad"), "last='pad' must be one of 'keep', 'drop', 'raise'"),  # type: ignore[arg-type]
    (lambda: ps.group([], 1, start=-1), "start=-1 is no position"),
    (lambda: ps.split(SIX, 4), r"batch of 6 .* k=4 .*divisible by 1, 2, 3, 6"),
    (lambda: ps.split(SIX, 0), r"batch of 6 .* k=0 .*divisible by"),
    (lambda: ps.split({"x": torch.ones(4), "y": torch.ones(2)}, 2), COMMON),
    (lambda: ps.split({"x": torch.ones(4), "y": torch.tensor(1)}, 2), COMMON),
    (lambda: ps.split({"x": 3}, 2), COMMON),
    (lambda: ps.split({}, 2), COMMON),
    (lambda: ps.merge([]), "no microbatches"),
    (lambda: ps.merge([{"x": torch.ones(1)}, {"x": torch.ones(2)}]), r"one length, these have \[1, 2\]"),
    (lambda: ps.plan(), "given neither"),
    (lambda: ps.plan(global_batch_size=4), r"given \['global_batch_size'\]"),
    (lambda: ps.plan(global_batch_size=4, local_tokens=2), "given"),
    (lambda: ps.plan(global_batch_size=4, local_batch_size=0), "local_batch_size=0 must be at least 1"),
    (lambda: ps.plan(global_tokens=4, local_tokens=2, axis_size=0), "axis_size=0 must be at least 1"),
    (lambda: ps.plan(global_batch_size=100, local_batch_size=8, axis_size=5),
     r"global_batch_size=100 .* 8 \* 5 = 40\. .*global_batch_size=80 or 120; local_batch_size=5 or 10"),
    (lambda: ps.plan(global_tokens=100, local_tokens=4, axis_size=8), r"global_tokens=100 .*Nearest that work: global_tokens=96 or 128$"),
    (lambda: ps.plan(global_batch_size=20, local_batch_size=4, axis_size=10), "global_batch_size=40; local_batch_size=1 or 2"),
    (lambda: ps.plan(global_tokens=6_000_034, local_tokens=3_000_000), r"local_tokens=2 or 3000017$"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_group_split_merge_and_plan_refuse(
    call: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 50))
def test_plan_multiplies_up(local: int, size: int, steps: int) -> None:
    total = local * size * steps
    expected = ps.BatchPlan(total, local, size, steps)
    assert (
        ps.plan(global_batch_size=total, local_batch_size=local, axis_size=size)
        == expected
    )
    assert ps.plan(global_tokens=total, local_tokens=local, axis_size=size) == expected


@given(st.integers(1, 200), st.integers(1, 30), st.integers(1, 4))
def test_plan_offers_the_nearest_that_work(total: int, local: int, ranks: int) -> None:
    """Of either size, and all that it offers works; the nearest is the first or the second."""

    def works(total: int, local: int) -> bool:
        return total % (local * ranks) == 0

    try:
        ps.plan(global_tokens=total, local_tokens=local, axis_size=ranks)
    except ValueError as error:
        offers = dict(
            offer.split("=") for offer in str(error).split("work: ")[1].split("; ")
        )
        sizes = {
            name: list(map(int, text.split(" or "))) for name, text in offers.items()
        }
        assert all(works(size, local) for size in sizes["global_tokens"])
        assert min(abs(size - total) for size in sizes["global_tokens"]) == min(
            abs(size - total) for size in range(1, 400) if works(size, local)
        )
        locals_ = [size for size in range(1, 201) if works(total, size)]
        closest = sorted(locals_, key=lambda size: abs(size - local))[:2]
        assert sizes.get("local_tokens", []) == sorted(closest)
    else:
        assert works(total, local)


def collate(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One microbatch of examples as they come."""
    (packed,) = ps.pack(examples, max_tokens=10**6)
    return packed


EXAMPLES = examples_of([3, 1, 4, 1, 5, 9])
PAIRS = [EXAMPLES[i : i + 2] for i in (0, 2, 4)]
TABLE: Any = datasets.Dataset.from_dict(
    {name: [one[name].tolist() for one in EXAMPLES] for name in ("tokens", "labels")}
)
two_of: Any = {"batch_size": 2, "collate_fn": collate}
SOURCES: dict[str, Callable[[], Any]] = {
    "a list": lambda: [collate(pair) for pair in PAIRS],
    "a generator": lambda: (collate(pair) for pair in PAIRS),
    "a loader with workers": lambda: data.DataLoader(EXAMPLES, num_workers=1, **two_of),  # type: ignore[arg-type]
    "rows of a table": lambda: data.DataLoader(TABLE.with_format("torch"), **two_of),
    "a stream of rows": lambda: data.DataLoader(TABLE.to_iterable_dataset().with_format("torch"), **two_of),
    "groups of a loader's worker": lambda: next(
        iter(data.DataLoader(TABLE.with_format("torch"), 6, collate_fn=lambda rows: [collate(rows[i : i + 2]) for i in (0, 2, 4)]))
    ),
}  # fmt: skip


def counted(m: Any) -> torch.Tensor:
    """The default, under another name: these labels are the tokens."""
    return ps.label_weights(m)


@pytest.mark.parametrize("source", SOURCES)
def test_sources_of_every_kind(source: str) -> None:
    """The tokens of each update, of four and two examples."""
    step = ps.make_update_step(lambda w, m: w * m["labels"], SGD, weight_fn=counted)
    w = torch.tensor(1.0)
    groups = ps.prefetch(ps.group(SOURCES[source](), 2), "cpu")
    assert [int(step(w, SGD.init(w), group)[2].num_tokens) for group in groups] == [
        9,
        14,
    ]


def test_microbatches_in_any_container() -> None:
    parts = ({key: value[:1] for key, value in MICROBATCH.items()}, MICROBATCH)
    assert_same(step_with(group=parts), step_with(group=list(parts)))


class Anew(Sequence[Any]):
    """Makes its microbatches whenever it is asked, with masks drawn anew, as for masked models."""

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
    mask_of = itemgetter("mask")
    assert step_with(group=Anew(), normalize=normalize, weight_fn=mask_of)[2].loss == 1
    assert ps.make_eval_step(loss_fn, weight_fn=mask_of)(PARAMS, Anew()).loss == 1
