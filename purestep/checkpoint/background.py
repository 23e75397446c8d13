"""Saving while the training goes on: ``Background``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from purestep import state
from purestep.checkpoint.file import File
from purestep.checkpoint.folder import Group, world
from purestep.checkpoint.series import begin, tidy
from purestep.checkpoint.store import slots_of, write
from purestep.types import Tree


class Background:
    """``save`` and ``save_step`` in a thread, one after the other, while the training goes on.

    Each call waits for the one before, copies the tensors to the host and returns: what is written
    is what they were at the call, whatever a donated step does to them. Copies are made into the
    same memory each time, once the size of the state. What goes wrong is raised by the next call,
    by ``wait()``, or where the ``with`` block ends. A program that ends waits for its last save,
    and keeps its exit code. Wait before ``torch.distributed.destroy_process_group()``, which ends
    a save of ranks.

    Ranks that save together do so over a process group of gloo that they make at the first call,
    so that their steps go on meanwhile. All of them make the same calls in the same order, the end
    of the block included.

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
        self._groups: list[Group] = []
        # A program that ends while gloo's threads let go of Python's tensors is aborted; this joins
        # them before, since it also runs where the program ends.
        weakref.finalize(self, _destroy, self._groups)

    def save(self, path: File, tree: Tree) -> None:
        """``save(path, tree)``, which goes on when this returns."""
        self.wait()
        self._begin(path, tree, lambda group: None)

    def save_step(self, folder: File, step: int, tree: Tree, keep: int = 3) -> None:
        """``save_step(folder, step, tree, keep)``, which goes on when this returns."""
        self.wait()
        path = begin(folder, step, keep)
        self._begin(path, tree, lambda group: tidy(path, keep, group))

    def wait(self) -> None:
        """Returns when all is on the disk, or raises what went wrong."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _begin(self, path: File, tree: Tree, end: Callable[[Group], None]) -> None:
        group = world(tree)
        if group is not None:
            self._groups[:] = self._groups or [dist.new_group(backend="gloo")]
            group = self._groups[0]
        slots = slots_of(path, tree, group)
        copies = {name: state.put(s, self._copy(name, state.local(s))) for name, s in slots.items()}

        def act(_: Background) -> None:
            write(path, copies, group)
            end(group)

        thread = ThreadPoolExecutor(1, "checkpoint")  # which Python waits for where it ends
        self._saving = thread.submit(act, self)  # which is kept until then
        thread.shutdown(wait=False)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = self._copies[name] = torch.empty_like(tensor, device="cpu")
        return copy.copy_(tensor)

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with suppress(*[Exception] * (kind is not None)):
                self.wait()
        finally:
            _destroy(self._groups)


def _destroy(groups: list[Group]) -> None:
    while groups:
        with suppress(ValueError):  # of a program that has destroyed all groups
            dist.destroy_process_group(groups.pop())
