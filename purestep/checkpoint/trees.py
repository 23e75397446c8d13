"""Trees in files and folders: ``save``, ``load`` and ``export``."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path

from purestep import state, tree as trees
from purestep.checkpoint import files
from purestep.checkpoint.ranks import Group, agreed, check_same, is_first, together, world
from purestep.checkpoint.whole import File, naming
from purestep.sharding import unshard
from purestep.state import Slot
from purestep.tree.shard import is_shard
from purestep.types import Tree


def save(path: File, tree: Tree) -> None:
    """Writes a tree of tensors, in the place of what was there: at every moment there is a whole one, the old or the new one.

    So whatever ends it, a crash, a full disk, Ctrl-C, leaves the last one, and several savers at once leave that of one of
    them. When it returns, all is on the disk. Nothing is held of it in memory, but for one leaf at a time that is not
    contiguous, or not on the host.

    A tree without ``Shard`` is saved by the process that calls this, to a file. One with ``Shard`` over a ``MeshAxis`` is saved by
    all processes together, to a folder, through ``torch.distributed.checkpoint``: each writes pieces of its own, and what all hold
    is written once. What goes wrong on one of them is raised on all.

    Raises ``TypeError`` and ``ValueError`` for what ``state_dict`` refuses, ``OSError`` where something cannot be written.

    >>> import torch
    >>> save("nowhere/state", {"w": torch.ones(2)})
    Traceback (most recent call last):
    ...
    OSError: nowhere/state cannot be written (No such file or directory): name a file in a folder that is there, ...
    """
    group = world(tree)
    write(path, slots_of(tree, group, path), group)


def slots_of(tree: Tree, group: Group, path: File) -> dict[str, Slot]:
    """What has to be written of a tree, by name."""
    return agreed(group, lambda: files.writable(state.slots(tree)), path)


def write(path: File, slots: Mapping[str, Slot], group: Group) -> None:
    """Writes a file, or with the ranks of a group a folder."""
    if group is None:
        with naming(path):
            files.write(path, slots)
    else:
        from purestep.checkpoint import folders

        folders.write(path, slots, group)


def load(path: File, like: Tree) -> Tree:
    """The tree that was saved; in containers, on devices and in the memory order of ``like``, and in fresh memory.

    Names, shapes and dtypes must be those of ``like``, or every difference is named. Nothing in the file is ever run, and
    nothing of it is returned before all of it was summed up: one that was cut short or changed is refused by its name.

    How a tensor is spread over ranks is not part of what is saved: where ``like`` has a ``Shard``, each rank loads its piece, of a
    folder that any number of ranks has written or of a file, and where it has a tensor, all of it. A ``like`` with ``Shard`` is
    loaded by all processes together, which all raise what goes wrong on one of them; one without, by each process that asks.

    >>> import tempfile, torch
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     save(file.name, {"w": torch.ones(2)})
    ...     load(file.name, like={"w": torch.zeros(3)})
    Traceback (most recent call last):
    ...
    ValueError: ... does not fit like:
      tree['w'] is torch.float32 of shape (2,), and torch.float32 of shape (3,) was expected
    """
    group = world(like)
    slots: dict[str, Slot] = {}

    def look() -> bool:
        slots.update(state.slots(like))
        return Path(path).is_dir()

    are_folders = together(group, look)
    check_same(path, are_folders)
    if are_folders[0]:
        from purestep.checkpoint import folders

        fresh = folders.read(path, slots, group)
    else:
        fresh = _read_file(path, slots, group)
    return trees.unflatten(trees.flatten(like, is_shard)[1], [*fresh.values()])


def _read_file(path: File, slots: Mapping[str, Slot], group: Group) -> dict[str, Slot]:
    fresh: dict[str, Slot] = {}

    def read() -> int:
        found, checksum = files.read(path, slots)
        fresh.update(found)
        return checksum

    check_same(path, together(group, read))
    return fresh


def export(path: File, tensors: Mapping[str, Slot]) -> None:
    """Writes tensors to one file, under the names that they have here: as safetensors, for other tools, such as transformers.

    Of pieces the whole tensors are written, which ranks gather one after the other: none of them holds the whole model. All
    processes call this together then, and the first one writes. Without pieces, the process writes that calls it.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(f"{folder}/model.safetensors", {"encoder.weight": torch.ones(2)})
    ...     b"encoder.weight" in Path(f"{folder}/model.safetensors").read_bytes()
    True
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"export takes a dict of tensors by name, such as the params of ps.from_module, and not {type(tensors).__name__}: "
            "of a tree take ps.state_dict(tree)"
        )

    def slots_of() -> dict[str, Slot]:
        slots = {name: state.slot(name, tensor) for name, tensor in tensors.items()}
        return files.ordered(files.writable(slots))

    group = world(dict(tensors))
    slots = agreed(group, slots_of, path)
    wholes = map(unshard, slots.values())

    def write_or_gather() -> None:
        try:
            if is_first(group):
                files.write(path, slots, lambda _: next(wholes), {"format": "pt"})
        finally:
            # A rank that does not write, or cannot, gathers what others wait for.
            deque(wholes, maxlen=0)

    with naming(path):
        together(group, write_or_gather)
