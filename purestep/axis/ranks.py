"""What axes have in common whose ranks run programs of their own: processes, or threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.axis.buckets import packed, summed
from purestep.axis.laws import Where, collective
from purestep.types import Tree

Wait: TypeAlias = Callable[[], None]
"""Waits for what was launched, as long as the axis itself allows."""

BUCKET_BYTES = 25 * 2**20


class RankError(RuntimeError):
    """This rank cannot go on because of another, which has failed, died or gone elsewhere.

    >>> from purestep import psum
    >>> from purestep.testing import ThreadAxis
    >>> axis = ThreadAxis(2)
    >>> def program(x):
    ...     try:
    ...         return psum(x, axis) if x > 1 else x
    ...     except RankError:
    ...         return "alone"
    >>> axis.map(program)([torch.tensor(1.0), torch.tensor(2.0)])
    [tensor(1.), 'alone']
    """


class Ranks(ABC):
    """Ranks that run programs of their own, and may therefore disagree.

    They meet in ``where`` for one law on one plain tensor each; ``device`` is where such tensors live.
    """

    own_programs = True
    size: int
    device: torch.device

    def __init__(self, bucket_bytes: int) -> None:
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise ValueError(
                f"{bucket_bytes=} must be a whole number of bytes, such as {BUCKET_BYTES}"
            )
        self.bucket_bytes = bucket_bytes

    @property
    @abstractmethod
    def where(self) -> Where:
        """Where the ranks meet."""

    @property
    @abstractmethod
    def meetings(self) -> int | None:
        """How many of the ranks' collectives have begun, whoever called them; None where nobody counts."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Which rank this is."""

    @property
    def members(self) -> frozenset[int]:
        """All ranks that it joins, this one included, by numbers that all axes of a world share; empty where nobody knows."""
        return frozenset()

    @property
    def index(self) -> Tensor:
        """The same as a scalar tensor."""
        return torch.tensor(self.rank)

    @property
    def on_host(self) -> bool:
        """Whether what the ranks exchange can be read without waiting for a device."""
        return self.device.type == "cpu"

    def apply(self, law: str, x: Tensor) -> Tensor:
        """The law over the ranks, with its transpose, under any transform."""
        if tree.eager(x):
            return self.where.meet(law, x)  # nobody asks for the transpose, whose record takes time
        return collective(x, None, law, self.where)

    def apply_tree(self, law: str, x: Tree) -> Tree:
        """psum or pvary of every leaf: sums in ⌈bytes / bucket_bytes⌉ collectives for each dtype."""
        if law == "psum":
            return summed(packed(x), self)
        return x if tree.eager(x) else tree.map(partial(self.apply, law), x)

    @abstractmethod
    def launch(self, law: str, x: Tensor, out: Tensor) -> Wait:
        """Starts a law on contiguous memory, whose result is in ``out`` when it has been waited for; psum: in ``x`` itself."""

    @abstractmethod
    def across(self, inner: Ranks) -> Ranks:
        """The axis over those of these ranks that hold the same of what is spread over ``inner``, a part of this axis."""
