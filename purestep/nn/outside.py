"""Dicts and sets outside of a module in which its hooks look layers up.

    features = {}
    layer.register_forward_hook(lambda layer, args, out: features.update({layer: out}))

The loss reads ``features[layer]``, but each call of ``apply`` runs on layers made anew. While a
call runs, the keys of such dicts are the new layers; before and after, they are the module's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import BuiltinMethodType, CellType, FunctionType, MethodType
from typing import Any

from torch.nn import Module

from purestep.torch_private import forward_hooks

_DEPTH = 4
"""How many steps lead from a hook to a dict: a partial of a method of an object, say."""


def find_mappings(module: Module) -> list[Any]:
    """Finds the dicts and sets that hooks of a module's parts can reach.

    >>> import torch
    >>> layer, features = torch.nn.Linear(1, 1), {}
    >>> _ = layer.register_forward_hook(lambda layer, args, out: features.update({layer: out}))
    >>> [mapping is features for mapping in find_mappings(layer)]
    [True]
    """
    mappings: dict[int, Any] = {}
    level: list[Any] = [
        hook for part in module.modules() for hook in forward_hooks(part)
    ]
    seen: dict[int, Any] = {}
    for _ in range(_DEPTH):
        level = [thing for thing in level if seen.setdefault(id(thing), thing) is thing]
        following: list[Any] = []
        for thing in level:
            if isinstance(thing, dict | set):
                mappings[id(thing)] = thing
            elif not isinstance(thing, Module):
                following += _reachable(thing)
        level = following
    return [*mappings.values()]


def _reachable(thing: Any) -> Iterable[Any]:
    """The objects to which a function or an object refers."""
    if isinstance(thing, MethodType):
        return [thing.__func__, thing.__self__]
    if isinstance(thing, BuiltinMethodType):
        return [thing.__self__]
    if isinstance(thing, partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, FunctionType):
        names = thing.__globals__
        globals_read = [
            names[name] for name in thing.__code__.co_names if name in names
        ]
        return [*(thing.__closure__ or ()), *(thing.__defaults__ or ()), *globals_read]
    if isinstance(thing, CellType):
        try:
            return [thing.cell_contents]
        except ValueError:  # It is empty yet.
            return []
    state = getattr(thing, "__dict__", None)
    return [*state.values()] if type(state) is dict else []


@contextmanager
def rekey_mappings(
    mappings: Sequence[Any], parts: Sequence[Module], new_parts: Sequence[Module]
) -> Iterator[None]:
    """Puts new layers in the place of a module's, as keys and members, while the context lasts."""
    try:
        for mapping in mappings:
            _rename(mapping, parts, new_parts)
        yield
    finally:
        for mapping in mappings:
            _rename(mapping, new_parts, parts)


def _rename(
    mapping: Any, old_keys: Sequence[Module], new_keys: Sequence[Module]
) -> None:
    for old, new in zip(old_keys, new_keys, strict=True):
        if old not in mapping:
            continue
        if isinstance(mapping, set):
            mapping.remove(old)
            mapping.add(new)
        else:
            mapping[new] = mapping.pop(old)
