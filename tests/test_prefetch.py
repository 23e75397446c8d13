"""``prefetch``: which copies live, what it reads of a source, and how it ends. T14 has the groups, and what goes wrong."""

import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep.counts import with_weights
from purestep.grads.per_microbatch import JOIN, pad_microbatches

TIMEOUT = 60


def labelled(count: int) -> list[dict[str, Tensor]]:
    """Makes microbatches whose first label is their index."""
    return [{"labels": torch.tensor([i, -100])} for i in range(count)]


def observed(on_copy: Callable[[Tensor], None]) -> Any:
    """Makes a microbatch that calls this with each copy that is brought to a device."""

    class Original(Tensor):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            copy = self.as_subclass(Tensor).clone()
            on_copy(copy)
            return copy

    return {"labels": torch.zeros(2).as_subclass(Original)}


def zero_labels(microbatch: Any) -> Tensor:
    return microbatch["labels"].as_subclass(Tensor) == 0


def join(threads: set[threading.Thread]) -> None:
    for thread in threads:
        thread.join(timeout=TIMEOUT)
        assert not thread.is_alive()


# Copies


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prefetch_keeps_to_its_depth(depth: int) -> None:
    """With the microbatch in use, the consumer's, ``depth`` copies live and no more."""
    copies: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    copied = threading.Semaphore(0)

    def count(copy: Tensor) -> None:
        copies.append(weakref.ref(copy))
        alive.append(sum(reference() is not None for reference in copies))
        copied.release()

    source = [[observed(count) for _ in range(3)] for _ in range(3)]
    number = 0
    for group in ps.prefetch(source, "cpu", depth, weight_fn=zero_labels):
        for microbatch in group:
            number += 1
            # So many are copied while nothing more is read: the first time depth,
            # then one for each microbatch that is dropped, as long as there are any.
            if number == 1:
                num_copies = depth
            elif number + depth - 1 <= 9:
                num_copies = 1
            else:
                num_copies = 0
            for _ in range(num_copies):
                assert copied.acquire(timeout=TIMEOUT)
            del microbatch
    assert number == 9
    assert len(alive) == 9
    assert max(alive) == depth


def test_prefetch_copies_again_one_at_a_time() -> None:
    """A group that is iterated again is not brought to the device as a whole."""
    copies: list[Tensor] = []
    source = [[observed(copies.append) for _ in range(3)]]
    groups = ps.prefetch(source, "cpu", weight_fn=zero_labels)
    group = next(groups)

    assert len(list(group)) == 3
    assert len(copies) == 3
    next(iter(group))
    assert len(copies) == 4
    count = ps.count_tokens(group, lambda m: zero_labels(m) * 2).num_tokens
    assert count == 12, "by weights of another kind"


def test_prefetch_keeps_to_its_depth_where_other_ranks_have_more() -> None:
    """A group is padded to the others' length without a copy of all of it on the device."""
    copies: list[Tensor] = []
    source = [[observed(copies.append) for _ in range(6)]]
    groups = ps.prefetch(source, "cpu", depth=1, weight_fn=zero_labels)
    group = next(groups)
    padded = pad_microbatches(
        with_weights(group, zero_labels), 8, "microbatch", zero_labels
    )

    microbatches = iter(padded.microbatches)
    next(microbatches)

    assert len(copies) == 1
    assert len(padded.microbatches) == 8
    assert [*microbatches][-2:] == [JOIN, JOIN] == padded.microbatches[6:]


def test_prefetch_does_not_touch_what_is_no_tensor() -> None:
    name = "a string"
    array = object()
    labels = torch.tensor([0, -100])
    source = [[{"labels": labels, "name": name, "more": [array, None]}]]

    groups = ps.prefetch(source, "cpu")
    (microbatch,) = next(groups)

    assert microbatch["name"] is name
    assert microbatch["more"] == [array, None]


def raise_stop_iteration(_: Any) -> Any:
    return next(iter([]))


TWO: Any = torch.ones(2)
DICT: Any = {"labels": TWO}
COUNTS: Any = ps.TokenCounts(TWO, TWO)
NO_GROUP = "got {}: .*ps.group.*in a list"
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        # StopIteration of anything but the source is an error, not the end.
        lambda: next(ps.prefetch([labelled(1)], "cpu", weight_fn=raise_stop_iteration)),
        RuntimeError,
        "raised StopIteration",
    ),
    (
        lambda: next(ps.prefetch([[TWO]], "cpu")),
        ValueError,
        r"reads microbatch\['labels'\]",
    ),
    (
        lambda: ps.prefetch([], "cpu", 0),
        ValueError,
        "depth=0 leaves no room",
    ),
    (
        lambda: next(ps.prefetch([DICT], "cpu")),
        TypeError,
        NO_GROUP.format("dict"),
    ),
    (
        lambda: next(ps.prefetch([TWO], "cpu")),
        TypeError,
        NO_GROUP.format("Tensor"),
    ),
    (
        lambda: next(ps.prefetch([COUNTS], "cpu")),
        TypeError,
        NO_GROUP.format("TokenCounts"),
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_prefetch_refuses(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# Positions and ends


def test_prefetch_tells_its_position() -> None:
    """Of what was handed over, where the source tells a position, as another ``prefetch`` does."""
    source = ps.group(labelled(10), 4, start=1)
    inner = ps.prefetch(source, "cpu", 3)
    outer = ps.prefetch(inner, "cpu")

    assert outer.position == 1
    seen = [(len(list(group)), outer.position) for group in outer]
    assert seen == [(4, 5), (4, 9), (1, 10)]


def test_prefetch_of_a_source_without_positions_has_none() -> None:
    groups = ps.prefetch([labelled(1)], "cpu")
    assert groups.position is None
    next(groups)
    assert groups.position is None


def prefetch_thread() -> threading.Thread:
    """Finds the only thread of a ``prefetch``."""
    threads = threading.enumerate()
    (thread,) = (thread for thread in threads if thread.name == "prefetch")
    return thread


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
    thread = prefetch_thread()

    del groups

    assert closed.wait(timeout=TIMEOUT)
    thread.join(timeout=TIMEOUT)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="its iterator was closed"):
        next(microbatches)
    assert len(list(group)) == 3, "again, from the host"


def test_prefetch_has_ended_its_thread_when_it_is_closed() -> None:
    for _ in range(20):
        groups = ps.prefetch([labelled(1)] * 9, "cpu")
        next(groups)
        thread = prefetch_thread()
        groups.close()
        assert not thread.is_alive()


@pytest.mark.timeout(30)
def test_prefetch_waits_for_no_source() -> None:
    """Sources that have stalled are left where they are, and not read when they come back."""
    go_on = threading.Event()
    reads: set[str] = set()
    threads_before = set(threading.enumerate())

    def stalled() -> Iterator[list[Any]]:
        yield labelled(1)
        reads.add("second")
        go_on.wait()
        yield labelled(1)
        reads.add("third")

    for _ in range(5):
        groups = ps.prefetch(stalled(), "cpu")
        assert len(list(next(groups))) == 1
        groups.close()
        assert list(groups) == []
    threads = set(threading.enumerate()) - threads_before
    assert len(threads) == 5

    go_on.set()
    join(threads)
    assert reads <= {"second"}


class Source(Iterator[list[Any]]):
    """An endless iterator of the user's, which can be closed."""

    closed = False

    def __next__(self) -> list[Any]:
        return labelled(2)

    def close(self) -> None:
        self.closed = True


def test_prefetch_closes_nothing_of_the_users() -> None:
    source = Source()
    threads_before = set(threading.enumerate())
    groups = ps.prefetch(source, "cpu")

    next(groups)
    groups.close()

    join(set(threading.enumerate()) - threads_before)
    assert not source.closed


def test_prefetch_begins_with_the_first_group_that_is_read() -> None:
    groups = ps.prefetch(ps.group(labelled(3), 2), "cpu")
    names = {thread.name for thread in threading.enumerate()}
    assert "prefetch" not in names
    groups.close()
    assert next(groups, "end") == "end"


# Groups that are left early


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prefetch_of_groups_that_are_left_early(depth: int) -> None:
    """A group that was left makes room for the next, and raises when it is read again."""
    copied = threading.Semaphore(0)
    microbatch = observed(lambda _: copied.release())
    source = [[microbatch] * 3] * 9
    groups = ps.prefetch(source, "cpu", depth, weight_fn=zero_labels)

    for _ in range(6):
        left_early = iter(next(groups))
        next(left_early)
        for _ in range(depth):
            is_copied = copied.acquire(timeout=20)
            assert is_copied, "the room of copies that were dropped is used again"
    assert not copied.acquire(timeout=0.1), "there is no more room than before"

    next(groups)
    full_group = list(next(groups))
    assert len(full_group) == 3
    with pytest.raises(RuntimeError, match="this group was left for a later one"):
        next(left_early)
    groups.close()
    assert list(groups) == []


def test_prefetch_reads_no_further_than_its_depth() -> None:
    """Of groups without microbatches, too, which take no room."""
    numbers = iter(range(10**9))
    empty_groups: Iterator[list[Any]] = ([] for _ in numbers)
    groups = ps.prefetch(empty_groups, "cpu")

    next(groups)
    time.sleep(0.2)

    # One in use, two ahead, one in the thread's hands.
    assert next(numbers) <= 4
    groups.close()


def test_prefetch_of_a_group_that_is_left_while_it_is_copied() -> None:
    """What is on its way then is dropped, and its room is free again."""
    began = threading.Event()
    go_on = threading.Event()

    def wait(_: Tensor) -> None:
        began.set()
        assert go_on.wait(timeout=TIMEOUT)

    source = [
        [*labelled(1), observed(wait)],
        labelled(3),
        [observed(wait)],
    ]
    groups = ps.prefetch(source, "cpu", weight_fn=zero_labels)
    next(iter(next(groups)))
    assert began.wait(timeout=TIMEOUT)
    threading.Timer(0.05, go_on.set).start()
    first_labels = [int(m["labels"][0]) for m in next(groups)]
    assert first_labels == [0, 1, 2]

    # Closed while the next one is copied, which was announced already.
    go_on.clear()
    groups.close()
    assert list(groups) == []
    go_on.set()


# Programs that end


PROGRAM = """
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


def test_prefetch_lets_programs_end() -> None:
    """In good order: also with a source that would never answer, or that is inside of torch."""
    programs = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, *case])
        for case in [("stalled", "in use"), ("at work", "closed")]
    ]
    try:
        assert [program.wait(timeout=120) for program in programs] == [0, 0]
    finally:
        for program in programs:
            program.kill()


class CountingWeights:
    """Counts the calls of a method, which is a new object wherever it is named."""

    def __init__(self) -> None:
        self.num_calls = 0

    def weigh(self, microbatch: Any) -> Tensor:
        self.num_calls += 1
        return torch.ones_like(microbatch["x"])


def test_prefetch_computes_weights_once() -> None:
    """By a bound method, too."""
    weights = CountingWeights()
    sgd = ps.optim.sgd(0.1)
    w = torch.ones(())

    def loss_fn(w: Tensor, m: Any) -> Tensor:
        return w * m["x"]

    step = ps.make_update_step(loss_fn, sgd, weight_fn=weights.weigh)
    source = [[{"x": torch.ones(2)}] * 3]
    groups = ps.prefetch(source, "cpu", weight_fn=weights.weigh)
    *_, metrics = step(w, sgd.init(w), next(groups))

    assert metrics.num_tokens == 6
    assert weights.num_calls == 3
