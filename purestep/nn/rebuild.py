"""Copies of a module's objects around other tensors, by a recipe that is made once.

Each call of ``apply`` runs on new copies. What leads to a part of the module is copied. So are the
containers in the attributes of its modules, which a call may fill. Followed are attributes,
containers and their keys, sets, bound methods, partials, weak references, and functions of
``torch.compile``. An int that is the ``id`` of a part becomes that of the part's copy. A function
in an attribute is copied if its closure or defaults have a part, a tensor or such a function. Not
a hook: what it fills through its closure stays.

All else is shared, such as objects with slots. What a call reaches through those is the module
itself, and ``first_call`` refuses to compute with it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from purestep.nn import hooks
from purestep.nn.copied_functions import (
    CopiedFunction,
    FunctionTemplate,
    contents_of,
    hold_weakly,
    parts_of_function,
)
from purestep.nn.traced_objects import (
    bind_method,
    decorated_methods_of,
    members_of,
    set_attributes_in_trace,
)
from purestep.torch_private import original_function


class Recipe(NamedTuple):
    """Describes how to copy a module around new tensors.

    ``rebuild`` makes a list of values: tensors, containers, objects, then values derived from those
    before. A position here is one in this list.
    """

    containers: list[Any]
    """The containers, which are copied. The first ones are the attributes of the objects."""
    classes: list[type]
    """The classes of the objects."""
    decorated_methods: list[list[str]]
    """Of each class, the methods that a compiler cannot call on an object made in its trace."""
    derived: list[tuple[Callable[..., Any], list[int]]]
    """A function of values that come before, and their positions: a bound method, say."""
    entries: list[tuple[int, Any, int]]
    """A container, by its number; a key; and the position of the value that goes there.

    They are written last, when all values exist, so that objects may refer to each other.
    """
    rekeyed_entries: list[tuple[int, int, int]]
    """The same for a dict some of whose keys are copies: the key, too, is a position."""
    cell_contents: list[tuple[int, int]]
    """The positions of a closure's cell and of its content, which is written last, too.

    So a function may be in one of its cells, as one that calls itself.
    """
    module_numbers: dict[str, int]
    """Which object each part of the module is, by the part's name."""
    root: int
    """The position of the module."""


class Copies(NamedTuple):
    """Holds the copies of one call: of the module, its objects, and the containers in them."""

    module: Any
    objects: list[Any]
    containers: list[Any]

    def container(self, number: int) -> Any:
        """Returns a container by its number; the first ones are the objects' ``__dict__``."""
        if number < len(self.objects):
            return self.objects[number].__dict__
        return self.containers[number]


def rebuild(
    recipe: Recipe,
    tensors: Sequence[Tensor],
    is_eval: bool,
    *,
    takes_hooks: bool = True,
) -> Copies:
    """Copies the module around tensors; ``is_eval`` puts the copy in evaluation mode.

    Without ``is_eval``, each part has the mode that it had for ``make_recipe``. The tensors replace
    those of ``make_recipe``, in the same order. No ``__init__`` runs. With ``takes_hooks``, which
    takes longer, hooks can be registered on parts that have none. Without it, that raises
    ``ValueError``.

    This runs in each call, so it is a few plain loops; a compiler traces them like other code.
    """
    containers = [template.copy() for template in recipe.containers]
    # Without __init__, which would make parameters of its own.
    objects: list[Any] = [object.__new__(cls) for cls in recipe.classes]
    values = [*tensors, *containers, *objects]
    for derive, positions in recipe.derived:
        parts = [values[position] for position in positions]
        values.append(derive(*parts))
    for number, key, position in recipe.entries:
        containers[number][key] = values[position]
    for number, key_position, position in recipe.rekeyed_entries:
        containers[number][values[key_position]] = values[position]
    for cell_position, position in recipe.cell_contents:
        values[cell_position].cell_contents = hold_weakly(values[position])
    if takes_hooks:
        hooks.give_dicts(containers[: len(objects)])
    is_traced = torch.compiler.is_dynamo_compiling()
    # The containers of no object come last, and are left out here.
    for obj, attributes, names in zip(
        objects, containers, recipe.decorated_methods, strict=False
    ):
        if is_eval and isinstance(obj, Module):
            attributes["training"] = False
        if is_traced:
            set_attributes_in_trace(obj, attributes, names)
        else:
            obj.__dict__.update(attributes)
    return Copies(values[recipe.root], objects, containers)


def make_recipe(
    module: Module, tensors: Sequence[Tensor], shared: Sequence[Any] = ()
) -> Recipe:
    """Makes the recipe by which ``rebuild`` copies a module around others than these tensors.

    It changes nothing in the module. ``shared`` are objects that are not followed. Copies share
    them, except for dicts, lists and deques in attributes of parts, or in containers there.

    >>> module = torch.nn.Linear(2, 2, bias=False)
    >>> recipe = make_recipe(module, [module.weight])
    >>> doubled = rebuild(recipe, [2 * module.weight], is_eval=False).module
    >>> torch.equal(doubled(torch.ones(2)), 2 * module(torch.ones(2)))
    True
    """
    builder = _RecipeBuilder(module, tensors, shared)
    builder.add_entries()
    builder.add_cached_methods()
    builder.add_cell_contents()
    return builder.recipe


class _RecipeBuilder:
    """Builds a module's ``recipe``: finds what each copy needs anew, and where it goes.

    Each ``add_...`` method completes one part of the recipe.
    """

    def __init__(
        self, module: Module, tensors: Sequence[Tensor], shared: Sequence[Any]
    ) -> None:
        parts = [*module.modules(), *tensors]
        self._parts_by_id = {id(part): part for part in parts}
        shared_ids = {id(value) for value in shared}
        holders = _find_holders(module, self._parts_by_id, shared_ids)
        self._copied = _find_copied(module, tensors, holders)
        empty_dicts = set()
        for empty in hooks.find_empty_dicts(module):
            # What another object holds, too, has to stay the same object in each copy.
            if len(holders[id(empty)]) == 1:
                empty_dicts.add(id(empty))
                self._copied.pop(id(empty))
        self._objects: list[Any] = []
        plain_containers: list[Any] = []
        for value in self._copied.values():
            if _is_plain_object(value):
                self._objects.append(value)
            elif type(value) in _CONTAINERS:
                plain_containers.append(value)
        self._containers: list[Any] = [vars(obj) for obj in self._objects]
        self._containers += plain_containers
        values = [*tensors, *self._containers, *self._objects]
        self._num_values = len(values)
        self._positions: dict[int, int] = {}
        self._cells: list[CellType] = []
        for position, value in enumerate(values):
            self._positions[id(value)] = position
        classes = [type(obj) for obj in self._objects]
        decorated = {cls: decorated_methods_of(cls) for cls in set(classes)}
        self.recipe = Recipe(
            containers=[container.copy() for container in self._containers],
            classes=classes,
            decorated_methods=[decorated[cls] for cls in classes],
            derived=[],
            entries=[],
            rekeyed_entries=[],
            cell_contents=[],
            module_numbers=self._number_modules(module),
            root=self._positions[id(module)],
        )
        for template in self.recipe.containers[: len(self._objects)]:
            for name, value in template.items():
                if id(value) in empty_dicts:
                    template[name] = hooks.NoHooks()

    def _number_modules(self, module: Module) -> dict[str, int]:
        """Looks up, by the first path of each part of a module, its number among the objects."""
        numbers = {id(obj): number for number, obj in enumerate(self._objects)}
        return {path: numbers[id(part)] for path, part in module.named_modules()}

    def add_entries(self) -> None:
        """Adds each container's copied values to the recipe; of a dict with copied keys, all."""
        for number, container in enumerate(self._containers):
            if self._has_copied_keys(container):
                self._add_rekeyed_entries(number, container)
            else:
                self._add_entries_of(number, container)

    def _has_copied_keys(self, container: Any) -> bool:
        """Returns whether a container is a dict with a key that each copy replaces."""
        if not isinstance(container, dict):
            return False
        return any(self._is_copied(key) for key in container)

    def _add_entries_of(self, number: int, container: Any) -> None:
        """Adds to the recipe the entries of a container whose values are copied.

        The container's template keeps the other entries, and None in place of these.
        """
        template = self.recipe.containers[number]
        for key, value in _parts_of(container):
            if self._is_copied(value):
                template[key] = None  # So that the recipe does not hold the original.
                position = self._find_position(value)
                self.recipe.entries.append((number, key, position))

    def _add_rekeyed_entries(self, number: int, container: dict[Any, Any]) -> None:
        """Adds all entries of a dict to the recipe, and empties its template.

        If only copied keys were replaced, they would move to the dict's end.
        """
        self.recipe.containers[number].clear()
        for key, value in container.items():
            key_position = self._find_position(key)
            position = self._find_position(value)
            self.recipe.rekeyed_entries.append((number, key_position, position))

    def add_cached_methods(self) -> None:
        """Adds methods with ``functools.cache`` or ``lru_cache`` to the recipe.

        Copies get them without a cache.

        The class's cache would keep the copies of each call, as its arguments.
        """
        for number, obj in enumerate(self._objects):
            owner = self._positions[id(obj)]
            for name, method in members_of(type(obj)).items():
                # An attribute of the object goes before the method.
                if type(method) is not _CACHED or name in vars(obj):
                    continue
                bind = partial(bind_method, method.__wrapped__)
                position = self._add_derived(bind, [owner])
                self.recipe.entries.append((number, name, position))

    def add_cell_contents(self) -> None:
        """Adds the contents of copied closure cells to the recipe; they may lead to more cells."""
        for cell in self._cells:  # It grows on the way.
            position = self._find_position(cell.cell_contents)
            self.recipe.cell_contents.append((self._positions[id(cell)], position))

    def _is_copied(self, value: Any) -> bool:
        """Returns whether copies of the module replace a value: a copied one, or a part's id."""
        return id(value) in self._copied or self._is_id_of_part(value)

    def _is_id_of_part(self, value: Any) -> bool:
        """Returns whether a value is an int that is the id of a module or tensor.

        As in ``self.scale = {id(layer.weight): 3.0}``.
        """
        return type(value) is int and value in self._parts_by_id

    def _find_position(self, value: Any) -> int:
        """Returns the position of a value, and first adds it to the recipe if it has none yet."""
        if self._is_id_of_part(value):
            return self._add_derived(id, [self._positions[value]])
        if id(value) in self._positions:
            return self._positions[id(value)]
        if type(value) is CellType and id(value) in self._copied:
            position = self._add_derived(CellType, [])
            self._cells.append(value)
        elif id(value) in self._copied:
            parts = [self._find_position(part) for _, part in _parts_of(value)]
            position = self._add_derived(_constructor_of(value), parts)
        else:
            position = self._add_derived(lambda: value, [])
        self._positions[id(value)] = position
        return position

    def _add_derived(self, derive: Any, positions: list[int]) -> int:
        """Adds to the recipe a value ``derive(*values at positions)``; returns the new position."""
        self.recipe.derived.append((derive, positions))
        self._num_values += 1
        return self._num_values - 1


def named_contents(module: Module) -> Iterator[tuple[str, Any]]:
    """Yields each part of a module, and what parts hold in attributes and in containers there.

    These are pairs of path and value: modules, tensors, containers and tuples, each value once, by
    its first path. Other values, and what these hold, are left out.

    >>> module = torch.nn.Linear(2, 2)
    >>> module.seen = {"last": [torch.zeros(3)]}
    >>> module.seen["itself"] = module.seen
    >>> [path for path, value in named_contents(module) if isinstance(value, Tensor)]
    ['_parameters[weight]', '_parameters[bias]', 'seen[last][0]']
    """
    seen: set[int] = set()
    queue: list[tuple[str, Any]] = [*module.named_modules()]
    for path, value in queue:  # It grows on the way.
        is_followed = isinstance(value, (*_CONTAINERS, tuple, Tensor, Module))
        if not is_followed or id(value) in seen:
            continue
        seen.add(id(value))
        for key, part in _parts_of(value):
            name = f"{path}[{key}]"
            if isinstance(value, Module):
                name = f"{path}.{key}".removeprefix(".")  # The module's own path is "".
            queue.append((name, part))
        yield path, value


def _find_holders(
    module: Module, parts_by_id: dict[int, Any], shared: Collection[int]
) -> dict[int, list[Any]]:
    """Returns the holders of each object that a module leads to, by the object's id.

    Goes into functions only where a module, a closure or a compiled function holds them, and not
    into objects whose ids are in ``shared``. An int that is a key of ``parts_by_id`` stands for
    that part.
    """
    holders: dict[int, list[Any]] = {id(module): []}
    queue: list[Any] = [module]
    for holder in queue:  # It grows on the way.
        if (
            id(holder) in shared
        ):  # Dicts outside of the module, whose keys ``outside`` replaces.
            continue
        targets = [part for _, part in _parts_of(holder)]
        if isinstance(holder, dict):
            targets += holder  # its keys
        for target in targets:
            if type(target) is FunctionType and not _leads_to(holder, target):
                continue  # A hook, say: with its closure, it may fill a list of the caller's.
            if type(target) is int:
                # It is no object to follow, but may be the id of one.
                target = parts_by_id.get(target, target)
            if id(target) not in holders:
                holders[id(target)] = []
                queue.append(target)
            holders[id(target)].append(holder)
    return holders


def _leads_to(holder: Any, function: FunctionType) -> bool:
    """Returns whether a function's holder is a module, a closure's cell or a compiled function."""
    is_attribute = isinstance(holder, Module | CellType)
    return is_attribute or original_function(holder) is function


def _find_copied(
    module: Module, tensors: Sequence[Tensor], holders: dict[int, list[Any]]
) -> dict[int, Any]:
    """Returns what each copy makes anew, by id.

    These are modules, ``tensors``, containers that a call may fill, and all that holds one of these
    and can be copied.
    """
    copied: dict[int, Any] = {}
    queue: list[Any] = [*module.modules(), *tensors]
    for _, value in named_contents(module):
        # A call may fill these: with ``self.log.append(x)``, the module's own log stays empty.
        if type(value) in _CONTAINERS:
            queue.append(value)
    for value in queue:  # It grows on the way.
        if id(value) not in copied and _constructor_of(value) is not None:
            copied[id(value)] = value
            # What refers to a copy is itself another object in each call.
            queue += holders.get(id(value), ())
    return copied


class _Rule(NamedTuple):
    """Says how objects of a type are copied: ``split`` gives the parts, which ``join`` takes."""

    split: Callable[[Any], Iterable[Any]]
    join: Callable[..., Any]


_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque)
_ATOMS = (str, bytes, int, float, complex, type, ModuleType, Tensor)
_CACHED = type(cache(len))
_RULES: dict[type, _Rule] = {
    MethodType: _Rule(
        split=lambda method: (method.__func__, method.__self__),
        join=bind_method,
    ),
    partial: _Rule(
        split=lambda function: (
            function.func,
            function.args,
            tuple(function.keywords),
            *function.keywords.values(),
        ),
        join=lambda func, args, names, *values: partial(
            func, *args, **dict(zip(names, values, strict=True))
        ),
    ),
    ref: _Rule(split=lambda reference: (reference(),), join=ref),
    set: _Rule(split=tuple, join=lambda *members: set(members)),
    CellType: _Rule(split=lambda cell: contents_of(cell), join=CellType),
    frozenset: _Rule(split=tuple, join=lambda *members: frozenset(members)),
}


def _parts_of(value: Any) -> list[tuple[Any, Any]]:
    """Returns what an object holds, each part after its key, attribute name or position.

    A function that a compiler made holds its original. Classes, modules of Python, tensors, numbers
    and texts hold nothing. Nor do objects without ``__dict__``, other than containers and types in
    ``_RULES``.
    """
    cls = type(value)
    original = original_function(value)
    if original is not None:
        return [(0, original)]
    if cls in _RULES:
        return [*enumerate(_RULES[cls].split(value))]
    if cls is FunctionType:
        return [*enumerate(parts_of_function(value))]
    if issubclass(cls, dict):
        return [*value.items()]
    if issubclass(cls, list | deque | tuple):
        return [*enumerate(value)]
    if issubclass(cls, _ATOMS):
        return []
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is dict:
        return [*attributes.items()]
    return []


def _constructor_of(value: Any) -> Callable[..., Any] | None:
    """Returns the function that makes a copy from an object's parts; None if it is shared.

    Tensors, dicts, lists, deques and plain objects are copied earlier: their function is never
    called. The copy of a compiled function is its uncompiled original.
    """
    cls = type(value)
    if original_function(value) is not None:
        # A compiled function was bound to the module's own tensors. The copy runs uncompiled: the
        # step itself is what is to be compiled.
        return lambda original: original
    if issubclass(cls, tuple):
        if hasattr(cls, "_fields"):  # A NamedTuple takes its fields one by one.
            return cls
        return lambda *parts: cls(parts)
    if issubclass(cls, Tensor) or cls in _CONTAINERS or _is_plain_object(value):
        return lambda: value
    if cls is FunctionType:
        return partial(CopiedFunction, FunctionTemplate.of(value))
    if cls in _RULES:
        return _RULES[cls].join
    return None


def _is_plain_object(value: Any) -> bool:
    """Returns whether an object's class and ``__dict__`` make up all of it.

    Not so with slots, with a built-in base such as dict, or for a type in ``_RULES``.
    """
    cls = type(value)
    attributes = getattr(value, "__dict__", None)
    if cls in _RULES or not isinstance(attributes, dict):
        return False
    # It fails for a subclass of a built-in type, such as dict, and for an abstract class.
    try:
        object.__new__(cls)
    except TypeError:
        return False
    # Slots hold values that are not in ``__dict__``, and would be missing in a copy.
    return not any(getattr(base, "__slots__", ()) for base in cls.__mro__)
