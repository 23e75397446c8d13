"""Initializes params that no rank holds, one part of a module at a time, in shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from purestep import tree
from purestep.tree.shard import Shard


def reset_parameters(
    module: Module,
    like: Mapping[str, Tensor | Shard],
    *,
    reset: Callable[[Module], None] | None = None,
) -> dict[str, Any]:
    """Initializes params by the ``reset_parameters`` of a module's parts, one part at a time.

    For a model on "meta" that no rank could hold: each rank draws the full values of one part,
    keeps its shards, and frees the others. Ranks draw from torch's generator, so let all start
    from one seed. The values are those that one rank draws for the whole model.

    Args:
        module: the one that ``from_module`` took. It stays as it is.
        like: params of ``from_module``, or ``ps.shard`` of these, which may be on "meta".
        reset: initializes the parameters of one part in place, such as ``model._init_weights`` of
            a Hugging Face model. None: ``part.reset_parameters()``.

    >>> from purestep import from_module
    >>> with torch.device("meta"):
    ...     module = torch.nn.Linear(1, 1)
    >>> params, apply = from_module(module)
    >>> ones = lambda part: torch.nn.init.ones_(part.weight)
    >>> reset_parameters(module, like={"weight": params["weight"]}, reset=ones)
    {'weight': tensor([[1.]])}
    """
    first_names = {id(p): name for name, p in module.named_parameters()}
    values: dict[str, Any] = {}
    for path, part in module.named_modules():
        wanted = {}
        for key, p in part._parameters.items():
            name = first_names.get(id(p), "")
            if name in like and name not in values:
                wanted[key] = name
        if not wanted:
            continue
        copied = _copy_with_memory(part, like[next(iter(wanted.values()))])
        if reset is None:
            _reset(path, copied)
        else:
            reset(copied)
        for key, name in wanted.items():
            values[name] = _cut(copied._parameters[key], like[name])
    unknown = [name for name in like if name not in values]
    if unknown:
        raise ValueError(
            f"{type(module).__name__} has no parameter {unknown[0]}: pass like=params, those of "
            "from_module"
        )
    return {name: values[name] for name in like}


def _copy_with_memory(part: Module, like: Tensor | Shard) -> Module:
    """Copies one part, with full parameters that have memory and no values."""
    (leaf,) = tree.leaves(like)
    device = leaf.device
    if leaf.is_meta:
        axis = getattr(like, "axis", None)
        device = getattr(axis, "device", torch.device("cpu"))
    copied = copy(part)
    copied._parameters = {}
    for key, p in part._parameters.items():
        if p is not None:
            empty = torch.empty(p.shape, dtype=p.dtype, device=device)
            copied._parameters[key] = Parameter(empty, requires_grad=p.requires_grad)
        else:
            copied._parameters[key] = None
    return copied


def _reset(path: str, part: Any) -> None:
    """Calls the part's own ``reset_parameters``."""
    if not hasattr(part, "reset_parameters"):
        raise ValueError(
            f"{path or 'the module'} is a {type(part).__name__}, which has parameters but no "
            "reset_parameters(): pass reset=, a function that initializes one part in place, such "
            "as model._init_weights of a Hugging Face model"
        )
    part.reset_parameters()


def _cut(full: Any, like: Tensor | Shard) -> Tensor | Shard:
    """Returns a copy of the block that this rank holds of a full tensor."""
    (leaf,), spec = tree.flatten(like)
    block = [(0, length) for length in full.shape]
    for shard_spec in tree.shard_specs(spec):
        assert shard_spec is not None
        block = shard_spec.local_block
    local = full.detach()
    for dim, (start, length) in enumerate(block):
        local = local.narrow(dim, start, length)
    local = local.to(leaf.dtype).clone(memory_format=torch.contiguous_format)
    cut: Tensor | Shard = tree.unflatten(spec, [local])
    return cut
