"""Sums over ranks in buckets: leaves of one dtype that travel together, last first.

The backward pass finds the gradient of the last leaf first. Leaves lie in a bucket row by row,
whatever their strides on any rank: in one row that all ranks sum, or, to be scattered, in a row for
each rank, of which this rank keeps the sum of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from purestep.axis.rows import entries_of, rows_of, width_of
from purestep.tree.shard import Place

if TYPE_CHECKING:
    from purestep.axis.ranks import Ranks, Wait

FIRST_BYTES = 2**20
"""The size of the first bucket, so that it leaves early."""

BLOCKS = 8
"""Whole leaves are scattered in about so many blocks at least, each freed when it has left."""


@dataclass
class _Bucket:
    """Where each of its leaves begins, which of them it waits for, and the memory of all."""

    dtype: torch.dtype
    device: torch.device
    over: Ranks | None
    apart: Ranks | None = None
    offsets: dict[int, int] = field(default_factory=dict)
    size: int = 0
    waiting: set[int] = field(default_factory=set)
    wait: Wait | None = None

    @cached_property
    def memory(self) -> Tensor:
        """A row, or one for each rank, for all leaves; made when the first is there."""
        rows = self.apart.size if self.apart else 1
        return torch.empty((rows, self.size), dtype=self.dtype, device=self.device)


class Buckets:
    """Sums of these leaves over ranks, which travel while a backward pass runs.

    ``ready(index, total)`` takes the final sum of a leaf, and lets the full buckets leave; ``fill``
    takes all others. After ``wait`` the ``sums`` are those of all ranks, by position; of leaves
    with a place in ``apart``, this rank's pieces. All ranks launch buckets in one order. Where the
    loss itself runs collectives over an axis of theirs, no bucket leaves before ``launch``, since
    ranks might mix them up.

    ``over`` has the leaves that are summed over an axis, after a scatter if they have one.
    """

    def __init__(
        self,
        axis: Ranks,
        leaves: Mapping[int, Tensor],
        dtypes: Sequence[torch.dtype],
        apart: Mapping[int, Place] | None = None,
        over: Mapping[int, Ranks] | None = None,
    ) -> None:
        self._leaves, self._left, self._apart = leaves, 0, apart or {}
        self.sums: dict[int, Tensor] = {}
        self._of: dict[int, _Bucket] = {}
        self._buckets: list[_Bucket] = []
        latest: dict[object, _Bucket] = {}
        whole = sum(math.prod(place.shape) for place in self._apart.values())
        for at, leaf in reversed([*leaves.items()]):
            place, beside = self._apart.get(at), axis if over is None else over.get(at)
            kind = dtypes[at], leaf.device, beside, place and place.axis
            bucket = latest.get(kind)
            width = width_of(place) if place else leaf.numel()
            rows, itemsize = place.axis.size if place else 1, dtypes[at].itemsize
            most = max(whole * itemsize // BLOCKS, FIRST_BYTES) if place else math.inf
            most = min(axis.bucket_bytes, most if self._buckets[1:] else FIRST_BYTES)
            if bucket is None or (bucket.size + width) * rows * itemsize > most:
                latest[kind] = bucket = _Bucket(*kind)
                self._buckets.append(bucket)
            self._of[at], bucket.offsets[at] = bucket, bucket.size
            bucket.size += width
            bucket.waiting.add(at)
        # The leaf with the lowest position is the last to be ready.
        self._buckets.sort(key=lambda bucket: -min(bucket.offsets))
        ends = [end for bucket in self._buckets for end in (bucket.over, bucket.apart)]
        self._axes = {axis, *(end for end in ends if end is not None)}
        self.begin()

    def _meetings(self) -> list[int | None]:
        return [axis.meetings for axis in self._axes]

    def begin(self) -> None:
        """From here on, no collective runs over the axes but the buckets and those of the loss."""
        self._begun = self._meetings()

    @property
    def early(self) -> int:
        """How many buckets have left before a collective of the loss; alike on all ranks."""
        return 0 if self._begun == self._meetings() else self._left

    def ready(self, index: int, total: Tensor) -> Tensor:
        """Takes the final sum of a leaf; returns it as it lies in its bucket, if it has one.

        The sum of a leaf that is scattered is gone: a tensor of its shape without memory is left.
        """
        if index not in self._of:
            return total
        if index not in self._of[index].waiting:
            raise RuntimeError(
                f"a param of shape {tuple(total.shape)} is given a gradient twice in one backward "
                "pass, by a torch.autograd.Function that runs one itself: return the gradient from "
                "the Function's backward instead"
            )
        taken = self._take(index, total)
        while self._left < len(self._buckets) and not self._buckets[self._left].waiting:
            if None in self._begun or self._meetings() != self._begun:
                break
            self._launch()
            self.begin()
        return taken

    def _take(self, index: int, total: Tensor | None) -> Tensor:
        bucket, leaf, place = self._of[index], self._leaves[index], self._apart.get(index)
        bucket.waiting.discard(index)
        start = bucket.offsets[index]
        if place is None:
            assert total is not None
            view = bucket.memory[0, start : start + leaf.numel()].view(total.shape)
            self.sums[index] = view.copy_(total.to_dense() if total.is_sparse else total)
            return view
        rows = bucket.memory[:, start : start + width_of(place)]
        rows.copy_(rows_of(total, place, place.axis.size)) if total is not None else rows.zero_()
        return rows.new_zeros(()).expand(place.shape)

    def fill(self, sums: Sequence[Tensor | None]) -> None:
        """Takes all sums that are not there yet; None is a scattered leaf's zero."""
        for index, bucket in self._of.items():
            if index in bucket.waiting:
                self._take(index, sums[index])

    def launch(self) -> None:
        """Starts all that is left."""
        while self._left < len(self._buckets):
            self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[self._left]
        if not bucket.size:
            bucket.wait = partial(bucket.memory.sum, 0)
        elif bucket.apart:
            bucket.wait = bucket.apart.launch(bucket.memory, "psum_scatter")
        elif bucket.over:
            bucket.wait = bucket.over.launch(bucket.memory[0])
        self._left += 1
        for earlier in self._buckets[: self._left - 2]:
            if earlier.apart:
                _scattered(earlier)  # Whole blocks are freed, but for two.

    def wait(self) -> None:
        """Waits for all that has been started."""
        started = self._buckets[: self._left]
        for bucket in started:
            if bucket.apart:
                _scattered(bucket)
                if bucket.over:
                    bucket.wait = bucket.over.launch(bucket.memory[0])
        for bucket in started:
            if bucket.wait:
                bucket.wait()
            for index, start in bucket.offsets.items() if bucket.apart else ():
                place = self._apart[index]
                self.sums[index] = entries_of(bucket.memory[:, start:][:, : width_of(place)], place)


def _scattered(bucket: _Bucket) -> None:
    if bucket.wait:
        bucket.memory, bucket.wait = bucket.wait()[None], None


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
