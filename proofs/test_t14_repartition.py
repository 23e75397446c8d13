"""T14, repartition. ``pack``, ``balance``, ``group`` and ``prefetch`` give the update of the order of arrival.

The update depends on the tokens alone, so their arrangement can be chosen for speed. Examples that
cannot be packed without changing a value are refused, however they are cut; a source that fails
raises its error; and a stream that is abandoned can be resumed.
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
from purestep import tree
from support import models
from support.optimizers import CAPTURE
from support.ranks import check_step
from support.strategies import (
    Batch,
    Case,
    Chooser,
    Setup,
    assert_same,
    builds,
    cut_batch,
    get_weights,
    make_case,
    make_cut,
)
from support.texts import RealCase, make_real_case
from support.theorem import System, as_tests, theorem

FLOATS = [torch.float64, torch.float32]
SIGNED = [*FLOATS, torch.int64, torch.int32, torch.int8]
WEIGHTS = [*FLOATS, torch.int64, torch.int16, torch.uint8]
PADS = [0, 7, -3, -100, 300, 0.5, 1e10]


def nest_example(row: Batch) -> Any:
    """Puts an example into a mapping of another class, with a list and a None in it."""
    return UserDict(data={"x": row["x"], "y": [row["y"]]}, w=row["w"], none=None)


def flatten_microbatch(microbatch: Any) -> Batch:
    """Returns what a loss finds there, in float64, and the weights as they came."""
    data = microbatch["data"]
    return {
        "x": data["x"].to(torch.float64),
        "y": data["y"][0].to(torch.float64),
        "w": microbatch["w"],
    }


class Examples(NamedTuple):
    """A case and its sequences as examples, of uneven length, perhaps empty; and how to pack and balance them."""

    case: Case
    rows: list[Batch]
    pad: dict[str, float]
    slack: int
    multiple_of: int
    ranks: int

    @property
    def pads_are_exact(self) -> bool:
        """Returns whether every leaf's dtype can represent its padding."""
        example = next(row for row in self.rows if len(row["w"]))
        for name, leaf in example.items():
            pad = self.pad[name]
            if torch.tensor(pad).to(leaf.dtype).double() != pad:
                return False
        return True

    @property
    def max_tokens(self) -> int:
        """Returns a budget in which the longest example fits."""
        longest = max(len(row["w"]) for row in self.rows)
        rounded = -(-longest // self.multiple_of) * self.multiple_of
        return max(1, rounded) + self.slack


def make_examples(choose: Chooser) -> Examples:
    """Cuts a case into examples: ignored ends may be cut off, empty examples may be added."""
    case = make_case(choose, fractional=choose.maybe())
    weight_dtypes = FLOATS if case.batch["w"].is_floating_point() else WEIGHTS
    dtypes = {
        "x": choose.choice(SIGNED),
        "y": choose.choice(SIGNED),
        "w": choose.choice(weight_dtypes),
    }
    rows = []
    for row in range(case.rows):
        example = {key: value[row] for key, value in case.batch.items()}
        length = choose.randint(used_length(example["w"]), len(example["w"]))
        rows.append(
            {key: value[:length].to(dtypes[key]) for key, value in example.items()}
        )
        if not choose.randrange(4):
            rows.append({key: torch.tensor([]) for key in example})
    return Examples(
        case,
        rows,
        pad={"x": choose.choice(PADS), "y": choose.choice(PADS), "w": 0.0},
        slack=choose.randint(0, 12),
        multiple_of=choose.randint(1, 3),
        ranks=choose.randint(1, 4),
    )


def used_length(weights: Tensor) -> int:
    """Returns the length up to the last token that counts."""
    if not weights.any():
        return 0
    return int((weights > 0).nonzero().max()) + 1


@theorem("T14", builds(make_examples))
def repartition(system: System, drawn: Examples) -> None:
    """Balanced over ranks and packed within a budget: the state and loss of the big batch, to the bit, or refused."""
    examples = [nest_example(row) for row in drawn.rows]

    def pack(examples: list[Any]) -> list[Any]:
        return ps.pack(
            examples,
            max_tokens=drawn.max_tokens,
            multiple_of=drawn.multiple_of,
            pad=drawn.pad,
        )

    if not drawn.pads_are_exact:
        error = catch_error(lambda: pack(examples))
        assert error is not None, "a padding that is rounded is accepted"
        assert isinstance(error, ValueError), repr(error)
        assert "example" in str(error)
        return

    shares = ps.balance(examples, drawn.ranks)
    packed = [microbatch for share in shares for microbatch in pack(share)]
    group = [flatten_microbatch(microbatch) for microbatch in packed]

    assert len(shares) == drawn.ranks
    for microbatch in group:
        assert 0 < microbatch["w"].numel() <= drawn.max_tokens
    with_tokens = [row for row in drawn.rows if len(row["w"])]
    num_rows = sum(len(microbatch["w"]) for microbatch in group)
    assert num_rows == len(with_tokens), "a row for each example"
    check_step(system, Setup("one", {}), drawn.case, [group])


def catch_error(call: Callable[[], Any]) -> BaseException | None:
    """Calls, and returns the error that is raised."""
    try:
        call()
    except BaseException as error:
        return error
    return None


class Fault(NamedTuple):
    """An error that is raised in one part of the stream, at one microbatch."""

    part: str
    position: int


class Stream(NamedTuple):
    """Microbatches in groups of ``k``; a fault somewhere, or none; and how many groups are used before it is abandoned."""

    case: Case
    parts: list[Batch]
    k: int
    depth: int
    fault: Fault | None
    error: BaseException
    max_groups: int

    @property
    def num_complete(self) -> int:
        """Returns how many groups come before the fault or the end."""
        if self.fault is not None:
            return self.fault.position // self.k
        return -(-len(self.parts) // self.k)

    @property
    def num_used(self) -> int:
        """Returns how many groups are used."""
        return min(self.max_groups, self.num_complete)

    def batches(self) -> Iterator[Any]:
        """Yields the microbatches, which contain more than tensors, up to a fault of the source.

        It raises that error. For a fault of copying, a tensor cannot be copied.
        """
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
        """Returns the weights, unless counting is what fails."""
        if self.fault == ("counting", int(batch["number"])):
            raise self.error
        return batch["w"]


class Stuck(Tensor):
    """A tensor that cannot be copied to a device."""

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


def make_stream(choose: Chooser) -> Stream:
    """Makes any cut of a case into microbatches; a fault somewhere, or none; abandoned somewhere, or used to the end."""
    case = make_case(choose)
    parts = cut_batch(case.batch, make_cut(choose, range(case.rows), range(1, 10)))
    fault_part = choose.choice(["source", "counting", "copying"])
    fault = Fault(fault_part, choose.randrange(len(parts)))
    has_fault = choose.maybe()
    return Stream(
        case,
        parts,
        error=choose.choice(ERRORS),
        k=choose.randint(1, 4),
        depth=choose.randint(1, 3),
        fault=fault if has_fault else None,
        max_groups=choose.choice([9, 9, 9, 0, 1, 2, 3]),
    )


@theorem("T14", builds(make_stream))
def stream(system: System, data: Stream) -> None:
    """Grouped and prefetched: each group has the gradient of its own microbatches; then comes the cause, or the rest."""
    threads_before = set(threading.enumerate())
    source = ps.group(data.batches(), data.k)
    groups = ps.prefetch(source, "cpu", data.depth, weight_fn=data.weights)

    check_groups(system, data, groups)
    if data.num_used == data.max_groups:
        check_abandoned(data, source, groups)
    elif data.fault is not None:
        check_fault(system, data, groups)
    else:
        assert isinstance(catch_error(lambda: next(groups)), StopIteration)
        assert groups.position == len(data.parts)

    groups.close()
    assert isinstance(catch_error(lambda: next(groups)), StopIteration)
    for thread in set(threading.enumerate()) - threads_before:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a stream that was closed has no thread"


def check_groups(system: System, data: Stream, groups: Any) -> None:
    """Checks each group's gradient, and the position after it."""
    params = data.case.params
    zeros = tree.zeros_like(params)
    step = system.make_update_step(models.integer_loss, CAPTURE, weight_fn=data.weights)
    plain = system.make_update_step(models.integer_loss, CAPTURE, weight_fn=get_weights)
    assert groups.position == 0
    for number in range(data.num_used):
        group = next(groups, None)
        assert group is not None, "an end before the end"
        actual = step(params, zeros, group)
        start = number * data.k
        parts = data.parts[start : start + data.k]
        assert groups.position == start + len(parts)
        assert_same(actual, plain(params, zeros, parts))


def check_fault(system: System, data: Stream, groups: Any) -> None:
    """Checks that the fault's error arrives, in the next group or the step that uses it."""
    assert data.fault is not None
    params = data.case.params
    step = system.make_update_step(models.integer_loss, CAPTURE, weight_fn=data.weights)
    error = catch_error(lambda: step(params, tree.zeros_like(params), next(groups)))
    assert error is data.error
    if data.fault.part == "copying":
        again = catch_error(lambda: next(groups))
        assert again is data.error, "the error is not taken for the end of the data"


def check_abandoned(data: Stream, source: Any, groups: Any) -> None:
    """Checks that the position is that of the groups used, not of those read ahead, and that closing ends a group."""
    has_more = data.fault is None and data.num_used < data.num_complete
    if has_more and data.num_used > 0:
        wait_until(lambda: int(source.position or 0) > int(groups.position or 0))
    num_used_parts = data.num_used * data.k
    assert groups.position == min(num_used_parts, len(data.parts))

    resumed = ps.group(iter(data.parts), data.k, start=groups.position)
    rest = [part for group in islice(resumed, len(data.parts)) for part in group]
    expected = data.parts[num_used_parts:]
    assert [id(part) for part in rest] == [id(part) for part in expected]

    if has_more:
        group = next(groups, None)
        assert group is not None, "an end before the end"
        microbatches = iter(group)
        next(microbatches)
        groups.close()
        error = catch_error(lambda: next(microbatches))
        assert isinstance(error, RuntimeError if len(group) > 1 else StopIteration)


def wait_until(holds: Callable[[], bool]) -> None:
    """Waits until the thread has read ahead; that it does is part of the claim."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "nothing is read ahead"
        time.sleep(0)


def make_packed_texts(choose: Chooser) -> tuple[RealCase, int]:
    """Makes texts, and how many tokens more than the longest of them a microbatch may hold."""
    return make_real_case(choose, FLOATS), choose.randrange(10)


@theorem("T14", builds(make_packed_texts))
def packed_within_bound(system: System, drawn: tuple[RealCase, int]) -> None:
    """For the transformer: packed by length, or several in one row, the exact gradient, but for rounding."""
    case, slack = drawn
    lengths = case.batch["w"].sum(1).tolist()
    examples = []
    for row, length in enumerate(lengths):
        tokens = case.batch["tokens"][row, :length]
        labels = case.batch["labels"][row, :length]
        examples.append({"tokens": tokens, "labels": labels})
    documents = ps.pack_documents(examples, row_tokens=models.CONTEXT)
    documents["mask"] = ps.segment_mask(documents["segments"])
    packed = ps.pack(examples, max_tokens=max(1, *lengths) + slack)
    packed = [part for part in packed if part["labels"].numel()]
    step = system.make_update_step(models.transformer_loss, CAPTURE)
    for group in (packed, [documents]):
        _, grads, metrics = step(case.params, tree.zeros_like(case.params), group)
        case.assert_within_bound(grads)
        case.assert_loss_within_bound(metrics.loss)


globals().update(as_tests(globals()))
