"""Counts the bytes of storages that operations make, and the operations."""

import weakref
from collections import Counter
from typing import Any

from torch import Tensor

from purestep.tree import leaves
from support.torch_private import TorchDispatchMode


def tensor_leaves(*values: Any) -> list[Tensor]:
    """Lists the tensors among the leaves."""
    return [leaf for leaf in leaves(values) if isinstance(leaf, Tensor)]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that were made since it was entered: alive ``now``, and at the ``peak``."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # What was there before is seen first, and counts nothing.
        self._record(tensor_leaves(args, kwargs), new=False)
        result = func(*args, **(kwargs or {}))
        self._record(tensor_leaves(result), new=True)
        return result

    def _record(self, seen: list[Tensor], new: bool) -> None:
        for tensor in seen:
            if tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            key = id(storage)
            if key in self._seen:
                continue
            size = storage.nbytes() if new else 0
            self._seen.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


class CountTouching(TorchDispatchMode):
    """Counts the operations that read or write a tensor of ``numel`` elements, or any, by name."""

    def __init__(self, numel: int | None = None) -> None:
        super().__init__()
        self.numel = numel
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        numels = {tensor.numel() for tensor in tensor_leaves(args, kwargs, result)}
        counts = self.numel is None or self.numel in numels
        if counts and not func.is_view:
            self.counts[func.overloadpacket.__name__] += 1
        return result


class CountOperations(TorchDispatchMode):
    """Counts the operations that run while it is entered, views included, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))
