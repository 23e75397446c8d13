"""Dicts and sets outside of a module in which its hooks look layers up.

    features = {}
    layer.register_forward_hook(lambda layer, args, out: features.update({layer: out}))

The loss reads ``features[layer]``, but each call of ``apply`` runs on copies of the layers. So
while a call runs, the keys of such dicts are the copies; before and after, they are the module's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import (
    BuiltinMethodType,
    CellType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

from torch.nn import Module

from purestep.torch_private import forward_hooks

_DEPTH = 4
"""How many objects lead from a hook to a dict, both included: method, object, attribute, say."""


def find_mappings(module: Module) -> list[Any]:
    """Returns the dicts and sets that the forward hooks of a module's parts reach, each once.

    The way from a hook to a dict or set has at most ``_DEPTH`` objects, both included. It does not
    go through an ``nn.Module``, a dict or a set, and through a module of Python only to attributes
    that a function names.

    >>> import torch
    >>> layer, features = torch.nn.Linear(1, 1), {}
    >>> _ = layer.register_forward_hook(lambda layer, args, out: features.update({layer: out}))
    >>> [mapping is features for mapping in find_mappings(layer)]
    [True]
    """
    mappings: list[Any] = []
    objects: list[Any] = []
    for part in module.modules():
        objects += forward_hooks(part)
    # By id, since not all objects have a hash; with the object, so that no other gets its id.
    seen: dict[int, Any] = {}
    for _ in range(_DEPTH):
        references: list[Any] = []
        for obj in objects:
            if id(obj) in seen:
                continue
            seen[id(obj)] = obj
            if isinstance(obj, dict | set):
                mappings.append(obj)
            elif not isinstance(obj, Module):
                references += _find_references(obj)
        objects = references
    return mappings


def _find_references(obj: Any) -> Iterable[Any]:
    """Returns the objects to which a function, method, ``partial`` or cell refers.

    Of another object, these are the values of its ``__dict__``. A class, a module of Python, or an
    object without ``__dict__``, such as a list, has none.
    """
    if isinstance(obj, MethodType):
        return [obj.__func__, obj.__self__]
    # ``features.update`` and ``features.__setitem__``
    if isinstance(obj, BuiltinMethodType | MethodWrapperType):
        return [obj.__self__]
    if isinstance(obj, partial):
        return [obj.func, *obj.args, *obj.keywords.values()]
    if isinstance(obj, FunctionType):
        return _find_references_of_function(obj)
    if isinstance(obj, CellType):
        try:
            return [obj.cell_contents]
        except ValueError:  # The closure's variable has no value yet.
            return []
    if isinstance(obj, ModuleType):
        return []
    attributes = getattr(obj, "__dict__", None)
    if type(attributes) is dict:  # A class has a mappingproxy, which is not followed.
        return [*attributes.values()]
    return []


def _find_references_of_function(function: FunctionType) -> list[Any]:
    """Returns a function's defaults, and the values of its closure and of globals that it names.

    Of a module of Python in closure or globals, and of modules in it, they are the attributes that
    the function names. Not all attributes: a hook that names torch would reach ``sys.modules``. A
    module that is a default stays as it is.
    """
    references: list[Any] = [*(function.__defaults__ or ())]
    references += (function.__kwdefaults__ or {}).values()
    # Those of ``store.features`` are ``store`` and ``features``.
    names = function.__code__.co_names
    namespace = function.__globals__
    values = [namespace[name] for name in names if name in namespace]
    for cell in function.__closure__ or ():
        values += _find_references(cell)
    seen = set()
    for value in values:  # It grows by attributes of modules.
        if not isinstance(value, ModuleType):
            references.append(value)
        elif id(value) not in seen:
            seen.add(id(value))
            attributes = vars(value)
            values += [attributes[name] for name in names if name in attributes]
    return references


@contextmanager
def rekey_mappings(
    mappings: Sequence[Any], parts: Sequence[Module], copies: Sequence[Module]
) -> Iterator[None]:
    """Replaces a module's parts by their copies in the keys of dicts and sets, during the context.

    ``copies`` has one for each part, in order. At the end, also by an exception, the keys are the
    parts again, also those that the call has added.
    """
    try:
        for mapping in mappings:
            _replace_keys(mapping, parts, copies)
        yield
    finally:
        for mapping in mappings:
            _replace_keys(mapping, copies, parts)


def _replace_keys(
    mapping: Any, old_keys: Sequence[Module], new_keys: Sequence[Module]
) -> None:
    """Replaces, in place, keys of a dict or members of a set by the new ones, one for one.

    Values, and the order of a dict, stay. Old keys that the dict or set lacks are passed over.
    """
    replacements = {}
    for old, new in zip(old_keys, new_keys, strict=True):
        if old in mapping:
            replacements[old] = new
    if isinstance(mapping, set):
        mapping.difference_update(replacements.keys())
        mapping.update(replacements.values())
    elif replacements:
        # All of them, since an entry that is added alone goes to the end.
        entries = [(replacements.get(key, key), mapping[key]) for key in mapping]
        mapping.clear()
        for key, value in entries:  # ``Counter.update`` would count the entries.
            mapping[key] = value
