"""Sums over ranks in buckets: leaves as one flat vector, cut into pieces of equal size.

The vector begins with the last leaf, whose gradient the backward pass finds first. Leaves lie in it row by
row, however they lie in the memory of any rank; a sum that comes out lies as its leaf does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from purestep import tree
from purestep.types import Tree

if TYPE_CHECKING:
    from purestep.axis.ranks import Ranks, Wait

FIRST_BYTES = 2**20
"""The size of the first bucket."""


class Packed(NamedTuple):
    """A tree of tensors, and one vector for each dtype with what they hold, row by row.

    Packing can go wrong on one rank alone, and is done before any other waits for it.
    """

    leaves: list[Tensor]
    structure: tree.Structure
    vectors: list[tuple[list[int], Tensor]]


def packed(x: Tree) -> Packed:
    """The tree, ready to be summed."""
    leaves, structure = tree.flatten(x)
    kinds = _alike((leaf.dtype, leaf.device) for leaf in leaves)
    vectors = [(members, torch.cat([leaves[i].reshape(-1) for i in members])) for members in kinds]
    return Packed(leaves, structure, vectors)


def summed(x: Packed, axis: Ranks) -> Any:
    """The sum over ranks of every leaf, in ⌈bytes / bucket_bytes⌉ collectives for each dtype."""
    sums = list(x.leaves)
    eager = tree.eager(sums)
    for members, flat in x.vectors:
        if flat.numel():
            pieces = [axis.apply("psum", piece) for piece in flat.split(_capacity(axis, flat))]
            flat = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        parts = flat.split([x.leaves[index].numel() for index in members])
        for index, part in zip(members, parts, strict=True):
            total = part.view(x.leaves[index].shape)
            sums[index] = laid_out_like(x.leaves[index], total) if eager else total
    return tree.unflatten(x.structure, sums)


class Buckets:
    """The same sums, of leaves that are still being added up: a bucket leaves as soon as it is complete.

    ``sums`` are buffers for the leaves, row-major views of flat vectors. Call ``begin``, write into them, and call
    ``ready(index)`` once when one is final, in any order: buckets are launched in one and the same order on every rank, so
    that communication overlaps with the backward pass that is still at work. The first is small, so that this begins
    early. ``launch`` those that are left, and ``wait`` for all; then ``sums`` are those of all ranks. Where the loss
    meets over this axis too, none leaves before ``launch``: ranks may find their gradients in different orders, and would
    mix up its collectives with these.
    """

    def __init__(
        self, axis: Ranks, leaves: Sequence[Tensor], dtypes: Sequence[torch.dtype]
    ) -> None:
        self.sums = list(leaves)
        self._axis = axis
        self._meetings: int | None = None
        self.elsewhere: dict[int, Tensor] = {}
        self._buckets: list[Tensor] = []
        self._places = [range(0)] * len(leaves)
        self._missing: list[int] = []
        self._waits: list[Wait] = []
        kinds = ((dtype, leaf.device) for dtype, leaf in zip(dtypes, leaves, strict=True))
        for members in _alike(kinds):
            like, dtype = leaves[members[0]], dtypes[members[0]]
            offsets = [*accumulate((leaves[index].numel() for index in members), initial=0)]
            flat = like.new_empty(offsets[-1], dtype=dtype)
            capacity = _capacity(axis, flat)
            first = capacity if self._buckets else min(capacity, FIRST_BYTES // flat.element_size())
            edges = [0, *range(first, len(flat), capacity), len(flat)]
            before = len(self._buckets)
            self._buckets += [flat[start:stop] for start, stop in pairwise(edges) if start < stop]
            self._missing += [0] * (len(self._buckets) - before)
            for index, (start, stop) in zip(members, pairwise(offsets), strict=True):
                leaf = leaves[index]
                self.sums[index] = flat[start:stop].view(leaf.shape)
                if not leaf.is_contiguous():
                    self.elsewhere[index] = leaf
                if start < stop:
                    places = bisect_right(edges, start) - 1, bisect_left(edges, stop)
                    self._places[index] = range(before + places[0], before + places[1])
                for place in self._places[index]:
                    self._missing[place] += 1

    def begin(self) -> None:
        """From here on, no other collective runs over the axis but where the loss calls it."""
        self._meetings = self._axis.meetings

    def ready(self, index: int) -> None:
        """The sum of this leaf is final."""
        for place in self._places[index]:
            self._missing[place] -= 1
        while (
            len(self._waits) < len(self._buckets)
            and not self._missing[len(self._waits)]
            and self._axis.meetings == (self._meetings or 0) + len(self._waits)
        ):
            self._launch()

    def launch(self) -> None:
        """Begins to sum all that is left."""
        while len(self._waits) < len(self._buckets):
            self._launch()

    def wait(self) -> None:
        """Waits for all sums."""
        for wait in self._waits:
            wait()
        for index, leaf in self.elsewhere.items():
            self.sums[index] = laid_out_like(leaf, self.sums[index])

    def _launch(self) -> None:
        self._waits.append(self._axis.launch(self._buckets[len(self._waits)]))


def laid_out_like(leaf: Tensor, total: Tensor) -> Tensor:
    """The total in the leaf's order in memory: kernels that take both read them side by side as they lie."""
    if total.stride() == leaf.stride():
        return total
    return torch.empty_like(leaf, dtype=total.dtype).copy_(total)


def _alike(kinds: Iterable[Hashable]) -> list[list[int]]:
    """The positions of each kind, last first."""
    groups: dict[Hashable, list[int]] = {}
    for index, kind in reversed(list(enumerate(kinds))):
        groups.setdefault(kind, []).append(index)
    return list(groups.values())


def _capacity(axis: Ranks, flat: Tensor) -> int:
    return max(1, axis.bucket_bytes // flat.element_size())
