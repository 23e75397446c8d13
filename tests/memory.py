"""How much memory is alive, by counting the storages that operations make."""

import weakref
from collections import Counter
from typing import Any

from torch import Tensor

from purestep.tree import leaves
from tests.torch_private import TorchDispatchMode


def tensors(*values: Any) -> list[Tensor]:
    """The tensors among the leaves."""
    return [leaf for leaf in leaves(values) if isinstance(leaf, Tensor)]


class LiveBytes(TorchDispatchMode):
    """Within it, ``now`` and ``peak`` are the bytes of tensors made since it was entered and alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._see(tensors(args, kwargs), new=False)
        result = func(*args, **(kwargs or {}))
        self._see(tensors(result), new=True)
        return result

    def _see(self, seen: list[Tensor], new: bool) -> None:
        for storage in [
            tensor.untyped_storage() for tensor in seen if not tensor.is_meta
        ]:
            key, size = id(storage), storage.nbytes() if new else 0
            if key not in self._known:
                self._known.add(key)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class Touched(TorchDispatchMode):
    """Counts the operations that read or write a tensor of ``numel`` elements, or any, by name."""

    def __init__(self, numel: int | None = None) -> None:
        super().__init__()
        self.numel = numel
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        touched = {tensor.numel() for tensor in tensors(args, kwargs, result)}
        if not func.is_view and (self.numel is None or self.numel in touched):
            self.counts[func.overloadpacket.__name__] += 1
        return result


class Operations(TorchDispatchMode):
    """Counts the operations that run while it is entered, views included, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))
