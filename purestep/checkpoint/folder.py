"""A folder for a tree whose tensors are sharded over ranks: ``torch.distributed.checkpoint``.

Each rank writes a file with its pieces, and one rank ``.metadata``, a pickle that says where each
piece is. The last four bytes of each file are the checksum of the others; readers pass over them.
"""

import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

from purestep import state, tree as trees
from purestep.axis import RankError
from purestep.axis.mesh import explain_lost_ranks
from purestep.checkpoint import file
from purestep.checkpoint.file import UNFINISHED, File, damaged, naming
from purestep.sharding import to_dtensor
from purestep.state import NamedLeaf
from purestep.sync.handshake import hash64
from purestep.tree.shard import is_shard
from purestep.types import Tree

T = TypeVar("T")

Group: TypeAlias = Any
"""A process group; None for one process, or for each by itself."""

_SEALED = 0x2144DF1C
"""The CRC-32 of any bytes with their CRC-32 after them."""


def world(tree: Tree) -> Group:
    """All processes, where a tensor is sharded over some of them; refused where there are none."""
    if not any(map(is_shard, trees.flatten(tree, is_shard)[0])):
        return None
    dist.get_rank()  # which torch refuses where there is no process group
    return dist.group.WORLD


def is_first(group: Group) -> bool:
    """Whether this rank does what one of them has to do."""
    return group is None or dist.get_rank(group) == 0


def agreed(
    group: Group, act: Callable[[], T], said: Callable[[T], set[str]] = lambda _: set()
) -> T:
    """What ``act`` returns on this rank; what is ``said`` of it must be the same on all ranks.

    A rank on which it raises raises that; the others raise a ``RankError`` that names the rank.
    """
    if group is None:
        return act()
    error: Exception | None = None
    mine: set[str] = set()
    try:
        result = act()
        mine = said(result)
        note: int | str = hash64(sorted(mine))
    except Exception as caught:
        error, note = caught, repr(caught)
    notes = gather_objects(group, note)
    for rank, other in enumerate(notes):
        if isinstance(other, str):
            raise error or RankError(
                f"rank {rank} failed, and all ranks with it: {other}"
            )
    if len({*notes}) > 1:
        raise difference(group, mine)
    return result


def gather_objects(group: Group, value: Any) -> list[Any]:
    """Gathers a small object of each rank."""
    values: list[Any] = [None] * dist.get_world_size(group)
    with explain_lost_ranks("the ranks of a checkpoint"):
        dist.all_gather_object(values, value, group=group)
    return values


def difference(group: Group, mine: set[str]) -> ValueError:
    """Names the first rank that differs from rank 0, which alone sends all that it has."""
    first: list[Any] = [mine]
    dist.broadcast_object_list(first, group=group, group_src=0)
    differences = gather_objects(group, min(mine ^ first[0], default=None))
    rank, what = next(
        (rank, what) for rank, what in enumerate(differences) if what is not None
    )
    return ValueError(
        f"rank {rank} differs from rank 0 in {what}: give all ranks one path, on a disk that they "
        "share, and trees of one structure"
    )


def write(path: File, slots: Mapping[str, NamedLeaf], group: Group) -> None:
    """Writes what all ranks hold, each its pieces, and gives the folder its name; alone, a file."""
    if group is None:
        return file.write(
            path, {name: state.local_tensor(slot) for name, slot in slots.items()}
        )
    from torch.distributed.checkpoint.api import (
        CheckpointException,
    )  # takes a second to import
    from torch.distributed.checkpoint.state_dict_saver import save

    place, first = os.path.realpath(path), is_first(group)
    folder, own = Path(place + UNFINISHED), f"__{dist.get_rank(group)}_*"
    with naming(path):
        try:
            # What a program that was killed has left goes before any rank makes the folder.
            agreed(
                group,
                lambda: shutil.rmtree(folder, ignore_errors=True) if first else None,
            )
            save(to_dtensor(dict(slots)), checkpoint_id=folder, process_group=group)
            agreed(
                group,
                lambda: _seal([*folder.glob(own), *[folder / ".metadata"] * first]),
            )
            agreed(group, lambda: folder.rename(place) if first else None)
        except CheckpointException as failed:  # which is no Exception
            rank, (error, _) = min(failed.failures.items())
            raise OSError(f"rank {rank}: {error}") from error
        finally:
            if first:
                shutil.rmtree(folder, ignore_errors=True)


def read(
    path: File, slots: Mapping[str, NamedLeaf]
) -> tuple[dict[str, NamedLeaf], str]:
    """The values of a folder in fresh memory, of a ``Shard`` the piece; and the name of its save.

    Each rank reads for itself, and only the files that hold its pieces.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    folder, planner, reader = Path(path), DefaultLoadPlanner(), FileSystemReader(path)
    _check(folder / ".metadata")
    metadata: Any = reader.read_metadata()
    entries = metadata.state_dict_metadata.items()
    found = {
        name: f"{e.properties.dtype} of shape {tuple(e.size)}" for name, e in entries
    }
    state.check_fit(found, slots, os.fspath(path))
    fresh = {name: state.empty_like(slot) for name, slot in slots.items()}
    planner.set_up_planner(to_dtensor(fresh), metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.create_local_plan()
    for name in {
        metadata.storage_data[item.storage_index].relative_path for item in plan.items
    }:
        _check(folder / name)
    reader.read_data(plan, planner).wait()
    return fresh, str(metadata.storage_meta.save_id)


def _seal(files: list[Path]) -> None:
    """Adds the checksum of each of these files to its end."""
    for path in files:
        checksum = _sum(path)
        with path.open("ab", buffering=0) as end:
            end.write(checksum.to_bytes(4, "little"))
            os.fsync(end.fileno())


def _check(path: Path) -> None:
    """Refuses a file that does not end in its checksum."""
    if not path.exists() or _sum(path) != _SEALED:
        raise damaged(path)


def _sum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as content:
        while chunk := content.read(2**22):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
