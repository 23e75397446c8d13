"""T14, repartition. ``pack``, ``balance``, ``group`` and ``prefetch`` give the update of the order of arrival.

The update depends on the tokens alone, so that how they are put together is free to be chosen for speed. Where
they cannot be put together without turning into something else, that is refused, however they are cut; where
the data cannot be had, the cause is raised; and a stream that is left can be gone on with.
"""

import threading
import time
from collections import UserDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

import purestep as ps
from proofs import models
from proofs.ranks import check_step
from proofs.strategies import (
    CAPTURE,
    Batch,
    Case,
    Chooser,
    How,
    RealCase,
    assert_same,
    case_of,
    cut,
    cut_of,
    drawn,
    real_case,
    weights_of,
)
from proofs.theorem import System, as_tests, theorem
from purestep import tree

FLOATS = [torch.float64, torch.float32]
SIGNED = [*FLOATS, torch.int64, torch.int32, torch.int8]
COUNTED = [*FLOATS, torch.int64, torch.int16, torch.uint8]
PADS = [0, 7, -3, -100, 300, 0.5, 1e10]


def dressed(row: Batch) -> Any:
    """An example in a mapping of another class, with a list and a None in it."""
    return UserDict(data={"x": row["x"], "y": [row["y"]]}, w=row["w"], none=None)


def undressed(microbatch: Any) -> Batch:
    """What a loss finds there, in float64, and the weights as they came."""
    data = {"x": microbatch["data"]["x"], "y": microbatch["data"]["y"][0]}
    return {**{k: v.to(torch.float64) for k, v in data.items()}, "w": microbatch["w"]}


class Examples(NamedTuple):
    """A case, and its sequences as examples: of uneven length, perhaps empty."""

    case: Case
    rows: list[Batch]
    pad: dict[str, float]

    @property
    def fit(self) -> bool:
        """Whether every leaf can hold what it is filled up with."""
        return all(
            torch.tensor(self.pad[name]).to(leaf.dtype).double() == self.pad[name]
            for name, leaf in next(row for row in self.rows if len(row["w"])).items()
        )


def example_case(choose: Chooser) -> tuple[Examples, int, int, int]:
    """A case cut into examples: ignored tokens at their ends are cut off, and empty examples stand between."""
    case = case_of(choose, fractional=choose.maybe())
    counted = FLOATS if case.batch["w"].is_floating_point() else COUNTED
    allowed = {"x": SIGNED, "y": SIGNED, "w": counted}
    dtypes = {name: choose.choice(each) for name, each in allowed.items()}
    rows = []
    for row in range(case.rows):
        example = {key: value[row] for key, value in case.batch.items()}
        used = int((example["w"] > 0).nonzero().max()) + 1 if example["w"].any() else 0
        length = choose.randint(used, len(example["w"]))
        rows.append(
            {key: value[:length].to(dtypes[key]) for key, value in example.items()}
        )
        if not choose.randrange(4):
            rows.append({key: torch.tensor([]) for key in example})
    pad = {"x": choose.choice(PADS), "y": choose.choice(PADS), "w": 0.0}
    slack, multiple_of, ranks = (
        choose.randint(0, 12),
        choose.randint(1, 3),
        choose.randint(1, 4),
    )
    return Examples(case, rows, pad), slack, multiple_of, ranks


@theorem("T14", drawn(example_case))
def repartition(system: System, drawn: tuple[Examples, int, int, int]) -> None:
    """Balanced over ranks and packed within a budget: the state and loss of the big batch, to the bit, or refused."""
    (case, rows, pad), slack, multiple_of, ranks = drawn
    examples = [dressed(row) for row in rows]
    longest = max(len(row["w"]) for row in rows)
    budget = max(1, -(-longest // multiple_of) * multiple_of) + slack

    def pack(examples: list[Any]) -> list[Any]:
        return ps.pack(examples, max_tokens=budget, multiple_of=multiple_of, pad=pad)

    if not drawn[0].fit:
        error = raised(lambda: pack(examples))
        assert isinstance(error, ValueError), (
            "accepted" if error is None else repr(error)
        )
        assert "example" in str(error)
        return
    shares = ps.balance(examples, ranks)
    assert len(shares) == ranks
    group = [undressed(microbatch) for share in shares for microbatch in pack(share)]
    assert all(0 < microbatch["w"].numel() <= budget for microbatch in group)
    kept = sum(len(row["w"]) > 0 for row in rows)
    assert sum(len(microbatch["w"]) for microbatch in group) == kept, (
        "a row for each example"
    )
    check_step(system, How("one", {}), case, [group])


def raised(attempt: Callable[[], Any]) -> BaseException | None:
    """What it raises."""
    try:
        attempt()
    except BaseException as error:
        return error
    return None


class Stream(NamedTuple):
    """Microbatches one after another, in groups of ``k``; what goes wrong where, and after how many groups it is left."""

    case: Case
    parts: list[Batch]
    k: int
    depth: int
    fault: tuple[str, int] | None
    error: BaseException
    leave: int

    @property
    def complete(self) -> int:
        """How many groups can be used to the end."""
        count = -(-len(self.parts) // self.k)
        return count if self.fault is None else self.fault[1] // self.k

    def batches(self) -> Iterator[Any]:
        """The source, whose microbatches hold what is no tensor, too."""
        for number, part in enumerate(self.parts):
            batch = {**part, "number": torch.tensor(number), "name": "no tensor"}
            if self.fault == ("source", number):
                raise self.error
            if self.fault == ("copying", number):
                stuck = part["x"].as_subclass(Stuck)
                stuck.error = self.error
                batch["x"] = stuck
            yield UserDict(batch) if number % 2 else batch

    def weights(self, batch: Any) -> Tensor:
        """The weights, unless counting is what fails."""
        if self.fault == ("counting", int(batch["number"])):
            raise self.error
        return batch["w"]


class Stuck(Tensor):
    """What cannot be brought to a device."""

    error: BaseException

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Fails."""
        raise self.error


ERRORS = [
    OSError("disk"),
    KeyboardInterrupt("stop"),
    SystemExit(3),
    ps.DataExhausted(1, 2),
]


def stream_case(choose: Chooser) -> Stream:
    """Any cut of a case into microbatches; a fault somewhere, or none; left somewhere, or at the end."""
    case = case_of(choose)
    parts = cut(case.batch, cut_of(choose, range(case.rows), range(1, 10)))
    kind, place = (
        choose.choice(["source", "counting", "copying"]),
        choose.randrange(len(parts)),
    )
    fault, error = (kind, place) if choose.maybe() else None, choose.choice(ERRORS)
    k, depth = choose.randint(1, 4), choose.randint(1, 3)
    leave = choose.choice([9, 9, 9, 0, 1, 2, 3])
    return Stream(case, parts, k, depth, fault, error, leave)


@theorem("T14", drawn(stream_case))
def stream(system: System, data: Stream) -> None:
    """Grouped and prefetched: each group has the gradient of its own microbatches; then comes the cause, or the rest."""
    threads = set(threading.enumerate())
    zeros, weight_fn = tree.zeros_like(data.case.params), data.weights
    step = system.make_update_step(models.integer_loss, CAPTURE, weight_fn=weight_fn)
    plain = system.make_update_step(models.integer_loss, CAPTURE, weight_fn=weights_of)
    source = ps.group(data.batches(), data.k)
    groups = ps.prefetch(source, "cpu", data.depth, weight_fn=weight_fn)
    assert groups.position == 0
    used = min(data.leave, data.complete)
    for number in range(used):
        group = next(groups, None)
        assert group is not None, "an end before the end"
        found = step(data.case.params, zeros, group)
        mine = data.parts[number * data.k : (number + 1) * data.k]
        assert groups.position == number * data.k + len(mine)
        assert_same(found, plain(data.case.params, zeros, mine))

    if used < data.leave and data.fault is not None:
        assert raised(lambda: step(data.case.params, zeros, next(groups))) is data.error
        if data.fault[0] == "copying":
            assert raised(lambda: next(groups)) is data.error, "no end of the data"
    elif used < data.leave:
        assert isinstance(raised(lambda: next(groups)), StopIteration)
        assert groups.position == len(data.parts)
    else:
        if data.fault is None and 0 < used < data.complete:
            wait_until(lambda: int(source.position or 0) > int(groups.position or 0))
        assert groups.position == min(used * data.k, len(data.parts))
        rest = ps.group(iter(data.parts), data.k, start=groups.position)
        again = [part for group in islice(rest, len(data.parts)) for part in group]
        assert [id(p) for p in again] == [id(p) for p in data.parts[used * data.k :]]
        if data.fault is None and used < data.complete:
            group = next(groups, None)
            assert group is not None, "an end before the end"
            microbatches = iter(group)
            next(microbatches)
            groups.close()
            expected = RuntimeError if len(group) > 1 else StopIteration
            assert isinstance(raised(lambda: next(microbatches)), expected)
    groups.close()
    assert isinstance(raised(lambda: next(groups)), StopIteration)
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a stream that was left has no thread"


def wait_until(holds: Callable[[], bool]) -> None:
    """Until the thread has come as far; that it does is part of the claim."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "nothing is read ahead"
        time.sleep(0)


def packed_case(choose: Chooser) -> tuple[RealCase, int]:
    """Texts, and how many tokens more than the longest of them a microbatch may hold."""
    return real_case(choose, [torch.float64, torch.float32]), choose.randrange(10)


@theorem("T14", drawn(packed_case))
def packed_within_bound(system: System, drawn: tuple[RealCase, int]) -> None:
    """For the transformer: packed by length, or several in one row, the exact gradient, but for rounding."""
    case, slack = drawn
    lengths = case.batch["w"].sum(1).tolist()
    text = {key: case.batch[key] for key in ("tokens", "labels")}
    examples = [
        {k: x[row, :n] for k, x in text.items()} for row, n in enumerate(lengths)
    ]
    documents = ps.pack_documents(examples, row_tokens=models.CONTEXT)
    documents["mask"] = ps.segment_mask(documents["segments"])
    packed = ps.pack(examples, max_tokens=max(1, *lengths) + slack)
    step = system.make_update_step(models.transformer_loss, CAPTURE)
    for group in ([part for part in packed if part["labels"].numel()], [documents]):
        _, grads, metrics = step(case.params, tree.zeros_like(case.params), group)
        case.assert_within_bound(grads)
        case.assert_loss_within_bound(metrics.loss)


globals().update(as_tests(globals()))
