"""Sums over ranks in buckets: leaves as one flat vector, cut into pieces of equal size.

The vector begins with the last leaf, whose gradient the backward pass finds first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from purestep.axis.ranks import Ranks, Wait


def bucketwise(axis: Ranks, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The sum over ranks of every leaf, in ⌈bytes / bucket_bytes⌉ collectives for each dtype."""
    sums = list(leaves)
    for members in _alike((leaf.dtype, leaf.device) for leaf in leaves):
        flat = torch.cat([leaves[index].reshape(-1) for index in members])
        if flat.numel():
            pieces = [axis.apply("psum", piece) for piece in flat.split(_capacity(axis, flat))]
            flat = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        parts = flat.split([leaves[index].numel() for index in members])
        for index, part in zip(members, parts, strict=True):
            sums[index] = part.view(leaves[index].shape)
    return sums


class Buckets:
    """The same sums, of leaves that are still being added up: a bucket leaves as soon as it is complete.

    ``sums`` are buffers for the leaves, views of flat vectors. Write into them, and call ``ready(index)``
    when one is final, in any order: buckets are launched in one and the same order on every rank, so
    that communication overlaps with the backward pass that is still at work. ``finish`` launches those
    that are left, and waits for all. Where the loss meets over this axis too, that is all of them: ranks
    may find their gradients in different orders, and would mix up its collectives with these.

    A row of integers travels with the last bucket. Each rank writes its own, as bytes, into its own row of
    a table of zeros: bytes, and sums of a byte and zeros, are exact in any floating point dtype.
    """

    def __init__(
        self, axis: Ranks, leaves: Sequence[Tensor], dtypes: Sequence[torch.dtype], width: int
    ) -> None:
        self.sums = list(leaves)
        self._axis = axis
        self._buckets: list[Tensor] = []
        self._missing: list[set[int]] = []
        self._waits: list[Wait] = []
        self._meetings = axis.meetings
        kinds = ((dtype, leaf.device) for dtype, leaf in zip(dtypes, leaves, strict=True))
        groups = _alike(kinds) or [[]]
        for members in groups:
            like = leaves[members[0]] if members else torch.empty(0, device=axis.device)
            dtype = dtypes[members[0]] if members else like.dtype
            sizes = [leaves[index].numel() for index in members]
            table = axis.size * width * 8 if members is groups[-1] else 0
            flat = like.new_empty(sum(sizes) + table, dtype=dtype)
            capacity = _capacity(axis, flat)
            # The table makes the last bucket a little larger, never one more of them.
            edges = [*range(0, max(1, sum(sizes)), capacity), len(flat)]
            first = len(self._buckets)
            self._buckets += [flat[start:stop] for start, stop in pairwise(edges)]
            self._missing += [set() for _ in edges[1:]]
            spans = pairwise(accumulate(sizes, initial=0))
            for index, (start, stop) in zip(members, spans, strict=True):
                self.sums[index] = _laid_out_like(leaves[index], flat[start:stop])
                for place in range(start // capacity, -(-stop // capacity)):
                    self._missing[first + place].add(index)

    def ready(self, index: int) -> None:
        """The sum of this leaf is final."""
        for missing in self._missing:
            missing.discard(index)
        if self._axis.meetings != (self._meetings or 0) + len(self._waits):
            return
        # All but the last, which waits for the row.
        while len(self._waits) < len(self._buckets) - 1 and not self._missing[len(self._waits)]:
            self._launch()

    def finish(self, row: Tensor, timeout: float | None = None) -> Tensor:
        """Sums what is left; returns the rows of all ranks, ``(ranks, width)``."""
        table = self._buckets[-1][-self._axis.size * len(row) * 8 :].view(self._axis.size, -1)
        table.zero_()[self._axis.rank] = row.view(torch.uint8).to(table)
        while len(self._waits) < len(self._buckets):
            self._launch()
        for wait in self._waits:
            wait(timeout)
        return table.to(torch.uint8).view(torch.int64)

    def _launch(self) -> None:
        self._waits.append(self._axis.launch(self._buckets[len(self._waits)]))


def _laid_out_like(leaf: Tensor, part: Tensor) -> Tensor:
    """The part as a tensor with the leaf's strides, which is how autograd wants its gradients."""
    if leaf.is_contiguous():
        return part.view(leaf.shape)
    strides = torch.empty_like(leaf, device="meta").stride()
    return part.as_strided(leaf.shape, strides, part.storage_offset())


def _alike(kinds: Iterable[Hashable]) -> list[list[int]]:
    """The positions of each kind, last first."""
    groups: dict[Hashable, list[int]] = {}
    for index, kind in reversed(list(enumerate(kinds))):
        groups.setdefault(kind, []).append(index)
    return list(groups.values())


def _capacity(axis: Ranks, flat: Tensor) -> int:
    return max(1, axis.bucket_bytes // flat.element_size())
