"""Units of a module: parts that gather their own sharded params where they run.

    unit(shards, x) = unit(unshard(shards), x)

Between its calls, a rank holds a unit's shards alone. The backward pass gathers the params again,
and scatters their gradients. What it needs beside them is either saved or, with ``remat``, computed
again from the unit's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias, cast
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from purestep import tree
from purestep.nn.first_call import get_storage
from purestep.nn.rebuild import Copies, Recipe
from purestep.nn.tensor_parallel import (
    DTensorSpec,
    Layouts,
    is_dtensor,
    local_part,
    spec_of,
    wrap,
)
from purestep.remat import remat
from purestep.sharding.shard import unshard
from purestep.torch_private import (
    call_module,
    has_transforms,
    in_checkpoint,
    replace_call,
    saved_tensors_hooks,
)
from purestep.tree.opaque import tensors_in
from purestep.tree.shard import Shard

Units: TypeAlias = (
    type[Module] | Sequence[type[Module]] | Callable[[str, Module], bool] | None
)
"""What chooses units: a class, several classes, or a function of name and module."""

_READS = (
    "__get__",
    "size",
    "stride",
    "dim",
    "numel",
    "is_floating_point",
    "is_complex",
)
"""Functions that ask what a tensor is, and compute nothing."""


class Slot(NamedTuple):
    """Locates a param among the containers of a copied module."""

    container: int
    key: Any
    name: str


class UnitSpec(NamedTuple):
    """Describes a unit: a part of a module, and the slots of the params that belong to it.

    ``module_number`` is the part's position in ``Copies.objects``.
    """

    path: str
    module_number: int
    slots: list[Slot]


def find_units(
    module: Module, tensors: Mapping[str, Tensor], recipe: Recipe, units: Units
) -> list[UnitSpec]:
    """Returns the units of a module that have params, each param in the innermost unit around it.

    A param that two parts share belongs to the innermost unit around both, if there is one. A unit
    that lies in two units, or in one and outside of it, leaves its params to the innermost unit
    around both places. The params of no unit are the root's. So are those that a tuple, set,
    partial, closure or weak reference holds by itself, as in ``nn.LSTM``. So are those in a dict
    whose keys are modules, params or ids of these, and those whose ``id`` a part holds. ``tensors``
    are those of the recipe, in its order.

    Raises ``ValueError`` if ``units`` chooses no part, or one that is not called itself, as a
    ``ModuleList``. The module as a whole cannot be chosen. None gives an empty list. Raises
    ``TypeError`` for ``units`` of another kind.
    """
    is_unit = _make_unit_predicate(units)
    paths: dict[int, str] = {}
    for path, part in module.named_modules():
        if path and is_unit(path, part):
            if type(part).forward is Module.forward:
                raise ValueError(
                    f"{path} is a {type(part).__name__}, which is not called itself, so it cannot "
                    "be a unit: choose the modules in it"
                )
            paths[id(part)] = path
    if units is not None and not paths:
        raise ValueError(
            f"{units=} chooses no part of {type(module).__name__}: pass the class of its blocks, "
            "or a function of name and module"
        )
    owners = _find_owners(module, paths)
    derived = _find_derived(recipe)
    slots: dict[int, list[Slot]] = {}
    names = [*tensors]
    for container, key, position in recipe.entries:
        if position >= len(names) or position in derived:
            continue
        owner = owners.get(id(tensors[names[position]]))
        if owner is not None:
            slots.setdefault(owner, []).append(Slot(container, key, names[position]))
    specs = []
    for part_id, path in paths.items():
        if part_id in slots:
            specs.append(UnitSpec(path, recipe.module_numbers[path], slots[part_id]))
    return specs


def _find_derived(recipe: Recipe) -> set[int]:
    """Returns positions in a recipe that its derived values, cells and rekeyed dicts refer to.

    A ``Slot`` is a key of a container, so it reaches none of these references. A param at such a
    position therefore belongs to no unit. Positions are those of ``Recipe``.
    """
    derived = {position for _, parts in recipe.derived for position in parts}
    derived |= {position for _, position in recipe.cell_contents}
    for _, key_position, position in recipe.rekeyed_entries:
        derived |= {key_position, position}
    return derived


def _make_unit_predicate(units: Units) -> Callable[[str, Module], bool]:
    """Makes the function of path and module that says which modules are units.

    ``units`` is such a function, a class, or several classes; None chooses no module. Raises
    ``TypeError`` for anything else.
    """
    if units is None:
        return lambda path, part: False
    classes: tuple[Any, ...] = (units,)
    if isinstance(units, Sequence):
        classes = tuple(units)
    if classes and all(isinstance(cls, type) for cls in classes):
        return lambda path, part: isinstance(part, classes)
    if not callable(units):
        raise TypeError(
            f"{units=} must be a class of modules, several classes, or a function of name and "
            "module, such as lambda name, module: isinstance(module, Block)"
        )
    return cast("Callable[[str, Module], bool]", units)


def _find_owners(module: Module, paths: Mapping[int, str]) -> dict[int, int]:
    """Returns, by a parameter's id, the id of the innermost unit that contains all of its places.

    Units count only while they are the same at all places, from the outermost on. ``paths`` has the
    units' paths by id. Parameters without such a unit are left out, as those of a unit that two
    other units share.
    """
    # The units around each place of a parameter, the outermost first.
    around: dict[int, list[list[int]]] = {}
    chains: dict[str, list[int]] = {"": []}
    for path, part in module.named_modules(remove_duplicate=False):
        chain = [*chains[path.rpartition(".")[0]]] if path else []
        if id(part) in paths:
            chain.append(id(part))
        chains[path] = chain
        for parameter in part.parameters(recurse=False):
            around.setdefault(id(parameter), []).append(chain)
    owners = {}
    for parameter_id, units in around.items():
        levels = zip(*units, strict=False)
        shared = [*takewhile(lambda level: len(set(level)) == 1, levels)]
        if shared:
            owners[parameter_id] = shared[-1][0]
    return owners


class Absent(Tensor):
    """Stands for the params of a unit that does not run: it has their shape, and no values.

    Raises ``RuntimeError`` where something computes with it.
    """

    param_name = "a param"

    @staticmethod
    def of(shard: Shard, name: str) -> Absent:
        """Makes an ``Absent`` of a param's full shape and name, in the memory of one element."""
        element = shard.local.detach().new_empty(())
        absent: Absent = element.expand(shard.shape).as_subclass(Absent)
        absent.param_name = name
        return absent

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs the functions in ``_READS``, as ``size``; raises ``RuntimeError`` for all others."""
        if getattr(func, "__name__", "") in _READS:
            plain: Any = super()
            return plain.__torch_function__(func, types, args, kwargs or {})
        leaves = tree.leaves((args, kwargs or {}))
        names = [leaf.param_name for leaf in leaves if isinstance(leaf, Absent)]
        raise RuntimeError(
            f"{', '.join(names) or 'a param'} is used outside of the call of its unit, where this "
            "rank holds a shard of it: choose as unit a module whose call does all that uses it, "
            "or leave it out of units= (with remat=True, take checkpoints inside of units away)"
        )


def install_units(
    units: Sequence[UnitSpec],
    shards: Mapping[str, Shard],
    copies: Copies,
    layouts: Layouts,
    frozen_names: dict[Any, str] | None,
    *,
    is_remat: bool,
) -> None:
    """Changes a copied module in place, so that each unit gathers its shards when it is called.

    ``shards`` are the sharded params, by name. A unit that has none of them stays as it is. Between
    calls, an ``Absent`` stands for each sharded param. In a call, the params in ``layouts`` become
    DTensors, or go through ``pvary``, as ``wrap`` does.

    The backward pass gathers the shards again. With ``is_remat``, it also computes the unit again.
    Under transforms of ``torch.func`` it does neither: the full params stay as tensors of the
    graph.

    In a first call, ``frozen_names`` has, by storage, the names of tensors that must not be written
    to. While a unit runs, its full params are among them. In other calls it is None.
    """
    for unit in units:
        slots = [slot for slot in unit.slots if slot.name in shards]
        if not slots:
            continue
        own_shards = {slot.name: shards[slot.name] for slot in slots}
        absent = {name: Absent.of(shard, name) for name, shard in own_shards.items()}
        places = []
        for slot in slots:
            places.append((copies.container(slot.container), slot.key, slot.name))
        _fill(places, absent)
        unit_module = copies.objects[unit.module_number]
        run = _recompute if is_remat else _gather_again
        # By a weak reference: a module that held itself would wait for Python's collector, with
        # all of the root's params.
        weak_module = ref(unit_module)
        sharded_unit = _ShardedUnit(
            unit.path, own_shards, places, absent, layouts, frozen_names
        )
        replace_call(unit_module, partial(_call_unit, run, sharded_unit, weak_module))


Places: TypeAlias = Sequence[tuple[Any, Any, str]]
"""Containers, keys, and the names of the params that go there."""


def _fill(places: Places, values: Mapping[str, Tensor]) -> None:
    """Writes to each place, a key of a container, the value of its name."""
    for container, key, name in places:
        container[key] = values[name]


class _ShardedUnit(NamedTuple):
    """Holds a unit of a copied module, with its shards and the places of its params."""

    path: str
    shards: Mapping[str, Shard]
    places: Places
    absent: Mapping[str, Tensor]
    layouts: Layouts
    frozen_names: dict[Any, str] | None

    def unshard(self, shards: Mapping[str, Shard]) -> dict[str, Tensor]:
        """Returns the full params of these shards: a collective of the ranks of their axes.

        In a step, ranks that run their own programs later compare in which order units gather. An
        error gets a note that names the unit.
        """
        axes = dict.fromkeys(shard.axis for shard in shards.values())
        process_axes = [axis for axis in axes if axis.is_multi_program]
        for axis in process_axes:
            axis.begin_gather(self.path)
        try:
            params: dict[str, Tensor] = unshard(shards)
        except Exception as error:
            error.add_note(f"where {self.path}, a unit, gathers its params")
            raise
        finally:
            for axis in process_axes:
                axis.end_gather()
        return params

    def call(
        self, module: Module, params: Mapping[str, Tensor], args: Any, kwargs: Any
    ) -> Any:
        """Calls the module with full params in its places; returns its output.

        Afterwards, also by an exception, ``absent`` is in these places again. During the call,
        ``frozen_names`` has the name of each param by its storage, unless it is None.
        """
        self._freeze(params)
        _fill(self.places, wrap(params, self.layouts))
        try:
            return call_module(module, *args, **kwargs)
        finally:
            _fill(self.places, self.absent)
            self._unfreeze(params)

    def _freeze(self, params: Mapping[str, Tensor]) -> None:
        """Forbids writes to params: adds storage and name to ``frozen_names``, if there is one."""
        for name, param in params.items():
            storage = get_storage(param)
            if self.frozen_names is not None and storage is not None:
                self.frozen_names[storage] = name

    def _unfreeze(self, params: Mapping[str, Tensor]) -> None:
        for param in params.values():
            if self.frozen_names is not None:
                self.frozen_names.pop(get_storage(param), None)


def _call_unit(
    run: Callable[..., Any],
    unit: _ShardedUnit,
    weak_module: ref[Module],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Returns the output of a unit's call by ``run``: ``_recompute`` or ``_gather_again``."""
    return run(unit, weak_module(), args, kwargs)


def _recompute(unit: _ShardedUnit, module: Module, args: Any, kwargs: Any) -> Any:
    """Gathers a unit's params, runs it, and keeps only its inputs for the backward pass.

    The backward pass gathers the params and calls the unit again. Under transforms of
    ``torch.func``, it does not: ``remat`` then keeps all, params too. With grad mode, raises
    ``ValueError`` for a cache of keys and values as the keyword ``past_key_values``, to which the
    unit would write twice.
    """
    if kwargs.get("past_key_values") is not None and torch.is_grad_enabled():
        raise ValueError(
            f"{unit.path} writes to a cache of keys and values, and with remat=True it would write "
            "twice: pass use_cache=False to the model"
        )

    @remat
    def run(shards: Any, args: Any, kwargs: Any) -> Any:
        return unit.call(module, unit.unshard(shards), args, kwargs)

    return run(unit.shards, args, kwargs)


def _gather_again(unit: _ShardedUnit, module: Module, args: Any, kwargs: Any) -> Any:
    """Gathers a unit's params, runs it, and keeps no param: the backward pass gathers them again.

    What else the backward pass needs is saved. Under transforms, some of which refuse hooks on
    saved tensors, params stay as tensors of the graph. Without grad mode, no backward pass follows.
    A checkpoint around the unit runs all of this again.
    """
    # What a checkpoint computes again gathers again.
    is_saving = torch.is_grad_enabled() and not in_checkpoint()
    params = unit.unshard(unit.shards)
    if not is_saving or has_transforms():
        return unit.call(module, params, args, kwargs)
    gathered = _GatheredAgain(unit, {})
    pack, unpack = _make_hooks(gathered, params)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = unit.call(module, params, args, kwargs)
    gathered.fill_in_backward(params, output, (args, kwargs))
    return output


class _GatheredAgain(NamedTuple):
    """Holds the params of a unit in the backward pass, gathered when the first one is needed."""

    unit: _ShardedUnit
    params: dict[str, Tensor]

    def read(self) -> dict[str, Tensor]:
        """Returns the params, without their graph; gathers them first if ``params`` is empty.

        The gather is a collective, and ``params`` is filled in place.
        """
        if not self.params:
            with torch.no_grad():
                shards = tree.map(Tensor.detach, dict(self.unit.shards))
                self.params.update(self.unit.unshard(shards))
        return self.params

    def fill_in_backward(
        self, params: Mapping[str, Tensor], output: Any, inputs: Any
    ) -> None:
        """Registers hooks that put params into the module while the backward pass runs there.

        So a checkpoint inside of the unit can call its parts again. After the unit, the module has
        ``Absent`` again, and the params are freed. But the params of a frozen unit stay in the
        module if no input of the unit has a graph.
        """
        input_tensors = [*tensors_in(inputs)]
        passed_on = {id(tensor) for tensor in input_tensors}
        for tensor in tensors_in(output):
            # A tensor that the unit passes on has its gradient outside of the unit.
            if tensor.requires_grad and id(tensor) not in passed_on:
                tensor.register_hook(self._enter)
        gather_nodes = {param.grad_fn for param in params.values() if param.grad_fn}
        for node in gather_nodes:
            # The backward pass of the gather comes after all that computes with the params.
            node.register_prehook(self._leave)
        if gather_nodes:
            return
        # Of a frozen unit, autograd gathers nothing.
        for tensor in input_tensors:
            if tensor.grad_fn is not None:
                tensor.register_hook(self._leave)

    def _enter(self, _: Tensor) -> None:
        wanted = {}
        for name, param in self.read().items():
            wanted[name] = param.requires_grad_(
                self.unit.shards[name].local.requires_grad
            )
        # Autograd calls this without grad mode, and a checkpoint saves the same tensors again.
        with torch.enable_grad():
            wrapped = wrap(wanted, self.unit.layouts)
        _fill(self.unit.places, wrapped)

    def _leave(self, _: Any) -> None:
        _fill(self.unit.places, self.unit.absent)
        self.params.clear()


class _Saved(NamedTuple):
    """Describes a view of a full param: the graph saves this description instead of the view."""

    unit: _GatheredAgain
    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtensor: DTensorSpec | None
    """The DTensor around the view, if there is one."""


def _make_hooks(
    gathered: _GatheredAgain, params: Mapping[str, Tensor]
) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Returns hooks that pack and unpack saved tensors, and keep no full param.

    A view in the param's dtype is packed as a description. To unpack it, the params are gathered if
    they are not yet. Other tensors go through the hooks that were active before. A view in another
    dtype is among them, or a conjugated one, and keeps its param.
    """
    names = {}
    for name, param in params.items():
        if param.numel():  # Without memory, all have one address.
            names[param.untyped_storage().data_ptr()] = name
    dtypes = {name: param.dtype for name, param in params.items()}
    outer_pack, outer_unpack = saved_tensors_hooks()

    def pack(x: Tensor) -> Any:
        name = None
        view = local_part(x)
        if type(view) is Tensor and view.layout is torch.strided:
            name = names.get(view.untyped_storage().data_ptr())
        if name is None or view.dtype != dtypes[name] or view.is_conj():
            return outer_pack(x)
        dtensor = spec_of(x) if is_dtensor(x) else None
        offset = int(view.storage_offset())
        return _Saved(gathered, name, view.shape, view.stride(), offset, dtensor)

    def unpack(saved: Any) -> Tensor:
        # A unit around this one has packed what it passes on to this one.
        if not isinstance(saved, _Saved) or saved.unit is not gathered:
            return outer_unpack(saved)
        param = gathered.read()[saved.name].detach()
        view = param.as_strided(saved.shape, saved.stride, saved.offset)
        return saved.dtensor.wrap(view) if saved.dtensor else view

    return pack, unpack
