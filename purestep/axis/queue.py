"""Collectives in one and the same order on every rank, each of which begins as soon as what it needs is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from purestep.axis.ranks import Ranks, Wait


class Load(NamedTuple):
    """What travels in one collective over an axis: something of each of these leaves."""

    leaves: Sequence[int]
    axis: Ranks
    launch: Callable[[], Wait]


class Queue:
    """Loads, which leave while a backward pass is still at work.

    Call ``begin``, and ``ready(index)`` once when a leaf is final, in any order: a load is launched when all of its leaves are
    ready and all loads before it have left, so that ranks launch in one order although they may find their gradients
    in different ones. ``launch`` those that are left, and ``wait`` for all. Where the loss meets over an axis too, none
    leaves over it before ``launch``: ranks would mix up its collectives with these.

    Args:
        loads: in the order in which they leave.
        most: how many may be under way before the first of them is waited for, so that what they hold is freed; None: all.
    """

    def __init__(self, loads: Sequence[Load], most: int | None = None) -> None:
        # The leaf with the lowest position is the last to come.
        self._loads = sorted(loads, key=lambda load: -min(load.leaves))
        self._most = most
        self._of: dict[int, list[int]] = {}
        for number, load in enumerate(self._loads):
            for index in load.leaves:
                self._of.setdefault(index, []).append(number)
        self._meetings: dict[Ranks, int | None] = {}
        self._missing = [len(load.leaves) for load in self._loads]
        self._waits: list[Wait] = []
        self._left = self._waited = 0

    def begin(self) -> None:
        """From here on, no other collective runs over the axes but where the loss calls it."""
        self._meetings = {load.axis: load.axis.meetings for load in self._loads}
        self._missing = [len(load.leaves) for load in self._loads]
        self._waits, self._left, self._waited = [], 0, 0

    def ready(self, index: int) -> None:
        """What this leaf brings is final."""
        for number in self._of.get(index, ()):
            self._missing[number] -= 1
        while self._left < len(self._loads) and not self._missing[self._left]:
            axis = self._loads[self._left].axis
            if axis.meetings is None or axis.meetings != self._meetings.get(axis):
                return
            self._launch()

    def launch(self) -> None:
        """Begins all that is left."""
        while self._left < len(self._loads):
            self._launch()

    def wait(self, but: int = 0) -> None:
        """Waits for all, but for the last ones."""
        while self._waited < self._left - but:
            wait, self._waits[self._waited] = self._waits[self._waited], _waited
            self._waited += 1
            wait()

    def _launch(self) -> None:
        if self._most is not None:
            self.wait(but=self._most - 1)
        load = self._loads[self._left]
        self._waits.append(load.launch())
        self._left += 1
        self._meetings[load.axis] = load.axis.meetings


def _waited() -> None:
    pass
