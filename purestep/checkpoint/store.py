"""Trees in files and folders: saved, in series and in the background, loaded and exported."""

import os
import re
import shutil
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from purestep import state, tree as trees
from purestep.checkpoint import file, folder
from purestep.checkpoint.file import UNFINISHED, File, naming
from purestep.checkpoint.folder import Group, agreed, is_first, world
from purestep.sharding import unshard
from purestep.state import NamedLeaf
from purestep.tree.shard import Shard
from purestep.types import Tree


def save(path: File, tree: Tree) -> None:
    """Writes a tree of tensors to a file, or a tree with ``Shard`` to a folder.

    The file replaces the old one, keeps its permissions, and follows links. At every moment there
    is a complete file, the old or the new one, even if the program is killed. A killed save may
    leave a folder beside it whose name ends in ``.unfinished``: you may remove it. safetensors
    cannot hold complex128 and complex32.

    A tree with ``Shard`` over a ``MeshAxis`` goes to a folder, by ``torch.distributed.checkpoint``.
    All processes call ``save``, and each writes its pieces. Replicated tensors are written once.
    The folder appears when it is complete. Its name must be new. An error on one rank is an error
    on all: a ``RankError`` where the rank's own error cannot be raised.

    ``TypeError`` and ``ValueError`` name what ``state_dict`` refuses, and ``OSError`` what cannot
    be written.

    >>> save("nowhere/state", {"w": torch.ones(2)})
    Traceback (most recent call last):
    ...
    OSError: nowhere/state cannot be written (No such file or directory): name a file in a ...
    """
    group = world(tree)
    folder.write(path, read_named_leaves(path, tree, group), group)


def read_named_leaves(path: File, tree: Tree, group: Group) -> dict[str, NamedLeaf]:
    """What this rank saves; refused where ranks differ."""

    def kinds(slots: Mapping[str, NamedLeaf]) -> set[str]:
        return {
            os.fspath(path),
            *(
                f"{name}, {state.format_named_leaf(slot)}"
                for name, slot in slots.items()
            ),
        }

    return agreed(group, lambda: state.named_leaves(tree), kinds)


def load(path: File, like: Tree) -> Tree:
    """Loads a tree into the containers, devices and memory order of ``like``.

    Its tensors are new. Names, shapes and dtypes must equal those of ``like``; the error names each
    difference. A file or folder that was cut short or changed is refused. Loading a file runs
    nothing. A folder holds a pickle, so load no folder that you do not trust.

    Any number of ranks can load it, whatever number saved it. Where ``like`` has a ``Shard``, each
    rank loads its piece. Where ``like`` has a tensor, each rank loads all of it. If ``like`` has a
    ``Shard``, all processes call ``load``.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     save(file.name, {"w": torch.ones(2)})
    ...     load(file.name, like={"w": torch.zeros(3)})
    Traceback (most recent call last):
    ...
    ValueError: ... does not fit like: build like as the saved tree was
      tree['w'] is torch.float32 of shape (2,); like has torch.float32 of shape (3,)
    """

    read = folder.read if os.path.isdir(path) else file.read
    fresh, _ = agreed(
        world(like),
        lambda: read(path, state.named_leaves(like)),
        lambda it: {f"{path}, {it[1]}"},
    )
    return trees.unflatten(
        trees.flatten(like)[1], [*map(state.local_tensor, fresh.values())]
    )


def export_safetensors(path: File, tensors: Mapping[str, Tensor | Shard]) -> None:
    """Writes named tensors to one file of safetensors, for tools such as transformers.

    If there is a ``Shard`` among them, all processes call this together. They gather one tensor
    after the other. The first process holds all of them on the host, and writes the file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_safetensors(f"{folder}/model.safetensors", {"encoder.weight": torch.ones(2)})
    ...     os.listdir(folder)
    ['model.safetensors']
    """
    for name, each in tensors.items():
        if not isinstance(each, Tensor | Shard) or name == "__metadata__":
            raise TypeError(
                f"export takes tensors by name, such as the params of ps.from_module: {name!r} is "
                f"{trees.format_leaf(each)}; '__metadata__' is the name of something "
                "else in the format"
            )
    group, wholes = world(dict(tensors)), {}
    slots = read_named_leaves(path, dict(tensors), group)
    for name, slot in zip(sorted(tensors), slots.values(), strict=True):
        whole = unshard(slot)
        if is_first(group):
            wholes[name] = whole.cpu()
    agreed(group, lambda: file.write(path, wholes) if is_first(group) else None)


def save_step(folder: File, step: int, tree: Tree, keep: int = 3) -> None:
    """Saves to ``folder/step``, then removes all but the last ``keep`` checkpoints there.

    It makes the folder if it is missing, and leaves other files alone. A folder that holds a later
    step is refused, because ``latest_checkpoint`` would still find that one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in range(100, 600, 100):
    ...         save_step(folder, step, {"w": torch.ones(2)})
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['00000300', '00000400', '00000500']
    """
    path = begin(folder, step, keep)
    save(path, tree)
    prune(path, keep, world(tree))


def latest_checkpoint(folder: File) -> Path | None:
    """Returns the path of the last complete checkpoint in the folder, or None.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_step(folder, 100, {"w": torch.ones(2)})
    ...     latest_checkpoint(folder).name, latest_checkpoint(f"{folder}/elsewhere")
    ('00000100', None)
    """
    return max(_found(folder), key=_step, default=None)


def begin(folder: File, step: int, keep: int) -> Path:
    """Where a step is saved, in a folder that is there; refused where it holds a later one."""
    for name, number, least in [("step", step, 0), ("keep", keep, 1)]:
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(
                f"{name}={number!r} must be a whole number, {least} or more"
            )
    with naming(folder):
        Path(folder).mkdir(exist_ok=True)
    last = latest_checkpoint(folder)
    if last is not None and _step(last) > step:
        raise ValueError(
            f"{folder} holds step {_step(last)}, which is later than {step}: remove what is later, "
            "or save to a different folder"
        )
    return Path(folder, f"{step:08}")


def prune(path: Path, keep: int, group: Group) -> None:
    """Removes what this checkpoint makes superfluous, and what killed programs have left."""
    if not is_first(group):
        return
    with suppress(FileNotFoundError):  # Another program does the same here.
        for old in sorted(_found(path.parent), key=_step)[:-keep]:
            old.rename(f"{old}{UNFINISHED}")  # so that half of one is none
        for left in _found(path.parent, rf".*\{UNFINISHED}"):
            if _step(left) < _step(path):
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def _found(folder: File, end: str = "") -> list[Path]:
    """The checkpoints in a folder, or what has the name of one and this end."""
    return [
        path
        for path in Path(folder).glob("*")
        if re.fullmatch(f"[0-9]{{8,}}{end}", path.name)
    ]


def _step(path: Path) -> int:
    return int(path.name.split(".")[0])


class AsyncCheckpointer(AbstractContextManager["AsyncCheckpointer"]):
    """Runs ``save`` and ``save_step`` in a thread, one after the other, while the training goes on.

    Each call waits for the save before it, copies the tensors to the host, and returns. So the file
    holds the values at the call, whatever a donated step does later. The copies use the same memory
    each time: the size of the state. The next call raises an error of the last save, and so do
    ``wait()`` and the end of the ``with`` block. The end of the program waits for the last save,
    and keeps its exit code.

    Ranks that save together make a gloo process group at the first call, so their steps can go on.
    Each process then holds a socket to each other process: at thousands of ranks, raise their limit
    of open files.
    All ranks make the same calls in the same order, the end of the block included. Call ``wait()``
    before ``torch.distributed.destroy_process_group()``, which would end a save of ranks.

    >>> import tempfile
    >>> w = torch.ones(2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with AsyncCheckpointer() as background:
    ...         background.save_step(folder, 1, w)
    ...         _ = w.zero_()
    ...     load(latest_checkpoint(folder), like=w)
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
        self._begin(path, tree)

    def save_step(self, folder: File, step: int, tree: Tree, keep: int = 3) -> None:
        """``save_step(folder, step, tree, keep)``, which goes on when this returns."""
        self.wait()
        self._begin(begin(folder, step, keep), tree, keep)

    def wait(self) -> None:
        """Returns when all is on the disk, or raises what went wrong."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _begin(self, path: File, tree: Tree, keep: int | None = None) -> None:
        group = world(tree)
        if group is not None:
            self._groups[:] = self._groups or [dist.new_group(backend="gloo")]
            group = self._groups[0]
        slots = read_named_leaves(path, tree, group)
        copies = {
            name: state.assign_leaf(s, self._copy(name, state.local_tensor(s)))
            for name, s in slots.items()
        }

        def act(_: AsyncCheckpointer) -> None:
            folder.write(path, copies, group)
            if keep is not None:
                prune(Path(path), keep, group)

        thread = ThreadPoolExecutor(
            1, "checkpoint"
        )  # which Python waits for where it ends
        self._saving = thread.submit(act, self)  # which is kept until then
        thread.shutdown(wait=False)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = self._copies[name] = torch.empty_like(tensor, device="cpu")
        return copy.copy_(tensor)

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
