"""``donate=True``: the update writes where params and state lie, so nothing else may lie there."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from itertools import chain, islice, pairwise
from operator import add, gt
from typing import Any, NoReturn

import torch
from torch import Tensor

from purestep import tree
from purestep.form import Flat, Form, once
from purestep.tokens import Group
from purestep.tree import Span, span
from purestep.types import Microbatch


def apart(group: Group, params: Flat, state: Flat) -> Group:
    """The same group, where nothing that is given away overlaps: each other here, a microbatch when it comes.

    The update would write there, too.
    """
    if not tree.eager() or params.form.requires_grad or state.form.requires_grad:
        return group  # Nothing is written over then.
    starts, ends = map(sorted, _edges(params, state))
    # In order, each ends before the next one begins, unless two of them overlap.
    if any(map(gt, ends, islice(starts, 1, None))):
        _explain([*_named(params, state)])

    def check(number: int, microbatch: Microbatch, data: list[Any]) -> None:
        if not tree.are_tensors(data) and any(isinstance(leaf, Mapping) for leaf in data):
            microbatch = tree.plain(microbatch)
            data = tree.leaves_of(microbatch)
        for position, leaf in enumerate(data):
            for start, stop in span(leaf):
                # As many have ended before it as begin before its end.
                if bisect_right(ends, start) != bisect_left(starts, stop):
                    path = tree.paths(microbatch, f"microbatches[{number}]")[position]
                    others = _named(params, state)
                    name = next(name for (a, b), name in others if a < stop and start < b)
                    raise ValueError(
                        f"donate=True lets the update write over {name}, but {path} shares its memory: clone one of "
                        "them"
                    )

    return group._replace(check=check)


def _named(params: Flat, state: Flat) -> Iterator[tuple[Span, str]]:
    given = params.tree(), state.tree()
    for leaf, name in zip(
        tree.leaves_of(given), tree.paths(given, "(params, opt_state)"), strict=True
    ):
        for each in span(leaf):
            yield each, name


def _explain(named: list[tuple[Span, str]]) -> NoReturn:
    """Raises for the first two that overlap."""
    pairs = pairwise(sorted(named))
    name, other = next((one[1], two[1]) for one, two in pairs if two[0][0] < one[0][1])
    if name == other:
        raise ValueError(
            f"donate=True needs memory of its own for each element, but {name} overlaps itself, as expand and unfold "
            "make it: clone it"
        )
    raise ValueError(
        f"donate=True needs a buffer for each leaf, but {name} and {other} share memory: clone one of them, or tie "
        "them inside loss_fn"
    )


def _edges(params: Flat, state: Flat) -> tuple[list[int], list[int]]:
    """Where the leaves begin, and where they end: all that lie somewhere."""
    leaves, sizes = params.leaves + state.leaves, _sizes(params.form, state.form)
    # Nearly always, all of them are in one piece, and are asked at once, in half the time.
    if sizes is not None and False not in map(Tensor.is_contiguous, leaves):
        starts = [*map(Tensor.data_ptr, leaves)]
        if 0 not in starts:
            return starts, [*map(add, starts, sizes)]
    spans = [*chain.from_iterable(map(span, leaves))]
    return [start for start, _ in spans], [stop for _, stop in spans]


@once
def _sizes(*forms: Form) -> tuple[int, ...] | None:
    """The bytes of each leaf; None where that is not all that there is to a leaf's memory."""
    if not all(form.plain for form in forms):
        return None
    kinds: Any = [*chain.from_iterable(form.kinds for form in forms)]
    if {layout for *_, layout, _ in kinds} - {torch.strided}:
        return None
    sizes = tuple([math.prod(shape) * dtype.itemsize for _, dtype, *_, shape in kinds])
    return None if 0 in sizes else sizes
