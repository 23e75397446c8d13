"""How a rank leaves a loss in whose midst all ranks gather params: so that all the others do, too.

A rank whose loss raises joins no further gather, and the others would wait for it for ever.

    RollCall    the first update: a small sum precedes each gather, to which a rank that has left
                adds 1, once; then the others leave, too. It costs a round trip for each gather
    Repeated    later updates, which gather what the first one did: a rank that leaves runs what
                the others still gather, with zeros

Both find a rank that gathers something else than the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from purestep.axis.process import GatherLog, Launch, ProcessAxis
from purestep.sync import handshake

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
KnownLaunches: TypeAlias = dict[tuple[int, int], list[Launch]]
"""The gathers and scatters of one microbatch, by rank and by the fingerprint of params.

They are empty if they vary.
"""


class RankLeftError(Exception):
    """Leaves a loss because another rank has left it, or gathers something else."""


class OtherGatherError(ValueError):
    """Leaves a loss because it gathers something else than in earlier updates."""


class GathersVaryError(Exception):
    """Ends an update in which the losses of all ranks gather something else than before."""


class Answers(NamedTuple):
    """What a rank says in a roll call, or the sums over all ranks."""

    num_left: float
    gather: float = 0
    """What this rank is about to gather, as a number."""
    gather_squared: float = 0


class RollCall:
    """Asks before each gather of an update whether all ranks of its axis take part.

    An axis stays open until a rank of it has left: that sum is the last one over it.
    """

    def __init__(self, axes: Iterable[ProcessAxis]) -> None:
        self._open = dict.fromkeys(axes)

    def before_launch(self, launch: Launch) -> None:
        """Raises if a rank of the axis has left, or is about to gather something else."""
        axis = launch.axis
        if (
            axis not in self._open
        ):  # A loss that catches the error must not go on alone.
            raise RankLeftError
        number = handshake.hash64(f"{launch}") % handshake.max_fingerprint(axis)
        message = _encode(Answers(0, number, number**2))
        axis.launch(message)()
        answers = Answers(*message.tolist())
        # By Cauchy-Schwarz, as fingerprints are compared: equal on all ranks.
        is_same = int(answers.gather) ** 2 == axis.size * int(answers.gather_squared)
        if answers.num_left or not is_same:
            del self._open[axis]
            raise RankLeftError

    def leave(self) -> None:
        """Tells the ranks of each open axis that this one gathers no more."""
        self._close(Answers(1))

    def end(self) -> None:
        """Meets the ranks that have left since the last gather."""
        self._close(Answers(0))

    def _close(self, answers: Answers) -> None:
        # All are launched before any is awaited: ranks of one axis may wait for those of another.
        waits = [axis.launch(_encode(answers)) for axis in self._open]
        self._open.clear()
        for wait in waits:
            wait()


def _encode(answers: Answers) -> Tensor:
    return torch.tensor(answers, dtype=torch.float64)


class Repeated:
    """Compares each gather of an update with those of earlier ones, which all ranks remember."""

    def __init__(self, launches: Iterable[Launch]) -> None:
        self._remaining = deque(launches)

    def before_launch(self, launch: Launch) -> None:
        """Raises if earlier updates have launched something else here."""
        if not self._remaining or launch != self._remaining[0]:
            raise self._other(f"{launch}")
        self._remaining.popleft()

    def leave(self) -> None:
        """Takes part with zeros in what the other ranks still launch."""
        while self._remaining:
            _, axis, op, shape, dtype, device = self._remaining.popleft()
            zeros = torch.zeros(shape, dtype=dtype, device=device)
            axis.launch(zeros, op)()

    def end(self) -> None:
        """Raises if earlier updates have launched more."""
        if self._remaining:
            raise self._other("nothing more")

    def _other(self, launched: str) -> OtherGatherError:
        before = f"{self._remaining[0]}" if self._remaining else "nothing more"
        return OtherGatherError(
            f"a loss runs {launched} where it ran {before} in an earlier update, "
            "as other ranks still do: run the same units, or ps.unshard, on all ranks"
        )


class LossGathers:
    """What the losses of one rank gather and scatter in one update, along these axes."""

    def __init__(
        self,
        axes: Iterable[ProcessAxis],
        known_launches: KnownLaunches,
        key: tuple[int, int],
    ) -> None:
        self.axes = [*axes]
        self.log = GatherLog([], [], [])
        self._known = known_launches
        self._key = key
        self._num_microbatches = 0
        self._guard: RollCall | Repeated | None = None
        for axis in self.axes:
            axis.start_gather_log(self.log)

    @property
    def are_known(self) -> bool:
        """Returns whether this rank remembers them from an earlier update."""
        return bool(self._known.get(self._key))

    def guard(self, num_microbatches: int, *, all_know: bool) -> None:
        """Prepares for a rank that leaves, before any microbatch has run."""
        if not self.axes:
            return
        self._num_microbatches = num_microbatches
        if all_know:
            self._guard = Repeated(self._known[self._key] * num_microbatches)
        else:
            self._guard = RollCall(self.axes)
        self.log.listeners.append(self._guard.before_launch)

    def leave(self) -> None:
        """Takes leave of the ranks that gather on."""
        self.stop()
        if self._guard is not None:
            self._guard.leave()

    def end(self) -> None:
        """Meets ranks that have left; raises if there was less to gather than before."""
        self.stop()
        if self._guard is not None:
            self._guard.end()

    def stop(self) -> None:
        """Notes no more."""
        for axis in self.axes:
            axis.stop_gather_log()

    def remember(self) -> None:
        """Remembers what each microbatch has launched, unless they differ."""
        launches = self.log.launches
        if self._guard is None or not launches or self._known.get(self._key) == []:
            return
        num_launches = len(launches) // self._num_microbatches
        first = launches[:num_launches]
        if first * self._num_microbatches == launches:
            self._known[self._key] = first

    def forget(self) -> None:
        """Notes that what losses gather varies from update to update."""
        self._known[self._key] = []


def again_if_gathers_vary(step: FunctionT) -> FunctionT:
    """Lets a step run again if all ranks gather something else than before, with roll calls.

    A loss may leave out a layer, as long as all ranks do. Each step is pure, and has changed
    nothing.
    """

    @wraps(step)
    def step_again(*args: Any) -> Any:
        with suppress(GathersVaryError):
            return step(*args)
        return step(*args)

    return step_again  # type: ignore[return-value]
