"""What the first call of a module shows: with which tensors it computes, and to which it writes.

Each question is asked before an operation is carried out, so what is refused has not happened.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from purestep.modules.keyed import NOISE
from purestep.torch_private import (
    arguments_of,
    is_wrapped,
    may_draw,
    storage_of,
    unwrapped,
    watching,
)

Messages = dict[int, str]
"""What to say of a storage."""

BUFFERS = (
    "buffers are constants, but for those that are passed: with "
    "buffers=dict(module.named_buffers()), apply returns (output, buffers). Or call .eval() of the "
    "part that writes to them before from_module"
)
_WRITTEN = {
    "parameter": (
        "it is the caller's, and differentiated: compute with a new tensor (weight.clamp(...)) "
        "instead. Of Gemma3n, set config.altup_coef_clip = None"
    ),
    "buffer": BUFFERS,
    "tensor": "compute a new one and assign it, which each call forgets; or make it a buffer",
}


def written(named: Mapping[str, Tensor], kind: str) -> Messages:
    """What to say of a call that writes to tensors of one kind."""
    why = _WRITTEN[kind]
    return _by_place(named, lambda name: f"the module writes to its {kind} {name}: {why}")


def elsewhere(named: Mapping[str, Tensor]) -> Messages:
    """What to say of a call that computes with parameters of the module itself."""
    return _by_place(
        named,
        lambda name: (
            f"the call computes with {name} of the module itself, which stays as it is while "
            "params change: a closure, a global name, a class, a default argument or another "
            "object leads to it. Let forward find it in the module's attributes"
        ),
    )


def _by_place(named: Mapping[str, Tensor], message: Callable[[str], str]) -> Messages:
    found = {place(tensor): message(name) for name, tensor in named.items()}
    return {key: each for key, each in found.items() if key}


def place(tensor: Tensor) -> int:
    """The storage of a tensor, in whatever wrappers of torch.func; 0 of what lies in none."""
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    return storage_of(tensor) if tensor.layout is torch.strided and tensor.numel() else 0


@contextmanager
def watched(
    writes: Messages, reads: Messages, tensors: Sequence[Tensor], keyed: bool
) -> Iterator[None]:
    """Refuses to write to some storages, to compute with others, and to draw without keys.

    Afterwards, ``tensors`` lie where they lay: nothing has been assigned to their ``.data``.

    >>> own = torch.nn.Linear(1, 1).weight
    >>> with watched(written({"weight": own}, "parameter"), {}, [own], keyed=False):
    ...     own.data.clamp_(0, 1)
    Traceback (most recent call last):
    ...
    ValueError: the module writes to its parameter weight: it is the caller's, ...
    """

    def look(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        given = arguments_of(operation, args, dict(kwargs))
        trains, _ = given.get("training", given.get("train", (None, False)))
        for name, (value, is_written) in given.items():
            # torch does not say that a batch norm writes to its running statistics.
            is_written |= bool(trains) and name.startswith("running_")
            for each in value if isinstance(value, list | tuple) else [value]:
                at = place(each) if isinstance(each, Tensor) else 0
                message = at and (reads.get(at) or (is_written and writes.get(at)))
                if message:
                    raise ValueError(message)
        if keyed and trains is not False and may_draw(operation, args, dict(kwargs)):
            name = str(operation).split(".")[1]
            raise ValueError(f"{name} draws random numbers that no key reaches: {NOISE}")

    places = [*map(place, tensors)]
    before = _generators() if keyed else []
    with watching(look):
        yield
    for at, now in zip(places, map(place, tensors), strict=True):
        if at != now and at in writes:
            raise ValueError(writes[at])
    if keyed and _generators() != before:
        raise ValueError(
            "numpy's or Python's generator has drawn random numbers during the call, which no key "
            "reaches: SpecAugment does (config.apply_spec_augment = False), or another thread, and "
            "then call again"
        )


def _generators() -> list[Any]:
    """The states of Python's generator and of numpy's."""
    numpy = sys.modules.get("numpy")
    states = [random.getstate()]
    return states if numpy is None else [*states, repr(numpy.random.get_state())]
