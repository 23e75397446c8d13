"""Where a tensor's values are: whether the host can read them at once, and which bytes they fill."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from purestep import torch_internals
from purestep.tree.observers import below_transforms


def at_hand(tensor: Tensor) -> Tensor | None:
    """The values below all wrappers of ``torch.func``; None where the host cannot read them at once.

    >>> torch.vmap(lambda x: x + at_hand(x).sum())(torch.tensor([1.0, 2.0]))
    tensor([4., 5.])
    """
    if torch.compiler.is_dynamo_compiling() or torch_internals.is_watched():
        return None
    tensor = below_transforms(tensor)
    return tensor if type(tensor) is Tensor and tensor.is_cpu else None


def number_at_hand(tensor: Tensor) -> float | None:
    """The value of a scalar; None where the host cannot read it at once, or a ``vmap`` has several."""
    known = at_hand(tensor)
    return None if known is None or known.ndim else known.item()


def brought(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, waited for only on the host, where it could be read before it has come."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def has_address(tensor: Tensor) -> bool:
    """Whether its values lie in memory; not on devices that compute later what they are told now (lazy, XLA)."""
    return not torch_internals.is_deferred(tensor)


def address(tensor: Tensor) -> int:
    """Where a tensor's values begin; its storage's own identity where they have no address.

    >>> x = torch.ones(4)
    >>> address(x[1:]) - address(x)
    4
    """
    if has_address(tensor):
        return tensor.data_ptr()
    return torch_internals.storage_address(tensor.untyped_storage())


Span: TypeAlias = tuple[int, int]
"""From which byte to which a leaf reaches."""


def span(leaf: Any) -> list[Span]:
    """From where to where a leaf reaches in memory, twice where its elements overlap each other.

    A leaf without memory that could be told lies nowhere. Where there are no addresses, a storage counts as one byte: whatever lies in it overlaps.
    """
    if not isinstance(leaf, Tensor):
        return []
    if leaf.layout is not torch.strided or leaf.is_nested:
        return span(torch_internals.values_inside(leaf))
    if not has_address(leaf):
        storage = address(leaf)
        return [(storage, storage + 1)]
    start, size = leaf.data_ptr(), leaf.nbytes
    if not (start and size):
        return []
    if leaf.is_contiguous():
        return [(start, start + size)]
    reach, folded = 0, False
    for stride, length in sorted(zip(leaf.stride(), leaf.shape, strict=True)):
        # Rows that are as far apart as they reach cannot meet. Others may, and then an element is written twice.
        folded = folded or (length > 1 and stride <= reach)
        reach += (length - 1) * stride
    return [(start, start + (1 + reach) * leaf.element_size())] * (1 + folded)
