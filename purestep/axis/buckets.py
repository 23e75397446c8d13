"""Sums over ranks in buckets: leaves of one dtype that travel together, last first.

The backward pass finds the gradient of the last leaf first. Leaves lie in a bucket row by row,
whatever their strides on any rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from purestep.axis.ranks import Ranks, Wait

FIRST_BYTES = 2**20
"""The size of the first bucket, so that it leaves early."""


@dataclass
class _Bucket:
    """Where each of its leaves begins, which of them it waits for, and the memory of all."""

    dtype: torch.dtype
    device: torch.device
    offsets: dict[int, int] = field(default_factory=dict)
    size: int = 0
    waiting: set[int] = field(default_factory=set)

    @cached_property
    def memory(self) -> Tensor:
        """A vector for all leaves, made when the first is there."""
        return torch.empty(self.size, dtype=self.dtype, device=self.device)


class Buckets:
    """Sums of these leaves over ranks, all-reduced while a backward pass runs.

    ``ready(index, total)`` takes the final sum of a leaf, and lets the full buckets leave; ``fill``
    takes all others. After ``wait`` the ``sums`` are those of all ranks, by position. All ranks
    launch buckets in one order. Where the loss itself runs collectives over the axis, no bucket
    leaves before ``launch``, since ranks might mix them up.
    """

    def __init__(
        self, axis: Ranks, leaves: Mapping[int, Tensor], dtypes: Sequence[torch.dtype]
    ) -> None:
        self._axis, self._leaves, self._left = axis, leaves, 0
        self.sums: dict[int, Tensor] = {}
        self._waits: list[Wait] = []
        self._of: dict[int, _Bucket] = {}
        self._buckets: list[_Bucket] = []
        latest: dict[tuple[torch.dtype, torch.device], _Bucket] = {}
        for at, leaf in reversed([*leaves.items()]):
            kind = dtypes[at], leaf.device
            bucket = latest.get(kind)
            most = min(axis.bucket_bytes, math.inf if self._buckets[1:] else FIRST_BYTES)
            if bucket is None or (bucket.size + leaf.numel()) * kind[0].itemsize > most:
                latest[kind] = bucket = _Bucket(*kind)
                self._buckets.append(bucket)
            self._of[at], bucket.offsets[at] = bucket, bucket.size
            bucket.size += leaf.numel()
            bucket.waiting.add(at)
        # The leaf with the lowest position is the last to be ready.
        self._buckets.sort(key=lambda bucket: -min(bucket.offsets))
        self.begin()

    def begin(self) -> None:
        """From here on, no collective runs over the axis but the buckets and those of the loss."""
        self._begun = self._axis.meetings

    @property
    def early(self) -> int:
        """How many buckets have left before a collective of the loss; alike on all ranks."""
        return 0 if self._begun == self._axis.meetings else self._left

    def ready(self, index: int, total: Tensor) -> Tensor:
        """Takes the final sum of a leaf; returns it as it lies in its bucket, if it has one."""
        if index not in self._of:
            return total
        if index not in self._of[index].waiting:
            raise RuntimeError(
                f"a param of shape {tuple(total.shape)} is given a gradient twice in one backward "
                "pass, by a torch.autograd.Function that runs one itself: return the gradient from "
                "the Function's backward instead"
            )
        self._take(index, total)
        while self._left < len(self._buckets) and not self._buckets[self._left].waiting:
            if self._begun is None or self._axis.meetings != self._begun:
                break
            self._launch()
            self.begin()
        return self.sums[index]

    def _take(self, index: int, total: Tensor) -> None:
        bucket = self._of[index]
        start = bucket.offsets[index]
        view = bucket.memory[start : start + total.numel()].view(total.shape)
        self.sums[index] = view.copy_(total.to_dense() if total.is_sparse else total)
        bucket.waiting.discard(index)

    def fill(self, sums: Sequence[Tensor]) -> None:
        """Takes all sums that are not there yet."""
        for index, bucket in self._of.items():
            if index in bucket.waiting:
                self._take(index, sums[index])

    def launch(self) -> None:
        """Starts all that is left."""
        while self._left < len(self._buckets):
            self._launch()

    def _launch(self) -> None:
        self._waits.append(self._axis.launch(self._buckets[self._left].memory))
        self._left += 1

    def wait(self) -> None:
        """Waits for all that has been started."""
        for wait in self._waits:
            wait()


def all_reduced(leaves: Sequence[Tensor], axis: Ranks) -> list[Tensor]:
    """The sum over ranks of every leaf, in new memory."""
    buckets = Buckets(axis, dict(enumerate(leaves)), [leaf.dtype for leaf in leaves])
    buckets.fill(leaves)
    buckets.launch()
    buckets.wait()
    return [laid_out_like(leaf, buckets.sums[at]) for at, leaf in enumerate(leaves)]


def laid_out_like(leaf: Tensor, total: Tensor) -> Tensor:
    """The total with the leaf's strides: kernels read both side by side."""
    if total.stride() == leaf.stride():
        return total
    return torch.empty_like(leaf, dtype=total.dtype).copy_(total)
