"""What an update has to leave as it was: its data, and the global state of the program."""

import gc
import itertools
import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from purestep.testing.trainer import Group

_SEEDS = itertools.count(1)


def _numpy(name: str, *args: Any) -> Any:
    """This function of NumPy's global generator, where NumPy is there."""
    return (
        getattr(sys.modules["numpy"].random, name)(*args)
        if "numpy" in sys.modules
        else None
    )


STATE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch's global generator": (torch.get_rng_state, torch.set_rng_state),
    "Python's global generator": (random.getstate, random.setstate),
    "NumPy's global generator": (lambda: _numpy("get_state"), lambda x: _numpy("set_state", x)),
    "whether gradients are recorded": (torch.is_grad_enabled, torch.set_grad_enabled),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the precision of products":
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "whether all is deterministic":
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "the search for anomalies": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "whether garbage is collected": (gc.isenabled, lambda on: (gc.disable, gc.enable)[on]()),
}  # fmt: skip
"""How each is read, and put back."""


class Watch:
    """Looks from its making to its end. The generators stand where no program has put them."""

    def __init__(self) -> None:
        self._kept = {name: read() for name, (read, _) in STATE.items()}
        seed = next(_SEEDS)
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        _numpy("seed", seed)
        self._before = {name: read() for name, (read, _) in STATE.items()}
        self._inputs: list[tuple[str, str]] = []

    def call(self, call: Callable[[Group], Any], group: Group) -> Any:
        """An update or an evaluation, on a copy of the data."""
        copied = [
            [{key: x.clone() for key, x in b.items()} for b in share] for share in group
        ]
        result = call(copied)
        if [*map(len, copied)] != [*map(len, group)]:
            self._inputs.append(("inputs", "the list of microbatches"))
        for share, other in zip(group, copied, strict=False):
            for old, new in zip(share, other, strict=False):
                keys = [
                    key
                    for key in {**old, **new}
                    if not _alike(old.get(key), new.get(key))
                ]
                self._inputs += [("inputs", f"the microbatch's {key}") for key in keys]
        return result

    def changed(self) -> list[tuple[str, str]]:
        """What is not as it was."""
        state = [
            name
            for name, old in self._before.items()
            if not _alike(STATE[name][0](), old)
        ]
        return [*self._inputs, *(("global state", name) for name in state)]

    def end(self) -> None:
        """Puts the global state back."""
        for name, (_, put) in STATE.items():
            put(self._kept[name])


def _alike(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        kinds = [(each.dtype, each.requires_grad, each.shape) for each in (x, y)]
        return kinds[0] == kinds[1] and bool(same(x, y).all())
    return pickle.dumps(x) == pickle.dumps(y)


def same(x: Tensor, y: Tensor) -> Tensor:
    """Where they are equal. What is no number in both is the same in both."""
    return (x == y) | (x.isnan() & y.isnan())
