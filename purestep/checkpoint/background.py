"""Saving while the training goes on: ``Background``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from purestep.checkpoint.ranks import Group, world
from purestep.checkpoint.series import check_step, write_step
from purestep.checkpoint.trees import slots_of, write
from purestep.checkpoint.whole import File
from purestep.pieces import Shard
from purestep.state import Slot
from purestep.types import Tree


class Background:
    """``save`` and ``save_step`` in a thread, one after the other, while the training goes on.

    Each waits for the one before, copies the tensors to the host and returns: what is written is what they were at the call, whatever
    a donated step does to them. Copies are made into the same memory each time, once the size of the state. What goes wrong is raised
    by the next one, by ``wait()``, or where the ``with`` block ends.

    Ranks that save together do so over a process group of their own, of gloo, so that their steps go on meanwhile. All of them make
    the same calls in the same order, the end of the block included.

    >>> import tempfile
    >>> from purestep.checkpoint import latest, load
    >>> w = torch.ones(2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Background() as background:
    ...         background.save_step(folder, 1, w)
    ...         _ = w.zero_()
    ...     load(latest(folder), like=w)
    tensor([1., 1.])
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[None] | None = None
        self._copies: dict[str, Tensor] = {}
        self._group: Group = None

    def save(self, path: File, tree: Tree) -> None:
        """``save(path, tree)``, which goes on when this returns."""
        self._begin(tree, lambda slots, group: write(path, slots, group))

    def save_step(self, folder: File, step: int, tree: Tree, keep: int = 3) -> None:
        """``save_step(folder, step, tree, keep)``, which goes on when this returns."""
        check_step(step, keep)
        self._begin(tree, lambda slots, group: write_step(folder, step, slots, keep, group))

    def wait(self) -> None:
        """Returns when all is on the disk, or raises what went wrong."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _begin(self, tree: Tree, write: Callable[[Mapping[str, Slot], Group], None]) -> None:
        self.wait()
        slots = slots_of(tree)
        if world(slots) is not None and self._group is None:
            self._group = dist.new_group(backend="gloo")
        group = None if world(slots) is None else self._group
        copies = {name: self._copy(name, slot) for name, slot in slots.items()}
        self._saving = self._thread.submit(write, copies, group)

    def _copy(self, name: str, slot: Slot) -> Any:
        if isinstance(slot, Shard):
            return Shard(self._copy(name, slot.piece), *slot.place)
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.dtype) != (slot.shape, slot.dtype):
            copy = self._copies[name] = torch.empty_like(slot, device="cpu")
        return copy.copy_(slot)

    def __enter__(self) -> Background:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._group is not None and kind is None:
                dist.destroy_process_group(self._group)
