"""``prefetch``: what lives, what is asked and what ends. T14 has the groups, and what goes wrong."""

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

TWO = torch.ones(2)


def labelled(count: int) -> list[dict[str, Tensor]]:
    """Microbatches that know their own number."""
    return [{"labels": torch.tensor([i, -100])} for i in range(count)]


def counted(made: Callable[[Tensor], None]) -> Any:
    """A tensor that calls this with each copy that is brought to a device."""

    class Original(Tensor):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            copy = self.as_subclass(Tensor).clone()
            made(copy)
            return copy

    return torch.zeros(2).as_subclass(Original)


def zero_labels(microbatch: Any) -> Tensor:
    return microbatch["labels"].as_subclass(Tensor) == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prefetch_keeps_to_its_depth(depth: int) -> None:
    """With the microbatch in use, the consumer's, ``depth`` copies live and no more."""
    copies: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    made, number = threading.Semaphore(0), 0

    def count(copy: Tensor) -> None:
        copies.append(weakref.ref(copy))
        alive.append(sum(ref() is not None for ref in copies))
        made.release()

    groups = [[{"labels": counted(count)} for _ in range(3)] for _ in "abc"]
    for group in ps.prefetch(groups, "cpu", depth, weight_fn=zero_labels):
        for microbatch in group:
            number += 1
            # So many are made while nothing more is asked for.
            for _ in range(depth if number == 1 else number + depth - 1 <= 9):
                assert made.acquire(timeout=60)
            del microbatch
    assert number == len(alive) == 9
    assert max(alive) == depth


def test_prefetch_copies_again_one_at_a_time() -> None:
    """A group that is iterated again is not brought to the device as a whole."""
    copied: list[Tensor] = []
    source = [[{"labels": counted(copied.append)} for _ in range(3)]]
    groups = ps.prefetch(source, "cpu", weight_fn=zero_labels)
    group = next(groups)
    assert len(list(group)) == len(copied) == 3
    next(iter(group))
    assert len(copied) == 4
    assert ps.count_tokens(group, lambda m: zero_labels(m) * 2).num_tokens == 12, (
        "by weights of another kind"
    )


BARE: list[Any] = [{"labels": TWO}, TWO, ps.TokenCounts(TWO, TWO)]
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: next(ps.prefetch([labelled(1)], "cpu", weight_fn=lambda _: next(iter([])))), RuntimeError, "raised StopIteration"),
    (lambda: next(ps.prefetch([[TWO]], "cpu")), ValueError, r"reads microbatch\['labels'\]"),
    (lambda: ps.prefetch([], "cpu", 0), ValueError, "depth=0 leaves no room"),
    *((lambda bare=bare: next(ps.prefetch([bare], "cpu")), TypeError, f"got {type(bare).__name__}: .*ps.group.*in a list") for bare in BARE),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_prefetch_refuses(call: Any, error: type[Exception], message: str) -> None:
    """StopIteration of anything but the source is an error, not the end."""
    with pytest.raises(error, match=message):
        call()


def test_prefetch_leaves_alone_what_is_no_tensor() -> None:
    name, array = "a string", object()
    groups = ps.prefetch(
        [[{**labelled(1)[0], "name": name, "more": [array, None]}]], "cpu"
    )
    (microbatch,) = next(groups)
    assert microbatch["name"] is name
    assert microbatch["more"] == [array, None]


def test_prefetch_tells_its_position() -> None:
    """Of what was handed over, where the source tells a position, as another ``prefetch`` does; None where it tells none."""
    groups = ps.prefetch(
        ps.prefetch(ps.group(labelled(10), 4, start=1), "cpu", 3), "cpu"
    )
    assert groups.position == 1
    assert [(len(list(group)), groups.position) for group in groups] == [
        (4, 5),
        (4, 9),
        (1, 10),
    ]
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
    (thread,) = (
        thread for thread in threading.enumerate() if thread.name == "prefetch"
    )
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


class Source(Iterator[list[Any]]):
    """Groups from an iterator of the user's, which can be closed."""

    closed = False

    def __next__(self) -> list[Any]:
        return labelled(2)

    def close(self) -> None:
        self.closed = True


def test_prefetch_closes_nothing_of_the_users() -> None:
    source, threads = Source(), set(threading.enumerate())
    groups = ps.prefetch(source, "cpu")
    next(groups)
    groups.close()
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=60)
    assert not source.closed


def test_prefetch_never_asked_never_begins() -> None:
    groups = ps.prefetch(ps.group(labelled(3), 2), "cpu")
    assert "prefetch" not in {thread.name for thread in threading.enumerate()}
    groups.close()
    assert next(groups, "end") == "end"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prefetch_of_groups_that_are_left_early(depth: int) -> None:
    """A group that was left makes room for the next, and says so when it is asked again."""
    made = threading.Semaphore(0)
    source = [[{"labels": counted(lambda _: made.release())}] * 3] * 9
    groups = ps.prefetch(source, "cpu", depth, weight_fn=zero_labels)
    for _ in range(6):
        first = iter(next(groups))
        next(first)
        for _ in range(min(depth, 3)):
            assert made.acquire(timeout=20), (
                "the room of copies that were dropped is used again"
            )
    assert not made.acquire(timeout=0.1), "there is no more room than before"
    next(groups)
    second = next(groups)
    assert len(list(second)) == 3
    with pytest.raises(RuntimeError, match="this group was left for a later one"):
        next(first)
    groups.close()
    assert list(groups) == []


def test_prefetch_reads_no_further_than_its_depth() -> None:
    """Of groups without microbatches, too, which take no room."""
    asked = iter(range(10**9))
    groups = ps.prefetch(([] for _ in asked), "cpu")
    next(groups)
    time.sleep(0.2)
    # One in use, two ahead, one in the thread's hands.
    assert next(asked) <= 4
    groups.close()


def test_prefetch_of_a_group_that_is_left_while_it_is_copied() -> None:
    """What is on its way then is let go, and its place is free again."""
    begun, go_on = threading.Event(), threading.Event()

    def wait(_: Tensor) -> None:
        begun.set()
        assert go_on.wait(timeout=60)

    source = [
        [*labelled(1), {"labels": counted(wait)}],
        labelled(3),
        [{"labels": counted(wait)}],
    ]
    groups = ps.prefetch(source, "cpu", weight_fn=zero_labels)
    next(iter(next(groups)))
    assert begun.wait(timeout=60)
    threading.Timer(0.05, go_on.set).start()
    assert [int(m["labels"][0]) for m in next(groups)] == [0, 1, 2]
    # Closed while the next one is copied, which was announced already.
    go_on.clear()
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


@pytest.mark.parametrize(
    ("source", "how"), [("stalled", "in use"), ("at work", "closed")]
)
def test_prefetch_lets_the_program_end(source: str, how: str) -> None:
    """In good order: also with a source that would never answer, or that is inside of torch."""
    subprocess.run([sys.executable, "-c", LEFT, source, how], check=True, timeout=120)


def test_prefetch_asks_for_weights_once() -> None:
    """Of a bound method too, which is a new object wherever it is named."""

    class Counting:
        asked = 0

        def weights(self, microbatch: Any) -> Tensor:
            self.asked += 1
            return torch.ones_like(microbatch["x"])

    counting, sgd, w = Counting(), ps.optim.sgd(0.1), torch.ones(())
    step = ps.make_update_step(lambda w, m: w * m["x"], sgd, weight_fn=counting.weights)
    ahead = ps.prefetch([[{"x": torch.ones(2)}] * 3], "cpu", weight_fn=counting.weights)
    assert step(w, sgd.init(w), next(ahead))[2].num_tokens == 6
    assert counting.asked == 3
