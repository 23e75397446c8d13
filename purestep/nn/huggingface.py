"""Checks of what a model of transformers takes and returns, where it goes wrong silently."""

import inspect
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from purestep import tree
from purestep.nn.traced_objects import members_of
from purestep.torch_private import backward_hooks_of, has_additive_masks


class Models(NamedTuple):
    """Says what calls need to know of the models of transformers in a module."""

    configs: list[Any]
    """The ``config`` of each model."""
    arguments: list[str]
    """The arguments of the module's ``forward``, by position."""


def models_of(module: Module) -> Models:
    """Returns the configs of the transformers models in a module, and the names of its arguments.

    These are the arguments of ``forward`` of the module's class, in order. A model is known by its
    class's ``base_model_prefix``; its config is None if it has none.

    >>> models_of(torch.nn.Linear(1, 1)).configs
    []
    """
    configs = []
    for part in module.modules():
        if hasattr(type(part), "base_model_prefix"):
            configs.append(getattr(part, "config", None))
    arguments = [*inspect.signature(type(module).forward).parameters]
    return Models(configs, arguments[1:])  # without self


def inspected_methods(module: Module) -> list[tuple[type[Module], str]]:
    """Returns methods, as pairs of class and name, whose signatures must be read before a trace.

    A compiler cannot read them on an object that is made in the trace. The first is
    ``register_buffer`` of the module's class. torch's ``Module.__setattr__`` reads it if it is
    overridden. The others are all methods, of any part, with "_chunk" in the method's name.
    ``apply_chunking_to_forward`` of transformers reads these.

    >>> [name for _, name in inspected_methods(torch.nn.Linear(1, 1))]
    ['register_buffer']
    """
    methods = [(type(module), "register_buffer")]
    for cls in {type(part): None for part in module.modules()}:
        for name, member in members_of(cls).items():
            if "_chunk" in name and inspect.isfunction(member):
                methods.append((cls, name))
    return methods


def with_empty_modules(
    methods: Sequence[tuple[type[Module], str]],
) -> list[tuple[Module, str]]:
    """Returns the pairs with a new module in place of each class, without parts and parameters.

    No ``__init__`` of the class runs. A part of the module itself would keep its parameters alive.
    """
    owners = []
    for cls, name in methods:
        # Not by Module.__init__, which may call that of another base, with its arguments.
        module = object.__new__(cls)
        vars(module).update(vars(Module()))
        owners.append((module, name))
    return owners


def check_call(
    models: Models, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
) -> None:
    """Raises ``ValueError`` if attention would add a mask of bools, or a cache joins documents.

    Eager attention adds a mask of more than two dimensions to its scores: True would count as 1. A
    cache joins documents if the caller passes ``position_ids`` and does not ask for a cache, but
    the model returns one. Only arguments of the module itself are checked, masks among them by a
    name that ends in "attention_mask". What it passes to models within it is not checked, nor is a
    module without a model of transformers.
    """
    if not models.configs:
        return
    arguments = {**dict(zip(models.arguments, args, strict=False)), **kwargs}
    if any(has_additive_masks(config) for config in models.configs):
        for name, value in arguments.items():
            if name.endswith("attention_mask"):
                _check_mask(name, value)
    # With a cache, models of transformers take a row for one text, and ignore that position_ids
    # begin again at each document. Not a matter if the caller asks for the cache.
    has_positions = arguments.get("position_ids") is not None
    wants_cache = (
        arguments.get("use_cache") or arguments.get("past_key_values") is not None
    )
    if has_positions and not wants_cache and _has_cache(output):
        raise ValueError(
            "the model has filled a cache, and so takes packed documents for one text whatever "
            "position_ids say: pass use_cache=False, or set model.config.use_cache = False before "
            "from_module"
        )


def find_partial_modules(module: Module) -> dict[str, Any]:
    """Returns the mesh of each module whose params get only a part of their gradient on a rank.

    The keys are the modules' paths. A ``tp_plan`` calls them "replicated_with_grad_allreduce", such
    as norms that see only this rank's heads. Their hooks sum ``param.grad``, which no pure function
    has. So ``apply`` takes ``pvary`` of the params instead. Raises ``ValueError`` where ``forward``
    was replaced before the plan.

    >>> find_partial_modules(torch.nn.Linear(1, 1))
    {}
    """
    meshes = {}
    for path, part in module.named_modules():
        forward = part.__dict__.get("forward")
        for function in (forward, *backward_hooks_of(part).values()):
            if _sums_grads(function):
                meshes[path] = _find_in_closure(function, "mesh")
        if _sums_grads(forward):
            _check_original_forward(path, part, forward)
    return meshes


def _check_original_forward(path: str, part: Module, forward: Any) -> None:
    """Raises ``ValueError`` unless a ``tp_plan``'s ``forward`` calls that of the part's class.

    ``forward`` is the function by which the plan has replaced the part's.
    """
    original = _find_in_closure(forward, "original_forward")
    if getattr(original, "__func__", None) is not type(part).forward:
        raise ValueError(
            f"{path} has a forward of another kind below that of the tp_plan, which apply would "
            "lose: set the plan before it, or leave this module out of the plan"
        )


def _sums_grads(function: Any) -> bool:
    """Returns whether a function is one that a ``tp_plan`` installs to sum ``param.grad``."""
    name = getattr(function, "__qualname__", "")
    return name.startswith("ReplicatedWithGradAllReduce.install_forward.")


def remove_grad_sums(part: Module) -> None:
    """Removes from a copied module, in place, what a ``tp_plan`` set on it to sum ``param.grad``.

    That is a ``forward`` or a backward hook, which sums over ranks. The class's ``forward`` is then
    called. Modules within the module stay as they are.
    """
    if _sums_grads(part.__dict__.get("forward")):
        del part.__dict__["forward"]  # Then its class's is called.
    hooks = backward_hooks_of(part)
    for key, hook in [*hooks.items()]:
        if _sums_grads(hook):
            del hooks[key]


def _find_in_closure(function: Any, name: str) -> Any:
    """Returns the value of a variable in a function's closure, or in functions there; else None."""
    variables = inspect.getclosurevars(function).nonlocals
    if name in variables:
        return variables[name]
    for inner in variables.values():
        if isinstance(inner, FunctionType):
            value = _find_in_closure(inner, name)
            if value is not None:
                return value
    return None


def _check_mask(name: str, value: Any) -> None:
    """Raises ``ValueError`` if eager attention would add a mask of bools to its scores.

    That is a mask of more than two dimensions; ``value`` may be a dict of masks. Other values pass.
    """
    # Models with several kinds of layers, such as Gemma 3, take a dict with a mask for each kind.
    masks = value.values() if isinstance(value, dict) else [value]
    for mask in masks:
        # From a mask of two dimensions, which marks padding, the model computes the one it adds.
        if isinstance(mask, Tensor) and mask.ndim > 2 and mask.dtype == torch.bool:
            raise ValueError(
                f"{name} is {tree.format_leaf(mask)}, which eager attention would "
                "add to its scores, "
                "True for 1: pass one to be added, as ps.segment_mask(segments, dtype) makes "
                'it, or set_attn_implementation("sdpa")'
            )


def _has_cache(output: Any) -> bool:
    """Returns whether a model has returned a cache of keys and values."""
    if getattr(output, "past_key_values", None) is not None:
        return True
    # With return_dict=False, the cache is one of a tuple.
    parts = output if isinstance(output, tuple) else ()
    return any(hasattr(part, "get_seq_length") for part in parts)
