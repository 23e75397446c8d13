"""Watches what an update has to leave as it was: its data, and the program's global state."""

import gc
import pickle
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep.testing.problem import Batch
from purestep.testing.trainer import Group


class _GlobalState(NamedTuple):
    """Holds the functions that read and write one piece of global state."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _call_numpy(function: str, *args: Any) -> Any:
    """Returns the result of a function of ``numpy.random``; None if NumPy has not been imported."""
    if "numpy" not in sys.modules:
        return None
    generator = sys.modules["numpy"].random
    return getattr(generator, function)(*args)


def _set_gc(enabled: bool) -> None:
    if enabled:
        gc.enable()
    else:
        gc.disable()


STATE = {
    "torch's global generator": _GlobalState(
        read=torch.get_rng_state,
        write=torch.set_rng_state,
    ),
    "Python's global generator": _GlobalState(
        read=random.getstate,
        write=random.setstate,
    ),
    "NumPy's global generator": _GlobalState(
        read=lambda: _call_numpy("get_state"),
        write=lambda state: _call_numpy("set_state", state),
    ),
    "whether gradients are recorded": _GlobalState(
        read=torch.is_grad_enabled,
        write=torch.set_grad_enabled,
    ),
    "the default dtype": _GlobalState(
        read=torch.get_default_dtype,
        write=torch.set_default_dtype,
    ),
    "the number of threads": _GlobalState(
        read=torch.get_num_threads,
        write=torch.set_num_threads,
    ),
    "the precision of products": _GlobalState(
        read=torch.get_float32_matmul_precision,
        write=torch.set_float32_matmul_precision,
    ),
    "whether all is deterministic": _GlobalState(
        read=torch.get_deterministic_debug_mode,
        write=torch.set_deterministic_debug_mode,
    ),
    "the search for anomalies": _GlobalState(
        read=torch.is_anomaly_enabled,
        write=torch.autograd.set_detect_anomaly,
    ),
    "whether garbage is collected": _GlobalState(
        read=gc.isenabled,
        write=_set_gc,
    ),
}
"""What an update may not change, by its name."""


UNUSUAL = 1_618_033
"""Is added to seeds: a program that seeds a generator with 1 is seen."""


class Watch:
    """Notes changes of data and global state from its making on.

    Making it seeds the global generators of torch's CPU, Python and NumPy, each with
    ``(seed + UNUSUAL) % 2**32``. So a program that draws from them does the same in every session.
    ``end`` puts back all global state that ``STATE`` lists.
    """

    def __init__(self, seed: int) -> None:
        self._original = _read_state()
        seed = (seed + UNUSUAL) % 2**32  # NumPy takes no larger one.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        _call_numpy("seed", seed)
        self._before = _read_state()
        self._changed_inputs: list[tuple[str, str]] = []

    def call(self, function: Callable[[Group], Any], group: Group) -> Any:
        """Calls a function on a copy of the group, and notes what it has changed in the copy.

        Returns the function's result; ``changed`` lists the notes.
        """
        copied = []
        for share in group:
            copied.append([_clone(batch) for batch in share])
        result = function(copied)
        if len(copied) != len(group):
            self._changed_inputs.append(("inputs", "the list of ranks"))
        for old_share, new_share in zip(group, copied, strict=False):
            self._compare(old_share, new_share)
        return result

    def _compare(self, old_share: Sequence[Batch], new_share: Sequence[Batch]) -> None:
        """Notes what a call has changed in one rank's microbatches."""
        names = []
        if len(old_share) != len(new_share):
            names.append("the list of microbatches")
        for old, new in zip(old_share, new_share, strict=False):
            for key in {**old, **new}:
                if not _is_equal(old.get(key), new.get(key)):
                    names.append(f"the microbatch's {key}")
        self._changed_inputs += [("inputs", name) for name in names]

    def changed(self) -> list[tuple[str, str]]:
        """Lists what has changed since ``Watch(seed)``, as pairs of a kind and a name.

        The kind is "inputs" or "global state".
        """
        changed = list(self._changed_inputs)
        for name, state in _read_state().items():
            if not _is_equal(state, self._before[name]):
                changed.append(("global state", name))
        return changed

    def end(self) -> None:
        """Puts the global state that ``STATE`` lists back as it was before ``Watch(seed)``."""
        for name, state in STATE.items():
            if self._original[name] is not None:  # Else NumPy was not imported then.
                state.write(self._original[name])


def _read_state() -> dict[str, Any]:
    return {name: state.read() for name, state in STATE.items()}


def _clone(batch: Batch) -> Batch:
    return {key: x.clone() for key, x in batch.items()}


def _is_equal(x: Any, y: Any) -> bool:
    if x is y:  # Such as True, or a dtype.
        return True
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if x.dtype != y.dtype or x.shape != y.shape:
            return False
        if x.requires_grad != y.requires_grad:
            return False
        # One operation in place of six, where there is no NaN.
        return torch.equal(x, y) or bool(equal_or_nan(x, y).all())
    # NumPy's state is a tuple with an array: its == is no bool.
    return pickle.dumps(x) == pickle.dumps(y)


def equal_or_nan(x: Tensor, y: Tensor) -> Tensor:
    """Returns the mask of the elements in which two tensors are equal, or both NaN."""
    both_nan = x.isnan() & y.isnan()
    return (x == y) | both_nan
