"""Trees in files and folders: ``save``, ``load`` and ``export``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from purestep import state, tree as trees
from purestep.checkpoint import file, folder
from purestep.checkpoint.file import File
from purestep.checkpoint.folder import Group, agreed, is_first, world
from purestep.sharding import unshard
from purestep.state import Slot
from purestep.tree.shard import Shard
from purestep.types import Tree


def save(path: File, tree: Tree) -> None:
    """Writes a tree of tensors to a file, or one with ``Shard`` to a folder.

    The file takes the place of the one that was there, with its rights, and links to it stay: at
    every moment it is whole, the old or the new one, however the program ends. A program that is
    killed leaves a folder beside it whose name ends in ``.unfinished``, and which may be removed.
    safetensors holds no complex128 and no complex32.

    A tree with ``Shard`` over a ``MeshAxis`` is saved by all processes together to a folder through
    ``torch.distributed.checkpoint``: each writes its pieces, and what all hold is written once. The
    folder appears when all of it is on the disk. Its name is new: none is replaced. An error on one
    rank is an error on all, a ``RankError`` where the rank's own cannot be raised.

    Raises ``TypeError`` and ``ValueError`` for what ``state_dict`` refuses, ``OSError`` where
    something cannot be written.

    >>> import torch
    >>> save("nowhere/state", {"w": torch.ones(2)})
    Traceback (most recent call last):
    ...
    OSError: nowhere/state cannot be written (No such file or directory): name a file in a ...
    """
    group = world(tree)
    write(path, slots_of(path, tree, group), group)


def slots_of(path: File, tree: Tree, group: Group) -> dict[str, Slot]:
    """What this rank saves; refused where ranks differ, or where a folder would replace another."""

    def find() -> dict[str, Slot]:
        if group is not None:
            with file.naming(path):
                os.stat(os.path.join(os.path.dirname(os.path.realpath(path)), "."))
                if os.path.exists(path):
                    raise FileExistsError("it exists")
        return state.slots(tree)

    return agreed(group, find, partial(_kinds, path))


def _kinds(path: File, slots: Mapping[str, Slot]) -> set[str]:
    return {os.fspath(path), *(f"{name}, {state.kind(slot)}" for name, slot in slots.items())}


def write(path: File, slots: Mapping[str, Slot], group: Group) -> None:
    """Writes a file, or with the ranks of a group a folder."""
    if group is None:
        file.write(path, {name: state.local(slot) for name, slot in slots.items()})
    else:
        folder.write(path, slots, group)


def load(path: File, like: Tree) -> Tree:
    """The tree that was saved, in the containers, on the devices and in the memory order of like.

    Its tensors are fresh. Names, shapes and dtypes must be those of ``like``, or the differences
    are named. A file or folder that was cut short or changed is refused by its name. A file runs
    nothing; a folder holds a pickle, so load no folder that you do not trust.

    How a tensor is spread over ranks is not part of what is saved: where ``like`` has a ``Shard``,
    each rank loads its piece, of a file or of a folder that any number of ranks has written, and
    where it has a tensor, all of it. A ``like`` with ``Shard`` is loaded by all processes together.

    >>> import tempfile, torch
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
        world(like), lambda: read(path, state.slots(like)), lambda it: {f"{path}, {it[1]}"}
    )
    return trees.unflatten(trees.flatten(like)[1], [*map(state.local, fresh.values())])


def export(path: File, tensors: Mapping[str, Tensor | Shard]) -> None:
    """Writes tensors to one file of safetensors by these names, for tools such as transformers.

    With ``Shard`` among them, all processes call this together and gather one tensor after the
    other; the first process holds all of them on the host, and writes.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(f"{folder}/model.safetensors", {"encoder.weight": torch.ones(2)})
    ...     os.listdir(folder)
    ['model.safetensors']
    """
    names = tensors if isinstance(tensors, Mapping) else [type(tensors)]
    for name in names:
        if not isinstance(name, str) or name == "__metadata__":
            raise TypeError(
                "export takes a dict of tensors by name, such as the params of ps.from_module, "
                f"with names that are str and not '__metadata__'; and here is {name!r}"
            )

    def find() -> dict[str, Slot]:
        return {
            name: state.slot(name, *((x.piece, x.place) if isinstance(x, Shard) else (x, None)))
            for name, x in tensors.items()
        }

    group, wholes = world(dict(tensors)), {}
    for name, slot in agreed(group, find, partial(_kinds, path)).items():
        whole = unshard(slot)
        if is_first(group):
            wholes[name] = whole.cpu()
    agreed(group, lambda: file.write(path, wholes) if is_first(group) else None)
