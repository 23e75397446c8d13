"""Copies groups to the device while another is in use."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.counts import PreweightedMicrobatches, compute_weights, label_weights
from purestep.types import Microbatch, WeightFn

_Groups: TypeAlias = Iterable[Sequence[Microbatch]]


def prefetch(
    groups: _Groups,
    device: torch.device | str,
    depth: int = 2,
    *,
    weight_fn: WeightFn = label_weights,
) -> PrefetchedGroups:
    """Prepares groups in a thread, and copies their microbatches to ``device``, one at a time.

    From your first ``next`` on, the thread takes groups from their source, and computes the weights
    of their tokens on the host. For CUDA, it pins microbatches and weights. It copies one
    microbatch while the step uses another. Tensors that are on the device, or pinned, are taken
    as they are: a source that overwrites them must clone them. The step sums the weights on the
    host, without waiting for the device. Leaves that are not tensors stay as they are. Mappings
    that optree takes for leaves, as a tokenizer's ``BatchEncoding``, become dicts.

    An error of the source, of ``weight_fn`` or of pinning is raised where you ask for that group.
    So is the ``TypeError`` for a group that is no sequence. An error of copying is raised where you
    ask for that microbatch.

    ``position`` belongs to the last group that you took, however far the thread has read ahead.
    ``group(batches, k, start=position)`` goes on from there. It is None if the source has none, as
    lists and generators: then count the groups that you use.

    Take all microbatches of a group before the next group: afterwards the first loop over the old
    group raises ``RuntimeError``. A second loop, or an index, copies microbatches from the host
    again.

    ``close()`` ends the stream, and so does dropping the last reference to it. Either waits for a
    quarter of a second at most. If the source is busy, the thread ends after it, and drops its
    errors. The end of the program waits for it, up to five seconds. The source itself is not
    closed; Python closes a generator without references.

    Args:
        groups: sequences of microbatches on the host, for ``update_step``.
        device: where the parameters are.
        depth: how many microbatches may be on the device, including the one in use. Less than 1
            raises ``ValueError``. With 1, a microbatch is copied when you ask for it.
        weight_fn: the step's.

    >>> groups = [[{"labels": torch.tensor([1, -100])}], []]
    >>> [[m["labels"].tolist() for m in group] for group in prefetch(groups, "cpu")]
    [[[1, -100]], []]
    """
    if depth < 1:
        raise ValueError(
            f"prefetch: {depth=} leaves no room on the device; take 2 to overlap"
        )
    position: int | None = getattr(groups, "position", None)
    return PrefetchedGroups(_Prefetcher(groups, device, depth, weight_fn), position)


class PrefetchedGroups(Iterator["PrefetchedGroup"]):
    """Yields groups whose microbatches are on the device, as ``ps.prefetch`` makes them.

    Attributes:
        position: that of the last group that you took, and of the source before the first; None
            if the source has none.

    >>> groups = prefetch([[{"labels": torch.tensor([1, -100])}]], "cpu")
    >>> type(groups).__name__, groups.position
    ('PrefetchedGroups', None)
    """

    def __init__(self, prefetcher: _Prefetcher, position: int | None) -> None:
        self.position = position
        self._prefetcher = prefetcher
        self._close = weakref.finalize(self, prefetcher.close)
        self._close.atexit = False

    def __next__(self) -> PrefetchedGroup:
        """Returns the next group, whose copies may be under way; drops those of the group before.

        Only copies that were not taken are dropped: the first loop over that group then raises
        ``RuntimeError``. ``position`` becomes that of the next group. Raises an error of the thread
        where its group would be, and ``StopIteration`` at the end.
        """
        group = self._prefetcher.next_group()
        if group is None:
            self.close()
            raise StopIteration
        self.position = group.position
        return group

    def close(self) -> None:
        """Ends the stream; waits for the thread for a quarter of a second at most.

        ``next`` then raises ``StopIteration``. A group whose first iteration has not ended raises
        ``RuntimeError`` at its next microbatch.
        """
        self._close()


class PrefetchedGroup(PreweightedMicrobatches):
    """Gives microbatches on the device: the first iteration waits for each copy in turn.

    It raises ``RuntimeError`` after you have asked for a later group, even if that raised, or the
    stream was closed. Iterated again, or indexed, the group copies its microbatches from the host
    again, at any time.
    """

    position: int | None
    abandoned = False
    _is_streamed = False

    def __init__(
        self,
        prefetcher: _Prefetcher,
        on_host: list[Microbatch],
        weights: list[Tensor],
    ) -> None:
        self._prefetcher = prefetcher
        self._on_host = on_host
        self._weights = weights

    def weights(self, weight_fn: WeightFn) -> Sequence[Tensor]:
        """Returns the checked weights of each microbatch by ``weight_fn``, before any copy.

        They are where the source has the data, which is the host as a rule. Those of ``prefetch``'s
        ``weight_fn`` are ready; others are computed at each call.
        """
        if weight_fn == self._prefetcher.weight_fn:
            return self._weights
        return [compute_weights(weight_fn, microbatch) for microbatch in self._on_host]

    def __len__(self) -> int:
        return len(self._on_host)

    def __getitem__(self, index: Any) -> Any:
        microbatch_or_list = self._on_host[index]
        return self._prefetcher.copy_to_device(microbatch_or_list)

    def __iter__(self) -> Iterator[Microbatch]:
        is_again = self._is_streamed
        self._is_streamed = True
        for microbatch in self._on_host:
            if is_again:
                yield self._prefetcher.copy_to_device(microbatch)
            else:
                yield self._prefetcher.next_microbatch(self)


class _Prefetcher:
    """Shares a queue between the thread and its consumer, guarded by ``changed``, a ``Condition``.

    ``queue`` holds what the consumer has yet to take, in order: each group, then the copies of its
    microbatches. The thread adds a group while fewer than ``depth`` items are in the queue. A copy
    takes one of ``free_slots``, which begins at ``depth - 1``. The consumer frees one whenever it
    asks for a microbatch, since it then lets go of the one before. It also frees one for each copy
    that it drops.
    """

    def __init__(
        self, groups: _Groups, device: Any, depth: int, weight_fn: WeightFn
    ) -> None:
        # With its index: the thread does not share the consumer's current device.
        self.device = torch.empty(0, device=device).device
        self.stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device)
        self.weight_fn = weight_fn
        self.depth = depth
        self.free_slots = depth - 1
        self.queue: deque[Any] = deque()
        self.current: PrefetchedGroup | None = None
        self.closed = False
        self.finished = False
        self.error: BaseException | None = None
        self.changed = threading.Condition()
        self.thread = threading.Thread(
            target=self._run, name="prefetch", args=(groups,), daemon=True
        )

    # The thread's side.

    def _run(self, groups: _Groups) -> None:
        """Loads groups in the thread up to the end, ``close`` or an error; then wakes the consumer.

        Sets ``finished``. Keeps the error in ``error`` for the consumer instead of raising it.
        """
        try:
            if self.stream is not None:
                torch.cuda.set_device(self.device)  # where pinning claims memory
            for group in groups:
                self._load(group, getattr(groups, "position", None))
                if self.closed:
                    break
        except BaseException as error:
            self.error = error
        with self.changed:
            self.finished = True
            self.changed.notify_all()
        atexit.unregister(self.close)

    def _load(self, microbatches: Sequence[Microbatch], position: int | None) -> None:
        """Pins a group for CUDA, weighs it, and queues it, then each microbatch on the device.

        Waits for room in the queue and for slots. Stops once the stream is closed or the group is
        abandoned. Raises ``TypeError`` if the group is a NamedTuple or no sequence, and as
        ``compute_weights`` does.
        """
        is_record = hasattr(microbatches, "_fields")
        if not isinstance(microbatches, Sequence) or is_record:
            raise TypeError(
                f"prefetch: a group is a list of microbatches, got {type(microbatches).__name__}: "
                "group bare batches with ps.group(batches, k), or wrap each of them in a list"
            )
        on_host = []
        for microbatch in microbatches:
            on_host.append(self._pin(tree.mappings_to_dicts(microbatch)))
        weights = []
        for microbatch in on_host:
            weights.append(self._pin(compute_weights(self.weight_fn, microbatch)))
        group = PrefetchedGroup(self, on_host, weights)
        group.position = position
        with self.changed:
            self.changed.wait_for(lambda: self.closed or len(self.queue) < self.depth)
        self._enqueue(group)
        for microbatch in on_host:
            if not self._claim_slot(group):
                return
            # Not bound to a name, which would keep the copy alive after the consumer's.
            self._enqueue(self._copy_on_stream(microbatch))

    def _claim_slot(self, group: PrefetchedGroup) -> bool:
        """Takes a free slot once there is one, and returns True.

        Returns False, without a slot, after ``close`` or when the consumer has asked for a later
        group.
        """
        with self.changed:
            self.changed.wait_for(
                lambda: self.closed or group.abandoned or self.free_slots > 0
            )
            if self.closed or group.abandoned:
                return False
            self.free_slots -= 1
            return True

    def _enqueue(self, item: Any) -> None:
        """Queues a group or a copy, and wakes the consumer; drops it if the stream is closed."""
        with self.changed:
            if not self.closed:
                self.queue.append(item)
                self.changed.notify_all()

    def _pin(self, microbatch: Microbatch) -> Microbatch:
        """Returns a microbatch whose tensor leaves on the host are pinned, so copies need not wait.

        Unless the device is CUDA, it returns the microbatch itself.
        """
        if self.stream is None:
            return microbatch
        return _map_tensors(
            lambda x: x.pin_memory() if x.device.type == "cpu" else x, microbatch
        )

    def _copy_on_stream(self, microbatch: Microbatch) -> tuple[Microbatch, Any]:
        """Copies to the device; returns the copy, then the event of its arrival.

        On CUDA it copies on a stream other than the consumer's. Elsewhere the event is None.
        """
        if self.stream is None:
            return self.copy_to_device(microbatch), None
        with torch.cuda.stream(self.stream):
            return self.copy_to_device(microbatch), self.stream.record_event()

    def copy_to_device(self, microbatch: Microbatch) -> Microbatch:
        """Returns a microbatch, or a list of them, with all leaves that are tensors on the device.

        Leaves that are there are not copied. Other leaves stay as they are.
        """
        return _map_tensors(lambda leaf: tree.to_device(leaf, self.device), microbatch)

    # The consumer's side.

    def next_group(self) -> PrefetchedGroup | None:
        """Returns the next group, or None at the end or after ``close``.

        The first call starts the thread. The group before is abandoned, and its remaining copies
        are dropped. After the queued groups it raises the thread's error once, a ``StopIteration``
        as ``RuntimeError``.
        """
        with self.changed:
            if self.thread.ident is None and not self.closed:
                # A daemon that is inside of torch when the interpreter ends takes it down.
                atexit.register(self.close, seconds=5.0)
                self.thread.start()
            if self.current is not None:
                self.current.abandoned = True
            item = self._dequeue()
            while item is not None and not isinstance(item, PrefetchedGroup):
                self.free_slots += 1  # This copy of the abandoned group is dropped.
                item = self._dequeue()
            self.current = item
            if item is not None or self.error is None or self.closed:
                return item
            error = self.error
            self.error = None
        if isinstance(error, StopIteration):
            # Raised by an iterator, it would be the end of the data.
            raise RuntimeError(
                "prefetch: weight_fn, or a group, raised StopIteration"
            ) from error
        raise error

    def next_microbatch(self, group: PrefetchedGroup) -> Microbatch:
        """Returns the group's next microbatch, once the thread has queued its copy.

        Before it waits, it frees a slot, since the consumer lets go of the microbatch before. On
        CUDA, the current stream waits for the copy, but the host does not. The group must have a
        further microbatch.

        Raises ``RuntimeError`` if ``next_group`` has been called again, or after ``close``. Raises
        the thread's error if copying failed.
        """
        item = None
        with self.changed:
            if not group.abandoned:
                self.free_slots += 1
                item = self._dequeue()
            if group.abandoned or self.closed:
                raise RuntimeError(
                    "prefetch: this group was left for a later one, or its iterator was closed: "
                    "use each group before the next"
                )
            if item is None:
                assert self.error is not None, "the thread ended within a group"
                raise self.error
        microbatch, event = item
        if event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(event)
            for leaf in tree.leaves(microbatch):
                if isinstance(leaf, Tensor):
                    leaf.record_stream(stream)
        return microbatch

    def _dequeue(self) -> Any:
        """Waits for the next item and removes it; returns None at the end or after ``close``.

        The end is that the thread has ended, and the queue is empty. The caller holds ``changed``.
        """
        self.changed.notify_all()
        self.changed.wait_for(lambda: self.queue or self.finished or self.closed)
        self.changed.notify_all()
        return self.queue.popleft() if self.queue else None

    def close(self, seconds: float = 0.25) -> None:
        """Drops all queued items, and ends the thread after its current work.

        Waits for the thread for ``seconds`` at most.
        """
        with self.changed:
            self.closed = True
            self.queue.clear()
            self.changed.notify_all()
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(seconds)


def _map_tensors(
    func: Callable[[Tensor], Tensor], microbatch: Microbatch
) -> Microbatch:
    """Returns the tree with a function applied to each tensor; other leaves stay as they are."""
    return tree.map(
        lambda leaf: func(leaf) if isinstance(leaf, Tensor) else leaf, microbatch
    )
