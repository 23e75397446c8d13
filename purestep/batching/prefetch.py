"""Groups on their way to the device while another is being used."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from types import GeneratorType
from typing import Any, overload

import torch
from torch import Tensor

from purestep import tree
from purestep.types import Microbatch, WeightFn
from purestep.weights import WeighedGroup, label_weights, weights_of


class prefetch(Iterator["PrefetchedGroup"]):  # noqa: N801
    """The same groups, their microbatches brought to ``device`` by a thread, one at a time, just before use.

    The thread takes groups from their source, pins them, counts their tokens on the host, and copies
    microbatch by microbatch: one is on its way while another is used. A step that is given such a group takes
    its count without waiting for the device. Leaves that are no tensors stay as they are; mappings that optree
    takes for leaves (a tokenizer's ``BatchEncoding``) come as dicts.

    Whatever goes wrong in the thread is raised here when its turn comes: in the source, in ``weight_fn`` or
    while pinning, where the next group is asked for; while copying, where the microbatch is.

    ``position`` is that of the source after the last group that was handed over, however far the thread has
    read ahead: ``group(batches, k, start=position)`` goes on from there. It is None where the source has none, as
    lists and generators: count there what you use.

    Leave it by ``close()``, or by letting go of it. Nothing is waited for but a moment: a source that is busy then
    is left to finish alone, and asked for nothing any more; only the program's end waits, up to ten seconds, for
    one that is at work. A generator is closed, and what that raises is raised by ``close()``; a source of any
    other kind is yours.

    Args:
        groups: sequences of microbatches on the host, for ``update_step``.
        device: where the parameters are.
        depth: how many microbatches may be on the device, the one in use included. At 1 a microbatch is
            copied when it is asked for.
        weight_fn: the one of the step.

    >>> groups = [[{"labels": torch.tensor([1, -100])}], []]
    >>> [[m["labels"].tolist() for m in group] for group in prefetch(groups, "cpu")]
    [[[1, -100]], []]
    """

    position: int | None

    def __init__(
        self,
        groups: Iterable[Sequence[Microbatch]],
        device: torch.device | str,
        depth: int = 2,
        *,
        weight_fn: WeightFn = label_weights,
    ) -> None:
        if depth < 1:
            raise ValueError(f"prefetch: {depth=} leaves no room on the device; take 2 to overlap")
        self._lane = _Lane(groups, torch.device(device), depth, weight_fn)
        self.position = _position(groups)
        self._close = weakref.finalize(self, self._lane.close)
        # Before the program ends there is more to wait for: ``settle``.
        self._close.atexit = False

    def __next__(self) -> PrefetchedGroup:
        """The next group, when there is one; its microbatches may still be on their way."""
        group = self._lane.next_group()
        if group is None:
            self.close()
            raise StopIteration
        self.position = group.position
        return group

    def close(self) -> None:
        """Ends the stream, and lets go of what has arrived: a group in use gives no more microbatches."""
        self._close()


class PrefetchedGroup(WeighedGroup):
    """A group that is on its way: iterate it once, in order, and each microbatch is there when asked for.

    Iterated again, or indexed, it is copied from the host again.
    """

    def __init__(self, on_host: list[Microbatch], weights: Sequence[Tensor], lane: _Lane) -> None:
        self._on_host, self._weights, self._lane = on_host, weights, lane
        self._arrived: deque[tuple[Microbatch, Any]] = deque()
        self._streamed = False
        self.position: int | None = None

    def weights(self, weight_fn: WeightFn) -> Sequence[Tensor]:
        """Those of each microbatch, on the host: asked for beforehand, where this is ``prefetch``'s ``weight_fn``."""
        if weight_fn == self._lane.weight_fn:
            return self._weights
        return [weights_of(weight_fn, microbatch) for microbatch in self._on_host]

    def __len__(self) -> int:
        return len(self._on_host)

    @overload
    def __getitem__(self, index: int) -> Microbatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[Microbatch]: ...
    def __getitem__(self, index: int | slice) -> Microbatch | list[Microbatch]:
        if isinstance(index, slice):
            return [self._lane.copy(microbatch) for microbatch in self._on_host[index]]
        return self._lane.copy(self._on_host[index])

    def __iter__(self) -> Iterator[Microbatch]:
        streamed, self._streamed = self._streamed, True
        for microbatch in self._on_host:
            yield self._lane.copy(microbatch) if streamed else self._lane.take(self)


# Seconds that a thread is waited for that was told to end: enough for a copy, and no time for who leaves. Before
# the program ends, it is given them so often, while it uses more than this part of a processor.
_PATIENCE = 0.25
_OFTEN = 40
_IDLE = 0.02


class _Lane:
    """What the thread and its consumer share, under one condition: who waits for whom.

    The thread goes through the groups in order, and through the microbatches of each. It waits

    * to announce a group, while ``depth`` groups are ``waiting`` to be asked for;
    * to copy a microbatch, while ``depth - 1`` are ``ahead`` of the consumer, in whose hands the last one is.
      Where a microbatch is ``wanted`` and none is ahead, it is copied all the same.

    It waits for no group that the consumer has left, and for nothing once the stream is ``closed``.

    The consumer waits until a group is announced, and until a microbatch of it has arrived; for no more than
    has arrived once the thread has ``finished``: then comes its ``error``, if there was one, or the end.
    """

    def __init__(
        self,
        groups: Iterable[Sequence[Microbatch]],
        device: torch.device,
        depth: int,
        weight_fn: WeightFn,
    ) -> None:
        self.groups, self.depth, self.weight_fn = groups, depth, weight_fn
        if device.type == "cuda" and device.index is None:
            # The consumer's, which the thread, as every thread, does not share.
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.changed = threading.Condition()
        self.waiting: deque[PrefetchedGroup] = deque()
        self.current: PrefetchedGroup | None = None
        self.ahead = 0
        self.wanted = False
        self.closed = False
        self.finished = False
        self.error: BaseException | None = None
        self.error_of_closing: BaseException | None = None
        self.clock: int | None = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.thread = threading.Thread(target=self._run, daemon=True, name="prefetch")

    # The thread's side.

    def _run(self) -> None:
        if hasattr(time, "pthread_getcpuclockid"):
            self.clock = time.pthread_getcpuclockid(threading.get_ident())
        groups: Iterator[Sequence[Microbatch]] | None = None
        try:
            if self.stream is not None:
                # Each thread begins on the first device, and pinning would claim memory there.
                torch.cuda.set_device(self.device)
            groups = iter(self.groups)
            for group in groups:
                if not self._send(group, _position(groups, self.groups)):
                    break
        except BaseException as error:  # raised again where the consumer is
            self.error = error
        try:
            # Whatever is no generator may be used elsewhere: a data set, a file.
            if isinstance(groups, GeneratorType):
                groups.close()
        except BaseException as error:  # raised again by close
            self.error_of_closing = error
        with self.changed:
            self.finished = True
            if self.closed:
                self.error = None
            self.changed.notify_all()
        atexit.unregister(self.settle)

    def _send(self, microbatches: Sequence[Microbatch], position: int | None) -> bool:
        """Announces a group and brings its microbatches; False when the stream is closed."""
        on_host = [self._pin(tree.plain(microbatch)) for microbatch in microbatches]
        weights = [self._pin(weights_of(self.weight_fn, each)) for each in on_host]
        group = PrefetchedGroup(on_host, weights, self)
        group.position = position
        with self.changed:
            self.changed.wait_for(lambda: self.closed or len(self.waiting) < self.depth)
            if self.closed:
                return False
            self.waiting.append(group)
            self.changed.notify_all()
        for microbatch in on_host:
            with self.changed:
                self.changed.wait_for(lambda: self._left(group) or self._has_room())
                if self._left(group):
                    break
                self.ahead += 1
            arrived = self._copy_aside(microbatch)
            with self.changed:
                if self._left(group):
                    self.ahead -= 1
                    break
                group._arrived.append(arrived)
                del arrived
                self.changed.notify_all()
        return not self.closed

    def _left(self, group: PrefetchedGroup) -> bool:
        """Whether the consumer has gone on to a later group, or closed the stream."""
        return group is not self.current and group not in self.waiting

    def _has_room(self) -> bool:
        return self.ahead < self.depth - 1 or (self.wanted and self.ahead == 0)

    def _pin(self, microbatch: Microbatch) -> Microbatch:
        if self.stream is None:
            return microbatch
        return _map_tensors(
            lambda leaf: leaf.pin_memory() if leaf.device.type == "cpu" else leaf, microbatch
        )

    def _copy_aside(self, microbatch: Microbatch) -> tuple[Microbatch, Any]:
        """The copy, on a stream of its own, and the event that says when it is there."""
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            return self.copy(microbatch), self.stream.record_event() if self.stream else None

    def copy(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch on the device."""
        return _map_tensors(lambda leaf: tree.brought(leaf, self.device), microbatch)

    # The consumer's side.

    def next_group(self) -> PrefetchedGroup | None:
        """The next group, or None at the end."""
        with self.changed:
            if self.thread.ident is None and not self.closed:
                atexit.register(self.settle)
                self.thread.start()
            self._leave()
            self.changed.wait_for(lambda: self.waiting or self.finished or self.closed)
            if self.waiting:
                self.current = self.waiting.popleft()
                self.changed.notify_all()
                return self.current
            error, self.error = self.error, None
        if isinstance(error, StopIteration):
            # Raised by an iterator, it would be the end of the data.
            raise RuntimeError("prefetch: weight_fn, or a group, raised StopIteration") from error
        if error is not None:
            raise error
        return None

    def take(self, group: PrefetchedGroup) -> Microbatch:
        """The group's next microbatch, when it has arrived."""
        with self.changed:
            self.wanted = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: group._arrived or self.finished or self._left(group))
            self.wanted = False
            if self._left(group):
                raise RuntimeError(
                    "prefetch: this group was left for a later one, or its iterator was closed, before "
                    "all of it was used; use groups in order, each before the next is asked for"
                )
            if not group._arrived:
                assert self.error is not None, "the thread ended in the middle of a group"
                raise self.error
            microbatch, event = group._arrived.popleft()
        try:
            if event is not None:
                here = torch.cuda.current_stream(self.device)
                here.wait_event(event)
                for leaf in filter(torch.is_tensor, tree.leaves_of(microbatch)):
                    leaf.record_stream(here)
            return microbatch
        finally:
            # At the very end: its place is free once the consumer has let go of the one before.
            with self.changed:
                self.ahead -= 1
                self.changed.notify_all()

    def _leave(self) -> None:
        """Goes on from the current group; what has arrived of it is let go."""
        if self.current is not None:
            self.ahead -= len(self.current._arrived)
            self.current._arrived.clear()
            self.current = None
            self.changed.notify_all()

    def close(self) -> None:
        """Ends the thread, which finishes first what it is doing, and lets go of all that has arrived."""
        with self.changed:
            self.closed = True
            self._leave()
            self.waiting.clear()
            self.error = None
            self.changed.notify_all()
        if self.thread.ident is not None and self.thread is not threading.current_thread():
            self.thread.join(_PATIENCE)
        error, self.error_of_closing = self.error_of_closing, None
        if error is not None:
            raise error

    def settle(self) -> None:
        """Before the program ends: the same, but a thread that is at work is waited for.

        The interpreter takes its threads down when it ends, and the whole process with a thread that is inside
        of torch. One that waits for a lock or a socket is left alone: it uses next to no processor time.
        """
        for _ in range(_OFTEN):
            before = self._processor_time()
            self.close()
            if not self.thread.is_alive() or self._processor_time() - before < _IDLE * _PATIENCE:
                break

    def _processor_time(self) -> float:
        """What the thread has used; where the system does not tell, it seems to be at work."""
        if self.clock is None:
            return time.monotonic()
        try:
            return time.clock_gettime(self.clock)
        except OSError:  # with the thread, its clock has ended
            return 0.0


def _position(*places: object) -> int | None:
    """How many microbatches a source has given: the first answer of these."""
    positions = (getattr(place, "position", None) for place in places)
    return next((position for position in positions if position is not None), None)


def _map_tensors(func: Callable[[Tensor], Tensor], microbatch: Microbatch) -> Microbatch:
    return tree.map(lambda leaf: func(leaf) if isinstance(leaf, Tensor) else leaf, microbatch)
