"""Refuses modules, params and names that ``from_module`` cannot run rightly, with the way out."""

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
from purestep.nn.tensor_parallel import local_part
from purestep.torch_private import has_backward_hooks
from purestep.tree.shard import is_shard
from purestep.validation import memory_span

_WRAPPERS = {
    "DistributedDataParallel": "pass module.module, and ps.MeshAxis to the step",
    "FullyShardedDataParallel": "pass a module that is not sharded, and ps.MeshAxis to the step",
    "FSDPModule": "pass a module that fully_shard has not changed, and ps.MeshAxis to the step",
    "DataParallel": "pass module.module",
    "OptimizedModule": "pass the module itself, and compile=True to the step",
    "ScriptModule": "pass the module that it was made of",
}
"""Classes that are refused. By name, since a torch without ``torch.distributed`` lacks some."""
_BATCH_NORMS = (BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm)
_CUT_HINT = (
    "without them updates depend on the cut: keep them, or take GroupNorm or LayerNorm"
)
_MAX_NAMES = 5
"""How many names an error shows."""


def check_module(module: Module) -> None:
    """Raises if ``from_module`` cannot take a module.

    That is ``TypeError`` for other objects, wrappers such as DDP, and parts that cannot be copied.
    It is ``ValueError`` for lazy modules, and for ``scale_grad_by_freq``, by which updates would
    depend on how batches are cut. A BatchNorm passes, and a module on "meta".
    """
    if not isinstance(module, Module):
        raise TypeError(f"from_module takes an nn.Module, got {type(module).__name__}")
    for name, part in module.named_modules():
        path = f"{type(module).__name__}.{name}".removesuffix(".")
        _check_part(path, part)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(
                f"{name} has no shape yet: call the lazy module once before from_module"
            )


def check_has_value(name: str, buffer: Tensor) -> None:
    """Raises ``ValueError`` if a tensor, which the caller knows is no parameter, is on "meta"."""
    if buffer.is_meta:
        raise ValueError(
            f"{name} has no values on the meta device, and is no parameter that can be loaded: "
            "make the module under accelerate.init_empty_weights(), which leaves buffers as they "
            "are, or assign its value before from_module"
        )


def _check_part(path: str, part: Module) -> None:
    """Raises if one part of a module cannot be in a pure function.

    That is ``TypeError`` for a wrapper, such as DDP, and for a class with ``__slots__``.
    ``scale_grad_by_freq`` of the part itself raises ``ValueError``.
    """
    bases = type(part).__mro__
    for base in bases:
        if base.__name__ in _WRAPPERS:
            raise TypeError(
                f"{path} is a {base.__name__}, no plain module: {_WRAPPERS[base.__name__]}"
            )
    # A copy is a new object with the same __dict__, in which slots are not.
    if any(getattr(base, "__slots__", ()) for base in bases):
        raise TypeError(
            f"{path} has __slots__, which copies lack: remove it from the class"
        )
    # It divides a row's gradient by how often the microbatch has the token, not the batch.
    if getattr(part, "scale_grad_by_freq", False):
        raise ValueError(
            f"{path}.scale_grad_by_freq makes updates depend on the cut: unset it"
        )


def check_trained(
    params: Mapping[str, Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Raises unless params are real floats, have no hooks, and share no memory with other tensors.

    Shared memory raises ``ValueError``, the others ``TypeError``. ``tensors`` are all tensors of
    the module, the params first.
    """
    _check_memory(params, tensors)
    for name, p in params.items():
        if not p.is_floating_point():
            raise TypeError(
                f"trainable= chooses {name}, which is {tree.format_leaf(p)} and has "
                "no gradient here: "
                "leave it out, or hold a complex one as torch.view_as_real(p)"
            )
        if has_backward_hooks([p]):
            raise TypeError(
                f"{name} has a hook on its gradient, which apply leaves out: remove it, and do the "
                "same in a Transform before the optimizer (ps.optim.chain)"
            )


def _check_memory(
    params: Mapping[str, Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Raises ``ValueError`` if the memory of a param overlaps that of another one of ``tensors``.

    ``tensors`` are the params and all others. With ``b.weight.data = a.weight.data``, an optimizer
    that updates ``a.weight`` updates both. A tensor with gaps or expanded
    dimensions counts by its first element. Two tensors that do not train may share memory.
    """
    spans = []
    for name, tensor in tensors.items():
        local = local_part(tensor)
        start = local.data_ptr() if local.layout is torch.strided else 0
        if start:  # Not sparse, and not without elements.
            is_dense = local.numel() == memory_span(local)
            num_bytes = local.nbytes if is_dense else local.element_size()
            spans.append((start, start + num_bytes, name))
    param_end = last_end = 0
    param = last = ""
    for start, end, name in sorted(spans):
        if start < param_end:
            raise _shared_memory_error(param, name)
        if name in params:
            if start < last_end:
                raise _shared_memory_error(name, last)
            param = name
            param_end = end
        if end > last_end:
            last = name
            last_end = end


def _shared_memory_error(param: str, other: str) -> ValueError:
    return ValueError(
        f"{param}, which trains, shares memory with {other}, which would not follow it: let "
        f"both be one Parameter (a.weight = b.weight), or compute {other} in forward"
    )


def check_no_buffer_trains(params: Mapping[str, Parameter], module: Module) -> None:
    """Raises ``ValueError`` for a param that is a buffer of the module, too.

    A call would have two values for it, one of ``params`` and one of ``buffers``.
    """
    names = {id(p): name for name, p in params.items()}
    for name, buffer in module.named_buffers():
        if id(buffer) in names:
            raise ValueError(
                f"the buffer {name} is the parameter {names[id(buffer)]}, which trains: leave "
                f"register_buffer out, as in self.{name} = self.{names[id(buffer)]}, or freeze "
                "the parameter"
            )


def find_written_buffers(module: Module) -> list[str]:
    """Returns the names of buffers of parts in training mode that track running statistics.

    BatchNorm writes to these. Parts that write without ``track_running_stats``, as
    ``spectral_norm`` does, are not found.

    For a BatchNorm without running statistics, in any mode, the list has a text that is no buffer's
    name. Each call lacks it, so that each is refused; the text says why.

    >>> find_written_buffers(torch.nn.BatchNorm1d(2))
    ['running_mean', 'running_var', 'num_batches_tracked']
    """
    names = []
    for path, part in module.named_modules():
        if isinstance(part, _BATCH_NORMS) and part.running_mean is None:
            names.append(f"statistics of {path} ({_CUT_HINT})")
        elif part.training and getattr(part, "track_running_stats", False):
            for name, _ in part.named_buffers():
                names.append(f"{path}.{name}".removeprefix("."))
    return names


def check_names(
    what: str,
    mapping: Any,
    allowed: Collection[str],
    required: Collection[str],
    hint: str,
) -> None:
    """Raises if a mapping lacks a required name, or has one that is not allowed.

    The error is a ``ValueError`` whose message ends with ``hint``. For what is no mapping, it is a
    ``TypeError``. ``what`` names the mapping in both messages.

    >>> check_names("params", {"bias": 0}, ["weight"], ["weight"], "pass those of from_module")
    Traceback (most recent call last):
    ...
    ValueError: params lacks weight, and has bias, which this module has not: pass those of ...
    """
    if not isinstance(mapping, Mapping):
        raise TypeError(
            f"{what} is a {type(mapping).__name__}, no mapping by name: "
            "pass a dict, and params first, as in apply(params, ...)"
        )
    missing = [name for name in required if name not in mapping]
    unknown = [name for name in mapping if name not in allowed]
    if missing or unknown:
        parts = []
        if missing:
            parts.append(f"lacks {format_names(missing)}")
        if unknown:
            parts.append(f"has {format_names(unknown)}, which this module has not")
        raise ValueError(f"{what} {', and '.join(parts)}: {hint}")


def check_are_tensors(what: str, values: Mapping[str, Any]) -> None:
    """Raises ``TypeError`` for a value that is neither a tensor nor a ``Shard``.

    ``what`` names the mapping in the message.
    """
    for name, value in values.items():
        if not isinstance(value, Tensor) and not is_shard(value):
            raise TypeError(
                f"{what}[{name!r}] is {value!r:.80}, no tensor: pass a tensor, as "
                f"torch.tensor(3.0), or leave {name} out"
            )


def check_writable(name: str, value: Any, target: Tensor) -> None:
    """Raises ``ValueError`` unless a value can be written to the module's tensor of that name.

    A ``Shard`` cannot, nor what is on the meta device or has another shape or dtype.
    """
    if is_shard(value):
        raise ValueError(
            f"{name} is a shard over {value.axis}: pass ps.unshard(params)"
        )
    expected = tree.format_leaf(target)
    if tree.format_leaf(value) != expected:
        raise ValueError(
            f"{name} is {tree.format_leaf(value)}, and the module's is {expected}: "
            "write back to the module that from_module took, or one like it"
        )
    # torch's ``copy_`` to "meta" writes nothing, without a word.
    if target.is_meta:
        raise ValueError(
            f"{name} of the module is on the meta device, which holds no values: call "
            "module.to_empty(device=...) first"
        )
    if value.is_meta:
        raise ValueError(
            f"{name} is on the meta device and has no values to write: load them first, as by "
            "ps.checkpoint.load_safetensors"
        )


def format_names(names: Iterable[str]) -> str:
    """Joins the first five names by commas, and "..." if there are more; "none" without any.

    >>> format_names("abcdef")
    'a, b, c, d, e, ...'
    >>> format_names("abcde")
    'a, b, c, d, e'
    >>> format_names([])
    'none'
    """
    names = [*names]
    if not names:
        return "none"
    shown = names[:_MAX_NAMES]
    if len(names) > _MAX_NAMES:
        shown.append("...")
    return ", ".join(shown)
