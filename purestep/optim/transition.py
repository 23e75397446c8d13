"""One transition of the state: the optimizer's update, or the identity."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.compiler import Compiler
from purestep.optim.base import Optimizer, compiled_, foreign, selected, with_grad_scale
from purestep.tokens import Weighed
from purestep.torch_internals import values_inside
from purestep.types import Microbatch, OptState, Params, Tree


class Transition(Protocol):
    """The optimizer's update where ``applied`` holds, and the identity where it does not."""

    def __call__(
        self,
        grads: Tree,
        opt_state: OptState,
        params: Params,
        /,
        *,
        grad_scale: Tensor | None,
        applied: Tensor,
    ) -> tuple[Params, OptState]: ...


def transition(
    optimizer: Optimizer, *, donate: bool, compile: bool | Compiler = False
) -> Transition:
    """The optimizer's update where ``applied`` holds, and the identity, to the bit, where it does not.

    ``update_`` does it in place where nobody transforms: on the buffers that come in, with ``donate``, and otherwise on
    one copy of them. A compiler gets what is no kernel of ``update_``. Under a transform the old state is still
    needed, and the choice is a selection.
    """
    update = with_grad_scale(optimizer.update, optimizer.takes)
    update_ = compiled_(optimizer, compile)
    copies = not donate and (compile is not False or optimizer.update_ is not None)

    def transit(
        grads: Tree,
        opt_state: OptState,
        params: Params,
        /,
        *,
        grad_scale: Tensor | None,
        applied: Tensor,
    ) -> tuple[Params, OptState]:
        eager = tree.eager()
        try:
            given = params, opt_state
            own = given if donate else tree.copied(given) if copies and eager else None
            if own is None:
                how = {"grad_scale": grad_scale, "applied": applied}
                return selected(Optimizer, update, grads, opt_state, params, **how)
            params, opt_state = own
            # The host knows already whether the step is taken, so nothing has to be selected.
            if eager and applied.is_cpu:
                if not applied:
                    return params, opt_state
                return update_(grads, opt_state, params, grad_scale=grad_scale, applied=None)
            return update_(grads, opt_state, params, grad_scale=grad_scale, applied=applied)
        except Exception as error:
            if mismatch := _mismatch(optimizer, opt_state, params):
                raise ValueError(mismatch) from error
            raise

    return transit


def _mismatch(optimizer: Optimizer, opt_state: OptState, params: Params) -> str | None:
    """In what this state is not the optimizer's own, where that can be told."""
    try:
        return foreign(optimizer.init, opt_state, params)
    except Exception:
        return None  # What went wrong first is what matters.


Extent: TypeAlias = tuple[int, int, int, bool]
"""From which byte to which a leaf reaches, its position, and whether its elements overlap each other."""


def check_buffers(donated: Tree, data: Sequence[Microbatch]) -> None:
    """Refuses leaves that are given away and overlap, each other or the data: the update would write there, too."""
    if not tree.eager(donated):
        return  # Nothing is written over then.
    given = _extents(tree.leaves_of(donated))
    for _, _, position, folded in given:
        if folded:
            raise ValueError(
                f"donate=True needs memory of its own for each element, but {_name(donated, position)} overlaps "
                "itself, as expand and unfold make it: clone it"
            )
    for (_, stop, before, _), (start, _, after, _) in pairwise(given):
        if start < stop:
            raise ValueError(
                f"donate=True needs a buffer for each leaf, but {_name(donated, before)} and {_name(donated, after)} "
                "share memory: clone one of them, or tie them inside loss_fn"
            )
    for number, microbatch in enumerate(data if given else ()):
        _check_apart(donated, given, number, microbatch)


def checked_as_they_come(group: Iterable[Weighed], donated: Tree) -> Iterator[Weighed]:
    """The same group, each microbatch of which is refused where it overlaps with what is given away."""
    given = _extents(tree.leaves_of(donated)) if tree.eager(donated) else []
    for number, (microbatch, weights) in enumerate(group):
        if given:
            _check_apart(donated, given, number, microbatch)
        yield microbatch, weights


def _check_apart(
    donated: Tree, given: Sequence[Extent], number: int, microbatch: Microbatch
) -> None:
    plain = tree.plain(microbatch)
    for theirs in _extents(tree.leaves_of(plain)):
        place = bisect_left(given, theirs)
        for ours in given[max(0, place - 1) : place + 1]:
            if max(ours[0], theirs[0]) < min(ours[1], theirs[1]):
                path = tree.paths(plain, f"microbatches[{number}]")[theirs[2]]
                raise ValueError(
                    f"donate=True lets the update write over {_name(donated, ours[2])}, but {path} shares its memory: "
                    "clone one of them"
                )


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
    if not tree.are_tensors(leaves) or {*map(_layout, leaves)} != {torch.strided}:
        return None
    starts, sizes = [*map(Tensor.data_ptr, leaves)], [*map(_nbytes, leaves)]
    missing = any(size and not start for start, size in zip(starts, sizes, strict=True))
    if missing or not all(map(Tensor.is_contiguous, leaves)):
        return None
    places = enumerate(zip(starts, sizes, strict=True))
    return [(start, start + size, position, False) for position, (start, size) in places if size]


_layout, _nbytes = attrgetter("layout"), attrgetter("nbytes")


def _extent(position: int, leaf: Any) -> list[Extent]:
    if not isinstance(leaf, Tensor):
        return []
    if leaf.layout is not torch.strided or leaf.is_nested:
        return _extent(position, values_inside(leaf))
    if not tree.has_address(leaf):
        storage = tree.address(leaf)
        return [(storage, storage + 1, position, False)]
    start = leaf.data_ptr()
    if not (start and leaf.nbytes):
        return []
    reach, folded = 0, False
    for stride, count in sorted(zip(leaf.stride(), leaf.shape, strict=True)):
        # Rows that are as far apart as they reach cannot meet. Others may, and then an element is written twice.
        folded = folded or (count > 1 and stride <= reach)
        reach += (count - 1) * stride
    return [(start, start + (1 + reach) * leaf.element_size(), position, folded)]
