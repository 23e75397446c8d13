"""A world of ranks in one process: threads that meet in their collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep.axis.base import RankError
from purestep.axis.primitives import COLLECTIVES
from purestep.axis.process import BUCKET_BYTES, ProcessAxis, Wait
from purestep.torch_private import never_compiled_alone, transformed


class ThreadAxis(ProcessAxis):
    """``size`` ranks as threads of this process: each runs its own program, as processes would.

    For tests of what ``VmapAxis`` cannot run: ranks with different numbers of microbatches, and
    ranks that go wrong. They meet in their collectives. Where one calls another
    collective, or another shape or dtype, or has ended, there is no hang: every rank that takes
    part gets an error at once, which names ranks and calls.

    As between processes, the first collective of each rank over an axis belongs to the first of the
    others, and so on. Gradients leave while others still compute. Several
    threads may map over one axis. (Forward-mode differentiation belongs to the whole process in
    torch: ``jvp`` is for ``VmapAxis`` and ``MeshAxis``.)

    Args:
        size: how many ranks.
        bucket_bytes: as in ``MeshAxis``.

    >>> axis = ThreadAxis(3)
    >>> axis.map(lambda x: axis.apply("psum", x))([torch.tensor(rank) for rank in range(3)])
    [tensor(3), tensor(3), tensor(3)]
    """

    device = torch.device("cpu")
    shares_backward_thread = True

    def __init__(self, size: int, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        if not isinstance(size, int) or size < 1:
            raise ValueError(
                f"ThreadAxis({size=}): an axis has a whole number of ranks, from 1"
            )
        super().__init__(bucket_bytes)
        self.size = size
        self._world = _World(size)
        self._groups = [tuple(range(size))] * size
        self._name = f"ThreadAxis({size})"

    @property
    def where(self) -> ThreadAxis:
        """The threads meet in the axis itself."""
        return self

    @property
    def meetings(self) -> int:
        """How many collectives over this axis the calling rank has begun."""
        run, rank = self._world.here(self)
        return run.begun(rank, (self._name, self._groups[rank]))

    @property
    def rank(self) -> int:
        """Which of the axis's ranks the calling thread is."""
        _, rank = self._world.here(self)
        return self._groups[rank].index(rank)

    @property
    def global_ranks(self) -> frozenset[int]:
        """The threads that it joins, by their ranks in the world."""
        _, rank = self._world.here(self)
        return frozenset(self._groups[rank])

    def split(self, *sizes: int) -> tuple[ThreadAxis, ...]:
        """The ranks as a mesh of these sizes: one axis for each dimension, which meets along it.

        >>> world = ThreadAxis(4)
        >>> dp, tp = world.split(2, 2)
        >>> world.map(lambda x: dp.apply("psum", x))([torch.tensor(10**rank) for rank in range(4)])
        [tensor(101), tensor(1010), tensor(101), tensor(1010)]
        """
        ranks = torch.arange(self.size)
        if ranks.numel() != torch.Size(sizes).numel() or min(sizes, default=0) < 1:
            raise ValueError(
                f"{self}.split{sizes}: the sizes must multiply to {self.size}"
            )
        grid, parts = ranks.view(sizes), []
        for dim, size in enumerate(sizes):
            lines = [
                tuple(line) for line in grid.movedim(dim, -1).reshape(-1, size).tolist()
            ]
            groups = [
                next(line for line in lines if rank in line)
                for rank in range(self.size)
            ]
            parts.append(self._part(groups, f"{self}.split{sizes}[{dim}]"))
        return tuple(parts)

    def _part(self, groups: list[tuple[int, ...]], name: str) -> ThreadAxis:
        """The axis that joins each thread of the world with its group."""
        axis = ThreadAxis(len(groups[0]), bucket_bytes=self.bucket_bytes)
        axis._world, axis._groups, axis._name = self._world, groups, name
        return axis

    def map(self, fn: Callable[..., Any]) -> Callable[..., list[Any]]:
        """``fn`` run by every rank: each argument has one entry per rank, and so has the result.

        An exception in one rank is raised here, with the rank in its notes. Ranks that waited for
        it get a ``RankError``, which is raised only where there is nothing else.
        """

        def mapped(*args: Sequence[Any]) -> list[Any]:
            if self._name != f"ThreadAxis({self._world.size})":
                raise ValueError(
                    f"{self} is a part of a world: map over the axis that was split"
                )
            if transformed() or self._world.is_running:
                raise RuntimeError(
                    f"{self}.map starts threads, which no transform and no other map reaches into: "
                    "transform inside fn, or take VmapAxis"
                )
            for position, arg in enumerate(args):
                if len(arg) != self.size:
                    raise ValueError(
                        f"argument {position} has {len(arg)} entries, but {self} takes one for "
                        "each rank"
                    )
            return self._world.run(
                fn, list(zip(*args, strict=True)) or [()] * self.size
            )

        return mapped

    def meet(self, law: str, x: Tensor) -> Tensor:
        """The law on a plain tensor of each rank: the arithmetic of a dimension of ranks."""
        return x.view_as(x) if law == "pvary" else self._begin(law, x.detach())()

    def launch(self, x: Tensor, law: str = "psum") -> Wait:
        """Hands over what ``x`` holds now; it holds psum when that has been waited for."""
        result = self._begin(law, x.clone())
        return (lambda: x.copy_(result())) if law == "psum" else result

    def across(self, inner: ProcessAxis) -> ThreadAxis:
        """The axis over those of these ranks that stand at the same place of ``inner``."""
        assert isinstance(inner, ThreadAxis)
        at = [inner._groups[rank].index(rank) for rank in range(self._world.size)]
        pairs = enumerate(self._groups)
        groups = [
            tuple(one for one in group if at[one] == at[rank]) for rank, group in pairs
        ]
        return self._part(groups, f"{self} across {inner}")

    def gather_object(self, value: Any) -> list[Any]:
        """All threads' values, in order of rank."""
        run, rank = self._world.here(self)
        group, number = self._groups[rank], self.meetings
        run.values[self._name, number, rank] = value
        self.meet("psum", torch.zeros(()))
        return [run.values[self._name, number, other] for other in group]

    def _begin(self, law: str, x: Tensor) -> Callable[[], Tensor]:
        """Brings ``x`` to the next meeting of this axis; returns what waits for its result."""
        run, rank = self._world.here(self)
        call = _Call(self._name, self._groups[rank], law, x.dtype, tuple(x.shape))
        meeting = run.bring(rank, call, x)
        return lambda: run.wait(rank, meeting)

    def __repr__(self) -> str:
        return self._name


class _Call(NamedTuple):
    """What a rank has called; ranks of one group meet if their calls are the same."""

    axis: str
    group: tuple[int, ...]
    law: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.law} of {self.dtype} {self.shape} over {self.axis}"


class _World:
    """Who the calling thread is: which rank, and of which run."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._local = threading.local()
        # A compiler would give all ranks one tensor, in whose graph the other ranks' losses stand.
        never_compiled_alone(_together)

    @property
    def is_running(self) -> bool:
        """Whether the calling thread is a rank already."""
        return hasattr(self._local, "place")

    def here(self, axis: ThreadAxis) -> tuple[_Run, int]:
        """The run that the calling thread takes part in, and its number there."""
        place: tuple[_Run, int] | None = getattr(self._local, "place", None)
        if place is None:
            raise RuntimeError(
                f"{axis} has ranks only while it maps: axis.map(fn)(...)"
            )
        return place

    def run(self, fn: Callable[..., Any], args: list[tuple[Any, ...]]) -> list[Any]:
        """``fn(*args[rank])`` in a thread for each rank."""
        run = _Run(self.size)
        results: list[Any] = [None] * self.size
        errors: dict[int, BaseException] = {}

        def thread(rank: int) -> None:
            self._local.place = run, rank
            try:
                results[rank] = fn(*args[rank])
                end = "has returned"
            except BaseException as error:
                errors[rank] = error
                end = f"has raised {type(error).__name__}: {error}"
            run.end(rank, end)

        ranks = range(self.size)
        threads = [
            threading.Thread(target=thread, args=(rank,), daemon=True) for rank in ranks
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        if not errors:
            return results
        first = min(
            errors, key=lambda rank: (isinstance(errors[rank], RankError), rank)
        )
        errors[first].add_note(f"raised by rank {first} of {self.size}")
        try:
            raise errors[first]
        finally:
            # Tracebacks hold the frames of the ranks, which hold this dict, which would hold them.
            errors.clear()


@dataclass(eq=False)
class _Meeting:
    """One collective: what each rank has brought to it, and what each takes away."""

    place: Hashable
    calls: dict[int, _Call] = field(default_factory=dict)
    brought: dict[int, Tensor] = field(default_factory=dict)
    results: dict[int, Tensor] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class _Run:
    """What the threads of one ``map`` share: meetings, what each waits for, and how it ended."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._meetings: dict[Hashable, _Meeting] = {}
        self._begun: dict[Hashable, int] = {}
        self._waiting: dict[int, _Meeting] = {}
        self._ended: dict[int, str] = {}
        self.values: dict[Hashable, Any] = {}

    def begun(self, rank: int, group: Hashable) -> int:
        """How many meetings of this group the rank has come to."""
        return self._begun.get((rank, group), 0)

    def bring(self, rank: int, call: _Call, x: Tensor) -> _Meeting:
        """Comes to the group's next meeting; the last one to come does the work for all."""
        group = call.axis, call.group
        with self._changed:
            number = self.begun(rank, group)
            self._begun[rank, group] = number + 1
            place = group, number
            meeting = self._meetings.setdefault(place, _Meeting(place))
            meeting.calls[rank], meeting.brought[rank] = call, x
            if meeting.errors or len(set(meeting.calls.values())) > 1:
                self._refuse(meeting)
            elif len(meeting.calls) == len(call.group):
                values = _together(call.law, [meeting.brought[r] for r in call.group])
                meeting.results.update(zip(call.group, values, strict=True))
                meeting.brought.clear()
                self._changed.notify_all()
            return meeting

    def wait(self, rank: int, meeting: _Meeting) -> Tensor:
        """What the rank takes away from a meeting, when all have come."""
        with self._changed:
            self._waiting[rank] = meeting
            self._refuse_the_impossible()
            while rank not in meeting.results and rank not in meeting.errors:
                self._changed.wait()
            del self._waiting[rank]
            if rank in meeting.errors:
                raise RankError(meeting.errors[rank])
            result = meeting.results.pop(rank)
            if not meeting.results:
                del self._meetings[meeting.place]
            return result

    def end(self, rank: int, how: str) -> None:
        """The rank comes to no meeting any more."""
        with self._changed:
            self._ended[rank] = how
            self._refuse_the_impossible()

    def _refuse_the_impossible(self) -> None:
        """Errors for the ranks that wait for what will not come."""
        pairs = self._waiting.items()
        waiting = [
            its for rank, its in pairs if rank not in {*its.results, *its.errors}
        ]
        none_computes = len(waiting) + len(self._ended) == self._size
        for meeting in waiting:
            missing = {*next(iter(meeting.calls.values())).group} - {*meeting.calls}
            if none_computes or missing & {*self._ended}:
                self._refuse(meeting)

    def _refuse(self, meeting: _Meeting) -> None:
        """An error for those who have come, and have none yet."""
        states = [
            f"rank {rank} {self._state(rank, meeting)}" for rank in range(self._size)
        ]
        message = "these ranks cannot meet: " + "; ".join(states)
        meeting.errors = dict.fromkeys(meeting.calls, message) | meeting.errors
        meeting.brought.clear()
        self._changed.notify_all()

    def _state(self, rank: int, meeting: _Meeting) -> str:
        for one in (meeting, self._waiting.get(rank)):
            if one is not None and rank in one.calls:
                return f"calls {one.calls[rank]}"
        return self._ended.get(rank, "still computes")


def _together(law: str, xs: list[Tensor]) -> list[Tensor]:
    """What every rank gets of what all of them have brought."""
    result, dim = COLLECTIVES[law].across(torch.stack(xs), 0, len(xs))
    if dim is None:
        return [result.clone() for _ in xs]
    return [part.clone() for part in result.unbind(dim)]
