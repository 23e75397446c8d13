"""How a rank leaves a loss in whose midst all ranks gather params: so that all the others do, too.

A rank whose loss raises joins no further gather, and the others would wait for it for ever.

    RollCall    while a rank does not know what the others gather, as in the first update: a small
                sum precedes each gather. A rank that leaves adds 1 to the next such sum, and then
                the others leave, too. It costs a round trip for each gather
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

from purestep import tree
from purestep.axis.process import GatherLog, Launch, ProcessAxis
from purestep.sharding.layout import shards_over
from purestep.sync import handshake
from purestep.types import Params

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
KnownLaunches: TypeAlias = dict[Any, list[Launch]]
"""The gathers and scatters of one microbatch, by ranks and by the fingerprint of params.

An empty list marks gathers that vary between updates.
"""


class RankLeftError(Exception):
    """Ends a rank's loss because another rank's loss has ended early, or gathers something else."""


class OtherGatherError(ValueError):
    """Ends a rank's update because its losses gather something else than in earlier updates."""


class GathersVaryError(Exception):
    """Ends an update in which the losses of all ranks gather something else than before.

    All ranks raise it, and ``again_if_gathers_vary`` runs the step again.
    """


class Answers(NamedTuple):
    """Holds what a rank sends before a gather, in ``RollCall``, or the sums over all ranks.

    ``num_left`` is 1 if the rank leaves its loss, else 0.
    """

    num_left: float
    gather: float = 0
    """A hash of the collective that this rank is about to launch."""
    gather_squared: float = 0
    """The square of the hash: sums of both tell whether all ranks have the same hash."""


class RollCall:
    """Asks by a small sum before each gather of an update whether all ranks of its axis take part.

    An axis is open while other ranks may wait for a sum of this one. A sum that shows that a rank
    leaves, or that ranks gather different things, closes its axis. A rank whose loss ends early
    calls ``leave``, any other ``end``: each closes the open axes by one last sum.
    """

    def __init__(self, axes: Iterable[ProcessAxis]) -> None:
        self._open = dict.fromkeys(axes)
        self._has_refused = False

    def before_launch(self, launch: Launch) -> None:
        """Raises ``RankLeftError`` if a rank of the axis has left, or launches something else.

        This is a sum over the axis, for whose result the host waits: all of its ranks raise. The
        axis is then closed, so ``leave`` does not sum over it. Later calls raise again, without a
        sum.
        """
        self._raise_again()
        axis = launch.axis
        number = handshake.hash64(f"{launch}") % handshake.max_fingerprint(axis)
        message = _encode(Answers(0, number, number**2))
        axis.launch(message)()
        answers = Answers(*message.tolist())
        # By Cauchy-Schwarz, as fingerprints are compared: equal on all ranks.
        is_same = int(answers.gather) ** 2 == axis.size * int(answers.gather_squared)
        if answers.num_left or not is_same:
            del self._open[axis]
            self._has_refused = True
            self._raise_again()

    def leave(self) -> None:
        """Tells the ranks of each open axis, by one more sum, that this one gathers no more.

        Closes the axes, and waits for the sums.
        """
        self._close(Answers(1))

    def end(self) -> None:
        """Takes part in one last sum over each open axis, and closes these axes.

        A rank that leaves its loss waits for this sum. An axis is open until a sum over it shows
        that a rank has left, or launches something else. The answers are not read. If
        ``before_launch`` has raised, it raises ``RankLeftError`` again instead, and runs no sum.
        """
        self._raise_again()
        self._close(Answers(0))

    def _raise_again(self) -> None:
        """Raises ``RankLeftError`` if ``before_launch`` has raised it.

        So a loss that catches the error does not go on alone.
        """
        if self._has_refused:
            raise RankLeftError

    def _close(self, answers: Answers) -> None:
        # All are launched before any is awaited: ranks of one axis may wait for those of another.
        waits = [axis.launch(_encode(answers)) for axis in self._open]
        self._open.clear()
        for wait in waits:
            wait()


def _encode(answers: Answers) -> Tensor:
    return torch.tensor(answers, dtype=torch.float64, device="cpu")


class Repeated:
    """Compares each gather of an update with the ``launches`` that all ranks remember, in order.

    This takes no communication.
    """

    def __init__(self, launches: Iterable[Launch]) -> None:
        self._remaining = deque(launches)
        self._refusal = ""

    def before_launch(self, launch: Launch) -> None:
        """Raises ``OtherGatherError`` if the launch is not the next one of the remembered launches.

        Otherwise takes it off these, so that ``leave`` does not run it. After an error, later calls
        raise the same error again.
        """
        self._raise_again()
        if not self._remaining or launch != self._remaining[0]:
            self._refuse(f"{launch}")
        self._remaining.popleft()

    def leave(self) -> None:
        """Launches, with zeros, all remembered collectives of the update that remain.

        It waits for one before it launches the next. So the other ranks, which still launch
        them, do not wait for this one.
        """
        while self._remaining:
            _, axis, op, shape, dtype, device = self._remaining.popleft()
            zeros = torch.zeros(shape, dtype=dtype, device=device)
            axis.launch(zeros, op)()

    def end(self) -> None:
        """Raises ``OtherGatherError`` if remembered launches remain, or if it was raised before."""
        self._raise_again()
        if self._remaining:
            self._refuse("nothing more")

    def _raise_again(self) -> None:
        """Raises ``OtherGatherError`` again if it has been raised before.

        So a loss that catches the error does not go on alone.
        """
        if self._refusal:
            raise OtherGatherError(self._refusal)

    def _refuse(self, launched: str) -> None:
        before = f"{self._remaining[0]}" if self._remaining else "nothing more"
        self._refusal = (
            f"a loss runs {launched} where it ran {before} in an earlier update, and other ranks "
            "do not: run the same units, or ps.unshard, on all ranks"
        )
        self._raise_again()


class LossGathers:
    """Logs what the losses of a rank gather and scatter in one update, over ``axes``.

    The logs start at once, and end with ``stop``. ``known_launches`` holds under ``key`` what a
    microbatch launched in earlier updates. Without ``known_launches``, other ranks do not learn of
    a rank that leaves its loss.
    """

    def __init__(
        self,
        axes: Iterable[ProcessAxis],
        known_launches: KnownLaunches | None,
        key: tuple[Any, ...],
    ) -> None:
        self.axes = [*axes]
        self.log = GatherLog([], [], [], [])
        self._known = known_launches
        self._key = key
        self._num_microbatches = 0
        self._guard: RollCall | Repeated | None = None
        for axis in self.axes:
            axis.start_gather_log(self.log)

    @property
    def are_known(self) -> bool:
        """Returns whether this rank remembers from an earlier update what a microbatch launches.

        It does not if gathers vary.
        """
        return bool(self._known and self._known.get(self._key))

    def guard(self, num_microbatches: int, *, all_know: bool) -> None:
        """Sets up ``Repeated`` if all ranks know what a microbatch launches, else a ``RollCall``.

        From then on, the guard's ``before_launch`` is called before each gather or scatter of
        shards, and may raise there. Sets up nothing without axes, or if ``known_launches`` is None.
        Call it before the first microbatch.

        ``num_microbatches`` is how many each rank runs, those that fill up included. ``Repeated``
        expects the launches of one microbatch that many times. ``all_know`` is whether
        ``are_known`` holds on all ranks. Both arguments are the same on all ranks.
        """
        if not self.axes or self._known is None:
            return
        self._num_microbatches = num_microbatches
        if all_know:
            self._guard = Repeated(self._known[self._key] * num_microbatches)
        else:
            self._guard = RollCall(self.axes)
        self.log.listeners.append(self._guard.before_launch)

    def leave(self) -> bool:
        """Stops the logs, and runs the ``leave`` of the guard, if there is one.

        Other ranks then do not wait for this one. Returns False if they would wait for ever: with
        axes, but without a guard.
        """
        self.stop()
        if self._guard is None:
            return not self.axes
        self._guard.leave()
        return True

    def end(self) -> None:
        """Stops the logs, and ends the guard if there is one.

        A ``RollCall`` runs a last sum for ranks that leave. A guard that has raised does so again,
        and ``Repeated`` raises if launches are left.
        """
        self.stop()
        if self._guard is not None:
            self._guard.end()

    def stop(self) -> None:
        """Stops the logs of its axes, and keeps what they have noted."""
        for axis in self.axes:
            axis.stop_gather_log()

    def describe(self) -> list[str]:
        """Lists, in order, what the losses have gathered, so that ranks can compare it.

        Under a ``RollCall``, it lists all launches of gathers and scatters, as text. Otherwise it
        lists the names of the units that have gathered their params.
        """
        if isinstance(self._guard, RollCall):
            return [f"{launch}" for launch in self.log.launches]
        return self.log.names

    def remember(self) -> None:
        """Stores what a microbatch has launched in ``known_launches``, for later updates.

        It stores nothing without a guard or launches, or after ``forget``. Nor does it if all
        launches are not equal repeats, one for each microbatch.
        """
        launches = self.log.launches
        if self._known is None or self._guard is None or not launches:
            return
        num_launches = len(launches) // self._num_microbatches
        first = launches[:num_launches]
        varies = self._known.get(self._key) == []
        if first * self._num_microbatches == launches and not varies:
            self._known[self._key] = first

    def forget(self) -> None:
        """Marks in ``known_launches`` that gathers vary for this rank and params of this structure.

        So none of these are remembered again. There must be ``known_launches``.
        """
        assert self._known is not None
        self._known[self._key] = []


def gather_axes(params: Params, axis: ProcessAxis) -> list[ProcessAxis]:
    """Lists the axes over which params are sharded, if they are ``axis`` or its subaxes.

    A loss gathers params over these. Each object comes once, as each has a log; equal axes may be
    several objects.
    """
    gathered = shards_over(tree.shard_specs(tree.flatten(params)[1]), axis)
    return [*{id(spec.axis): spec.axis for spec in gathered.values()}.values()]


def has_other_axes(params: Params, axes: Iterable[ProcessAxis]) -> bool:
    """Returns whether params are sharded over a further axis of processes or threads.

    An axis in ``axes`` does not count. Tensor parallelism has a further axis. Its ranks wait for
    each other inside the loss, where no session can say that one has left.
    """
    gathered = [*axes]
    for shard_spec in tree.shard_specs(tree.flatten(params)[1]):
        for other in shard_spec.axes if shard_spec else ():
            if other.is_multi_program and other not in gathered:
                return True
    return False


def again_if_gathers_vary(step: FunctionT) -> FunctionT:
    """Wraps a step to run once more if it raises ``GathersVaryError``.

    The first run has marked in ``known_launches`` that gathers vary, so the second has roll calls.
    A loss may then leave out a layer if all ranks do. The first run has changed nothing else but
    torch's random generator. An error of the second run is raised. The wrapper takes positional
    arguments alone.
    """

    @wraps(step)
    def step_again(*args: Any) -> Any:
        with suppress(GathersVaryError):
            return step(*args)
        return step(*args)

    return step_again  # type: ignore[return-value]
