"""A module's objects made anew around other tensors: what ``apply`` of ``from_module`` runs on.

Made anew is whatever leads to a module, or to one of its tensors: modules, containers, methods, functions that close
over them. All other things are shared.
"""

from __future__ import annotations

import dis
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle


class Plan(NamedTuple):
    """How a skeleton is made: a list of values grows, and each step refers to earlier ones by their positions."""

    constants: list[Any]
    containers: list[Any]
    made: list[tuple[Callable[..., Any], list[int]]]
    places: list[tuple[int, Any, int]]
    root: int


def plan(module: Module, inputs: Sequence[Tensor], training: bool) -> Plan:
    """A plan in which ``inputs`` of the module's tensors are open; its other parameters are constants.

    >>> module = torch.nn.Linear(2, 2, bias=False)
    >>> how = plan(module, [module.weight], training=True)
    >>> doubled = values(how, [2 * module.weight])[how.root]
    >>> torch.equal(doubled(torch.ones(2)), 2 * module(torch.ones(2)))
    True
    """
    holders = {key: held_by for key, (_, held_by) in reached(module).items()}
    anew: dict[int, Any] = {}
    todo: list[Any] = [*module.modules(), *module.parameters(), *module.buffers()]
    while todo:
        thing = todo.pop()
        if id(thing) not in anew:
            anew[id(thing)] = thing
            todo += [holder for holder, _ in holders.get(id(thing), ())]
    # What a call does to the module's own containers and tensors does not stay there. What cannot be made anew goes on
    # seeing the old ones, which is no harm: it does not lead to the module.
    todo = [*_kept(module).values()]
    while todo:
        thing = todo.pop()
        if id(thing) not in anew:
            anew[id(thing)] = thing
            for holder, _ in holders.get(id(thing), ()):
                if type(holder) in _CONTAINERS or _maker(holder) is not None:
                    todo.append(holder)

    def refuse(thing: Any) -> NoReturn:
        path, here = "", thing
        while here is not module:
            here, key = holders[id(here)][0]
            if key not in ("__dict__", "_modules"):
                path = (f".{key}" if isinstance(key, str) else f"[{key}]") + path
        raise TypeError(
            f"{type(module).__name__}{path} is a {type(thing).__name__} that leads back to the module or a part of it, and "
            "apply cannot make it anew for each call: take it away, or give it that part when it is called"
        )

    open_ = {id(tensor): position for position, tensor in enumerate(inputs)}
    frozen = {id(p): p.detach() for p in module.parameters() if id(p) not in open_}
    things = [thing for thing in anew.values() if not isinstance(thing, Tensor)]
    containers = [thing for thing in things if type(thing) in _CONTAINERS]
    at, constants = {**open_}, []
    for thing in things:
        for _, part in [] if type(thing) in _CONTAINERS else _parts(thing):
            if id(part) not in at and (id(part) in frozen or id(part) not in anew):
                at[id(part)] = len(at)
                constants.append(frozen.get(id(part), part))
    at |= {id(each): position for position, each in enumerate(containers, len(at))}

    made: list[tuple[Callable[..., Any], list[int]]] = []
    begun: set[int] = set()

    def make(thing: Any) -> int:
        if id(thing) not in at:
            maker = _maker(thing)
            if maker is None or id(thing) in begun:
                refuse(thing)
            begun.add(id(thing))
            parts = [make(part) for _, part in _parts(thing)]
            at[id(thing)] = len(at)
            made.append((maker, parts))
        return at[id(thing)]

    root = make(module)
    states = {id(vars(each)) for each in module.modules()}
    copies, places = [], []
    for thing in containers:
        copies.append(thing.copy())
        if id(thing) in states:
            copies[-1]["training"] = training and thing["training"]
            copies[-1] |= {name: OrderedDict() for name in _NEVER_RUN & thing.keys()}
        for key, part in _parts(thing):
            if id(part) in anew:
                if key is _NO_KEY:
                    refuse(thing)
                copies[-1][key] = frozen.get(id(part))
                if id(part) not in frozen:
                    places.append((at[id(thing)], key, make(part)))
    return Plan(constants, copies, made, places, root)


def values(plan: Plan, inputs: Sequence[Tensor]) -> list[Any]:
    """All that a plan makes around these inputs; at ``plan.root`` is the module."""
    values = [*inputs, *plan.constants, *[container.copy() for container in plan.containers]]
    for make, parts in plan.made:
        values.append(make(*[values[part] for part in parts]))
    for container, key, part in plan.places:
        values[container][key] = values[part]
    return values


def own_tensors(module: Module) -> dict[str, Tensor]:
    """Tensors in a module's attributes, and in containers there, that are neither parameters nor buffers: by their paths.

    >>> module = torch.nn.Linear(2, 2)
    >>> module.seen = {"last": [torch.zeros(3)]}
    >>> [*own_tensors(module)]
    ['seen[last][0]']
    """
    known = {*map(id, module.parameters()), *map(id, module.buffers())}
    kept = _kept(module).items()
    return {name: t for name, t in kept if isinstance(t, Tensor) and id(t) not in known}


def _kept(module: Module) -> dict[str, Any]:
    """Containers and tensors in a module's attributes, and in containers there: each once, by the first of its paths."""
    kept: dict[str, Any] = {}
    todo = [
        (f"{name}.{key}".removeprefix("."), held)
        for name, each in module.named_modules()
        for key, held in vars(each).items()
    ]
    seen: set[int] = set()
    for path, thing in todo:
        if type(thing) in (*_CONTAINERS, tuple) and id(thing) not in seen:
            seen.add(id(thing))
            todo += [(f"{path}[{key}]", part) for key, part in _parts(thing) if key is not _NO_KEY]
        if type(thing) in _CONTAINERS or isinstance(thing, Tensor):
            kept.setdefault(path, thing)
    return kept


_CONTAINERS = (dict, OrderedDict, list, set)
"""Made first and filled last, so that things may refer to each other in circles through them."""

_ATOMS = (
    *(str, bytes, int, float, complex, type(None), type, ModuleType, CodeType),
    *(Tensor, torch.dtype, torch.device, RemovableHandle),
)
_NO_KEY = object()
_NEVER_RUN = {
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
}
"""Hooks of a module that no call runs."""


def reached(module: Module) -> dict[int, tuple[Any, list[tuple[Any, Any]]]]:
    """Each thing that the module leads to, by its identity, with what holds it and under which key."""
    found: dict[int, tuple[Any, list[tuple[Any, Any]]]] = {id(module): (module, [])}
    todo: list[Any] = [module]
    while todo:
        thing = todo.pop()
        for key, part in _parts(thing):
            if id(part) not in found:
                found[id(part)] = (part, [])
                todo.append(part)
            found[id(part)][1].append((thing, key))
    return found


def global_name(module: Module) -> tuple[str, str] | None:
    """A function that the module runs and the global name by which it refers to the module, a part, or a tensor of it.

    >>> global_name(torch.nn.Linear(2, 2))
    """
    own = {*map(id, [*module.modules(), *module.parameters(), *module.buffers()])}

    def leads_there(value: Any) -> bool:
        if isinstance(value, Module):
            return any(id(each) in own for each in value.modules())
        if type(value) in (*_CONTAINERS, tuple):
            return any(id(part) in own for _, part in _parts(value))
        return id(value) in own

    todo = [thing for thing, _ in reached(module).values() if isinstance(thing, FunctionType)]
    classes = {base for each in module.modules() for base in type(each).__mro__}
    for each in classes - {*Module.__mro__}:
        todo += [held for held in vars(each).values() if isinstance(held, FunctionType)]
    seen: set[int] = set()
    for function in todo:
        codes = [function.__code__]
        for code in codes:
            if id(code) in seen:
                continue
            seen.add(id(code))
            codes += [part for part in code.co_consts if isinstance(part, CodeType)]
            for name in code.co_names:
                value = function.__globals__.get(name)
                if isinstance(value, FunctionType) and value.__globals__ is function.__globals__:
                    todo.append(value)
                # Names of attributes stand beside those of globals.
                elif leads_there(value) and name in {
                    each.argval
                    for each in dis.get_instructions(code)
                    if each.opname == "LOAD_GLOBAL"
                }:
                    return function.__qualname__, name
    return None


def _parts(thing: Any) -> list[tuple[Any, Any]]:
    """What a thing holds, each with its key: what its maker takes, where it has one."""
    if isinstance(thing, _ATOMS):
        return []
    if isinstance(thing, Module):
        return [("__dict__", vars(thing))]
    if type(thing) in (dict, OrderedDict):
        thing = {key: part for key, part in thing.items() if key not in _NEVER_RUN}
        return [*thing.items(), *((_NO_KEY, key) for key in thing if not isinstance(key, str))]
    if type(thing) in (list, tuple):
        return [*enumerate(thing)]
    if isinstance(thing, set):
        return [(_NO_KEY, each) for each in thing]
    if isinstance(thing, FunctionType):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
        names = ("__defaults__", "__kwdefaults__", "__dict__")
        return [*cells, *[(name, getattr(thing, name)) for name in names]]
    if isinstance(thing, MethodType):
        return [("__func__", thing.__func__), ("__self__", thing.__self__)]
    if type(thing) is partial:
        return [("func", thing.func), ("args", thing.args), ("keywords", thing.keywords)]
    if isinstance(thing, weakref.ref):
        return [("()", thing())]
    return [(type(part).__name__, part) for part in gc.get_referents(thing)]


def _maker(thing: Any) -> Callable[..., Any] | None:
    """The function that makes such a thing of its parts; None where there is none."""
    if isinstance(thing, Module):
        return partial(_module, type(thing))
    if isinstance(thing, FunctionType):
        return partial(_function, thing.__code__, thing.__globals__, thing.__name__)
    return _MAKERS.get(type(thing))


_MAKERS: dict[type, Callable[..., Any]] = {
    tuple: lambda *parts: parts,
    MethodType: MethodType,
    partial: lambda function, args, keywords: partial(function, *args, **keywords),
    CellType: CellType,
    weakref.ref: weakref.ref,
}


def _module(cls: type[Module], state: dict[str, Any]) -> Module:
    new = object.__new__(cls)
    object.__setattr__(new, "__dict__", state)
    return new


def _function(code: CodeType, names: dict[str, Any], name: str, *parts: Any) -> FunctionType:
    *cells, defaults, keyword_defaults, state = parts
    new = FunctionType(code, names, name, defaults, tuple(cells))
    new.__kwdefaults__ = keyword_defaults
    new.__dict__.update(state)
    return new
