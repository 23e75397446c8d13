"""Sums over ranks in buckets: leaves as one flat vector, cut into pieces of equal size.

The vector begins with the last leaf, whose gradient the backward pass finds first. Leaves lie in it row by
row, however they lie in the memory of any rank; a sum that comes out lies as its leaf does.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep import tree
from purestep.axis.ranks import Ranks, Wait
from purestep.types import Tree


class Packed(NamedTuple):
    """A tree of tensors, and one vector for each dtype with what they hold, row by row.

    Packing can go wrong on one rank alone, and is done before any other waits for it.
    """

    leaves: list[Tensor]
    structure: tree.Structure
    vectors: list[tuple[list[int], Tensor]]


def packed(x: Tree) -> Packed:
    """The tree, ready to be summed; integers in int64."""
    leaves, structure = tree.flatten(x)
    leaves = [summable(leaf) for leaf in leaves]
    kinds = _alike((leaf.dtype, leaf.device) for leaf in leaves)
    vectors = [(members, torch.cat([leaves[i].reshape(-1) for i in members])) for members in kinds]
    return Packed(leaves, structure, vectors)


def summable(x: Tensor) -> Tensor:
    """The tensor, in int64 where it holds integers."""
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.int64)


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

    ``sums`` are buffers for the leaves, row-major views of flat vectors. Write into them, and call ``ready(index)``
    when one is final, in any order: buckets are launched in one and the same order on every rank, so
    that communication overlaps with the backward pass that is still at work. ``finish`` launches those
    that are left, and waits for all; then ``sums`` are those of all ranks. Where the loss meets over this axis too, that is all of them: ranks
    may find their gradients in different orders, and would mix up its collectives with these.

    A row of integers travels with the last bucket. Each rank writes its own, as bytes, into its own row of
    a table of zeros: bytes, and sums of a byte and zeros, are exact in any floating point dtype.
    """

    def __init__(
        self, axis: Ranks, leaves: Sequence[Tensor], dtypes: Sequence[torch.dtype], width: int
    ) -> None:
        self.sums = list(leaves)
        self._axis = axis
        self._elsewhere: dict[int, Tensor] = {}
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
                leaf = leaves[index]
                self.sums[index] = flat[start:stop].view(leaf.shape)
                if not leaf.is_contiguous():
                    self._elsewhere[index] = leaf
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

    def finish(self, row: Tensor) -> Tensor:
        """Sums what is left; returns the rows of all ranks, ``(ranks, width)``."""
        table = self._buckets[-1][-self._axis.size * len(row) * 8 :].view(self._axis.size, -1)
        table.zero_()[self._axis.rank] = row.view(torch.uint8).to(table)
        while len(self._waits) < len(self._buckets):
            self._launch()
        for wait in self._waits:
            wait()
        for index, leaf in self._elsewhere.items():
            self.sums[index] = laid_out_like(leaf, self.sums[index])
        return table.to(torch.uint8).view(torch.int64)

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
