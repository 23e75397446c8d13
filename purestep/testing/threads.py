"""A world of ranks in one process: threads that meet in their collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep.axis.laws import LAWS
from purestep.axis.ranks import BUCKET_BYTES, RankError, Ranks, Wait


class ThreadAxis(Ranks):
    """``size`` ranks as threads of this process: each runs a program of its own, as processes would.

    For tests of what ``VmapAxis`` cannot run: ranks with different numbers of microbatches, and ranks that go
    wrong. They meet in their collectives. Where they cannot, because one calls another collective, with
    another shape or dtype, or has ended, every rank that takes part gets an error at once that names ranks
    and calls: never a hang. (Forward-mode differentiation belongs to the whole process in torch: ``jvp`` is
    for ``VmapAxis`` and ``MeshAxis``.)

    Args:
        size: how many ranks.
        bucket_bytes: as in ``MeshAxis``.

    >>> axis = ThreadAxis(3)
    >>> axis.map(lambda x: axis.apply("psum", x))([torch.tensor(1), torch.tensor(2), torch.tensor(3)])
    [tensor(6), tensor(6), tensor(6)]
    """

    device = torch.device("cpu")

    def __init__(self, size: int, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        if not isinstance(size, int) or size < 1:
            raise ValueError(
                f"ThreadAxis(size={size!r}): an axis has a whole number of ranks, at least one"
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
        """None that somebody else's could be mistaken for: what is launched waits."""
        return 0

    @property
    def rank(self) -> int:
        """Which of the axis's ranks the calling thread is."""
        rank = self._world.rank(self)
        return self._groups[rank].index(rank)

    def split(self, *sizes: int) -> tuple[ThreadAxis, ...]:
        """The ranks as a mesh of these sizes: one axis for each dimension, which meets along it.

        >>> world = ThreadAxis(4)
        >>> dp, tp = world.split(2, 2)
        >>> world.map(lambda x: dp.apply("psum", x))([torch.tensor(10**rank) for rank in range(4)])
        [tensor(101), tensor(1010), tensor(101), tensor(1010)]
        """
        ranks = torch.arange(self.size)
        if ranks.numel() != torch.Size(sizes).numel() or min(sizes, default=0) < 1:
            raise ValueError(f"{self}.split{sizes}: the sizes must multiply to {self.size}")
        grid = ranks.view(sizes)
        return tuple(self._along(grid, dim) for dim in range(len(sizes)))

    def _along(self, grid: Tensor, dim: int) -> ThreadAxis:
        axis = ThreadAxis(grid.shape[dim], bucket_bytes=self.bucket_bytes)
        axis._world = self._world
        lines = grid.movedim(dim, -1).reshape(-1, axis.size).tolist()
        axis._groups = [
            next(tuple(line) for line in lines if rank in line) for rank in range(self.size)
        ]
        axis._name = f"{self}.split{tuple(grid.shape)}[{dim}]"
        return axis

    def map(self, fn: Callable[..., Any]) -> Callable[..., list[Any]]:
        """``fn`` run by every rank: each argument has one entry per rank, and so has what comes back.

        An exception in one rank is raised here, with the rank in its notes. Ranks that waited for it get
        a ``RankError``, which is raised only where there is nothing else.
        """

        def mapped(*args: Sequence[Any]) -> list[Any]:
            if self._name != f"ThreadAxis({self._world.size})":
                raise ValueError(f"{self} is a part of a world: map over the axis that was split")
            if torch._C._are_functorch_transforms_active() or self._world.is_running:
                raise RuntimeError(
                    f"{self}.map starts threads, which no transform and no other map reaches into: "
                    "transform inside fn, or take VmapAxis"
                )
            for position, arg in enumerate(args):
                if len(arg) != self.size:
                    raise ValueError(
                        f"argument {position} has {len(arg)} entries, but {self} takes one for each rank"
                    )
            return self._world.run(fn, list(zip(*args, strict=True)) or [()] * self.size)

        return mapped

    def meet(self, law: str, x: Tensor) -> Tensor:
        """The law on one plain tensor of each rank: the same arithmetic as on a dimension of ranks."""
        if law == "pvary":
            return x.view_as(x)
        rank = self._world.rank(self)
        group = self._groups[rank]
        call = _Call(self._name, group, law, x.dtype, tuple(x.shape))

        def together(xs: list[Tensor]) -> list[Tensor]:
            result, dim = LAWS[law].across(torch.stack(xs), 0, len(xs))
            return [
                result.clone() if dim is None else result.select(dim, r).clone()
                for r in range(len(xs))
            ]

        return self._world.meet(rank, call, x.detach(), together)

    def launch(self, flat: Tensor) -> Wait:
        """Sums what ``flat`` holds now, when it is waited for: a thread meets in one place at a time."""
        sent = flat.clone()

        def wait(timeout: float | None) -> None:
            flat.copy_(self.meet("psum", sent))

        return wait

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
    """Threads, what each of them waits in, and how it ended."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._local = threading.local()
        self._changed = threading.Condition()
        self._restart()

    def _restart(self) -> None:
        self._waiting: dict[int, tuple[_Call, Tensor]] = {}
        self._results: dict[int, Tensor] = {}
        self._errors: dict[int, str] = {}
        self._ended: dict[int, str] = {}

    @property
    def is_running(self) -> bool:
        """Whether the calling thread is a rank already."""
        return hasattr(self._local, "rank")

    def rank(self, axis: ThreadAxis) -> int:
        """The number of the calling thread."""
        rank: int | None = getattr(self._local, "rank", None)
        if rank is None:
            raise RuntimeError(f"{axis} has ranks only while it maps: axis.map(fn)(...)")
        return rank

    def run(self, fn: Callable[..., Any], args: list[tuple[Any, ...]]) -> list[Any]:
        """``fn(*args[rank])`` in a thread for each rank."""
        self._restart()
        results: list[Any] = [None] * self.size
        errors: dict[int, BaseException] = {}

        def thread(rank: int) -> None:
            self._local.rank = rank
            try:
                results[rank] = fn(*args[rank])
                end = "has returned"
            except BaseException as error:
                errors[rank] = error
                end = f"has raised {type(error).__name__}: {error}"
            with self._changed:
                self._ended[rank] = end
                self._refuse_the_impossible()

        threads = [
            threading.Thread(target=thread, args=(rank,), daemon=True) for rank in range(self.size)
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        for rank in sorted(errors, key=lambda rank: (isinstance(errors[rank], RankError), rank)):
            error = errors[rank]
            error.add_note(f"raised by rank {rank} of {self.size}")
            raise error
        return results

    def meet(
        self,
        rank: int,
        call: _Call,
        x: Tensor,
        together: Callable[[list[Tensor]], list[Tensor]],
    ) -> Tensor:
        """Waits for the other ranks of the call's group; the last one to come does the work for all."""
        with self._changed:
            self._waiting[rank] = call, x
            here = [self._waiting.get(other) for other in call.group]
            if all(other is not None and other[0] == call for other in here):
                values = together([other[1] for other in here if other is not None])
                self._results.update(zip(call.group, values, strict=True))
                for other in call.group:
                    del self._waiting[other]
                self._changed.notify_all()
            else:
                self._refuse_the_impossible()
            while rank not in self._results and rank not in self._errors:
                self._changed.wait()
            if rank in self._errors:
                raise RankError(self._errors.pop(rank))
            return self._results.pop(rank)

    def _refuse_the_impossible(self) -> None:
        """Errors for the ranks that wait for what will not come."""
        stuck = {
            rank
            for rank, (call, _) in self._waiting.items()
            if any(self._never(other, call) for other in call.group)
        }
        if len(self._waiting) + len(self._ended) == self.size:
            stuck = set(self._waiting)
        if stuck:
            states = [f"rank {rank} {self._state(rank)}" for rank in range(self.size)]
            message = "these ranks cannot meet: " + "; ".join(states)
            for rank in stuck:
                del self._waiting[rank]
                self._errors[rank] = message
            self._changed.notify_all()

    def _never(self, other: int, call: _Call) -> bool:
        """Whether the other rank has ended, or is in another call of the same group."""
        if other in self._ended:
            return True
        waiting = self._waiting.get(other)
        return waiting is not None and waiting[0] != call and waiting[0].group == call.group

    def _state(self, rank: int) -> str:
        if rank in self._waiting:
            return f"calls {self._waiting[rank][0]}"
        return self._ended.get(rank, "still computes")
