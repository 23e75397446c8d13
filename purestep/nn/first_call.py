"""Checks of a module's first call: with which tensors it computes, and to which it writes.

Each operation is checked before it runs, so that what is refused has not happened.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module

from purestep import torch_private
from purestep.nn.dropout import UNKEYED_HINT
from purestep.nn.tensor_parallel import local_part
from purestep.torch_private import is_persistent

BUFFERS_HINT = (
    "with buffers=dict(module.named_buffers()), apply returns (output, buffers); or call .eval() "
    "of what writes to them before from_module"
)
_WRITES = (
    "the module writes to {}: compute a new tensor, which each call forgets. Of a buffer, "
    f"{BUFFERS_HINT}. Of Gemma3n, set config.altup_coef_clip = None"
)
_EMPTIED = (
    "the module assigns to {}, a buffer that is None before or after the call: let it be a tensor "
    "in both, or register it with persistent=False where each call may forget it"
)
_OWN_PARAMETER = (
    "the call computes with {} of the module itself, which does not train: a closure, a global "
    "name, a class or another object leads to it. Let forward find it in the module's attributes"
)
_HOST_GENERATORS = (
    "numpy's or Python's generator has drawn numbers during the call, which no key reaches: switch "
    "that off (config.apply_spec_augment = False). If another thread draws them, call again"
)


def get_storage(value: Any) -> torch.UntypedStorage | None:
    """Returns a tensor's storage, below the wrappers of ``torch.func`` and of DTensor.

    None for what has none: other values, sparse tensors, tensors without elements.
    """
    if not isinstance(value, Tensor):
        return None
    # Under ``grad`` and ``vmap``, operations get wrappers, whose storage is not the tensor's.
    tensor = local_part(torch.func.debug_unwrap(value))
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    return tensor.untyped_storage()


class OwnStorages:
    """Names the storages of a module's parameters, and keeps none of them alive.

    Weak references to the parameters would forbid ``torch.utils.swap_tensors``, by which a module
    on DTensors moves. A deep copy or a pickle names no storage, since it would meet others.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._names: dict[StorageWeakRef, str] = {}
        for name, parameter in parameters.items():
            storage = get_storage(parameter)
            if storage is not None:
                self._names[StorageWeakRef(storage)] = name

    def __reduce__(self) -> Any:
        return OwnStorages, ({},)

    def except_for(
        self, storages: Iterable[torch.UntypedStorage | None]
    ) -> dict[StorageWeakRef, str]:
        """Returns parameters' names by weak reference to their storage, except for ``storages``."""
        others = {StorageWeakRef(x) for x in storages if x is not None}
        return {ref: name for ref, name in self._names.items() if ref not in others}


@contextmanager
def check_first_call(
    frozen: Mapping[str, Tensor],
    own_storages: OwnStorages,
    inputs: Sequence[Any],
    uses_keys: bool,
) -> Iterator[dict[Any, str]]:
    """Checks in a context what a module's first call does, and raises ``ValueError`` if it may not.

    * An operation of torch that writes to a strided tensor in ``frozen`` raises before it runs. If
      another tensor was assigned to its ``.data``, the context raises at its end.
    * An operation that uses the module's own parameters raises before it runs: it should compute
      with params. ``own_storages`` names their memory. Memory that is also in ``inputs`` or
      ``frozen`` may be used, since a caller may pass the parameters themselves.
    * With ``uses_keys``, an operation of torch that draws random numbers raises before it runs. If
      the global generator of Python or numpy has drawn, the context raises at its end.

    It yields the names of frozen tensors by storage. A unit adds the params that it gathers: they
    are then frozen, too.

    >>> weight = torch.nn.Linear(1, 1).weight
    >>> with check_first_call({"weight": weight}, OwnStorages({}), [], False):
    ...     weight.data.clamp_(0, 1)
    Traceback (most recent call last):
    ...
    ValueError: the module writes to weight: compute a new tensor, which ...
    """
    # Storages, since views and ``.data`` are other tensors in the same memory.
    frozen_storages = {name: get_storage(x) for name, x in frozen.items()}
    frozen_names: dict[Any, str] = {
        storage: name for name, storage in frozen_storages.items() if storage
    }
    readable = {None, *frozen_names}
    readable |= {get_storage(x) for x in inputs}
    unreadable_names = own_storages.except_for(readable)
    states = _generator_states() if uses_keys else None
    check = _make_operation_check(unreadable_names, frozen_names, uses_keys)
    with torch_private.watch_operations(check):
        yield frozen_names
    for name, tensor in frozen.items():
        # ``p.data = other`` is no operation, so it was not seen above.
        if get_storage(tensor) is not frozen_storages[name]:
            raise ValueError(_WRITES.format(name))
    if uses_keys and _generator_states() != states:
        raise ValueError(_HOST_GENERATORS)


def _make_operation_check(
    unreadable_names: Mapping[StorageWeakRef, str],
    frozen_names: Mapping[Any, str],
    uses_keys: bool,
) -> Callable[[Any, Sequence[Any], Mapping[str, Any]], None]:
    """Makes a function that raises ``ValueError`` for an operation that is not allowed.

    The function takes ``(operation, args, kwargs)``. An operation must not use a tensor in
    ``unreadable_names``, or write to one in ``frozen_names``. Both mappings have names by storage.
    With ``uses_keys``, it must not draw random numbers.
    """

    def check_operation(
        operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        arguments = torch_private.bind_arguments(operation, args, dict(kwargs))
        training, _ = arguments.get("training", arguments.get("train", (None, False)))
        for name, (value, is_written) in arguments.items():
            # torch's schemas do not say that a batch norm writes to its running statistics.
            writes = is_written or (bool(training) and name.startswith("running_"))
            values = value if isinstance(value, list | tuple) else [value]
            for storage in [get_storage(x) for x in values]:
                if storage is None:
                    continue
                own_name = unreadable_names.get(StorageWeakRef(storage))
                if own_name is not None:
                    raise ValueError(_OWN_PARAMETER.format(own_name))
                if writes and storage in frozen_names:
                    raise ValueError(_WRITES.format(frozen_names[storage]))
        # Operations such as rrelu draw only with training=True.
        if (
            uses_keys
            and training is not False
            and torch_private.may_draw_random(operation, args, dict(kwargs))
        ):
            name = str(operation).split(".")[1]  # Of aten.bernoulli_.float, say.
            raise ValueError(
                f"{name} draws random numbers that no key reaches: {UNKEYED_HINT}"
            )

    return check_operation


def check_assigned(module: Module, buffers: Mapping[str, Tensor]) -> None:
    """Raises ``ValueError`` if a call has assigned another tensor to one of these buffers.

    The call ran on a copy of the module, so the new value would be forgotten. Buffers that no
    checkpoint keeps, ``persistent=False``, may be assigned: tables of positions, say, which the
    module computes again.

    >>> module = torch.nn.BatchNorm1d(1)
    >>> buffers = dict(module.named_buffers())
    >>> module.running_var = module.running_var / 2
    >>> check_assigned(module, buffers)
    Traceback (most recent call last):
    ...
    ValueError: the module writes to running_var: compute a new tensor, which ...
    """
    for name, buffer in module.named_buffers():
        is_other = buffer is not buffers.get(name, buffer)
        if is_other and name in module.state_dict():
            raise ValueError(_WRITES.format(name))


def names_of_buffers(module: Module) -> set[str]:
    """Returns all names of a module's buffers, without those that are None.

    >>> names_of_buffers(torch.nn.BatchNorm1d(1, track_running_stats=False))
    set()
    """
    return {name for name, _ in module.named_buffers(remove_duplicate=False)}


def check_emptied(module: Module, original: Module) -> None:
    """Raises ``ValueError`` if a call has set a buffer to None, or one that was None to a tensor.

    ``original`` is the module as it was before. Buffers with ``persistent=False`` may be assigned.

    >>> original = torch.nn.Module()
    >>> original.register_buffer("cache", None)
    >>> module = torch.nn.Module()
    >>> module.register_buffer("cache", torch.ones(1))
    >>> check_emptied(module, original)
    Traceback (most recent call last):
    ...
    ValueError: the module assigns to cache, a buffer that is None before or after the call: ...
    """
    for full, empty in ((module, original), (original, module)):
        parts = dict(empty.named_modules(remove_duplicate=False))
        for name in sorted(names_of_buffers(full) - names_of_buffers(empty)):
            path, _, attribute = name.rpartition(".")
            # A call may register new parts and buffers, which ``empty`` lacks.
            part = parts.get(path, Module())
            value = getattr(part, attribute, "missing")
            if value is None and is_persistent(part, attribute):
                raise ValueError(_EMPTIED.format(name))


def _generator_states() -> tuple[Any, str]:
    """Returns the state of Python's generator, and the ``repr`` of numpy's state.

    numpy's state holds an array of 624 numbers. Its ``==`` gives no bool, and ``repr`` shows all of
    them. Where nothing has imported numpy, the text is "None": no module draws from it.
    """
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    return random.getstate(), repr(numpy_state)
