"""Sums over ranks in buckets: leaves as one flat vector, cut into pieces of equal size.

The vector begins with the last leaf, whose gradient the backward pass finds first. Leaves lie in it row by
row, however they lie in the memory of any rank; a sum that comes out lies as its leaf does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from purestep import tree
from purestep.axis.queue import Load
from purestep.types import Tree

if TYPE_CHECKING:
    from purestep.axis.ranks import Ranks

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
    kinds = _alike({at: (leaf.dtype, leaf.device) for at, leaf in enumerate(leaves)})
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

    ``sums`` are buffers for the leaves, by their positions: row-major views of flat vectors, to be written to before their
    ``loads`` leave. The first bucket is small, so that this begins early. When all loads have been waited for, the sums
    are those of all ranks; ``settle`` them.
    """

    def __init__(
        self, axis: Ranks, leaves: Mapping[int, Tensor], dtypes: Sequence[torch.dtype]
    ) -> None:
        self.sums = dict(leaves)
        self.loads: list[Load] = []
        self._elsewhere: dict[int, Tensor] = {}
        for members in _alike({at: (dtypes[at], leaf.device) for at, leaf in leaves.items()}):
            like, dtype = leaves[members[0]], dtypes[members[0]]
            offsets = [*accumulate((leaves[at].numel() for at in members), initial=0)]
            flat = like.new_empty(offsets[-1], dtype=dtype)
            capacity = _capacity(axis, flat)
            first = capacity if self.loads else min(capacity, FIRST_BYTES // flat.element_size())
            edges = [0, *range(first, len(flat), capacity), len(flat)]
            within: list[list[int]] = [[] for _ in edges[1:]]
            for at, (start, stop) in zip(members, pairwise(offsets), strict=True):
                leaf = leaves[at]
                self.sums[at] = flat[start:stop].view(leaf.shape)
                if not leaf.is_contiguous():
                    self._elsewhere[at] = leaf
                if start < stop:
                    for place in range(bisect_right(edges, start) - 1, bisect_left(edges, stop)):
                        within[place].append(at)
            for inside, (start, stop) in zip(within, pairwise(edges), strict=True):
                if start < stop:
                    launch = partial(axis.launch, "psum", flat[start:stop], flat[start:stop])
                    self.loads.append(Load(inside, axis, launch))

    def settle(self) -> None:
        """The sums as they are to be read: each in its leaf's order in memory."""
        for at, leaf in self._elsewhere.items():
            self.sums[at] = laid_out_like(leaf, self.sums[at])


def laid_out_like(leaf: Tensor, total: Tensor) -> Tensor:
    """The total in the leaf's order in memory: kernels that take both read them side by side as they lie."""
    if total.stride() == leaf.stride():
        return total
    return torch.empty_like(leaf, dtype=total.dtype).copy_(total)


def _alike(kinds: Mapping[int, Hashable]) -> list[list[int]]:
    """The positions of each kind, last first."""
    groups: dict[Hashable, list[int]] = {}
    for index, kind in reversed([*kinds.items()]):
        groups.setdefault(kind, []).append(index)
    return list(groups.values())


def _capacity(axis: Ranks, flat: Tensor) -> int:
    return max(1, axis.bucket_bytes // flat.element_size())
