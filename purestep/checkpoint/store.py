"""Saves trees, also in series and in the background; loads and exports them."""

import os
import re
import shutil
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from purestep import state, tree as trees
from purestep.checkpoint.file import (
    UNFINISHED,
    File,
    SavedLeaves,
    path_in_errors,
    read_file,
    write_file,
)
from purestep.checkpoint.folder import (
    Group,
    is_first,
    on_all_ranks,
    on_first_rank,
    read_folder,
    save_group,
    write_folder,
)
from purestep.sharding import unshard
from purestep.state import NamedLeaves
from purestep.tree.shard import Shard
from purestep.types import Tree

_CHECKPOINT = re.compile(r"[0-9]{8,}")

# A killed save leaves 00000100.<random>.unfinished, a killed removal 00000100.unfinished.
_UNFINISHED_CHECKPOINT = re.compile(r"[0-9]{8,}(\..*)?" + re.escape(UNFINISHED))


def save(path: File, tree: Tree) -> None:
    """Writes a tree of tensors to a file, or a tree with ``Shard`` to a folder.

    The file replaces the old one, keeps its permissions, and follows links. At every moment there
    is a complete file, the old or the new one, even if the program is killed. A killed save may
    leave a folder beside it whose name ends in ``.unfinished``: you may remove it. safetensors
    cannot hold complex128 and complex32. Without ``Shard``, each process saves by itself: call
    ``save`` on one rank.

    A tree with ``Shard`` over a ``MeshAxis`` goes to a folder, by ``torch.distributed.checkpoint``.
    All processes call ``save``, and each writes its shards. Replicated tensors are written once.
    The folder appears when it is complete. Its name must be new, on a disk that all share. If
    ``save`` fails on one rank, that rank raises its error, and the others ``OSError`` or
    ``RankError``.

    ``TypeError`` and ``ValueError`` name what ``state_dict`` refuses, and ``OSError`` what cannot
    be written. A ``path`` that is neither a ``str`` nor an ``os.PathLike`` raises ``TypeError``. A
    ``Shard`` raises ``ValueError`` without a process group, else ``TypeError`` if it is over any
    other axis. Paths or trees that differ between ranks raise ``ValueError``.

    >>> save("nowhere/state", {"w": torch.ones(2)})
    Traceback (most recent call last):
    ...
    OSError: nowhere/state cannot be written (No such file or directory): name a file in a ...
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"save(path, tree) got a {type(path).__name__} as path: perhaps the arguments are "
            "swapped"
        )
    group = save_group(tree)
    leaves = agree_on_leaves(path, tree, group)
    write_folder(path, leaves, group)


def agree_on_leaves(
    path: File,
    tree: Tree,
    group: Group,
    check: Callable[[Tree], None] = lambda _: None,
) -> NamedLeaves:
    """Returns the leaves that this rank saves, by name, after all ranks have compared theirs.

    Raises on all ranks, as ``on_all_ranks`` does, if paths, names, shapes or dtypes differ, or if
    one rank fails, as where ``check`` refuses its tree. If ``group`` is None, nothing is compared.
    """

    def name_leaves() -> NamedLeaves:
        check(tree)
        return state.named_leaves(tree)

    def describe(leaves: NamedLeaves) -> set[str]:
        description = {os.fspath(path)}
        for name, leaf in leaves.items():
            description.add(f"{name}, {state.format_named_leaf(leaf)}")
        return description

    return on_all_ranks(group, name_leaves, describe)


def load(path: File, like: Tree) -> Tree:
    """Loads a tree into the containers, devices and memory order of ``like``.

    Its tensors are new. ``like`` must be a tree that ``state_dict`` takes. Names, shapes and dtypes
    must equal those of ``like``: else ``ValueError`` lists the first differences. A file or folder
    that was cut short or changed also raises ``ValueError``, and so does a folder of ``save_step``:
    load its ``latest_checkpoint``. A missing file raises ``FileNotFoundError``, and one that cannot
    be read another ``OSError``. Loading a file runs no code. A folder holds a pickle, so load no
    folder that you do not trust.

    Any number of ranks can load a checkpoint, whatever number saved it. Where ``like`` has a
    ``Shard``, each rank loads its shard. Where ``like`` has a tensor, each rank loads all of it. If
    ``like`` has a ``Shard``, all processes call ``load`` with one path. If it fails on one rank,
    that rank raises its error, and the others ``RankError``. If they read different saves, all
    raise ``ValueError``.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     save(file.name, {"w": torch.ones(2)})
    ...     load(file.name, like={"w": torch.zeros(3)})
    Traceback (most recent call last):
    ...
    ValueError: ... does not fit like: build like as the saved tree was
      tree['w'] is torch.float32 of shape (2,); like has torch.float32 of shape (3,)
    """

    def read() -> SavedLeaves:
        expected = state.named_leaves(like)
        if os.path.isdir(path):
            last = latest_checkpoint(path)
            if last is not None:
                raise ValueError(
                    f"{os.fspath(path)} is a folder of checkpoints: load {last}, as "
                    "ps.checkpoint.latest_checkpoint returns it"
                )
            return read_folder(path, expected)
        return read_file(path, expected)

    def describe(saved: SavedLeaves) -> set[str]:
        return {f"{path}, {saved.save_id}"}

    saved = on_all_ranks(save_group(like), read, describe)
    tensors = [state.local_tensor(leaf) for leaf in saved.leaves.values()]
    _, spec = trees.flatten(like)
    return trees.unflatten(spec, tensors)


def export_safetensors(path: File, tensors: Mapping[str, Tensor | Shard]) -> None:
    """Writes named tensors to one file of safetensors, for tools like transformers.

    If there is a ``Shard`` among them, all processes call this together. They gather one tensor
    after the other. The first process collects them in host memory, and writes the file. If one
    process fails, all raise. Without ``Shard``, call it on one rank.

    An older file is replaced. A value that is neither a ``Shard`` nor a plain dense tensor with
    values raises ``TypeError``. So do a name that is no ``str``, and the name "__metadata__". A
    ``Shard`` without a process group raises ``ValueError``. A file or dtype that cannot be written
    raises ``OSError``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_safetensors(f"{folder}/model.safetensors", {"encoder.weight": torch.ones(2)})
    ...     os.listdir(folder)
    ['model.safetensors']
    """
    # Other mappings are no trees. What is no mapping is refused below, by all ranks if it is a tree
    # with Shard, as a list.
    tree = dict(tensors) if isinstance(tensors, Mapping) else tensors
    group = save_group(tree)
    leaves = agree_on_leaves(path, tree, group, _check_exported)
    full_tensors = {}
    for name, leaf in zip(sorted(tensors), leaves.values(), strict=True):
        full_tensor = unshard(leaf)
        if is_first(group):
            full_tensors[name] = full_tensor.cpu()
    on_first_rank(group, lambda: write_file(path, full_tensors))


def _check_exported(tensors: object) -> None:
    """Raises ``TypeError`` unless an argument maps texts to tensors or ``Shard``s.

    It also raises it for the name "__metadata__".
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"tensors must be a dict of tensors by name, got {type(tensors).__name__}: pass the "
            "params of ps.from_module, or module.state_dict()"
        )
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(
                f"tensors has the key {name!r}: names in files are texts, as those of "
                "ps.from_module; pass {str(name): tensor}"
            )
        if not isinstance(tensor, Tensor | Shard) or name == "__metadata__":
            raise TypeError(
                f"export takes tensors by name, such as the params of ps.from_module: {name!r} is "
                f"{trees.format_leaf(tensor)}; '__metadata__' is the name of "
                "something else in the format"
            )


def save_step(folder: File, step: int, tree: Tree, keep: int = 3) -> None:
    """Saves to ``folder/step``, then removes all but the last ``keep`` checkpoints there.

    The name of a step has at least eight digits, as ``00000100``. A ``step`` below 0 or a ``keep``
    below 1 raises ``ValueError``. The folder is made if it is missing, but not its parents. What
    killed saves of earlier steps left is removed too, other files are not. A folder that holds a
    later step raises ``ValueError``, because ``latest_checkpoint`` would still return the later
    one. A tree with ``Shard`` needs all processes to call this, another tree one rank alone.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in range(100, 600, 100):
    ...         save_step(folder, step, {"w": torch.ones(2)})
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['00000300', '00000400', '00000500']
    """
    path = prepare_step_path(folder, step, keep)
    save(path, tree)
    prune_checkpoints(path, keep, save_group(tree))


def latest_checkpoint(folder: File) -> Path | None:
    """Returns the path of the complete checkpoint with the highest step in the folder.

    Returns None if there is no checkpoint or no folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_step(folder, 100, {"w": torch.ones(2)})
    ...     latest_checkpoint(folder).name, latest_checkpoint(f"{folder}/elsewhere")
    ('00000100', None)
    """
    return max(_list_matches(folder, _CHECKPOINT), key=_parse_step, default=None)


def prepare_step_path(folder: File, step: int, keep: int) -> Path:
    """Makes the folder if it is missing, and returns the path in it for the checkpoint of a step.

    Its parents are not made. ``keep`` is checked, and nothing is removed. Raises ``ValueError`` if
    a later step is there, if ``step`` is below 0 or ``keep`` below 1, or if one is no int. Raises
    ``OSError`` if the folder cannot be made.
    """
    _check_at_least("step", step, 0)
    _check_at_least("keep", keep, 1)
    with path_in_errors(folder):
        Path(folder).mkdir(exist_ok=True)
    last = latest_checkpoint(folder)
    if last is not None and _parse_step(last) > step:
        raise ValueError(
            f"{folder} holds step {_parse_step(last)}, which is later than {step}: a "
            "resumed run counts on from the step that it loaded, so save that in the tree; for a "
            "new run, remove what is later, or take a different folder"
        )
    return Path(folder, f"{step:08}")


def _check_at_least(name: str, number: int, minimum: int) -> None:
    """Raises ``ValueError`` unless ``number`` is an int, no bool, and at least ``minimum``.

    The error calls it ``name``.
    """
    is_int = isinstance(number, int) and not isinstance(number, bool)
    if not is_int or number < minimum:
        raise ValueError(f"{name}={number!r} must be a whole number, {minimum} or more")


def prune_checkpoints(path: Path, keep: int, group: Group) -> None:
    """Removes all but the last ``keep`` checkpoints in the folder of ``path``, on the first rank.

    ``path`` is the last checkpoint there, and ``keep`` at least 1. Files and folders that killed
    programs left of steps before it are removed too. The other ranks do nothing, and do not wait.
    If another program removes the same files, the rest may stay.
    """
    if not is_first(group):
        return
    step = _parse_step(path)
    with suppress(FileNotFoundError):  # Another program does the same here.
        # Before a rename: where a killed save left the folder 00000100.unfinished, the file
        # 00000100 cannot take its name.
        _remove_unfinished(path.parent, step)
        checkpoints = _list_matches(path.parent, _CHECKPOINT)
        checkpoints.sort(key=_parse_step)
        for old in checkpoints[:-keep]:
            # Renamed first: a checkpoint that is removed in part must not look complete.
            old.rename(f"{old}{UNFINISHED}")
        _remove_unfinished(path.parent, step)


def _remove_unfinished(folder: Path, step: int) -> None:
    """Removes the unfinished files and folders of the steps before ``step`` in a folder.

    Raises ``FileNotFoundError`` if another program removes one at the same time.
    """
    for unfinished in _list_matches(folder, _UNFINISHED_CHECKPOINT):
        if _parse_step(unfinished) >= step:
            continue
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        else:
            unfinished.unlink()


def _list_matches(folder: File, name: re.Pattern[str]) -> list[Path]:
    """Lists the files and folders in a folder whose whole names match a pattern, in any order.

    A folder that is missing has none.
    """
    return [path for path in Path(folder).glob("*") if name.fullmatch(path.name)]


def _parse_step(path: Path) -> int:
    """Reads the step from the name of a checkpoint, complete or unfinished."""
    return int(path.name.split(".")[0])


class AsyncCheckpointer(AbstractContextManager["AsyncCheckpointer"]):
    """Runs ``save`` and ``save_step`` in a thread, one after the other, while the training goes on.

    Each call waits for the save before it, copies the tensors to the host, and returns. So the file
    holds the values at the call, whatever a donated step does later. The copies use the same memory
    each time: the size of the state. The next call raises an error of the last save, and so do
    ``wait()`` and the end of the ``with`` block. If the block raises, its error comes alone. The
    end of the program waits for the last save. If that fails, the exit code does not change.

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
        # A program that ends while gloo's threads let go of Python's tensors is aborted. Destroying
        # the group joins them before, since finalizers also run at the end of the program.
        weakref.finalize(self, _destroy_groups, self._groups)

    def save(self, path: File, tree: Tree) -> None:
        """Begins ``save`` after the save before it, and returns when the tensors are copied.

        If the save before it failed, raises that error, and saves nothing. A tree that
        ``state_dict`` refuses raises here, and so do paths or trees that differ between ranks. So
        does a ``Shard`` without a process group. Other errors come at the next call or ``wait()``.
        """
        self.wait()
        self._start(path, tree)

    def save_step(self, folder: File, step: int, tree: Tree, keep: int = 3) -> None:
        """Begins ``save_step`` after the save before it, and returns when the tensors are copied.

        If the save before it failed, raises that error, and saves nothing. An invalid ``step`` or
        ``keep``, a folder that cannot be made, and one that holds a later step raise here. So do a
        tree that ``state_dict`` refuses, and paths or trees that differ between ranks. So does a
        ``Shard`` without a process group. Other errors come at the next call or ``wait()``.
        """
        self.wait()
        path = prepare_step_path(folder, step, keep)
        self._start(path, tree, keep)

    def wait(self) -> None:
        """Waits for the last save, if there is one, to end, and raises its error, once."""
        saving = self._saving
        self._saving = None
        if saving is not None:
            saving.result()

    def _start(self, path: File, tree: Tree, keep: int | None = None) -> None:
        """Copies the tensors to the host and saves them in a thread; call ``wait`` before.

        The thread then removes all but the last ``keep`` checkpoints beside ``path``; if ``keep``
        is None, none. For a tree with ``Shard``, the first call makes a gloo group of all ranks.
        Raises here as ``save_group`` and ``agree_on_leaves`` do.
        """
        group = save_group(tree)
        if group is not None:
            if not self._groups:
                self._groups.append(dist.new_group(backend="gloo"))
            group = self._groups[0]
        copies: NamedLeaves = {}
        for name, leaf in agree_on_leaves(path, tree, group).items():
            copy = self._copy_to_host(name, state.local_tensor(leaf))
            copies[name] = state.replace_local(leaf, copy)

        def write(_: AsyncCheckpointer) -> None:
            write_folder(path, copies, group)
            if keep is not None:
                prune_checkpoints(Path(path), keep, group)

        # Python waits for the threads of an executor where it ends.
        thread = ThreadPoolExecutor(1, "checkpoint")
        # Its argument keeps self, and so the process group, until the save ends.
        self._saving = thread.submit(write, self)
        thread.shutdown(wait=False)

    def _copy_to_host(self, name: str, tensor: Tensor) -> Tensor:
        """Copies a tensor to the host, into the last copy of that name if shape and dtype fit.

        Returns the copy.
        """
        copy = self._copies.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty_like(tensor, device="cpu")
            self._copies[name] = copy
        return copy.copy_(tensor)

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            if error_type is None:
                self.wait()
            else:
                # An error of the block is not replaced by one of the save.
                with suppress(Exception):
                    self.wait()
        finally:
            _destroy_groups(self._groups)


def _destroy_groups(groups: list[Group]) -> None:
    """Destroys those process groups that still exist, and empties the list."""
    while groups:
        # It raises if the program has destroyed all groups.
        with suppress(ValueError):
            dist.destroy_process_group(groups.pop())
