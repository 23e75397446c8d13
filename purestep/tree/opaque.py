"""Opaque leaves: mappings and dataclasses that hold tensors, and that optree takes for leaves."""

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields
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
    elif is_dataclass_object(leaf):
        for field in fields(leaf):
            value = getattr(leaf, field.name, None)
            yield from tensors_in(value)


def is_dataclass_object(leaf: Any) -> bool:
    """Returns whether a leaf is an object of a dataclass, and not the class itself."""
    # In a trace, a number that varies cannot be asked for attributes.
    if isinstance(leaf, (int, float)):
        return False
    # Of the object: a trace cannot ask the class of a NumPy scalar.
    return hasattr(leaf, "__dataclass_fields__") and not isinstance(leaf, type)


def has_graph(leaf: Any) -> bool:
    """Returns whether any tensor in a leaf requires grad and was computed from others."""
    if type(leaf) is Tensor:
        return leaf.requires_grad and not leaf.is_leaf
    for tensor in tensors_in(leaf):
        if tensor.requires_grad and not tensor.is_leaf:
            return True
    return False


def detach_opaque(leaf: Any) -> Any:
    """Copies a leaf with detached tensors, which require grad if the originals do.

    It copies containers as ``map_tensors`` does. Copied tensors share the memory of the originals,
    but ``requires_grad_()`` of a copy leaves the original as it is. Copies require grad since
    networks for physics differentiate by their collocation points.
    """
    return map_tensors(_detach, leaf)


def copy_opaque(leaf: Any) -> Any:
    """Copies the containers that ``map_tensors`` copies, with the same tensors in them.

    A tensor is returned itself.
    """
    return map_tensors(_same, leaf)


def clone_opaque(leaf: Any) -> Any:
    """Copies a leaf with its tensors in new memory, but for those that ``map_tensors`` leaves."""
    return map_tensors(_clone_tensor, leaf)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _detach(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _clone_tensor(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def map_tensors(function: Callable[[Tensor], Tensor], leaf: Any) -> Any:
    """Copies a leaf with the results of a function of its tensors in their place.

    It copies dicts, ``UserDict``, lists, tuples and dataclasses. Other objects stay as they are:
    subclasses of list and tuple, such as a NamedTuple, and other mappings, such as a
    ``MappingProxyType``. Of a dict that is a dataclass, too, it copies the items alone.
    """
    if isinstance(leaf, Tensor):
        return function(leaf)
    if isinstance(leaf, UserDict):
        twin: Any = copy(leaf)  # Such as a tokenizer's BatchEncoding.
        twin.data = _map_values(function, leaf)
        return twin
    if isinstance(leaf, dict):
        twin = copy(leaf)
        # Not by update, which transformers' ModelOutput refuses.
        for key, value in _map_values(function, leaf).items():
            twin[key] = value
        return twin
    if type(leaf) in (list, tuple):
        return type(leaf)(map_tensors(function, value) for value in leaf)
    if is_dataclass_object(leaf):
        twin = copy(leaf)
        for field in fields(leaf):
            value = getattr(leaf, field.name, None)
            mapped = map_tensors(function, value)
            # By object's own method: a frozen dataclass refuses others.
            object.__setattr__(twin, field.name, mapped)
        return twin
    return leaf


def _map_values(
    function: Callable[[Tensor], Tensor], mapping: Mapping[Any, Any]
) -> dict[Any, Any]:
    values = {}
    for key, value in mapping.items():
        values[key] = map_tensors(function, value)
    return values
