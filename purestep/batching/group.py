"""A stream of batches as groups, one for each update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, get_args

from purestep.types import Microbatch

Last = Literal["keep", "drop", "raise"]


class DataExhausted(RuntimeError):  # noqa: N818
    """The data ran out in the middle of a group, which held ``found`` of ``wanted`` microbatches.

    >>> groups = group(range(3), 2, last="raise")
    >>> next(groups)
    [0, 1]
    >>> try:
    ...     next(groups)
    ... except DataExhausted as end:
    ...     print(f"{end.found} of {end.wanted}")
    1 of 2
    """

    def __init__(self, found: int, wanted: int) -> None:
        super().__init__(
            f"the data ran out after {found} of {wanted} microbatches of a group: catch DataExhausted to "
            'end the epoch there, or take the short group (last="keep") or leave it (last="drop")'
        )
        self.found, self.wanted = found, wanted


class group(Iterator[list[Microbatch]]):  # noqa: N801
    """Groups of ``k`` microbatches from any iterable of them: a list, a generator, a ``DataLoader``.

    Args:
        batches: the microbatches, in order.
        k: how many make an update.
        last: what becomes of a tail shorter than ``k``: "keep" gives it as a short group, which an update
            step weighs by the tokens it has; "drop" leaves it; "raise" is ``DataExhausted``.
        start: how many batches to skip: the ``position`` of the iterator that is to be resumed.

    >>> list(group(range(5), 2))
    [[0, 1], [2, 3], [4]]
    >>> groups = group(range(5), 2, last="drop")
    >>> next(groups), groups.position
    ([0, 1], 2)
    >>> list(group(range(5), 2, last="drop", start=groups.position))
    [[2, 3]]
    """

    def __init__(
        self, batches: Iterable[Microbatch], k: int, last: Last = "keep", *, start: int = 0
    ) -> None:
        if k < 1:
            raise ValueError(f"group: {k=} microbatches make no group")
        if start < 0:
            raise ValueError(
                f"group: {start=} is no position; take the position of an earlier group"
            )
        if last not in get_args(Last):
            raise ValueError(
                f"group: {last=} must be one of {', '.join(map(repr, get_args(Last)))}"
            )
        self._batches, self._to_skip = iter(batches), start
        self._k, self._last = k, last
        self._taken: list[Microbatch] = []
        self.position = start

    def __next__(self) -> list[Microbatch]:
        """The next group. Batches taken before an error of the source are part of the next one."""
        while len(self._taken) < self._k:
            try:
                batch = next(self._batches)
            except StopIteration:
                break
            if self._to_skip:
                self._to_skip -= 1
            else:
                self._taken.append(batch)
        taken, self._taken = self._taken, []
        if not taken or (len(taken) < self._k and self._last == "drop"):
            raise StopIteration
        if len(taken) < self._k and self._last == "raise":
            raise DataExhausted(len(taken), self._k)
        self.position += len(taken)
        return taken
