"""Operations on lists of tensors: one call for all that share a dtype and a device.

On a GPU each call is a few launches, whatever the number of tensors. Transforms and autograd do
not see these kernels: callers ask ``tree.is_plain_eager`` first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from purestep.torch_private import foreach as kernel, foreach_clone

Column: TypeAlias = list[Tensor]
"""Tensors of one dtype on one device."""

Kernel: TypeAlias = Callable[..., Column]
InplaceKernel: TypeAlias = Callable[..., None]

add: Kernel = kernel("add")
add_: InplaceKernel = kernel("add_")
addcmul_: InplaceKernel = kernel("addcmul_")
copy_: InplaceKernel = kernel("copy_")
div: Kernel = kernel("div")
div_: InplaceKernel = kernel("div_")
lerp: Kernel = kernel("lerp")
lerp_: InplaceKernel = kernel("lerp_")
mul: Kernel = kernel("mul")
mul_: InplaceKernel = kernel("mul_")
norm: Kernel = kernel("norm")
sign: Kernel = kernel("sign")
sqrt: Kernel = kernel("sqrt")
sub: Kernel = kernel("sub")


def group_by_kind(leaves: Sequence[Tensor]) -> list[list[int]]:
    """Groups the positions of leaves by dtype and device.

    >>> import torch
    >>> group_by_kind([torch.ones(1), torch.ones(2, dtype=torch.int64), torch.ones(3)])
    [[0, 2], [1]]
    """
    groups: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        key = (leaf.dtype, leaf.device)
        group = groups.setdefault(key, [])
        group.append(index)
    return [*groups.values()]


def split_by_kind(leaves: Sequence[Tensor]) -> list[Column]:
    """Returns leaves as columns of one dtype and device each, as ``group_by_kind`` orders them."""
    columns = []
    for group in group_by_kind(leaves):
        column = [leaves[index] for index in group]
        columns.append(column)
    return columns


def clone(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Returns clones of the leaves, in their order.

    In torch 2.11 they are made by ``multiply_by_one``, which may change complex numbers.

    >>> import torch
    >>> clone([torch.ones(1), torch.tensor(2)])
    [tensor([1.]), tensor(2)]
    """
    clones = [*leaves]
    for group in group_by_kind(leaves):
        column = [leaves[index] for index in group]
        cloned = foreach_clone(column)
        for index, leaf in zip(group, cloned, strict=True):
            clones[index] = leaf
    return clones


def cast(column: Column, like: Column) -> Column:
    """Returns a column in the dtype of ``like``: itself if it has that, else new tensors.

    Both have the same shapes, and at least one tensor.
    """
    if column[0].dtype == like[0].dtype:
        return column
    # The memory comes from a clone: to allocate tensor by tensor would be a call for each.
    converted = foreach_clone(like)
    copy_(converted, column)
    return converted


def scale_(leaves: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiplies all leaves in place by one number, which may lie on their device.

    >>> import torch
    >>> leaves = [torch.ones(1), torch.ones(1, dtype=torch.float64)]
    >>> scale_(leaves, torch.tensor(2.0)), leaves
    (None, [tensor([2.]), tensor([2.], dtype=torch.float64)])
    """
    for column in split_by_kind(leaves):
        number = as_number(factor, column[0])
        mul_(column, number)


def divide_(leaves: Sequence[Tensor], divisor: Tensor) -> None:
    """Divides all leaves in place by a scalar tensor, on the host or on their device.

    >>> import torch
    >>> leaves = [torch.ones(1)]
    >>> divide_(leaves, torch.tensor(4.0)), leaves
    (None, [tensor([0.2500])])
    """
    for column in split_by_kind(leaves):
        number = as_number(divisor, column[0])
        div_(column, number)


def as_number(value: float | Tensor, like: Tensor) -> float | Tensor:
    """Returns a number as foreach kernels take it, for tensors of ``like``'s dtype.

    A tensor on the host becomes a Python number, and one on a device is cast to that dtype. Python
    numbers stay as they are.
    """
    if not isinstance(value, Tensor):
        return value
    if value.is_cpu:
        return value.item()
    return value.to(like.dtype)


def where_(old: Sequence[Tensor], new: Sequence[Tensor], condition: Tensor) -> None:
    """Writes ``new`` over ``old`` if the scalar ``condition``, on their device, is True.

    ``new`` is cast to the dtypes of ``old``. On CUDA, ``new`` must not share memory with ``old``:
    both would become 0.

    >>> import torch
    >>> old = [torch.zeros(1), torch.zeros(2)]
    >>> where_(old, [torch.ones(1), torch.ones(2)], torch.tensor(True)), old
    (None, [tensor([1.]), tensor([1., 1.])])
    """
    from purestep.tree import foreach_where  # it registers an operation with torch

    foreach_where.write_where(old, new, condition)
