"""Sums over ranks in buckets: leaves as one flat vector for each dtype, cut into equal parts.

The vector begins with the last leaf, whose gradient the backward pass finds first. Leaves lie in it
row by row, whatever their strides on any rank.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from purestep.axis.ranks import Ranks, Wait

FIRST_BYTES = 2**20
"""The size of the first bucket, so that it leaves early."""


class Buckets:
    """Flat buffers for the sums of these leaves, all-reduced while a backward pass runs.

    Add gradients to the ``views``. ``ready(index)`` lets the full buckets leave, ``launch`` all
    others; after ``wait`` the ``results`` are the sums over ranks. All ranks launch buckets in one
    order. Where the loss itself runs collectives over the axis, no bucket leaves before ``launch``,
    since ranks might mix them up.
    """

    def __init__(
        self, axis: Ranks, leaves: Mapping[int, Tensor], dtypes: Sequence[torch.dtype]
    ) -> None:
        self._axis, self._leaves = axis, leaves
        self.views: dict[int, Tensor] = {}
        self._waits: list[Wait] = []
        alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for at, leaf in reversed([*leaves.items()]):
            alike.setdefault((dtypes[at], leaf.device), []).append(at)
        buckets: list[tuple[list[int], Tensor]] = []
        for (dtype, device), group in alike.items():
            sizes = [leaves[at].numel() for at in group]
            offsets = [*accumulate(sizes, initial=0)]
            vector = torch.zeros(offsets[-1], dtype=dtype, device=device)
            for at, offset, size in zip(group, offsets, sizes, strict=False):
                # Not split: its views of a lazy tensor cannot be added to.
                self.views[at] = vector[offset : offset + size].view(leaves[at].shape)
            most = max(1, axis.bucket_bytes // dtype.itemsize)
            first = most if buckets else min(most, FIRST_BYTES // dtype.itemsize)
            for start, stop in pairwise([0, *range(first, len(vector), most), len(vector)]):
                inside = group[bisect_right(offsets, start) - 1 : bisect_left(offsets, stop)]
                if inside:
                    buckets.append((inside, vector[start:stop]))
        # The leaf with the lowest position is the last to be ready.
        buckets.sort(key=lambda bucket: -bucket[0][-1])
        self._parts = [part for _, part in buckets]
        self._left, self._missing = 0, [*(len(inside) for inside, _ in buckets), -1]
        self._of: list[tuple[int, ...]] = [()] * len(dtypes)
        for number, (inside, _) in enumerate(buckets):
            for at in inside:
                # What is added up elsewhere is copied when all is there.
                self._of[at] += (number,) if leaves[at].is_contiguous() else ()
        self.begin()

    def begin(self) -> None:
        """From here on, no collective runs over the axis but the buckets and those of the loss."""
        self._begun = self._axis.meetings

    def ready(self, index: int) -> None:
        """The sum of this leaf is final."""
        missing = self._missing
        for number in self._of[index]:
            missing[number] -= 1
        while not missing[self._left]:  # the last one is -1
            if self._begun is None or self._axis.meetings != self._begun:
                return
            self._launch()
            self.begin()

    def fill(self, sums: Sequence[Tensor]) -> None:
        """Copies the sums that are elsewhere into their views."""
        for at, view in self.views.items():
            if sums[at] is not view and not sums[at].is_set_to(view):
                view.copy_(sums[at])

    def launch(self) -> None:
        """Starts all that is left."""
        while self._left < len(self._parts):
            self._launch()

    def _launch(self) -> None:
        part = self._parts[self._left]
        self._waits.append(self._axis.launch("psum", part, part))
        self._left += 1

    def wait(self) -> None:
        """Waits for all that has been started."""
        for wait in self._waits:
            wait()

    def results(self) -> dict[int, Tensor]:
        """The sums over ranks, by position, each with its leaf's strides."""
        return {at: laid_out_like(self._leaves[at], view) for at, view in self.views.items()}


def all_reduced(leaves: Sequence[Tensor], axis: Ranks) -> list[Tensor]:
    """The sum over ranks of every leaf, in new memory."""
    buckets = Buckets(axis, dict(enumerate(leaves)), [leaf.dtype for leaf in leaves])
    buckets.fill(leaves)
    buckets.launch()
    buckets.wait()
    sums = buckets.results()
    return [sums[at] for at in range(len(leaves))]


def laid_out_like(leaf: Tensor, total: Tensor) -> Tensor:
    """The total with the leaf's strides: kernels read both side by side."""
    if total.stride() == leaf.stride():
        return total
    return torch.empty_like(leaf, dtype=total.dtype).copy_(total)
