"""What the first call of a module shows: with which tensors it computes, and to which it writes.

Each question is asked before an operation is carried out, so what is refused has not happened.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from purestep.modules.keyed import NOISE
from purestep.torch_private import (
    arguments_of,
    is_wrapped,
    may_draw,
    storage_of,
    unwrapped,
    watching,
)


class Tensors(NamedTuple):
    """Those of a call by name: params, buffers, others, and the module's parameters that train."""

    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    others: Mapping[str, Tensor]
    trained: Mapping[str, Tensor]


BUFFERS = (
    "buffers are constants, but for those that are passed: with "
    "buffers=dict(module.named_buffers()), apply returns (output, buffers). Or call .eval() of the "
    "part that writes to them before from_module"
)
_WRITES = {
    "parameter": (
        "it is the caller's, and differentiated: compute with a new tensor (weight.clamp(...)) "
        "instead. Of Gemma3n, set config.altup_coef_clip = None"
    ),
    "buffer": BUFFERS,
    "tensor": (
        "compute a new one and assign it, which each call forgets; or make it a buffer "
        "(register_buffer), and pass buffers=dict(module.named_buffers())"
    ),
}


def written(kind: str, name: str) -> str:
    """What to say of a call that writes to a tensor."""
    return f"the module writes to its {kind} {name}: {_WRITES[kind]}"


def place(tensor: Tensor) -> int:
    """The storage of a tensor, in whatever wrappers of torch.func; 0 of what lies in none."""
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    return storage_of(tensor) if tensor.layout is torch.strided and tensor.numel() else 0


def elsewhere(name: str) -> str:
    """What to say of a call that computes with a parameter of the module itself."""
    return (
        f"the call computes with {name} of the module itself, which stays as it is while params "
        "change: a global name, a class, a default argument or another object leads to it. Let "
        "forward find it in the module's attributes"
    )


@contextmanager
def watched(tensors: Tensors, inputs: Sequence[Any], keyed: bool, training: bool) -> Iterator[None]:
    """Refuses to compute with other parameters, to write to tensors, and to draw without keys.

    >>> own = torch.nn.Linear(1, 1).weight
    >>> with watched(Tensors({"weight": own}, {}, {}, {}), [], False, True):
    ...     own.data.clamp_(0, 1)
    Traceback (most recent call last):
    ...
    ValueError: the module writes to its parameter weight: it is the caller's, ...
    """
    kept = _by_storage(tensors)
    read = {place(each): elsewhere(name) for name, each in tensors.trained.items()}
    for each in inputs:
        read.pop(place(each) if isinstance(each, Tensor) else 0, None)
    read = {key: message for key, message in read.items() if key and key not in kept}

    def look(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        given = arguments_of(operation, args, dict(kwargs))
        for tensor, is_written in _operands(operation, given):
            at = place(tensor)
            message = read.get(at) or (kept.get(at) if is_written else None)
            if message is not None:
                raise ValueError(message)
        trains, _ = given.get("training", (True, False))
        if keyed and trains and may_draw(operation, args, dict(kwargs)):
            name = str(operation).split(".")[1]
            raise ValueError(f"{name} draws random numbers that no key reaches: {NOISE}")

    before, numpy = _generators() if keyed else [], _Numpy(kept)
    with watching(look), numpy if training else nullcontext():
        yield
    for copy, tensor in numpy.copies:
        if not torch.equal(copy, tensor):
            raise ValueError(kept[place(tensor)])
    if keyed and _generators() != before:
        raise ValueError(
            "numpy's or Python's generator has drawn random numbers during the call, which no key "
            "reaches: SpecAugment does (config.apply_spec_augment = False), or another thread, and "
            "then call again"
        )


def check_assigned(aliases: Mapping[str, Tensor], tensors: Tensors) -> None:
    """Refuses a call that has moved the aliases to other memory, through ``.data``."""
    messages = _by_storage(tensors)
    for name, each in {**tensors.params, **tensors.buffers, **tensors.others}.items():
        if place(aliases[name]) != place(each):
            raise ValueError(messages.get(place(each), written("tensor", name)))


def _by_storage(tensors: Tensors) -> dict[int, str]:
    """What to say of a write to each storage."""
    named = zip(_WRITES, tensors[:3], strict=True)
    messages = {place(t): written(kind, name) for kind, ts in named for name, t in ts.items()}
    return {key: message for key, message in messages.items() if key}


class _Numpy(TorchFunctionMode):
    """Gives numpy copies of a module's tensors, which show later whether it has written to them."""

    def __init__(self, kept: Mapping[int, str]) -> None:
        super().__init__()
        self._kept = kept
        self.copies: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.numpy, Tensor.__array__) and place(args[0]) in self._kept:
            self.copies.append((args[0].clone(), args[0]))
            args = (self.copies[-1][0], *args[1:])
        return func(*args, **(kwargs or {}))


def _operands(
    operation: Any, given: Mapping[str, tuple[Any, bool]]
) -> Iterator[tuple[Tensor, bool]]:
    """The tensors of an operation, and whether it writes to them."""
    # torch does not say that these write to their running statistics.
    trains, _ = given.get("training", given.get("train", (False, False)))
    normalises = trains and "batch_norm" in operation.name()
    for name, (value, written) in given.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, Tensor):
                yield each, written or (normalises and name.startswith("running_"))


def _generators() -> list[Any]:
    """The states of Python's generator and of numpy's."""
    numpy = sys.modules.get("numpy")
    states = [random.getstate()]
    return states if numpy is None else [*states, repr(numpy.random.get_state())]
