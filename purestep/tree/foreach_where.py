"""``foreach_where_``: selects between two lists of tensors, as one operation of torch's.

torch has foreach forms of its arithmetic, but none of ``where``. Arithmetic cannot select floats: 0
times NaN is NaN. It can select integers, and each float is one, by its bits:

    old ← (old − new) · [not condition] + new

Modulo 2ⁿ that is exact, so NaN, infinities and -0.0 are selected like any other value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from purestep.tree import foreach

INTEGERS = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}
"""The integers of each size in bytes."""


def select_by_bits(old: list[Tensor], new: list[Tensor], condition: Tensor) -> None:
    """Writes ``new``, cast to the dtypes of ``old``, over ``old`` if the condition is True.

    ``new`` must not share memory with ``old``: both would become 0. It takes three foreach calls
    for each pair of dtypes, on each device. The condition and casts take a few more.
    """
    for group in foreach.group_by_kind(old):
        old_column = [old[index] for index in group]
        new_column = [new[index] for index in group]
        # Leaves of one dtype may get new values of several, and a column has one.
        for alike in foreach.group_by_kind(new_column):
            _select_column(
                [old_column[index] for index in alike],
                [new_column[index] for index in alike],
                condition,
            )


def _select_column(old: list[Tensor], new: list[Tensor], condition: Tensor) -> None:
    """Does what ``select_by_bits`` does for columns of one dtype and device each."""
    new = foreach.cast(new, old)
    old_bits = [view_bits(leaf) for leaf in old]
    new_bits = [view_bits(leaf) for leaf in new]
    keeps_old = condition.logical_not().to(old_bits[0].dtype)
    foreach.add_(old_bits, new_bits, alpha=-1)
    foreach.mul_(old_bits, keeps_old)
    foreach.add_(old_bits, new_bits)


def view_bits(x: Tensor) -> Tensor:
    """Views each element as the integer of its bits, and a complex one as two integers."""
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.view(INTEGERS[x.itemsize])


def select_by_leaf(
    old: list[Tensor], new: list[Tensor], condition: Tensor
) -> list[Tensor]:
    """Returns ``new`` if the condition is True, else ``old``, leaf by leaf, in dtypes of ``old``.

    It is for devices whose foreach operations are loops.
    """
    selected = []
    for new_leaf, old_leaf in zip(new, old, strict=True):
        # Of int64 and float32, ``where`` would make float32, which rounds large integers.
        cast = new_leaf.to(old_leaf.dtype)
        selected.append(torch.where(condition, cast, old_leaf))
    return selected


_operations = library.Library("purestep", "FRAGMENT")
_operations.define(
    "foreach_where(Tensor[] old, Tensor[] new, Tensor condition) -> Tensor[]"
)
_operations.impl("foreach_where", select_by_leaf, "CompositeExplicitAutograd")
_operations.define(
    "foreach_where_(Tensor(a!)[] old, Tensor[] new, Tensor condition) -> ()"
)
_operations.impl("foreach_where_", select_by_bits, "CUDA")


def write_where(old: Any, new: Any, condition: Tensor) -> None:
    """Writes ``new`` over ``old``, two lists of tensors, in place, if the condition is True.

    ``new`` is cast to the dtypes of ``old``. The condition is a bool scalar. If it is on CUDA,
    ``new`` must not share memory with ``old``: both would become 0.
    """
    if condition.is_cuda:
        torch.ops.purestep.foreach_where_(old, new, condition)
    elif old:
        selected = torch.ops.purestep.foreach_where(old, new, condition)
        foreach.copy_(old, selected)
