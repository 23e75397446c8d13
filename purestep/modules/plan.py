"""A module's objects made anew around other tensors, by a plan that is made once.

The plan follows attributes, containers, methods, partials and closures, and nothing else. What
leads to the module or to one of its tensors is made anew, and so are the containers in the
attributes of modules. All other objects are shared.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module


class Plan(NamedTuple):
    """How a list of values grows: tensors, containers, objects, and what is made of them.

    ``places`` in containers and ``attributes`` of objects are filled last, so that things may refer
    to each other in circles.
    """

    containers: list[Any]
    objects: list[tuple[type, dict[str, Any]]]
    made: list[tuple[Callable[..., Any], list[int]]]
    places: list[tuple[int, Any, int]]
    attributes: list[tuple[int, str, int]]
    root: int


def build(plan: Plan, tensors: Sequence[Tensor]) -> Any:
    """The module made anew around these tensors; a compiler traces it like any other code."""
    containers = [each.copy() for each in plan.containers]
    values = [*tensors, *containers, *[_object(kind, state) for kind, state in plan.objects]]
    for make, parts in plan.made:
        values.append(make(*[values[part] for part in parts]))
    for position, key, part in plan.places:
        values[position][key] = values[part]
    for position, name, part in plan.attributes:
        values[position].__dict__[name] = values[part]
    return values[plan.root]


def in_evaluation(plan: Plan) -> Plan:
    """The same plan with all modules in evaluation mode."""
    return plan._replace(
        objects=[
            (kind, {**state, "training": False} if issubclass(kind, Module) else state)
            for kind, state in plan.objects
        ]
    )


def plan_of(module: Module, tensors: Sequence[Tensor]) -> Plan:
    """A plan in which these tensors of the module are open.

    >>> module = torch.nn.Linear(2, 2, bias=False)
    >>> plan = plan_of(module, [module.weight])
    >>> doubled = build(plan, [2 * module.weight])
    >>> torch.equal(doubled(torch.ones(2)), 2 * module(torch.ones(2)))
    True
    """
    holders = _holders(module)
    anew: dict[int, Any] = {}
    todo = [*module.modules(), *tensors]
    for thing in todo:
        if anew.setdefault(id(thing), thing) is thing:
            todo += [each for each, _ in holders.get(id(thing), ()) if id(each) not in anew]
    # A call that writes to the containers of its modules writes to copies.
    anew |= {id(each): each for each in held_by(module).values()}

    objects = [each for each in anew.values() if _is_object(each)]
    containers = [each for each in anew.values() if type(each) in _CONTAINERS]
    first = [*tensors, *containers, *objects]
    at = {id(each): position for position, each in enumerate(first)}
    plan = Plan([each.copy() for each in containers], [], [], [], [], at[id(module)])

    def position_of(thing: Any, begun: tuple[int, ...] = ()) -> int:
        if id(thing) not in at:
            is_new = id(thing) in anew
            maker = _maker(thing) if is_new else lambda: thing
            if maker is None or id(thing) in begun:
                raise TypeError(_refused(thing, holders))
            inside = [part for _, part in _parts(thing)] if is_new else []
            parts = [position_of(part, (*begun, id(thing))) for part in inside]
            at[id(thing)] = len(first) + len(plan.made)
            plan.made.append((maker, parts))
        return at[id(thing)]

    for thing, copy in zip(containers, plan.containers, strict=True):
        for key, part in _parts(thing):
            if id(part) in anew:
                if key is _A_KEY:
                    raise TypeError(_refused(thing, holders))
                copy[key] = None
                plan.places.append((at[id(thing)], key, position_of(part)))
    for thing in objects:
        state = dict(vars(thing))
        for name, part in _parts(thing):
            if id(part) in anew:
                state[name] = None
                plan.attributes.append((at[id(thing)], name, position_of(part)))
        cached = [each for base in type(thing).__mro__ for each in vars(base).items()]
        for name, method in cached:
            # What a class caches would keep the object of each call.
            if type(method) is _CACHED and name not in state:
                plan.attributes.append((at[id(thing)], name, len(first) + len(plan.made)))
                plan.made.append((method.__wrapped__.__get__, [at[id(thing)]]))
                state[name] = None
        plan.objects.append((type(thing), state))
    return plan


def held_by(module: Module) -> dict[str, Any]:
    """Containers and tensors in the attributes of modules, and in containers there, by their paths.

    Parameters and buffers are not among them.

    >>> module = torch.nn.Linear(2, 2)
    >>> module.seen = {"last": [torch.zeros(3)]}
    >>> [path for path, each in held_by(module).items() if isinstance(each, Tensor)]
    ['seen[last][0]']
    """
    held: dict[str, Any] = {}
    seen = {*map(id, module.parameters()), *map(id, module.buffers())}
    todo = [
        (f"{name}.{key}".removeprefix("."), part)
        for name, each in module.named_modules()
        for key, part in _parts(each)
    ]
    for path, thing in todo:
        if id(thing) in seen or not isinstance(thing, _HELD):
            continue
        seen.add(id(thing))
        parts = [(key, part) for key, part in _parts(thing) if key is not _A_KEY]
        todo += [(f"{path}[{key}]", part) for key, part in parts]
        if not isinstance(thing, tuple) or any(isinstance(part, _HELD) for _, part in parts):
            held[path] = thing
    return held


Holders = dict[int, list[tuple[Any, Any]]]


def _holders(module: Module) -> Holders:
    """What holds each thing that the module leads to, and under which key."""
    found: Holders = {id(module): []}
    todo: list[Any] = [module]
    for thing in todo:
        for key, part in _parts(thing):
            if id(part) not in found:
                todo.append(part)
            found.setdefault(id(part), []).append((thing, key))
    return found


def _refused(thing: Any, holders: Holders) -> str:
    holder, key = holders[id(thing)][0]
    return (
        f"{type(holder).__name__}.{key} is a {type(thing).__name__} that leads back to the module "
        "or a part of it, and apply cannot make it anew for each call: take it away, or pass that "
        "part to it when it is called"
    )


_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set)
_HELD = (dict, list, deque, set, tuple, Tensor)
_ATOMS = (str, bytes, int, float, complex, type, ModuleType, CodeType, Tensor)
_CACHED = type(cache(len))
_A_KEY = object()


def _parts(thing: Any) -> list[tuple[Any, Any]]:
    """The keys and values of a thing: those that its maker takes, where it has one."""
    kind = type(thing)
    if thing is None or issubclass(kind, _ATOMS):
        return []
    if issubclass(kind, dict):
        return [*thing.items(), *((_A_KEY, key) for key in thing if not isinstance(key, str))]
    if issubclass(kind, list | deque | tuple):
        return [*enumerate(thing)]
    if issubclass(kind, set | frozenset):
        return [(_A_KEY, each) for each in thing]
    if kind is FunctionType:
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
        return [*cells, ("__defaults__", thing.__defaults__), ("", thing.__kwdefaults__)]
    if kind is CellType:
        return [("", thing.cell_contents)] if thing != CellType() else []
    if kind is MethodType:
        return [("__func__", thing.__func__), ("__self__", thing.__self__)]
    if kind is partial:
        return [("func", thing.func), ("args", thing.args), ("keywords", thing.keywords)]
    if kind is _CACHED:
        return [("__wrapped__", thing.__wrapped__)]
    if kind is ref:
        return [("()", thing())]
    state = getattr(thing, "__dict__", None)
    return [*state.items()] if type(state) is dict else []


def _is_object(thing: Any) -> bool:
    """Whether all that there is to a thing is its ``__dict__``."""
    kind = type(thing)
    if kind in _MAKERS or not isinstance(getattr(thing, "__dict__", None), dict):
        return False
    try:
        object.__new__(kind)
    except TypeError:
        return False
    return not any(getattr(base, "__slots__", ()) for base in kind.__mro__)


def _object(kind: type, state: dict[str, Any]) -> Any:
    new: Any = object.__new__(kind)
    new.__dict__.update(state)
    if torch.compiler.is_dynamo_compiling() and issubclass(kind, Module):
        # Of methods that a compiler finds in an object it has made, it does not know the closures.
        new.__dict__.setdefault("forward", partial(kind.forward, new))
    return new


def _maker(thing: Any) -> Callable[..., Any] | None:
    """The function that makes such a thing of its parts; None where there is none."""
    kind = type(thing)
    if issubclass(kind, tuple):
        return kind if hasattr(kind, "_fields") else lambda *parts: kind(parts)
    return partial(_function, thing) if kind is FunctionType else _MAKERS.get(kind)


_MAKERS: dict[type, Callable[..., Any]] = {
    FunctionType: lambda *_: None,
    CellType: CellType,
    MethodType: lambda function, owner: function.__get__(owner),
    partial: lambda function, args, keywords: partial(function, *args, **keywords),
    _CACHED: lambda function: function,
    ref: ref,
}


def _function(function: FunctionType, *parts: Any) -> FunctionType:
    *cells, defaults, keyword_defaults = parts
    code, names = function.__code__, function.__globals__
    new = FunctionType(code, names, function.__name__, defaults, tuple(cells))
    new.__kwdefaults__ = keyword_defaults
    new.__dict__.update(function.__dict__)
    return new
