"""Runs ranks as threads of one process, which meet in their collectives."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from purestep.axis.base import RankError
from purestep.axis.primitives import COLLECTIVES
from purestep.axis.process import BUCKET_BYTES, ProcessAxis, Wait
from purestep.torch_private import has_transforms, skip_compilation

_Group: TypeAlias = tuple[int, ...]
"""Ranks of the world that meet, in the order of their ranks on the axis."""


class ThreadAxis(ProcessAxis):
    """Runs ``size`` ranks as threads of this process; they may run different code, as processes do.

    For tests of what ``VmapAxis`` cannot run: ranks with different numbers of microbatches, and
    ranks that go wrong. They meet in their collectives. Where one calls another collective, or
    another shape or dtype, or has ended, there is no hang. Every rank that takes part gets an error
    at once, which names ranks and calls. Ranks that wait for each other over different axes get
    theirs when no rank computes any more.

    As between processes, the first collective of each rank over an axis meets the first of the
    others, and so on. Gradients are reduced while others are still computed. Several threads may
    map over one axis at once. (Forward-mode differentiation belongs to the whole process in torch:
    ``jvp`` is for ``VmapAxis`` and ``MeshAxis``.)

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
        world_group: _Group = tuple(range(size))
        self._groups = [world_group] * size
        self._name = f"ThreadAxis({size})"

    @property
    def process_group(self) -> ThreadAxis:
        """Returns the axis itself, which runs its collectives without a process group of torch."""
        return self

    @property
    def num_collectives(self) -> int:
        """Counts the collectives over this axis that the calling rank has begun in this ``map``.

        "pvary" does not count. Axes of the same name and ranks, as of two equal splits, count
        together. Raises RuntimeError outside of ``map``.
        """
        run, rank = self._world.current(self)
        group = self._groups[rank]
        return run.count_begun(rank, (self._name, group))

    @property
    def rank(self) -> int:
        """Returns the position of the calling thread on the axis, from 0 to size - 1.

        Raises RuntimeError outside of ``map``.
        """
        _, rank = self._world.current(self)
        return self._groups[rank].index(rank)

    @property
    def global_ranks(self) -> frozenset[int]:
        """Returns the world ranks of the caller's group on this axis, the caller included.

        Raises RuntimeError outside of ``map``.
        """
        _, rank = self._world.current(self)
        return frozenset(self._groups[rank])

    def split(self, *sizes: int) -> tuple[ThreadAxis, ...]:
        """Arranges the ranks as a mesh of these sizes, and returns one axis for each dimension.

        The last dimension varies fastest. On an axis that ``split`` made, each group of ranks
        becomes a mesh. Raises ValueError unless the sizes are positive and multiply to the number
        of ranks.

        >>> world = ThreadAxis(4)
        >>> dp, tp = world.split(2, 2)
        >>> world.map(lambda x: dp.apply("psum", x))([torch.tensor(10**rank) for rank in range(4)])
        [tensor(101), tensor(1010), tensor(101), tensor(1010)]
        """
        is_mesh = min(sizes, default=0) > 0 and math.prod(sizes) == self.size
        if not is_mesh:
            raise ValueError(
                f"{self}.split{sizes}: the sizes must multiply to {self.size}"
            )
        # On a part of a mesh, each group of ranks is a mesh by itself.
        meshes = [torch.tensor(group).view(sizes) for group in {*self._groups}]
        axes = []
        for dim, size in enumerate(sizes):
            groups: list[_Group] = [()] * len(self._groups)
            for mesh in meshes:
                lines = mesh.movedim(dim, -1).reshape(-1, size)
                for line in lines.tolist():
                    for rank in line:
                        groups[rank] = tuple(line)
            name = f"{self}.split{sizes}[{dim}]"
            axes.append(self._subaxis(groups, name))
        return tuple(axes)

    def _subaxis(self, groups: list[_Group], name: str) -> ThreadAxis:
        """Returns an axis of the same world, on which a rank meets those of ``groups[rank]``."""
        size = len(groups[0])
        axis = ThreadAxis(size, bucket_bytes=self.bucket_bytes)
        axis._world = self._world
        axis._groups = groups
        axis._name = name
        return axis

    def map(self, fn: Callable[..., Any]) -> Callable[..., list[Any]]:
        """Returns a function that runs ``fn`` on every rank, each in a thread.

        Its arguments and its result have one entry per rank. If ranks raise, it raises the
        exception of the lowest of them, with the rank in the notes. Ranks that waited for a rank
        that raised get a ``RankError``, which it raises only if there is no other exception.

        It also raises RuntimeError under a transform or inside another ``map`` of these ranks. It
        raises ValueError on an axis that ``split`` or ``complement`` made, and for arguments of
        another length.
        """

        def mapped(*args: Sequence[Any]) -> list[Any]:
            self._check_can_map(args)
            rank_args: list[Any] = [()] * self.size
            if args:
                rank_args = list(zip(*args, strict=True))
            return self._world.run(fn, rank_args)

        return mapped

    def _check_can_map(self, args: Sequence[Sequence[Any]]) -> None:
        if self._name != f"ThreadAxis({self._world.size})":
            raise ValueError(
                f"{self} is a part of a world: map over the axis that was split"
            )
        if has_transforms() or self._world.is_running:
            raise RuntimeError(
                f"{self}.map starts threads, which no transform and no other map reaches into: "
                "transform inside fn, or take VmapAxis"
            )
        for position, arg in enumerate(args):
            if len(arg) != self.size:
                raise ValueError(
                    f"argument {position} has {len(arg)} entries, but {self} takes one for each "
                    "rank"
                )

    def run(self, op: str, x: Tensor) -> Tensor:
        """Returns this rank's result of the collective ``op``; waits for the other ranks' tensors.

        The result is new memory, and autograd does not see it. "pvary" instead waits for no rank,
        and returns a view of ``x``, also outside of ``map``. Other ops raise RuntimeError there,
        and ``RankError`` if the ranks cannot meet.
        """
        if op == "pvary":  # It only marks x as different on each rank.
            return x.view_as(x)
        wait = self._begin(op, x.detach())
        return wait()

    def launch(self, x: Tensor, op: str = "psum") -> Wait:
        """Begins a collective on a copy of ``x``, and returns the wait for its result.

        Call the wait once. That for a psum writes the sum into ``x``, and returns ``x``; others
        return a new tensor. The wait raises ``RankError`` if the ranks cannot meet, and ``launch``
        raises RuntimeError outside of ``map``.
        """
        wait = self._begin(op, x.clone())
        if op != "psum":
            return wait

        def wait_and_copy() -> Tensor:
            return x.copy_(wait())

        return wait_and_copy

    def complement(self, inner: ProcessAxis) -> ThreadAxis:
        """Returns the axis over those of this axis's ranks that have the same rank in ``inner``.

        ``inner`` must be an axis of the same world. Raises ``AssertionError`` if it is no
        ``ThreadAxis``.
        """
        assert isinstance(inner, ThreadAxis)
        size = self._world.size
        inner_ranks = [inner._groups[rank].index(rank) for rank in range(size)]
        groups = []
        for rank, group in enumerate(self._groups):
            inner_rank = inner_ranks[rank]
            same = [other for other in group if inner_ranks[other] == inner_rank]
            groups.append(tuple(same))
        return self._subaxis(groups, f"{self} across {inner}")

    def gather_object(self, value: Any) -> list[Any]:
        """Returns the values of all ranks of this axis, in order of rank.

        It is a collective, counted as one, in which all ranks share the objects: none is copied.
        Raises ``RankError`` if the ranks cannot meet, and RuntimeError outside of ``map``.
        """
        run, rank = self._world.current(self)
        group = self._groups[rank]
        number = self.num_collectives
        run.values[self._name, number, rank] = value
        self.run("psum", torch.zeros(()))  # Until then all have left their values.
        return [run.values[self._name, number, other] for other in group]

    def _begin(self, op: str, x: Tensor) -> Callable[[], Tensor]:
        """Joins the axis's next collective with ``x``, and returns the wait for its result.

        Raises RuntimeError outside of ``map``.
        """
        run, rank = self._world.current(self)
        call = _Call(
            self._name,
            self._groups[rank],
            op,
            x.dtype,
            tuple(x.shape),
        )
        collective = run.join(rank, call, x)
        return lambda: run.wait(rank, collective)

    def __repr__(self) -> str:
        return self._name


class _Call(NamedTuple):
    """Describes what a rank calls; ranks of one group meet if their calls are the same."""

    axis: str
    group: _Group
    op: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.op} of {self.dtype} {self.shape} over {self.axis}"


class _World:
    """Starts threads as ranks, and tells each thread which rank of which run it is."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._local = threading.local()
        # A compiler would give all ranks one tensor, in whose graph the other ranks' losses stand.
        skip_compilation(_compute_results)

    @property
    def is_running(self) -> bool:
        """Returns whether the calling thread is a rank of this world, inside of ``map``."""
        return hasattr(self._local, "run")

    def current(self, axis: ThreadAxis) -> tuple[_Run, int]:
        """Returns the run of the calling thread and its rank in the world.

        Raises RuntimeError, with the name of ``axis``, if the thread is no rank.
        """
        if not self.is_running:
            raise RuntimeError(
                f"{axis} has ranks only while it maps: axis.map(fn)(...)"
            )
        return self._local.run, self._local.rank

    def run(self, fn: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
        """Calls ``fn(*args[rank])`` in a thread for each rank, and returns the results by rank.

        Waits for all threads. If any has raised, it raises what ``_raise_first`` selects.
        """
        run = _Run(self.size)
        results: list[Any] = [None] * self.size
        errors: _Errors = {}

        def run_rank(rank: int) -> None:
            self._local.run = run
            self._local.rank = rank
            try:
                results[rank] = fn(*args[rank])
                end = "has returned"
            except BaseException as error:
                errors[rank] = error
                end = f"has raised {type(error).__name__}: {error}"
            run.end(rank, end)

        threads = [
            threading.Thread(target=run_rank, args=(rank,), daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            _raise_first(errors, self.size)
        return results


_Errors: TypeAlias = dict[int, BaseException]


def _raise_first(errors: _Errors, size: int) -> NoReturn:
    """Raises the error of the lowest rank, with a note that names the rank.

    A ``RankError`` is raised only if there are no other errors. Empties ``errors``.
    """
    causes = [rank for rank in errors if not isinstance(errors[rank], RankError)]
    first = min(causes or errors)
    errors[first].add_note(f"raised by rank {first} of {size}")
    try:
        raise errors[first]
    finally:
        # Tracebacks hold the frames of the ranks, which hold this dict, which would hold them.
        errors.clear()


@dataclass(eq=False)
class _Collective:
    """Holds for one collective the calls and inputs of its ranks, and their results or errors."""

    key: Hashable
    calls: dict[int, _Call] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    results: dict[int, Tensor] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)

    def is_done(self, rank: int) -> bool:
        """Returns whether there is an error for a rank, or a result that it has not taken yet."""
        return rank in self.results or rank in self.errors


class _Run:
    """Shares between the threads of one ``map`` their collectives, and which ranks wait or ended.

    A rank gets an error, instead of a hang, if its collective cannot be completed any more. It
    comes at once if calls differ or a missing rank has ended, else when no rank computes any more.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._collectives: dict[Hashable, _Collective] = {}
        self._num_begun: dict[Hashable, int] = {}
        self._waiting: dict[int, _Collective] = {}
        self._ended: dict[int, str] = {}
        self.values: dict[Hashable, Any] = {}

    def count_begun(self, rank: int, group: Hashable) -> int:
        """Returns how many collectives a rank has begun over a group: an axis's name and ranks."""
        return self._num_begun.get((rank, group), 0)

    def join(self, rank: int, call: _Call, x: Tensor) -> _Collective:
        """Joins the group's next collective, and returns it without a wait.

        The last rank to join computes it for all. If calls differ, all ranks that join get an
        error, which ``wait`` raises.
        """
        group = (call.axis, call.group)
        with self._changed:
            number = self.count_begun(rank, group)
            self._num_begun[rank, group] = number + 1
            key = (group, number)
            collective = self._collectives.setdefault(key, _Collective(key))
            collective.calls[rank] = call
            collective.inputs[rank] = x
            calls = set(collective.calls.values())
            if collective.errors or len(calls) > 1:
                self._refuse(collective)
            elif len(collective.calls) == len(call.group):
                self._complete(collective, call)
            return collective

    def _complete(self, collective: _Collective, call: _Call) -> None:
        """Computes the results of all ranks, and wakes those that wait."""
        inputs = [collective.inputs[rank] for rank in call.group]
        results = _compute_results(call.op, inputs)
        # No rank gets a result if their number is wrong: a rank with one would wait for no error.
        collective.results = dict(zip(call.group, results, strict=True))
        collective.inputs.clear()
        self._changed.notify_all()

    def wait(self, rank: int, collective: _Collective) -> Tensor:
        """Waits for a rank's result of a collective, and returns it; each rank may do so once.

        Raises ``RankError`` if the collective cannot be computed.
        """
        with self._changed:
            self._waiting[rank] = collective
            self._refuse_the_impossible()
            while not collective.is_done(rank):
                self._changed.wait()
            del self._waiting[rank]
            if rank in collective.errors:
                raise RankError(collective.errors[rank])
            result = collective.results.pop(rank)
            if not collective.results:  # The last rank has its own.
                del self._collectives[collective.key]
            return result

    def end(self, rank: int, state: str) -> None:
        """Notes how a rank has ended, for messages; ranks that wait for it get errors."""
        with self._changed:
            self._ended[rank] = state
            self._refuse_the_impossible()

    def _refuse_the_impossible(self) -> None:
        """Gives errors to ranks that wait for a rank that has ended.

        If no rank computes any more, all ranks that wait get one.
        """
        waiting = [
            collective
            for rank, collective in self._waiting.items()
            if not collective.is_done(rank)
        ]
        none_computes = len(waiting) + len(self._ended) == self._size
        for collective in waiting:
            call = next(iter(collective.calls.values()))
            missing = set(call.group).difference(collective.calls)
            if none_computes or not missing.isdisjoint(self._ended):
                self._refuse(collective)

    def _refuse(self, collective: _Collective) -> None:
        """Stores an error for each joined rank that has none yet, and wakes those that wait.

        It says what each rank of the world does; ``wait`` raises it.
        """
        states = [
            f"rank {rank} {self._describe_state(rank, collective)}"
            for rank in range(self._size)
        ]
        message = "these ranks cannot meet: " + "; ".join(states)
        for rank in collective.calls:
            collective.errors.setdefault(rank, message)
        collective.inputs.clear()
        self._changed.notify_all()

    def _describe_state(self, rank: int, collective: _Collective) -> str:
        if rank in collective.calls:
            return f"calls {collective.calls[rank]}"
        other = self._waiting.get(rank)
        if other is not None and rank in other.calls:
            return f"calls {other.calls[rank]}"
        return self._ended.get(rank, "still computes")


def _compute_results(op: str, xs: list[Tensor]) -> list[Tensor]:
    """Returns each rank's result of the collective ``op`` on the inputs of all, as new tensors."""
    stacked = torch.stack(xs)
    result, dim = COLLECTIVES[op].batch_rule(stacked, 0, len(xs))
    if dim is None:
        return [result.clone() for _ in xs]
    return [part.clone() for part in result.unbind(dim)]
