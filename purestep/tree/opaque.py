"""Opaque leaves: mappings and dataclasses that hold tensors, and that optree takes for leaves."""

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors_in(leaf: Any) -> Iterator[Tensor]:
    """Yields the tensors of a leaf: itself, or those in mappings, lists, tuples and dataclasses.

    These may be nested. Other objects have none.

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
            value = getattr(leaf, field.name, None)
            yield from tensors_in(value)


def has_graph(leaf: Any) -> bool:
    """Returns whether any tensor in a leaf requires grad and was computed from others."""
    for tensor in tensors_in(leaf):
        if tensor.requires_grad and not tensor.is_leaf:
            return True
    return False


def detach_opaque(leaf: Any) -> Any:
    """Copies a leaf with detached tensors, which require grad if the originals do.

    It copies dicts, ``UserDict``, lists, tuples and dataclasses. Other objects stay as they are, a
    NamedTuple, too. Copied tensors share the memory of the originals, but ``requires_grad_()`` of a
    copy leaves the original as it is. Copies require grad since networks for physics differentiate
    by their collocation points.
    """
    if isinstance(leaf, Tensor):
        return leaf.detach().requires_grad_(leaf.requires_grad)
    if isinstance(leaf, Mapping) and isinstance(getattr(leaf, "data", None), dict):
        twin: Any = copy(leaf)  # A UserDict, such as a tokenizer's BatchEncoding.
        twin.data = _detach_values(leaf)
        return twin
    if isinstance(leaf, dict):
        twin = copy(leaf)
        values = _detach_values(leaf)
        twin.update(values)
        return twin
    if type(leaf) in (list, tuple):
        return type(leaf)(detach_opaque(value) for value in leaf)
    if is_dataclass(leaf) and not isinstance(leaf, type):
        twin = copy(leaf)
        for field in fields(leaf):
            value = getattr(leaf, field.name, None)
            detached = detach_opaque(value)
            # By object's own method: a frozen dataclass refuses others.
            object.__setattr__(twin, field.name, detached)
        return twin
    return leaf


def _detach_values(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    values = {}
    for key, value in mapping.items():
        values[key] = detach_opaque(value)
    return values
