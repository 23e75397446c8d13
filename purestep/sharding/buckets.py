"""Buckets: leaves of one dtype that travel between ranks together, last first.

The backward pass finds the gradient of the last leaf first. Leaves lie in a bucket row by row,
whatever their strides on any rank. All ranks sum one row, or gather a row of each; or they scatter
a row for each rank, of which this rank keeps the sum of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from purestep.axis.process import ProcessAxis, Wait
from purestep.sharding.layout import pack_rows, row_numel, unpack_rows
from purestep.tree.shard import ShardSpec

FIRST_BYTES = 2**20
"""The size of the first bucket, so that it leaves early."""


@dataclass
class _Bucket:
    """Where each of its leaves begins, which of them it waits for, and the memory of all."""

    dtype: torch.dtype
    device: torch.device
    over: ProcessAxis | None
    apart: ProcessAxis | None
    rows: int
    offsets: dict[int, int] = field(default_factory=dict)
    width: int = 0
    waiting: set[int] = field(default_factory=set)
    wait: Wait | None = None

    @cached_property
    def memory(self) -> Tensor:
        """The rows of all leaves, made when the first is there; backends take no empty ones."""
        return torch.empty(
            self.rows, max(self.width, 1), dtype=self.dtype, device=self.device
        )


class GradBuckets:
    """Leaves that travel between ranks, while a backward pass runs: their sums, above all.

    ``ready(index, total)`` takes the final sum of a leaf, and lets the full buckets leave; ``fill``
    takes all others. After ``wait`` the ``sums`` are those of all ranks, by position. All ranks
    launch buckets in one order. Where the loss itself runs collectives over an axis of theirs, no
    bucket leaves before ``launch``, since ranks might mix them up.

    Leaves with a place in ``apart`` are scattered, or gathered if that is the ``law``. ``over`` has
    the leaves that are summed over an axis, after a scatter if they have one.
    """

    def __init__(
        self,
        axis: ProcessAxis,
        leaves: Mapping[int, Tensor],
        dtypes: Sequence[torch.dtype],
        apart: Mapping[int, ShardSpec] | None = None,
        over: Mapping[int, ProcessAxis] | None = None,
        law: str = "psum_scatter",
        first_bytes: float = FIRST_BYTES,
    ) -> None:
        self._left, self._apart, self._law = 0, apart or {}, law
        self.sums: dict[int, Tensor] = {}
        self._of: dict[int, _Bucket] = {}
        self._buckets: list[_Bucket] = []
        latest: dict[object, _Bucket] = {}
        for at, leaf in reversed([*leaves.items()]):
            place, beside = self._apart.get(at), axis if over is None else over.get(at)
            ranks = place.axis.size if place else 1
            width = row_numel(place) if place else leaf.numel()
            rows = 1 if law == "all_gather" else ranks
            kind = dtypes[at], leaf.device, beside, place and place.axis, rows
            bucket = latest.get(kind)
            most = min(
                axis.bucket_bytes, math.inf if self._buckets[1:] else first_bytes
            )
            if (
                bucket is None
                or (bucket.width + width) * ranks * dtypes[at].itemsize > most
            ):
                latest[kind] = bucket = _Bucket(*kind)
                self._buckets.append(bucket)
            self._of[at], bucket.offsets[at] = bucket, bucket.width
            bucket.width += width
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

    def _take(self, index: int, total: Tensor) -> Tensor:
        bucket, place = self._of[index], self._apart.get(index)
        bucket.waiting.discard(index)
        start = bucket.offsets[index]
        if place is None:
            view = bucket.memory[0, start : start + total.numel()].view(total.shape)
            self.sums[index] = view.copy_(
                total.to_dense() if total.is_sparse else total
            )
            return view
        rows = bucket.memory[:, start : start + row_numel(place)]
        rows.copy_(pack_rows(total, place, bucket.rows))
        return rows.new_zeros(()).expand(total.shape)

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
        bucket = self._buckets[self._left]
        if bucket.apart:
            bucket.wait = bucket.apart.launch(bucket.memory, self._law)
        elif bucket.over:
            bucket.wait = bucket.over.launch(bucket.memory[0])
        self._left += 1
        if self._left > 2:
            self._receive(
                self._buckets[self._left - 3]
            )  # The rows of all ranks are freed.

    def _receive(self, bucket: _Bucket) -> None:
        if bucket.apart and bucket.wait:
            bucket.memory, bucket.wait = bucket.wait().view(-1, bucket.width or 1), None

    def wait(self) -> None:
        """Waits for all that has been started."""
        started = self._buckets[: self._left]
        for bucket in started:
            self._receive(bucket)
            if bucket.apart and bucket.over:
                bucket.wait = bucket.over.launch(bucket.memory[0])
        for bucket in started:
            if bucket.wait:
                bucket.wait()
            for index in self._apart.keys() & bucket.offsets:
                place, start = self._apart[index], bucket.offsets[index]
                rows = bucket.memory[:, start : start + row_numel(place)]
                self.sums[index] = unpack_rows(rows, place)

    def finish(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """The sums of all ranks, by position; others as they are."""
        self.fill(sums)
        self.launch()
        self.wait()
        return [self.sums.get(at, here) for at, here in enumerate(sums)]


def run_in_buckets(
    law: str, tensors: Sequence[Tensor], places: Sequence[ShardSpec]
) -> list[Tensor]:
    """The wholes of all pieces, or this rank's pieces of the sums, in few collectives."""
    if not tensors:
        return []
    leaves, dtypes = dict(enumerate(tensors)), [x.dtype for x in tensors]
    apart = dict(enumerate(places))
    return GradBuckets(places[0].axis, leaves, dtypes, apart, {}, law, math.inf).finish(
        tensors
    )
