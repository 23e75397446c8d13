"""Attributes and methods of objects, which a compiler may have made in its trace."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.nn import Module

from purestep import torch_private


def set_attributes_in_trace(
    obj: Any, attributes: dict[str, Any], decorated_methods: Sequence[str]
) -> None:
    """Writes attributes to an object that was made in a compiler's trace.

    If ``attributes`` lacks a module's ``forward`` or one of the class's ``decorated_methods``,
    these are added to it first, bound to the object: otherwise the compiler loses their closures.
    ``call_forward_of_object`` lets the compiler call a ``forward`` that is added.
    """
    # Dynamo loses the closures of methods on objects made in the trace, so bind these.
    if isinstance(obj, Module) and "forward" not in attributes:
        attributes["forward"] = partial(type(obj).forward, obj)
        torch_private.call_forward_of_object(attributes)
    for name in decorated_methods:
        if name not in attributes:
            attributes[name] = partial(getattr(type(obj), name), obj)
    # torch 2.11's compiler knows no ``update`` of ``__dict__``.
    for name, value in attributes.items():
        obj.__dict__[name] = value


def bind_method(function: Any, owner: Any) -> Any:
    """Returns a function bound to ``owner``, as a method; in a trace, as a ``partial``."""
    if torch.compiler.is_dynamo_compiling():
        # torch 2.11's compiler knows no ``__get__`` of functions.
        return partial(function, owner)
    return function.__get__(owner)


def members_of(cls: type) -> dict[str, Any]:
    """Returns what a class has, inherited or not, by name: without calling its descriptors.

    >>> type(members_of(Module)["children"])
    <class 'function'>
    """
    members: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        members.update(vars(base))
    return members


def decorated_methods_of(cls: type) -> list[str]:
    """Lists the methods of a class whose decorator has a closure, such as ``@torch.no_grad()``.

    Special methods, as ``__call__``, and decorators that set no ``__wrapped__`` are left out.
    """
    names = []
    for name, member in members_of(cls).items():
        if not isinstance(member, FunctionType) or name.startswith("__"):
            continue  # Python looks up special methods on the class alone.
        if member.__closure__ and "__wrapped__" in vars(member):
            names.append(name)
    return names
