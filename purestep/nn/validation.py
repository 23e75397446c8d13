"""Modules and parameters that ``from_module`` refuses, with the way out."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    Module,
    Parameter,
    SyncBatchNorm,
)
from torch.nn.parameter import is_lazy

from purestep import tree
from purestep.torch_private import hooks_backward

_WRAPPERS = {
    "DistributedDataParallel": "pass module.module, and ps.MeshAxis to the step",
    "FullyShardedDataParallel": "pass a module that is not sharded, and ps.MeshAxis to the step",
    "FSDPModule": "pass a module that fully_shard has not changed, and ps.MeshAxis to the step",
    "DataParallel": "pass module.module",
    "OptimizedModule": "pass the module itself, and compile=True to the step",
    "ScriptModule": "pass the module that it was made of",
}
_BATCH_NORMS = (BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm)
_OF_THE_CUT = (
    "without them updates depend on the cut: keep them, or take GroupNorm or LayerNorm"
)


def check_module(module: Module) -> None:
    """Refuses what is no plain module with values."""
    if not isinstance(module, Module):
        raise TypeError(f"from_module takes an nn.Module, got {type(module).__name__}")
    for name, each in module.named_modules():
        path = f"{type(module).__name__}.{name}".removesuffix(".")
        for wrapper in {
            base.__name__ for base in type(each).__mro__
        } & _WRAPPERS.keys():
            raise TypeError(
                f"{path} is a {wrapper}, no plain module: {_WRAPPERS[wrapper]}"
            )
        slots = [base for base in type(each).__mro__ if getattr(base, "__slots__", ())]
        if slots and [*each.parameters()]:
            raise TypeError(
                f"{path} has __slots__, which copies lack: remove it from the class"
            )
        if getattr(each, "scale_grad_by_freq", False):
            raise ValueError(
                f"{path}.scale_grad_by_freq makes updates depend on the cut: unset it"
            )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor) or tensor.is_meta:
            raise ValueError(
                f"{name} has no values yet: load it, or call a lazy module, before from_module"
            )


def check_params(
    params: Mapping[str, Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Refuses params without a gradient, with hooks, or in the memory of other tensors."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():  # Those that train stand first.
        address = tensor.data_ptr() if tensor.layout is torch.strided else 0
        other = (
            first.setdefault(address, name)
            if name in params
            else first.get(address, name)
        )
        if address and other != name:
            raise ValueError(
                f"{other}, which trains, shares memory with {name}, which would not follow it: let "
                f"both be one Parameter (a.weight = b.weight), or compute {name} in forward"
            )
    for name, p in params.items():
        if not p.is_floating_point():
            raise TypeError(
                f"trainable= chooses {name}, which is {tree.format_leaf(p)} and has "
                "no gradient here: "
                "leave it out, or hold a complex one as torch.view_as_real(p)"
            )
        if hooks_backward([p]):
            raise TypeError(
                f"{name} has a hook on its gradient, which apply leaves out: remove it, and do the "
                "same in a Transform before the optimizer (ps.optim.chain)"
            )


def written_in_training(module: Module) -> list[str]:
    """The buffers to which a module's parts write when it trains, as BatchNorm does, by name.

    For a BatchNorm without running statistics, a name that no buffer has, and why.

    >>> written_in_training(torch.nn.BatchNorm1d(2))
    ['running_mean', 'running_var', 'num_batches_tracked']
    """
    names = []
    for path, each in module.named_modules():
        if isinstance(each, _BATCH_NORMS) and each.running_mean is None:
            names += [f"statistics of {path} ({_OF_THE_CUT})"]
        elif each.training and getattr(each, "track_running_stats", False):
            names += [
                f"{path}.{name}".removeprefix(".") for name, _ in each.named_buffers()
            ]
    return names


def check_names(
    what: str, given: Any, known: Collection[str], needed: Collection[str], way_out: str
) -> None:
    """Refuses a mapping that lacks a name, or has one too many."""
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise TypeError(
            f"{what} is a {kind}, no mapping by name: call apply(params, ...)"
        )
    missing = [name for name in needed if name not in given]
    unknown = [name for name in given if name not in known]
    if unknown or missing:
        raise ValueError(
            f"{what} lacks {listed(missing)}, and has no place for {listed(unknown)}: {way_out}"
        )


def listed(names: Iterable[str]) -> str:
    """The first five names.

    >>> listed("abcdef")
    'a, b, c, d, e, ...'
    """
    first, *others = [*names] or ["none"]
    return ", ".join([first, *others[:4], *(["..."] if others[4:] else [])])
