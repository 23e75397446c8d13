"""Groups a stream of microbatches, one group for each update."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from numbers import Integral
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
    """Reports that the data ended within a group.

    It had ``num_found`` of ``num_expected`` microbatches, which are lost.

    >>> groups = group(range(3), 2, last="raise")
    >>> next(groups)
    [0, 1]
    >>> try:
    ...     next(groups)
    ... except DataExhausted as end:
    ...     print(f"{end.num_found} of {end.num_expected}")
    1 of 2
    """

    def __init__(self, num_found: int, num_expected: int) -> None:
        super().__init__(
            f"the data ran out after {num_found} of {num_expected} microbatches of a group: catch "
            'DataExhausted, or choose last="keep" or last="drop"'
        )
        self.num_found = num_found
        self.num_expected = num_expected


def group(
    batches: Iterable[Microbatch],
    k: int,
    last: Last = "keep",
    *,
    start: int = 0,
) -> Groups:
    """Puts the microbatches of any iterable, as a list or a ``DataLoader``, into groups of ``k``.

    Returns an iterator of lists, which reads ``k`` microbatches at a time. Raises ``ValueError``
    unless ``k`` is an integer from 1 on, ``start`` a whole number from 0 on, and for another
    ``last``. Warns of a ``DataLoader`` without batches.

    Args:
        batches: the microbatches, in order.
        k: how many make one update.
        last: what happens to a last group shorter than ``k``. "keep": the step weighs it by its
            tokens. "drop": it is left out. "raise": ``DataExhausted``.
        start: how many batches to skip: the ``position`` of the group after which you resume.

    A position holds only if the batches come in the same order again. With ``shuffle=True`` alone,
    a ``DataLoader`` draws its order from torch's global generator: a ``start`` above 0 then raises
    ``ValueError``. Seed the order by the epoch, and save the epoch and the position in the
    checkpoint:

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
    if not isinstance(k, Integral) or k < 1:
        raise ValueError(
            f"group: {k=} microbatches make no group: call group(batches, k)"
        )
    # A float that is no integer would skip for ever, and a tensor would be counted down in place.
    is_finite = hasattr(start, "__int__") and math.isfinite(start)
    if not is_finite or start < 0 or start != int(start):
        raise ValueError(
            f"group: {start=} is no position; take that of an earlier group"
        )
    if last not in get_args(Last):
        raise ValueError(f"group: {last=} must be one of {str(get_args(Last))[1:-1]}")
    if start and _uses_global_generator(batches):
        raise ValueError(
            f"group: {start=} of a DataLoader that shuffles by torch's global generator: its "
            "order is another one now. Seed it: DataLoader(..., shuffle=True, "
            "generator=torch.Generator().manual_seed(epoch)), in the first run as well"
        )
    if _is_empty_loader(batches):
        warnings.warn(
            "ps.group: this DataLoader has no batches, so a loop over the groups does nothing: its "
            "dataset is empty, or drop_last=True leaves out what is fewer than batch_size",
            stacklevel=2,
        )
    return Groups(batches, int(k), last, int(start))


class Groups(Iterator[list[Microbatch]]):
    """Yields groups of microbatches, as ``ps.group`` makes them.

    Attributes:
        position: how many batches the groups that you took have used, and those that ``start``
            skips. ``ps.group(..., start=position)`` goes on from there.

    >>> groups = Groups(range(5), 2, "keep", start=0)
    >>> next(groups), groups.position
    ([0, 1], 2)
    """

    def __init__(
        self, batches: Iterable[Microbatch], k: int, last: Last, start: int
    ) -> None:
        self._batches = iter(batches)
        self._k = k
        self._last = last
        self._num_to_skip = start
        self._pending: list[Microbatch] = []
        self._is_used_up = False
        self.position = start

    def __iter__(self) -> Groups:
        """Returns itself; warns if ``next`` has raised ``StopIteration``, as in a second epoch."""
        if self._is_used_up:
            warnings.warn(
                "these groups are used up: call ps.group again for each epoch",
                stacklevel=2,
            )
        return self

    def __next__(self) -> list[Microbatch]:
        """Returns the next group, and moves ``position``; the first call skips ``start`` batches.

        A last group that is short is returned, left out, or raises ``DataExhausted``, as ``last``
        says. If the source raises within a group, the next call goes on with the batches read so
        far.
        """
        while self._num_to_skip:
            next(self._batches, None)
            self._num_to_skip -= 1
        # Where the source raises, the list keeps the microbatches that came before.
        self._pending += islice(self._batches, self._k - len(self._pending))
        microbatches = self._pending
        self._pending = []
        is_short = len(microbatches) < self._k
        if not microbatches or (is_short and self._last == "drop"):
            self._is_used_up = True
            raise StopIteration
        if is_short and self._last == "raise":
            raise DataExhausted(len(microbatches), self._k)
        self.position += len(microbatches)
        return microbatches


def _is_empty_loader(batches: Any) -> bool:
    """Returns whether ``batches`` is a ``DataLoader`` whose length is known, and 0.

    Other data without batches are ordinary, as a stream on a rank without data.
    """
    if not isinstance(batches, DataLoader):
        return False
    with suppress(TypeError):  # A stream or a sampler may have no length.
        return len(batches) == 0
    return False


def _uses_global_generator(batches: Any) -> bool:
    """Returns whether ``batches`` is a ``DataLoader`` whose order torch's global generator draws.

    Only torch's random samplers are known.
    """
    if not isinstance(batches, DataLoader):
        return False
    random_samplers = RandomSampler | SubsetRandomSampler | WeightedRandomSampler
    samplers = [batches.sampler, getattr(batches.batch_sampler, "sampler", None)]
    return any(
        isinstance(sampler, random_samplers) and sampler.generator is None
        for sampler in samplers
    )
