"""Provides a device that is not the CPU: in torch's CPU wheel, lazy tensors.

They take every code path that depends on the device, refuse what CUDA refuses, and compute with the CPU's kernels. A
lazy tensor has no address, and its values are computed when they are read, which can be counted.

``PURESTEP_DEVICE=cuda`` takes a real device instead, for which torch itself says where the host waits.
``PURESTEP_DEVICE=cpu`` runs the same tests on the CPU: there are no waits to see.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from purestep import tree
from support.strategies import Case
from support.texts import RealCase
from support.theorem import PURESTEP, System
from support.torch_private import lazy_backend, lazy_metrics

DEVICE_TYPE = os.environ.get("PURESTEP_DEVICE", "lazy")
"""The device of the tests: "lazy", "cuda" or "cpu"."""

SEES_WAITS = DEVICE_TYPE != "cpu"
"""Whether the host can wait for the device, and ``Waits`` sees it."""

READING = [
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
]
"""Operations whose result the host has to read: on CUDA it waits for all kernels queued before."""

COPIES: dict[Any, int] = {
    torch.tensor: 0,
    torch.as_tensor: 0,
    Tensor.to: 0,
    Tensor.copy_: 1,
}
"""Functions that copy values to a device, and the index of the argument that holds them."""


@cache
def get_device() -> torch.device:
    """Returns the device, which exists from the first call on, for the rest of the process."""
    if DEVICE_TYPE != "lazy":
        return torch.empty(0, device=DEVICE_TYPE).device
    lazy_backend.init()
    return torch.device("lazy", 0)


def move_case(drawn: Any) -> Any:
    """Moves a drawn case to the device. Aliases stay aliases, and state lies where ``init`` puts it."""
    tensors: dict[int, Tensor] = {}

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tensors.setdefault(id(value), to_device(value))
        if isinstance(value, Case):
            params = tree.map(move, value.params)
            opt_state = place_like(value.opt_state, value.optimizer.init(params))
            return replace(
                value, params=params, batch=move_all(value.batch), opt_state=opt_state
            )
        if isinstance(value, RealCase):
            return replace(
                value, params=move_all(value.params), batch=move_all(value.batch)
            )
        return value

    def move_all(values: Any) -> Any:
        return tree.map(move, values)

    return move_all(drawn)


def to_device(value: Tensor) -> Tensor:
    """Returns a tensor on the device: on the CPU the tensor itself, laid out as it was drawn."""
    return value.to(get_device())


def place_like(values: Any, like: Any) -> Any:
    """Moves each leaf to the device of the same leaf of ``like``."""
    return tree.map(lambda leaf, other: leaf.to(other.device), values, like)


class Waits:
    """Records in ``seen`` the names of operations that make the host wait for the device.

    These are reads of values, copies to the host, and copies to the device without
    ``non_blocking=True``, for which CUDA waits, too. Copies are seen in the thread that enters, reads in all.
    On CUDA, a name is the line of Python that waits.

    >>> with Waits() as waits:
    ...     _ = torch.ones(3, device=get_device()).sum().item()
    >>> waits.seen
    ['aten::_local_scalar_dense']
    """

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._watch = WATCHES[DEVICE_TYPE](self.seen)

    def __enter__(self) -> Waits:
        get_device()
        self._watch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._watch.__exit__(*error)


@contextmanager
def _watch_lazy(seen: list[str]) -> Iterator[None]:
    lazy_metrics.reset()
    with _WatchCopies(seen):
        yield
    for name in set(READING) & set(lazy_metrics.counter_names()):
        seen += [name] * lazy_metrics.counter_value(name)


@contextmanager
def _watch_cuda(seen: list[str]) -> Iterator[None]:
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchronizing CUDA operation" in str(warning.message):
            seen.append(f"{warning.filename}:{warning.lineno}")
        elif "prototype feature" not in str(warning.message):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )


@contextmanager
def _watch_nothing(seen: list[str]) -> Iterator[None]:
    yield


WATCHES = {"lazy": _watch_lazy, "cuda": _watch_cuda, "cpu": _watch_nothing}


class _WatchCopies(TorchFunctionMode):
    """Sees copies between the host and lazy tensors."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = {_is_lazy(leaf) for leaf in tree.leaves((args, kwargs))}
        outputs = {_is_lazy(leaf) for leaf in tree.leaves(result)}
        to_host = True in inputs and (False in outputs or func is Tensor.tolist)
        to_device = (
            func in COPIES and True in outputs and not _is_lazy(args[COPIES[func]])
        )
        if to_host or (to_device and not kwargs.get("non_blocking")):
            self.seen.append(func.__name__)
        return result


def _is_lazy(value: Any) -> bool | None:
    """Returns whether a tensor is lazy; None for other values."""
    if not isinstance(value, Tensor):
        return None
    return value.device.type == "lazy"


def without_waits(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that makes steps: its steps assert that the host does not wait."""

    def make_asserting(*args: Any, **settings: Any) -> Callable[..., Any]:
        step = make(*args, **settings)

        def run(*state: Any) -> Any:
            with Waits() as waits:
                result = step(*state)
            assert not waits.seen, f"the step waits for the device: {waits.seen}"
            return result

        return run

    return make_asserting


ON_DEVICE = System(
    make_update_step=without_waits(PURESTEP.make_update_step),
    make_eval_step=without_waits(PURESTEP.make_eval_step),
)
"""purestep, where no step may wait for its device."""
