"""Dicts and sets outside of a module in which its hooks and functions look layers up.

    features = {}
    layer.register_forward_hook(lambda layer, args, out: features.update({layer: out}))

The loss reads ``features[layer]``, but each call of ``apply`` runs on copies of the layers. So
while a call runs, the keys of such dicts are the copies; before and after, they are the module's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
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

_LOOKUPS = (FunctionType, MethodType, BuiltinMethodType, partial, dict, set)
"""Types of attributes by which a part may look up a layer."""

_COPIED = (dict, OrderedDict, defaultdict, set)
"""Types of attributes that each copy of a part has for itself."""

_LOCK = threading.Lock()
"""Is held while keys are replaced, and not while a call runs."""


def find_mappings(module: Module) -> list[Any]:
    """Returns dicts and sets outside of a module that its parts reach, each once.

    Forward hooks may fill theirs later: all are returned that they reach. Of those that attributes
    and methods reach, a dict or set is returned if a part is a key of it now.

    The way to a dict or set has at most ``_DEPTH`` objects, both included. It does not go through
    an ``nn.Module``, a class, a container or slots. Through a module of Python it goes only to
    attributes that a function names.

    >>> import torch
    >>> layer, features = torch.nn.Linear(1, 1), {}
    >>> _ = layer.register_forward_hook(lambda layer, args, out: features.update({layer: out}))
    >>> [mapping is features for mapping in find_mappings(layer)]
    [True]
    """
    parts = [*module.modules()]
    hooks: list[Any] = []
    for part in parts:
        hooks += forward_hooks(part)
    mappings = _reach(hooks)
    ids = {id(mapping) for mapping in mappings}
    for part in parts:  # Those in attributes are copied for each call.
        ids |= {id(value) for value in vars(part).values() if type(value) in _COPIED}
    for mapping in _reach(_find_lookups(parts)):
        if id(mapping) not in ids and any(_has_key(mapping, part) for part in parts):
            mappings.append(mapping)
    return mappings


def _find_lookups(parts: Sequence[Module]) -> list[Any]:
    """Returns functions of parts, and the dicts and sets that no copy of a part has for itself.

    These are functions in attributes, and dicts and sets there of a subclass, as a ``Counter``. Of
    each class they are its functions, dicts and sets, without those of its bases. ``__init__`` is
    left out: what it fills may be a register of all modules, which no call reads.
    """
    lookups: list[Any] = []
    for part in parts:
        for value in vars(part).values():
            if issubclass(type(value), _LOOKUPS) and type(value) not in _COPIED:
                lookups.append(value)
    for cls in {type(part) for part in parts}:
        for name, value in vars(cls).items():
            if name != "__init__" and isinstance(value, FunctionType | dict | set):
                lookups.append(value)
    return lookups


def _reach(objects: list[Any]) -> list[Any]:
    """Returns the dicts and sets that objects reach, each once, by at most ``_DEPTH`` objects."""
    mappings: list[Any] = []
    # By id, since not all objects have a hash; with the object, so that no other gets its id.
    seen: dict[int, Any] = {}
    for _ in range(_DEPTH):
        references: list[Any] = []
        for obj in objects:
            if id(obj) in seen:
                continue
            seen[id(obj)] = obj
            # By its type: a proxy may load something if it is asked for its class.
            if issubclass(type(obj), dict | set):
                mappings.append(obj)
            elif not issubclass(type(obj), Module):
                references += _find_references(obj)
        objects = references
    return mappings


def _find_references(obj: Any) -> Iterable[Any]:
    """Returns the objects to which a function, method, ``partial`` or cell refers.

    Of another object, these are the values of its ``__dict__``. A class, a module of Python, or an
    object without ``__dict__``, such as a list, has none.
    """
    cls = type(obj)
    if cls is MethodType:
        return [obj.__func__, obj.__self__]
    # ``features.update`` and ``features.__setitem__``
    if cls in (BuiltinMethodType, MethodWrapperType):
        return [obj.__self__]
    if issubclass(cls, partial):
        return [obj.func, *obj.args, *obj.keywords.values()]
    if cls is FunctionType:
        return _find_references_of_function(obj)
    if cls is CellType:
        try:
            return [obj.cell_contents]
        except ValueError:  # The closure's variable has no value yet.
            return []
    if issubclass(cls, ModuleType):
        return []
    try:  # Without ``__getattr__``, by which a proxy may load something.
        attributes = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return []
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


class Rekeying:
    """Holds dicts and sets, and whether a call has replaced keys of them."""

    def __init__(self, mappings: Sequence[Any]) -> None:
        self.mappings = mappings
        self.is_active = False


@contextmanager
def rekey_mappings(
    rekeying: Rekeying, parts: Sequence[Module], copies: Sequence[Module]
) -> Iterator[None]:
    """Replaces a module's parts by their copies in the keys of dicts and sets, during the context.

    ``copies`` has one for each part, in order. At the end, also by an exception, the keys are the
    parts again, also those that the call has added. Raises ``RuntimeError`` if another call has
    replaced keys, and has not ended: the copies are those of one call.
    """
    with _LOCK:
        if rekeying.is_active:
            raise RuntimeError(
                "apply runs in another thread, or inside of itself, while layers of its module are "
                "keys of a dict or set that hooks or functions read. Make a module for each "
                "thread, or let the keys be names"
            )
        has_replaced = False
        try:
            for mapping in rekeying.mappings:
                has_replaced |= _replace_keys(mapping, parts, copies)
        except BaseException:
            _restore_keys(rekeying, parts, copies)
            raise
        rekeying.is_active = has_replaced
    try:
        yield
    finally:
        with _LOCK:
            try:
                _restore_keys(rekeying, parts, copies)
            finally:
                if has_replaced:
                    rekeying.is_active = False


def _restore_keys(
    rekeying: Rekeying, parts: Sequence[Module], copies: Sequence[Module]
) -> None:
    for mapping in rekeying.mappings:
        _replace_keys(mapping, copies, parts)


def _has_key(mapping: Any, key: Module) -> bool:
    """Returns whether a dict or set has a key, whatever a subclass makes of ``in``."""
    contains = set.__contains__ if isinstance(mapping, set) else dict.__contains__
    return contains(mapping, key)


def _replace_keys(
    mapping: Any, old_keys: Sequence[Module], new_keys: Sequence[Module]
) -> bool:
    """Replaces, in place, keys of a dict or members of a set by the new ones, one for one.

    Values, and the order of a dict, stay. Old keys that the dict or set lacks are passed over.
    Returns whether it has any.
    """
    replacements = {}
    for old, new in zip(old_keys, new_keys, strict=True):
        if _has_key(mapping, old):
            replacements[old] = new
    if isinstance(mapping, set):
        mapping.difference_update(replacements.keys())
        mapping.update(replacements.values())
    elif replacements:
        # All of them, since an entry that is added alone goes to the end.
        # By dict's own method: that of a subclass may change the order, as in a cache.
        values = [(key, dict.__getitem__(mapping, key)) for key in mapping]
        entries = [(replacements.get(key, key), value) for key, value in values]
        mapping.clear()
        for key, value in entries:  # ``Counter.update`` would count the entries.
            mapping[key] = value
    return bool(replacements)
