"""What the first call of a module shows: with which tensors it computes, and to which it writes.

Each question is asked before an operation is carried out, so what is refused has not happened.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from purestep import torch_private
from purestep.nn.dropout import NOISE

BUFFERS = (
    "with buffers=dict(module.named_buffers()), apply returns (output, buffers); or call .eval() "
    "of what writes to them before from_module"
)
_WRITES = (
    "the module writes to {}: compute a new tensor, which each call forgets. Of a buffer, "
    f"{BUFFERS}. Of Gemma3n, set config.altup_coef_clip = None"
)
_ELSEWHERE = (
    "the call computes with {} of the module itself, which does not train: a closure, a global "
    "name, a class or another object leads to it. Let forward find it in the module's attributes"
)
_NUMBERS = (
    "numpy's or Python's generator has drawn numbers during the call, which no key reaches: switch "
    "that off (config.apply_spec_augment = False). If another thread draws them, call again"
)


def memory_range(tensor: Any) -> torch.UntypedStorage | None:
    """The storage of a tensor, in whatever wrappers of torch.func; None of what has none."""
    tensor = torch.func.debug_unwrap(tensor) if isinstance(tensor, Tensor) else tensor
    strided = isinstance(tensor, Tensor) and tensor.layout is torch.strided
    return tensor.untyped_storage() if strided and tensor.numel() else None


@contextmanager
def check_first_call(
    kept: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    inputs: Sequence[Any],
    keyed: bool,
) -> Iterator[None]:
    """Refuses to write to what is kept, to compute with others of the module, to draw without keys.

    Parameters of the module itself may be inputs, or what is kept.

    >>> own = torch.nn.Linear(1, 1).weight
    >>> with check_first_call({"weight": own}, {}, [], keyed=False):
    ...     own.data.clamp_(0, 1)
    Traceback (most recent call last):
    ...
    ValueError: the module writes to weight: compute a new tensor, which ...
    """
    places = {name: memory_range(each) for name, each in kept.items()}
    writes = {at: name for name, at in places.items() if at}
    known = {None, *writes, *map(memory_range, inputs)}
    reads = {
        memory_range(each): name
        for name, each in own.items()
        if memory_range(each) not in known
    }

    def look(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        given = torch_private.arguments_of(operation, args, dict(kwargs))
        trains, _ = given.get("training", given.get("train", (None, False)))
        for name, (value, written) in given.items():
            # torch does not say that a batch norm writes to its running statistics.
            written |= bool(trains) and name.startswith("running_")
            for at in map(
                memory_range, value if isinstance(value, list | tuple) else [value]
            ):
                if at in reads:
                    raise ValueError(_ELSEWHERE.format(reads[at]))
                if written and at in writes:
                    raise ValueError(_WRITES.format(writes[at]))
        if (
            keyed
            and trains is not False
            and torch_private.may_draw(operation, args, dict(kwargs))
        ):
            name = str(operation).split(".")[1]
            raise ValueError(
                f"{name} draws random numbers that no key reaches: {NOISE}"
            )

    before = keyed and _generators()
    with torch_private.watching(look):
        yield
    for name, each in kept.items():
        if (
            memory_range(each) is not places[name]
        ):  # Something has been assigned to its ``.data``.
            raise ValueError(_WRITES.format(name))
    if keyed and _generators() != before:
        raise ValueError(_NUMBERS)


def check_assigned(module: Module, buffers: Mapping[str, Tensor]) -> None:
    """Refuses a call that has put another tensor in the place of one of these, which is forgotten.

    A module may do so with buffers that no checkpoint keeps, such as tables of positions.

    >>> module = torch.nn.BatchNorm1d(1)
    >>> buffers = dict(module.named_buffers())
    >>> module.running_var = module.running_var / 2
    >>> check_assigned(module, buffers)
    Traceback (most recent call last):
    ...
    ValueError: the module writes to running_var: compute a new tensor, which ...
    """
    for name, each in module.named_buffers():
        if each is not buffers.get(name, each) and name in module.state_dict():
            raise ValueError(_WRITES.format(name))


def _generators() -> Any:
    """The states of Python's generator and of numpy's."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), repr(numpy and numpy.random.get_state())
