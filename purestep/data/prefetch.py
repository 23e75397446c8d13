"""Groups on their way to the device while another is in use."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.counts import PreweightedMicrobatches, compute_weights, label_weights
from purestep.types import Microbatch, WeightFn

_Groups: TypeAlias = Iterable[Sequence[Microbatch]]


class prefetch(Iterator["PrefetchedGroup"]):  # noqa: N801
    """Prepares groups in a thread, and copies their microbatches to ``device``, one at a time.

    The thread takes groups from their source, pins them, and counts their tokens on the host. It
    copies one microbatch while the step uses another. Tensors that are on the device are not
    copied: a source that fills them anew must clone them. The step reads the count without waiting
    for the device. Leaves that are not tensors stay as they are. Mappings that optree takes for
    leaves, such as a tokenizer's ``BatchEncoding``, become dicts.

    An error of the source, of ``weight_fn`` or of pinning is raised where you ask for that group.
    An error of copying is raised where you ask for that microbatch.

    ``position`` belongs to the last group that you took, however far the thread has read ahead.
    ``group(batches, k, start=position)`` goes on from there. It is None if the source has none, as
    lists and generators: then count the groups that you use.

    ``close()`` ends the stream, and so does dropping the last reference to it. Neither waits for a
    busy source: the thread ends after it, and drops its errors. The end of the program waits for
    it, up to five seconds. The source itself is not closed; Python closes a generator without
    references.

    Args:
        groups: sequences of microbatches on the host, for ``update_step``.
        device: where the parameters are.
        depth: how many microbatches may be on the device, including the one in use. With 1, a
            microbatch is copied when you ask for it.
        weight_fn: the step's.

    >>> groups = [[{"labels": torch.tensor([1, -100])}], []]
    >>> [[m["labels"].tolist() for m in group] for group in prefetch(groups, "cpu")]
    [[[1, -100]], []]
    """

    def __init__(
        self,
        groups: _Groups,
        device: torch.device | str,
        depth: int = 2,
        *,
        weight_fn: WeightFn = label_weights,
    ) -> None:
        if depth < 1:
            raise ValueError(
                f"prefetch: {depth=} leaves no room on the device; take 2 to overlap"
            )
        self.position: int | None = getattr(groups, "position", None)
        self._copies = _Copies(groups, device, depth, weight_fn)
        self._close = weakref.finalize(self, self._copies.close)
        self._close.atexit = False

    def __next__(self) -> PrefetchedGroup:
        """The next group, when there is one; its microbatches may still be on their way."""
        group = self._copies.next_group()
        if group is None:
            self.close()
            raise StopIteration
        self.position = group.position
        return group

    def close(self) -> None:
        """Ends the stream; a group in use gives no more microbatches."""
        self._close()


class PrefetchedGroup(PreweightedMicrobatches):
    """A group on its way to the device: the first iteration waits for each microbatch in turn.

    Iterated again, or indexed, it is copied from the host again.
    """

    position: int | None
    left = False
    _streamed = False

    def __init__(
        self, copies: _Copies, on_host: list[Microbatch], weights: list[Tensor]
    ) -> None:
        self._copies, self._on_host, self._weights = copies, on_host, weights

    def weights(self, weight_fn: WeightFn) -> Sequence[Tensor]:
        """Those of each microbatch, on the host: known, where this is ``prefetch``'s weight_fn."""
        if weight_fn == self._copies.weight_fn:
            return self._weights
        return [compute_weights(weight_fn, microbatch) for microbatch in self._on_host]

    def __len__(self) -> int:
        return len(self._on_host)

    def __getitem__(self, index: Any) -> Any:
        return self._copies.copy(
            self._on_host[index]
        )  # one microbatch, or a list of some

    def __iter__(self) -> Iterator[Microbatch]:
        streamed, self._streamed = self._streamed, True
        for microbatch in self._on_host:
            yield self._copies.copy(microbatch) if streamed else self._copies.take(self)


class _Copies:
    """The state that the thread and its consumer share, under one condition.

    ``ahead`` holds what the consumer has yet to take, in order: each group, then the copies of its
    microbatches. The thread announces a group while fewer than ``depth`` things are ahead. A copy
    takes one of ``room``, which begins at ``depth - 1``. The consumer adds one whenever it asks for
    a microbatch, since it then lets go of the one before. It adds one for each copy that it drops.
    """

    def __init__(
        self, groups: _Groups, device: Any, depth: int, weight_fn: WeightFn
    ) -> None:
        # With its index: the thread does not share the consumer's current device.
        self.device = torch.empty(0, device=device).device
        self.stream = (
            torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        )
        self.depth, self.room, self.weight_fn = depth, depth - 1, weight_fn
        self.ahead: deque[Any] = deque()
        self.current: PrefetchedGroup | None = None
        self.closed = self.finished = False
        self.error: BaseException | None = None
        self.changed = threading.Condition()
        self.thread = threading.Thread(
            None, self._run, "prefetch", (groups,), daemon=True
        )

    # The thread's side.

    def _run(self, groups: _Groups) -> None:
        try:
            if self.stream is not None:
                torch.cuda.set_device(self.device)  # where pinning claims memory
            for group in groups:
                self._bring(group, getattr(groups, "position", None))
                if self.closed:
                    break
        except BaseException as error:  # raised again where the consumer is
            self.error = error
        with self.changed:
            self.finished = True
            self.changed.notify_all()
        atexit.unregister(self.close)

    def _bring(self, microbatches: Sequence[Microbatch], position: int | None) -> None:
        if not isinstance(microbatches, Sequence) or hasattr(microbatches, "_fields"):
            raise TypeError(
                f"prefetch: a group is a list of microbatches, got {type(microbatches).__name__}: "
                "group bare batches with ps.group(batches, k), or wrap each of them in a list"
            )
        on_host = [
            self._pinned(tree.mappings_to_dicts(microbatch))
            for microbatch in microbatches
        ]
        weights = [
            self._pinned(compute_weights(self.weight_fn, each)) for each in on_host
        ]
        group = PrefetchedGroup(self, on_host, weights)
        group.position = position
        with self.changed:
            self.changed.wait_for(lambda: self.closed or len(self.ahead) < self.depth)
        self._put(group)
        for microbatch in on_host:
            with self.changed:
                self.changed.wait_for(
                    lambda: self.closed or group.left or self.room > 0
                )
                if self.closed or group.left:
                    return
                self.room -= 1
            self._put(self._copied_aside(microbatch))

    def _put(self, item: Any) -> None:
        with self.changed:
            if not self.closed:
                self.ahead.append(item)
                self.changed.notify_all()

    def _pinned(self, microbatch: Microbatch) -> Microbatch:
        if self.stream is None:
            return microbatch
        return _map_tensors(
            lambda x: x.pin_memory() if x.device.type == "cpu" else x, microbatch
        )

    def _copied_aside(self, microbatch: Microbatch) -> tuple[Microbatch, Any]:
        """The copy, made on a stream beside the consumer's, and the event of its arrival."""
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            return self.copy(
                microbatch
            ), self.stream.record_event() if self.stream else None

    def copy(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch on the device."""
        return _map_tensors(lambda leaf: tree.to_device(leaf, self.device), microbatch)

    # The consumer's side.

    def next_group(self) -> PrefetchedGroup | None:
        """The next group, or None at the end."""
        with self.changed:
            if self.thread.ident is None and not self.closed:
                # A daemon that is inside of torch when the interpreter ends takes it down.
                atexit.register(self.close, seconds=5.0)
                self.thread.start()
            if self.current is not None:
                self.current.left = True
            while not isinstance(item := self._next(), PrefetchedGroup | None):
                self.room += 1
            self.current = item
            if item is not None or self.error is None or self.closed:
                return item
            error, self.error = self.error, None
        if isinstance(error, StopIteration):
            # Raised by an iterator, it would be the end of the data.
            raise RuntimeError(
                "prefetch: weight_fn, or a group, raised StopIteration"
            ) from error
        raise error

    def take(self, group: PrefetchedGroup) -> Microbatch:
        """The group's next microbatch, when it has arrived."""
        with self.changed:
            self.room += not group.left
            item = None if group.left else self._next()
            if group.left or self.closed:
                raise RuntimeError(
                    "prefetch: this group was left for a later one, or its iterator was closed: "
                    "use each group before the next"
                )
            if item is None:
                assert self.error is not None, (
                    "the thread ended in the middle of a group"
                )
                raise self.error
        microbatch, event = item
        if event is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_event(event)
            for leaf in filter(torch.is_tensor, tree.leaves(microbatch)):
                leaf.record_stream(here)
        return microbatch

    def _next(self) -> Any:
        """The next thing ahead, or None at the end."""
        self.changed.notify_all()
        self.changed.wait_for(lambda: self.ahead or self.finished or self.closed)
        self.changed.notify_all()
        return self.ahead.popleft() if self.ahead else None

    def close(self, seconds: float = 0.25) -> None:
        """Ends the thread, which first finishes what it is doing, and drops all copies."""
        with self.changed:
            self.closed = True
            self.ahead.clear()
            self.changed.notify_all()
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(seconds)


def _map_tensors(
    func: Callable[[Tensor], Tensor], microbatch: Microbatch
) -> Microbatch:
    return tree.map(
        lambda leaf: func(leaf) if isinstance(leaf, Tensor) else leaf, microbatch
    )
