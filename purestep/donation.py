"""``donate=True``: the update writes where params and state lie, so nothing else may lie there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count, repeat
from operator import add, attrgetter, lt
from typing import Any, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.tokens import Group, Weighed
from purestep.torch_internals import values_inside
from purestep.types import Microbatch, Tree

Extent: TypeAlias = tuple[int, int, int, bool]
"""From which byte to which a leaf reaches, its position, and whether its elements overlap each other."""


def apart(group: Group, donated: Tree) -> Group:
    """The same group, where nothing that is given away overlaps: each other here, a microbatch when it comes.

    The update would write there, too.
    """
    leaves = tree.leaves_of(donated)
    if not (leaves and tree.eager()) or tree.any_requires_grad(leaves):
        return group  # Nothing is written over then.
    given = _extents(leaves)
    starts, stops, positions, folded = zip(*given, strict=True) if given else ((), (), (), ())
    if any(folded):
        raise ValueError(
            f"donate=True needs memory of its own for each element, but {_name(donated, positions[folded.index(True)])} "
            "overlaps itself, as expand and unfold make it: clone it"
        )
    if any(map(lt, starts[1:], stops)):
        place = [*map(lt, starts[1:], stops)].index(True)
        raise ValueError(
            f"donate=True needs a buffer for each leaf, but {_name(donated, positions[place])} and "
            f"{_name(donated, positions[place + 1])} share memory: clone one of them, or tie them inside loss_fn"
        )

    def check(number: int, microbatch: Microbatch) -> None:
        data = tree.leaves_of(microbatch)
        if any(isinstance(leaf, Mapping) for leaf in data):
            microbatch = tree.plain(microbatch)
            data = tree.leaves_of(microbatch)
        for start, stop, position, _ in chain(*map(_extent, count(), data)):
            place = bisect_right(starts, start)
            before = place > 0 and start < stops[place - 1]
            if before or (place < len(starts) and starts[place] < stop):
                path = tree.paths(microbatch, f"microbatches[{number}]")[position]
                name = _name(donated, positions[place - 1 if before else place])
                raise ValueError(
                    f"donate=True lets the update write over {name}, but {path} shares its memory: clone one of them"
                )

    def checked() -> Iterator[Weighed]:
        for number, (microbatch, weights) in enumerate(group.weighed):
            check(number, microbatch)
            yield microbatch, weights

    return group._replace(weighed=checked()) if given else group


def _name(donated: Tree, position: int) -> str:
    return tree.paths(donated, "(params, opt_state)")[position]


def _extents(leaves: Sequence[Any]) -> list[Extent]:
    """Where each leaf lies, in the order of memory; a leaf without memory that could be told lies nowhere.

    Where there are no addresses, a storage counts as one byte: whatever lies in it overlaps.
    """
    extents = _in_one_piece(leaves)
    if extents is None:
        extents = [extent for pair in enumerate(leaves) for extent in _extent(*pair)]
    extents.sort()
    return extents


def _in_one_piece(leaves: Sequence[Any]) -> list[Extent] | None:
    """The extents of leaves that are all tensors in one piece, as nearly always: all asked at once, in half the time."""
    if not tree.are_tensors(leaves) or any(leaf.layout is not torch.strided for leaf in leaves):
        return None
    starts, sizes = [*map(Tensor.data_ptr, leaves)], [*map(_nbytes, leaves)]
    if 0 in starts or 0 in sizes or not all(map(Tensor.is_contiguous, leaves)):
        return None
    return [*zip(starts, map(add, starts, sizes), range(len(leaves)), repeat(False), strict=False)]


_nbytes = attrgetter("nbytes")


def _extent(position: int, leaf: Any) -> list[Extent]:
    if not isinstance(leaf, Tensor):
        return []
    if leaf.layout is not torch.strided or leaf.is_nested:
        return _extent(position, values_inside(leaf))
    if not tree.has_address(leaf):
        storage = tree.address(leaf)
        return [(storage, storage + 1, position, False)]
    start, size = leaf.data_ptr(), leaf.nbytes
    if not (start and size):
        return []
    if leaf.is_contiguous():
        return [(start, start + size, position, False)]
    reach, folded = 0, False
    for stride, length in sorted(zip(leaf.stride(), leaf.shape, strict=True)):
        # Rows that are as far apart as they reach cannot meet. Others may, and then an element is written twice.
        folded = folded or (length > 1 and stride <= reach)
        reach += (length - 1) * stride
    return [(start, start + (1 + reach) * leaf.element_size(), position, folded)]
