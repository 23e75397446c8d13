"""A stream of batches as groups, one for each update."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal, get_args

from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from purestep.types import Microbatch

Last = Literal["keep", "drop", "raise"]


class DataExhausted(RuntimeError):  # noqa: N818
    """The data ran out in the middle of a group, after ``found`` of ``wanted`` microbatches.

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
            f"the data ran out after {found} of {wanted} microbatches of a group: catch "
            'DataExhausted, or choose last="keep" or last="drop"'
        )
        self.found, self.wanted = found, wanted


class group(Iterator[list[Microbatch]]):  # noqa: N801
    """Puts microbatches from any iterable into groups of ``k``: a list, a ``DataLoader``.

    Args:
        batches: the microbatches, in order.
        k: how many make one update.
        last: what happens to a last group shorter than ``k``. "keep": the step weighs it by its
            tokens. "drop": it is left out. "raise": ``DataExhausted``.
        start: how many batches to skip: the ``position`` of the group after which you resume.

    A position holds only if the batches come in the same order again. With ``shuffle=True`` alone,
    a ``DataLoader`` draws its order from torch's global generator, and ``start`` refuses it. Seed
    the order by the epoch, and save the epoch and the position in the checkpoint:

    >>> from torch.utils.data import DataLoader
    >>> def epoch_of(epoch, start=0):
    ...     order = torch.Generator().manual_seed(epoch)
    ...     loader = DataLoader(torch.arange(5), shuffle=True, generator=order)
    ...     return group(loader, 2, start=start)
    >>> import torch
    >>> groups = epoch_of(epoch=3)
    >>> first = next(groups)
    >>> list(epoch_of(epoch=3, start=groups.position)) == list(groups)
    True

    >>> list(group(range(5), 2))
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        batches: Iterable[Microbatch],
        k: int,
        last: Last = "keep",
        *,
        start: int = 0,
    ) -> None:
        if k < 1:
            raise ValueError(f"group: {k=} microbatches make no group")
        if start < 0:
            raise ValueError(
                f"group: {start=} is no position; take that of an earlier group"
            )
        if last not in get_args(Last):
            raise ValueError(
                f"group: {last=} must be one of {str(get_args(Last))[1:-1]}"
            )
        if start and _shuffles_by_the_global_generator(batches):
            raise ValueError(
                f"group: {start=} of a DataLoader that shuffles by torch's global generator: its "
                "order is another one now. Seed it: DataLoader(..., shuffle=True, "
                "generator=torch.Generator().manual_seed(epoch)), in the first run as well"
            )
        self._batches, self._to_skip = iter(batches), start
        self._k, self._last = k, last
        self._taken: list[Microbatch] = []
        self.position = start

    def __next__(self) -> list[Microbatch]:
        """The next group. Batches taken before an error of the source are part of the next one."""
        while self._to_skip:
            next(self._batches, None)
            self._to_skip -= 1
        self._taken += islice(self._batches, self._k - len(self._taken))
        taken, self._taken = self._taken, []
        if not taken or (len(taken) < self._k and self._last == "drop"):
            raise StopIteration
        if len(taken) < self._k and self._last == "raise":
            raise DataExhausted(len(taken), self._k)
        self.position += len(taken)
        return taken


def _shuffles_by_the_global_generator(batches: Any) -> bool:
    if not isinstance(batches, DataLoader):
        return False
    samplers = [batches.sampler, getattr(batches.batch_sampler, "sampler", None)]
    shuffles = RandomSampler | SubsetRandomSampler | WeightedRandomSampler
    return any(
        isinstance(each, shuffles) and each.generator is None for each in samplers
    )
