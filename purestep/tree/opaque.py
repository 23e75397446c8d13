"""Leaves that hold tensors inside: mappings and dataclasses that optree takes for leaves."""

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors_in(leaf: Any) -> Iterator[Tensor]:
    """Yields the tensors of a leaf: itself, or those in its items and fields.

    >>> import torch
    >>> from collections import UserDict
    >>> [*tensors_in(UserDict(x=torch.tensor(1), rest=[torch.tensor(2)]))]
    [tensor(1), tensor(2)]
    """
    if isinstance(leaf, Tensor):
        yield leaf
    elif isinstance(leaf, Mapping):
        for value in leaf.values():
            yield from tensors_in(value)
    elif isinstance(leaf, list | tuple):
        for value in leaf:
            yield from tensors_in(value)
    elif is_dataclass(leaf) and not isinstance(leaf, type):
        for field in fields(leaf):
            yield from tensors_in(getattr(leaf, field.name, None))


def has_graph(leaf: Any) -> bool:
    """Whether a tensor of the leaf was computed from others that require grad."""
    return any(
        tensor.requires_grad and not tensor.is_leaf for tensor in tensors_in(leaf)
    )


def detach_opaque(leaf: Any) -> Any:
    """Returns the leaf with other tensors of the same values, which require grad if these do.

    What a loss does to them, such as ``requires_grad_()``, does not reach the caller's. So it gets
    collocation points that require grad, as networks for physics take them.
    """
    if isinstance(leaf, Tensor):
        return leaf.detach().requires_grad_(leaf.requires_grad)
    if isinstance(leaf, Mapping) and isinstance(getattr(leaf, "data", None), dict):
        twin: Any = copy(leaf)  # A UserDict, such as a tokenizer's BatchEncoding.
        twin.data = {key: detach_opaque(value) for key, value in leaf.items()}
        return twin
    if isinstance(leaf, dict):
        twin = copy(leaf)
        twin.update({key: detach_opaque(value) for key, value in leaf.items()})
        return twin
    if type(leaf) in (list, tuple):
        return type(leaf)(map(detach_opaque, leaf))
    if is_dataclass(leaf) and not isinstance(leaf, type):
        twin = copy(leaf)
        for field in fields(leaf):
            # By object's own way: a frozen dataclass refuses others.
            object.__setattr__(
                twin, field.name, detach_opaque(getattr(leaf, field.name, None))
            )
        return twin
    return leaf
