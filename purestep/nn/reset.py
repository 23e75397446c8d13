"""Initializes params that no rank holds, one unit of a module at a time, in shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from purestep import tree
from purestep.nn.from_module import name_tensors
from purestep.nn.rebuild import Copies, make_recipe, rebuild
from purestep.nn.units import Slot, Units, find_units
from purestep.torch_private import version_counter
from purestep.tree.shard import Shard

Like: TypeAlias = Mapping[str, Tensor | Shard]
"""Params, or shards of them, that tell shapes, dtypes and devices."""


def reset_parameters(
    module: Module,
    like: Like,
    *,
    reset: Callable[[Module], None] | None = None,
    units: Units = None,
) -> dict[str, Any]:
    """Returns new params, initialized as ``module.apply(reset)`` would, one unit at a time.

    For a model on "meta" that no rank could hold: each rank draws the full values of one unit,
    keeps its shards, and frees the rest. Params of no unit are full until the end. Ranks draw
    from torch's generator, so let all start from one seed. Raises ``ValueError`` if a param gets no
    value, or if a part around its unit writes to it. A write through ``.data`` is lost there. It
    also raises for a name in ``like`` that is no parameter's.

    Args:
        module: the one that ``from_module`` took. It stays as it is.
        like: params of ``from_module``, or ``ps.shard`` of these, which may be on "meta". They
            stay as they are, and the result has their names, shards, dtypes and devices. Instead of
            "meta", that is the device of the shard's axis, or the CPU.
        reset: initializes one part in place, such as ``model._init_weights`` of a Hugging Face
            model. It is called for each part of the module, the innermost first. None:
            ``part.reset_parameters()``, where a part has that.
        units: as in ``from_module``. None: all params are full at once.

    >>> from purestep import from_module
    >>> with torch.device("meta"):
    ...     module = torch.nn.Linear(1, 1)
    >>> params, apply = from_module(module)
    >>> ones = lambda part: [torch.nn.init.ones_(p) for p in part.parameters()]
    >>> reset_parameters(module, like=params, reset=ones)
    {'weight': tensor([[1.]]), 'bias': tensor([1.])}
    """
    tensors = name_tensors(module, {})
    unknown = [name for name in like if not isinstance(tensors.get(name), Parameter)]
    if unknown:
        raise ValueError(
            f"{type(module).__name__} has no parameter {unknown[0]}: pass like=params, those of "
            "from_module"
        )
    recipe = make_recipe(module, [*tensors.values()])
    specs = find_units(module, tensors, recipe, units)
    in_units = {slot.name for spec in specs for slot in spec.slots}
    values = {name: _copy_tensor(tensor) for name, tensor in tensors.items()}
    root = [name for name in like if name not in in_units]
    for name in root:
        values[name] = _allocate(tensors[name], like[name])
    placeholders = {name: values[name] for name in like if name in in_units}
    versions = {name: version_counter(p) for name, p in placeholders.items()}
    copies = rebuild(recipe, [*values.values()], is_eval=False)
    # Not by path: a part that lies in two places is reset in both, as by ``module.apply``.
    slots = {id(copies.objects[spec.module_number]): spec.slots for spec in specs}
    drawn: dict[str, Any] = {}

    def visit(part: Module, path: str) -> None:
        unit_slots = [slot for slot in slots.get(id(part), ()) if slot.name in like]
        names = {slot.name for slot in unit_slots}
        full = {name: _allocate(tensors[name], like[name]) for name in names}
        _fill_slots(copies, unit_slots, full)
        for name, child in part.named_children():
            visit(child, f"{path}.{name}".removeprefix("."))
        _reset_part(part, path, reset)
        drawn.update(_cut_all(full, like))
        _fill_slots(copies, unit_slots, placeholders)

    visit(copies.module, "")
    for name, version in versions.items():
        if version_counter(placeholders[name]) != version:
            raise ValueError(
                f"a part around {name} writes to it, when its unit is over: choose a unit that "
                "has this part, or pass no units="
            )
    drawn.update(_cut_all({name: values[name] for name in root}, like))
    return {name: drawn[name] for name in like}


def _copy_tensor(tensor: Tensor) -> Tensor:
    """Clones a tensor, so that a reset may write to it; for a parameter, makes an empty stand-in.

    The stand-in is a parameter on "meta", wherever the parameter is. It has the same shape, dtype
    and ``requires_grad``.
    """
    if not isinstance(tensor, Parameter):
        return tensor.clone()
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return Parameter(empty, requires_grad=tensor.requires_grad)


def _allocate(tensor: Tensor, like: Tensor | Shard) -> Tensor:
    """Makes a full parameter of NaN, on the device of ``like``.

    If ``like`` is on "meta", that is the device of the shard's axis, or else the CPU.
    """
    (leaf,) = tree.leaves(like)
    device = leaf.device
    if leaf.is_meta:
        axis = getattr(like, "axis", None)
        device = getattr(axis, "device", torch.device("cpu"))
    empty = torch.full(tensor.shape, torch.nan, dtype=tensor.dtype, device=device)
    return Parameter(empty, requires_grad=tensor.requires_grad)


def _fill_slots(
    copies: Copies, slots: Iterable[Slot], values: Mapping[str, Tensor]
) -> None:
    for slot in slots:
        copies.container(slot.container)[slot.key] = values[slot.name]


def _reset_part(
    part: Module, path: str, reset: Callable[[Module], None] | None
) -> None:
    """Initializes one part in place by ``reset(part)``, after the parts inside of it.

    The caller has initialized these. Without ``reset``, calls ``part.reset_parameters()``. If there
    is none, raises ``ValueError`` for own parameters with NaN.
    """
    if reset is not None:
        reset(part)
        return
    own_reset: Any = getattr(part, "reset_parameters", None)
    if own_reset is not None:
        own_reset()
    elif any(p.isnan().any() for p in _own_parameters(part)):
        raise ValueError(
            f"{path or 'the module'} is a {type(part).__name__}, which has parameters but no "
            "reset_parameters(): pass reset=, a function that initializes one part in place, such "
            "as model._init_weights of a Hugging Face model"
        )


def _own_parameters(part: Module) -> Sequence[Parameter]:
    """Returns the parameters that a part itself holds, and that are not on "meta"."""
    return [p for p in part.parameters(recurse=False) if not p.is_meta]


def _cut_all(full: Mapping[str, Tensor], like: Like) -> dict[str, Any]:
    """Returns copies of this rank's blocks of full params, by name, in the form of ``like``.

    They have the dtypes of ``like``, and the devices of the full params. Raises ``ValueError``
    if a param still has a NaN.
    """
    blocks = {}
    for name, param in full.items():
        if param.isnan().any():
            raise ValueError(
                f"nothing initializes {name}: let reset= or a part's reset_parameters() write to it"
            )
        blocks[name] = _cut(param.detach(), like[name])
    return blocks


def _cut(full: Tensor, like: Tensor | Shard) -> Any:
    """Returns a copy of this rank's block of a full tensor, in the form and dtype of ``like``."""
    (leaf,), spec = tree.flatten(like)
    block = [(0, length) for length in full.shape]
    for shard_spec in tree.shard_specs(spec):
        assert shard_spec is not None
        block = shard_spec.local_block
    local = full
    for dim, (start, length) in enumerate(block):
        local = local.narrow(dim, start, length)
    local = local.to(leaf.dtype).clone(memory_format=torch.contiguous_format)
    return tree.unflatten(spec, [local])
