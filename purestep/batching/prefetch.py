"""Groups on their way to the device while another is being used."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, overload

import torch
from torch import Tensor

from purestep import tree
from purestep.tokens import WeighedGroup, label_weights, weigh
from purestep.types import Microbatch, WeightFn


def prefetch(
    groups: Iterable[Sequence[Microbatch]],
    device: torch.device | str,
    depth: int = 2,
    *,
    weight_fn: WeightFn = label_weights,
) -> Iterator[PrefetchedGroup]:
    """The same groups, their microbatches brought to ``device`` by a thread, one at a time, just before use.

    The thread takes groups from their source, pins them, counts their tokens on the host, and copies
    microbatch by microbatch: one is on its way while another is used, and no more than ``depth`` are on the
    device. A step that is given such a group takes its count without waiting for the device.

    An error of the source is raised here, with its traceback, when its turn comes. An iterator that is
    abandoned ends its thread.

    Args:
        groups: sequences of microbatches on the host, for ``update_step``.
        device: where the parameters are.
        depth: how many microbatches may be on the device, the one in use included.
        weight_fn: the one of the step.

    >>> groups = [[{"labels": torch.tensor([1, -100])}], []]
    >>> [[m["labels"].tolist() for m in group] for group in prefetch(groups, "cpu")]
    [[[1, -100]], []]
    """
    if depth < 1:
        raise ValueError(f"prefetch: {depth=} leaves no room on the device; take 2 to overlap")
    return _consume(_Lane(groups, torch.device(device), depth, weight_fn))


class PrefetchedGroup(WeighedGroup):
    """A group that is on its way: iterate it once, in order, and each microbatch is there when asked for.

    Iterated again, or indexed, it is copied from the host again.
    """

    def __init__(self, on_host: list[Microbatch], weights: Sequence[Tensor], lane: _Lane) -> None:
        self._on_host, self._weights, self._lane = on_host, weights, lane
        self._arrived: deque[tuple[Microbatch, Any]] = deque()
        self._held = 0
        self._streamed = False

    def weights(self, weight_fn: WeightFn) -> Sequence[Tensor]:
        """Those of each microbatch, on the host: asked for beforehand, where this is ``prefetch``'s ``weight_fn``."""
        return (
            self._weights if weight_fn is self._lane.weight_fn else weigh(self._on_host, weight_fn)
        )

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
        if self._streamed:
            yield from self[:]
            return
        self._streamed = True
        for _ in self._on_host:
            try:
                yield self._lane.take(self)
            finally:
                self._lane.release(self)


class _Lane:
    """What the thread and its consumer share, under one condition."""

    def __init__(
        self,
        groups: Iterable[Sequence[Microbatch]],
        device: torch.device,
        depth: int,
        weight_fn: WeightFn,
    ) -> None:
        self.device, self.depth, self.weight_fn = device, depth, weight_fn
        self.changed = threading.Condition()
        self.waiting: deque[PrefetchedGroup] = deque()
        self.current: PrefetchedGroup | None = None
        self.on_device = 0
        self.closed = False
        self.finished = False
        self.error: BaseException | None = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.thread = threading.Thread(
            target=self._run, args=(groups,), daemon=True, name="prefetch"
        )

    # The thread's side.

    def _run(self, groups: Iterable[Sequence[Microbatch]]) -> None:
        try:
            for group in groups:
                if not self._send(group):
                    break
        except BaseException as error:  # raised again where the group is asked for
            with self.changed:
                self.error = error
        finally:
            if self.closed and hasattr(groups, "close"):
                groups.close()
            with self.changed:
                self.finished = True
                self.changed.notify_all()

    def _send(self, microbatches: Sequence[Microbatch]) -> bool:
        """Announces a group and brings its microbatches; False when nobody wants them any more."""
        on_host = [self._pin(microbatch) for microbatch in microbatches]
        weights = [self._pin(each) for each in weigh(on_host, self.weight_fn)]
        group = PrefetchedGroup(on_host, weights, self)
        with self.changed:
            self.changed.wait_for(lambda: self.closed or len(self.waiting) < self.depth)
            self.waiting.append(group)
            self.changed.notify_all()
        for microbatch in on_host:
            with self.changed:
                self.changed.wait_for(
                    lambda: self.closed or self._passed_by(group) or self.on_device < self.depth
                )
                if self.closed or self._passed_by(group):
                    break
                self.on_device += 1
                group._held += 1
            arrived = self._copy_aside(microbatch)
            with self.changed:
                group._arrived.append(arrived)
                self.changed.notify_all()
        return not self.closed

    def _passed_by(self, group: PrefetchedGroup) -> bool:
        return group is not self.current and group not in self.waiting

    def _pin(self, microbatch: Microbatch) -> Microbatch:
        if self.stream is None:
            return microbatch
        return tree.map(Tensor.pin_memory, microbatch)

    def _copy_aside(self, microbatch: Microbatch) -> tuple[Microbatch, Any]:
        """The copy, on a stream of its own, and the event that says when it is there."""
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            return self.copy(microbatch), self.stream.record_event() if self.stream else None

    def copy(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch on the device."""
        return tree.map(lambda leaf: leaf.to(self.device, non_blocking=True), microbatch)

    # The consumer's side.

    def next_group(self) -> PrefetchedGroup | None:
        """The next group, when there is one."""
        with self.changed:
            if self.current is not None:
                self.on_device -= self.current._held
                self.current._held = 0
                self.current._arrived.clear()
                self.current = None
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.waiting or self.finished)
            if self.waiting:
                self.current = self.waiting.popleft()
                self.changed.notify_all()
                return self.current
            if self.error is not None:
                raise self.error
            return None

    def take(self, group: PrefetchedGroup) -> Microbatch:
        """The group's next microbatch, when it has arrived."""
        with self.changed:
            self.changed.wait_for(lambda: group._arrived or self.finished or self._passed_by(group))
            if not group._arrived:
                raise RuntimeError(
                    "prefetch: this group was left for a later one, or its iterator was closed, before "
                    "all of it was used; use groups in order, each before the next is asked for"
                )
            microbatch, event = group._arrived.popleft()
        if event is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_event(event)
            for leaf in tree.leaves_of(microbatch):
                leaf.record_stream(here)
        return microbatch

    def release(self, group: PrefetchedGroup) -> None:
        """Makes room where a microbatch of the group was used, unless the whole group was left."""
        with self.changed:
            if group._held:
                self.on_device -= 1
                group._held -= 1
            self.changed.notify_all()

    def close(self) -> None:
        """Ends the thread, which finishes what it is doing first."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        atexit.unregister(self.close)
        self.thread.join(timeout=10)


def _consume(lane: _Lane) -> Iterator[PrefetchedGroup]:
    # A thread that still waits when the interpreter ends would take it down.
    atexit.register(lane.close)
    lane.thread.start()
    try:
        while (group := lane.next_group()) is not None:
            yield group
            del group
    finally:
        lane.close()
