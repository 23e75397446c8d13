"""Operations on lists of tensors: one call for all that share a dtype and a device.

On a GPU each call is a few launches, whatever the number of tensors. Nothing here is seen by
transforms or autograd: callers ask ``tree.eager`` first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from purestep import torch_private

Column: TypeAlias = list[Tensor]
"""Tensors of one dtype on one device."""

add: Callable[..., list[Tensor]] = torch_private.foreach("add")
add_: Callable[..., None] = torch_private.foreach("add_")
addcmul_: Callable[..., None] = torch_private.foreach("addcmul_")
copy_: Callable[..., None] = torch_private.foreach("copy_")
div: Callable[..., list[Tensor]] = torch_private.foreach("div")
div_: Callable[..., None] = torch_private.foreach("div_")
lerp: Callable[..., list[Tensor]] = torch_private.foreach("lerp")
lerp_: Callable[..., None] = torch_private.foreach("lerp_")
mul: Callable[..., list[Tensor]] = torch_private.foreach("mul")
mul_: Callable[..., None] = torch_private.foreach("mul_")
norm: Callable[..., list[Tensor]] = torch_private.foreach("norm")
sign: Callable[..., list[Tensor]] = torch_private.foreach("sign")
sqrt: Callable[..., list[Tensor]] = torch_private.foreach("sqrt")
sub: Callable[..., list[Tensor]] = torch_private.foreach("sub")


def group_by_kind(leaves: Sequence[Tensor]) -> list[list[int]]:
    """Groups the positions of leaves by dtype and device.

    >>> import torch
    >>> group_by_kind([torch.ones(1), torch.ones(2, dtype=torch.int64), torch.ones(3)])
    [[0, 2], [1]]
    """
    groups: dict[Any, list[int]] = {}
    for position, leaf in enumerate(leaves):
        groups.setdefault((leaf.dtype, leaf.device), []).append(position)
    return [*groups.values()]


def split_by_kind(leaves: Sequence[Tensor]) -> list[Column]:
    """Splits leaves into columns of one dtype and device each."""
    return [
        [leaves[position] for position in positions]
        for positions in group_by_kind(leaves)
    ]


def clone(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Clones each leaf.

    >>> import torch
    >>> clone([torch.ones(1), torch.tensor(2)])
    [tensor([1.]), tensor(2)]
    """
    clones = [*leaves]
    for positions in group_by_kind(leaves):
        column = torch_private.foreach_clone(
            [leaves[position] for position in positions]
        )
        for position, leaf in zip(positions, column, strict=True):
            clones[position] = leaf
    return clones


def cast(column: Column, like: Column) -> Column:
    """Returns the column in the dtype of another one of the same shapes; itself if it has that."""
    if column[0].dtype == like[0].dtype:
        return column
    # The memory comes from a clone: to allocate tensor by tensor would be a call for each.
    converted = torch_private.foreach_clone(like)
    copy_(converted, column)
    return converted


def scale_(leaves: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiplies all leaves by one number, which may lie on their device.

    >>> import torch
    >>> leaves = [torch.ones(1), torch.ones(1, dtype=torch.float64)]
    >>> scale_(leaves, torch.tensor(2.0)), leaves
    (None, [tensor([2.]), tensor([2.], dtype=torch.float64)])
    """
    for column in split_by_kind(leaves):
        mul_(column, as_number(factor, column[0]))


def divide_(leaves: Sequence[Tensor], divisor: Tensor) -> None:
    """Divides all leaves by a scalar tensor.

    >>> import torch
    >>> leaves = [torch.ones(1)]
    >>> divide_(leaves, torch.tensor(4.0)), leaves
    (None, [tensor([0.2500])])
    """
    for column in split_by_kind(leaves):
        div_(column, as_number(divisor, column[0]))


def as_number(value: float | Tensor, like: Tensor) -> float | Tensor:
    """Returns a number as foreach kernels take it: read where that waits for no device."""
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.is_cpu else value.to(like.dtype)


def where_(old: Sequence[Tensor], new: Sequence[Tensor], condition: Tensor) -> None:
    """Writes ``new`` over ``old`` if the scalar ``condition``, on their device, is True.

    >>> import torch
    >>> old = [torch.zeros(1), torch.zeros(2)]
    >>> where_(old, [torch.ones(1), torch.ones(2)], torch.tensor(True)), old
    (None, [tensor([1.]), tensor([1., 1.])])
    """
    from purestep.tree import foreach_where  # which registers an operation with torch

    foreach_where.write_where(old, new, condition)
