"""A module's objects made anew around other tensors, by a plan that is made once.

The plan follows attributes, containers and their keys, sets, bound methods, partials, weak
references and functions that ``torch.compile`` has made. What leads to a part of the module is made
anew, and so are the containers in the attributes of modules. A number that is the ``id`` of a part
becomes that of the new part. All else is shared: closures, objects with slots. What a call reaches
through those is the module itself, which its first call shows.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, partial
from inspect import getmembers_static
from operator import attrgetter
from types import MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from purestep import torch_private
from purestep.torch_private import uncompiled


class Recipe(NamedTuple):
    """How a list of values grows: tensors, containers, objects, and what is made of them.

    The first containers are the attributes of the objects. ``places`` in containers are filled
    last, so that things may refer to each other in circles. ``items`` are those of dicts whose keys
    are made anew: the container, and the positions of key and value.
    """

    containers: list[Any]
    objects: list[type]
    made: list[tuple[Callable[..., Any], list[int]]]
    places: list[tuple[int, Any, int]]
    items: list[tuple[int, int, int]]
    root: int


def rebuild(plan: Recipe, tensors: Sequence[Tensor], evaluates: bool) -> Any:
    """The module made anew around these tensors; a compiler traces it like any other code."""
    containers = [each.copy() for each in plan.containers]
    objects: list[Any] = [object.__new__(kind) for kind in plan.objects]
    values = [*tensors, *containers, *objects]
    for make, parts in plan.made:
        values.append(make(*[values[part] for part in parts]))
    for index, key, part in plan.places:
        containers[index][key] = values[part]
    for index, key, part in plan.items:
        containers[index][values[key]] = values[part]
    compiling = torch.compiler.is_dynamo_compiling()
    for new, attributes in zip(objects, containers, strict=False):
        if evaluates and isinstance(new, Module):
            attributes["training"] = False
        if not compiling:
            new.__dict__.update(attributes)
            continue
        if isinstance(new, Module) and "forward" not in attributes:
            # Of methods that a compiler finds in an object it has made, it does not know closures.
            attributes["forward"] = partial(type(new).forward, new)
            torch_private.call_forward_of_object(attributes)
        # torch 2.11's compiler knows no ``update`` of ``__dict__``.
        for name, value in attributes.items():
            new.__dict__[name] = value
    return values[plan.root]


def make_recipe(
    module: Module, tensors: Sequence[Tensor], shared: Sequence[Any] = ()
) -> Recipe:
    """A plan in which these tensors of the module are open, and ``shared`` things stay as they are.

    >>> module = torch.nn.Linear(2, 2, bias=False)
    >>> plan = make_recipe(module, [module.weight])
    >>> doubled = rebuild(plan, [2 * module.weight], evaluates=False)
    >>> torch.equal(doubled(torch.ones(2)), 2 * module(torch.ones(2)))
    True
    """
    anew = _made_anew(module, tensors, {id(thing) for thing in shared})
    objects = [each for each in anew.values() if _is_object(each)]
    containers = [
        *map(vars, objects),
        *[t for t in anew.values() if type(t) in _CONTAINERS],
    ]
    first = [*tensors, *containers, *objects]
    at = {id(each): position for position, each in enumerate(first)}
    copies = [each.copy() for each in containers]
    plan = Recipe(copies, [type(each) for each in objects], [], [], [], at[id(module)])
    parts_by_id = _parts_by_id(module, tensors)

    def made(make: Callable[..., Any], parts: list[int]) -> int:
        plan.made.append((make, parts))
        return len(first) + len(plan.made) - 1

    def position_of(thing: Any) -> int:
        if type(thing) is int and thing in parts_by_id:
            return made(id, [at[thing]])
        if id(thing) not in at:
            maker = _maker(thing) if id(thing) in anew else None
            parts = [position_of(part) for _, part in _parts(thing)] if maker else []
            at[id(thing)] = made(maker or (lambda: thing), parts)
        return at[id(thing)]

    def is_new(thing: Any) -> bool:
        return id(thing) in anew or (type(thing) is int and thing in parts_by_id)

    for index, thing in enumerate(containers):
        if isinstance(thing, dict) and any(map(is_new, thing)):
            copies[index].clear()  # Filled again in its order.
            for key, part in thing.items():
                plan.items.append((index, position_of(key), position_of(part)))
            continue
        for key, part in _parts(thing):
            if is_new(part):
                copies[index][key] = None
                plan.places.append((index, key, position_of(part)))
    for index, thing in enumerate(objects):
        for name, method in getmembers_static(
            type(thing), lambda each: type(each) is _CACHED
        ):
            # Its cache would keep the object of each call.
            bound = made(partial(_bind, method.__wrapped__), [at[id(thing)]])
            plan.places.append((index, name, bound))
    return plan


def tensors_held_by(module: Module) -> Iterator[tuple[str, Any]]:
    """What modules hold in attributes, and in containers there: tensors, containers and modules.

    >>> module = torch.nn.Linear(2, 2)
    >>> module.seen = {"last": [torch.zeros(3)]}
    >>> module.seen["itself"] = module.seen
    >>> [path for path, each in tensors_held_by(module) if isinstance(each, Tensor)]
    ['_parameters[weight]', '_parameters[bias]', 'seen[last][0]']
    """
    seen = set[int]()
    todo: list[tuple[str, Any]] = [*module.named_modules()]
    for path, thing in todo:
        if id(thing) not in seen and isinstance(
            thing, (*_CONTAINERS, tuple, Tensor, Module)
        ):
            seen.add(id(thing))
            name = "{}.{}" if isinstance(thing, Module) else "{}[{}]"
            todo += [
                (name.format(path, key).strip("."), part) for key, part in _parts(thing)
            ]
            yield path, thing


def _made_anew(
    module: Module, tensors: Sequence[Tensor], shared: Collection[int]
) -> dict[int, Any]:
    """What leads to the module or to one of these tensors, and what its modules' calls may fill."""
    holders: dict[int, list[Any]] = {id(module): []}
    parts_by_id = _parts_by_id(module, tensors)
    todo: list[Any] = [module]
    for thing in todo:
        if id(thing) in shared:
            continue
        keys = [*thing] if isinstance(thing, dict) else []
        for part in [*keys, *(part for _, part in _parts(thing))]:
            # An int is no object to follow, but may be the id of one.
            target = parts_by_id.get(part, part) if type(part) is int else part
            if id(target) not in holders:
                todo.append(target)
            holders.setdefault(id(target), []).append(thing)
    anew: dict[int, Any] = {}
    todo = [*module.modules(), *tensors]
    todo += [each for _, each in tensors_held_by(module) if type(each) in _CONTAINERS]
    for thing in todo:
        if id(thing) not in anew and _maker(thing) is not None:
            anew[id(thing)] = thing
            todo += holders.get(id(thing), ())
    return anew


def _parts_by_id(module: Module, tensors: Sequence[Tensor]) -> dict[int, Any]:
    """The module's parts by their ids, under which a module may look them up."""
    return {id(part): part for part in [*module.modules(), *tensors]}


def _bind(function: Any, owner: Any) -> Any:
    """Makes a function a method of ``owner``."""
    if torch.compiler.is_dynamo_compiling():
        return partial(
            function, owner
        )  # torch 2.11's compiler knows no ``__get__`` of functions.
    return function.__get__(owner)


_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque)
_ATOMS = (str, bytes, int, float, complex, type, ModuleType, Tensor)
_CACHED = type(cache(len))
_MADE: dict[type, tuple[Callable[[Any], Any], Callable[..., Any]]] = {
    MethodType: (attrgetter("__func__", "__self__"), _bind),
    partial: (
        attrgetter("func", "args", "keywords"),
        lambda f, args, kw: partial(f, *args, **kw),
    ),
    ref: (lambda to: (to(),), ref),
    set: (tuple, lambda *members: set(members)),
    frozenset: (tuple, lambda *members: frozenset(members)),
}
"""The parts of such a thing, and what makes one of them."""


def _parts(thing: Any) -> list[tuple[Any, Any]]:
    """The keys and values of a thing: those that its maker takes, where it has one."""
    kind = type(thing)
    if (original := uncompiled(thing)) is not None:
        return [(0, original)]
    if kind in _MADE:
        return [*enumerate(_MADE[kind][0](thing))]
    if issubclass(kind, dict):
        return [*thing.items()]
    if issubclass(kind, list | deque | tuple):
        return [*enumerate(thing)]
    state = None if issubclass(kind, _ATOMS) else getattr(thing, "__dict__", None)
    return [*state.items()] if type(state) is dict else []


def _maker(thing: Any) -> Callable[..., Any] | None:
    """What makes such a thing of its parts; None where it is shared."""
    kind = type(thing)
    if uncompiled(thing) is not None:
        return lambda original: original  # The step itself is what is to be compiled.
    if issubclass(kind, tuple):
        return kind if hasattr(kind, "_fields") else lambda *parts: kind(parts)
    if issubclass(kind, Tensor) or kind in _CONTAINERS or _is_object(thing):
        return lambda: thing
    return _MADE[kind][1] if kind in _MADE else None


def _is_object(thing: Any) -> bool:
    """Whether all that there is to a thing is its ``__dict__``."""
    kind = type(thing)
    if kind in _MADE or not isinstance(getattr(thing, "__dict__", None), dict):
        return False
    try:
        object.__new__(kind)
    except TypeError:
        return False
    return not any(getattr(base, "__slots__", ()) for base in kind.__mro__)
