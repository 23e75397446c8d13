"""How much memory is alive, by counting the storages that operations make."""

import weakref
from typing import Any

from torch import Tensor

from purestep.tree import leaves_of
from tests.torch_private import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Within it, ``now`` and ``peak`` are the bytes of tensors made since it was entered and alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in leaves_of((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._see(leaf, new=False)
        result = func(*args, **(kwargs or {}))
        for leaf in leaves_of(result):
            if isinstance(leaf, Tensor):
                self._see(leaf, new=True)
        return result

    def _see(self, tensor: Tensor, new: bool) -> None:
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes() if new else 0
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def forget() -> None:
            self._known.discard(key)
            self.now -= size

        weakref.finalize(storage, forget)


class Touched(TorchDispatchMode):
    """Counts the operations that read or write a tensor of ``numel`` elements, by name."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        touched = leaves_of((args, kwargs, result))
        if not func.is_view and any(
            isinstance(t, Tensor) and t.numel() == self.numel for t in touched
        ):
            name = func.overloadpacket.__name__
            self.counts[name] = self.counts.get(name, 0) + 1
        return result
