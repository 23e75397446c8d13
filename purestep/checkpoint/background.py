"""Saving while the training goes on: ``Background``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from purestep.axis import RankError
from purestep.checkpoint.ranks import Group, LostError, world
from purestep.checkpoint.series import check_step, write_step
from purestep.checkpoint.trees import slots_of, write
from purestep.checkpoint.whole import File
from purestep.state import Slot
from purestep.tree.shard import Shard
from purestep.types import Tree

Slots: TypeAlias = Mapping[str, Slot]
Write: TypeAlias = Callable[[File, Slots, Group], None]


class Background:
    """``save`` and ``save_step`` in a thread, one after the other, while the training goes on.

    Each waits for the one before, copies the tensors to the host and returns: what is written is what they were at the call, whatever
    a donated step does to them. Copies are made into the same memory each time, once the size of the state. What goes wrong is raised
    by the next one, by ``wait()``, or where the ``with`` block ends. A save that nobody waits for may be lost; the last one is there.

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
        self._saving: Future[None] | None = None
        self._copies: dict[str, Tensor] = {}
        self._group: Group = None

    def save(self, path: File, tree: Tree) -> None:
        """``save(path, tree)``, which goes on when this returns."""
        self._begin(path, tree, write)

    def save_step(self, folder: File, step: int, tree: Tree, keep: int = 3) -> None:
        """``save_step(folder, step, tree, keep)``, which goes on when this returns."""
        check_step(step, keep)
        self._begin(
            Path(folder, str(step)),
            tree,
            lambda _, slots, group: write_step(folder, step, slots, keep, group),
        )

    def wait(self) -> None:
        """Returns when all is on the disk, or raises what went wrong."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _begin(self, path: File, tree: Tree, write: Write) -> None:
        self.wait()
        together = world(tree) is not None
        if together and self._group is None:
            self._group = dist.new_group(backend="gloo")
        slots = slots_of(tree, self._group if together else None, path)
        copies = {name: self._copy(name, slot) for name, slot in slots.items()}
        saving = self._saving = Future[None]()

        def run() -> None:
            try:
                self._write(path, copies, write, together)
                saving.set_result(None)
            except BaseException as error:
                saving.set_exception(error)

        # A program that ends does not wait for it, since one of those it meets may have ended.
        Thread(target=run, name="checkpoint", daemon=True).start()

    def _copy(self, name: str, slot: Slot) -> Any:
        if isinstance(slot, Shard):
            return Shard(self._copy(name, slot.piece), *slot.place)
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.dtype) != (slot.shape, slot.dtype):
            copy = self._copies[name] = torch.empty_like(slot, device="cpu")
        return copy.copy_(slot)

    def _write(self, path: File, copies: Slots, write: Write, together: bool) -> None:
        lost = ""
        try:
            write(path, copies, self._group if together else None)
        except LostError as error:
            lost = str(error)
        if lost:
            # Over this group others wait for this rank, and hear from its end alone that they need not. It ends with the last
            # reference to it, so none may be in what is raised.
            self._leave()
            raise RankError(lost)

    def _leave(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.wait()
        except Exception:
            if kind is None:
                raise
        finally:
            self._leave()
