"""Writes and reads a folder, for trees whose tensors are sharded over ranks.

The format is that of ``torch.distributed.checkpoint``. Each rank writes a file with its shards, and
one rank ``.metadata``, a pickle that says where each shard is. The last four bytes of each file are
the checksum of the others; torch's readers pass over them.
"""

import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from purestep import state, tree as trees
from purestep.axis import MeshAxis, RankError
from purestep.axis.mesh import explain_lost_ranks
from purestep.checkpoint.file import (
    UNFINISHED,
    File,
    SavedLeaves,
    make_damage_error,
    path_in_errors,
    write_file,
)
from purestep.state import NamedLeaves
from purestep.sync.handshake import hash64
from purestep.tree.shard import Shard, is_shard
from purestep.types import Tree

T = TypeVar("T")

Group: TypeAlias = Any
"""A process group; None where each process saves and loads by itself."""

_CRC_OF_SEALED = 0x2144DF1C
"""The CRC-32 of any bytes that end in their own CRC-32."""


def save_group(tree: Tree) -> Group:
    """Returns the group of all processes if a leaf is a ``Shard``, else None.

    Raises ``ValueError`` if a leaf is a ``Shard``, but there is no process group.
    """
    nodes, _ = trees.flatten(tree, is_shard)
    if not any(is_shard(node) for node in nodes):
        return None
    dist.get_rank()  # It raises where there is no process group.
    return dist.group.WORLD


def is_first(group: Group) -> bool:
    """Returns whether this rank is the first of the group, or saves without a group."""
    return group is None or dist.get_rank(group) == 0


def on_all_ranks(
    group: Group,
    act: Callable[[], T],
    describe: Callable[[T], set[str]] = lambda _: set(),
) -> T:
    """Calls ``act`` on all ranks; raises on all if it fails on one, or if descriptions differ.

    A rank on which it fails raises its error, the others a ``RankError`` that names the first rank
    that failed. If descriptions differ, all raise ``ValueError``. Else each rank returns its
    result.

    Args:
        group: the ranks. None: only this process calls ``act``.
        act: a function without arguments.
        describe: returns what must be equal on all ranks of a result of ``act``. By default,
            results may differ.
    """
    if group is None:
        return act()
    error: Exception | None = None
    description: set[str] = set()
    status: int | str
    try:
        result = act()
        description = describe(result)
        status = hash64(sorted(description))
    except Exception as caught:
        error = caught
        status = repr(caught)
    statuses = gather_objects(group, status)
    for rank, other in enumerate(statuses):
        if isinstance(other, str):
            if error is not None:
                raise error
            raise RankError(f"rank {rank} failed, and all ranks with it: {other}")
    if len({*statuses}) > 1:
        raise make_difference_error(group, description)
    return result


def on_first_rank(group: Group, act: Callable[[], None]) -> None:
    """Calls ``act`` on the first rank alone, while the others wait; raises on all if it fails.

    All ranks of the group call this together. The first raises the error of ``act``, the others
    ``RankError``. Without a group, this process calls ``act``.
    """

    def act_if_first() -> None:
        if is_first(group):
            act()

    on_all_ranks(group, act_if_first)


def gather_objects(group: Group, value: Any) -> list[Any]:
    """Gathers a small object from each rank; every rank gets all of them, in rank order.

    The objects are pickled. Raises ``RankError`` if the connection is lost.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    with explain_lost_ranks("the ranks of a checkpoint"):
        dist.all_gather_object(values, value, group=group)
    return values


def make_difference_error(group: Group, description: set[str]) -> ValueError:
    """Makes the ``ValueError`` that names the first rank whose description differs from rank 0's.

    All ranks call it, after at least one description differed. Rank 0 alone sends its whole
    description, each other rank one difference.
    """
    received: list[Any] = [description]
    dist.broadcast_object_list(received, group=group, group_src=0)
    difference = min(description ^ received[0], default=None)
    differences = gather_objects(group, difference)
    rank = next(i for i, other in enumerate(differences) if other is not None)
    return ValueError(
        f"rank {rank} differs from rank 0 in {differences[rank]}: give all ranks one path, on a "
        "disk that they share, and trees of one structure"
    )


def write_folder(path: File, leaves: NamedLeaves, group: Group) -> None:
    """Writes the shards of all ranks to a new folder; without a group, the tensors to a file.

    Without a group, a file that exists is replaced. All ranks of a group call it together. They all
    raise if one fails, or if ``path`` is a file or a folder that holds files. What cannot be
    written raises ``OSError``, on the other ranks perhaps ``RankError``. So do ranks that write to
    different folders. A ``Shard`` over an axis that is no ``MeshAxis`` raises ``TypeError``.
    """
    if group is None:
        tensors = {name: state.local_tensor(leaf) for name, leaf in leaves.items()}
        write_file(path, tensors)
        return
    # Their import takes a second.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    target = os.path.realpath(path)
    unfinished = Path(target + UNFINISHED)

    def remove_unfinished() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)

    def append_checksums() -> None:
        for file in unfinished.glob(f"__{dist.get_rank(group)}_*"):
            _append_crc(file)
        if is_first(group):
            _append_crc(unfinished / ".metadata")

    def rename_to_target() -> None:
        _check_files_exist(unfinished)
        unfinished.rename(target)

    with path_in_errors(path):
        try:
            # Removes what a killed program wrote, before any rank makes the folder.
            on_first_rank(group, remove_unfinished)
            tensors = {name: _to_block(leaf) for name, leaf in leaves.items()}
            save(tensors, checkpoint_id=unfinished, process_group=group)
            on_all_ranks(group, append_checksums)
            on_first_rank(group, rename_to_target)
        except CheckpointException as failure:  # It is no Exception.
            rank, (error, _) = min(failure.failures.items())
            if not isinstance(error, Exception):
                raise error from failure  # As Ctrl-C raises it elsewhere.
            raise OSError(f"rank {rank}: {error}") from error
        finally:
            if is_first(group):
                remove_unfinished()


def _check_files_exist(folder: Path) -> None:
    """Raises ``OSError`` unless a folder has each file that its metadata name.

    It lacks them if another rank wrote to a different disk, or by a relative path from another
    working directory.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    # Not those that ``save`` returns: in torch 2.11 they name no files.
    metadata: Any = FileSystemReader(folder).read_metadata()
    files = {entry.relative_path for entry in metadata.storage_data.values()}
    for file in sorted(files):
        if not (folder / file).exists():
            raise OSError(
                f"{file} is missing in {folder}: give all ranks one path, on a disk that they share"
            )


def read_folder(path: File, like: NamedLeaves) -> SavedLeaves:
    """Reads the leaves of ``like`` from a folder; of a ``Shard``, this rank's part.

    Each rank reads for itself, and only the files that hold its part of the leaves. The leaves are
    new. The ``save_id`` is the one that torch has given to the save. Raises ``ValueError`` as
    ``read_file`` does, also for a folder without a checkpoint. A ``Shard`` over an axis that is no
    ``MeshAxis`` raises ``TypeError``.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    folder = Path(path)
    reader = FileSystemReader(path)
    _check_crc(folder / ".metadata")
    metadata: Any = reader.read_metadata()
    formatted = {}
    for name, entry in metadata.state_dict_metadata.items():
        formatted[name] = f"{entry.properties.dtype} of shape {tuple(entry.size)}"
    state.check_fit(formatted, like, os.fspath(path))
    loaded = {name: state.empty_like(leaf) for name, leaf in like.items()}
    planner = DefaultLoadPlanner()
    blocks = {name: _to_block(leaf) for name, leaf in loaded.items()}
    planner.set_up_planner(blocks, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.create_local_plan()
    storage = metadata.storage_data
    files = {storage[item.storage_index].relative_path for item in plan.items}
    for file in files:
        _check_crc(folder / file)
    reader.read_data(plan, planner).wait()
    return SavedLeaves(loaded, str(metadata.storage_meta.save_id))


def _to_block(leaf: Tensor | Shard) -> Tensor:
    """Returns a tensor as it is; of a ``Shard``, a block that shares its memory.

    Raises ``TypeError`` for a ``Shard`` over an axis that is no ``MeshAxis``.
    """
    if isinstance(leaf, Tensor):
        return leaf
    (local,) = trees.leaves(leaf)
    shard_spec = leaf.inner_spec
    for axis in shard_spec.axes:
        if not isinstance(axis, MeshAxis):
            raise TypeError(
                f"a Shard over {axis} is not saved by processes: shard it over a ps.MeshAxis, or "
                "take ps.unshard"
            )
    block: Block = local.detach().as_subclass(Block)
    block.full_shape = torch.Size(leaf.shape)
    starts, lengths = zip(*shard_spec.local_block, strict=True)
    block.offsets = torch.Size(starts)
    block.lengths = torch.Size(lengths)
    return block


class Block(Tensor):
    """Holds a block of a larger tensor, as ``torch.distributed.checkpoint`` saves and loads it.

    Its methods with two underscores are torch's interface for tensors that are saved in parts.
    """

    full_shape: torch.Size
    offsets: torch.Size
    lengths: torch.Size

    def size(self, dim: int | None = None) -> Any:
        """Returns the size of the larger tensor, or of its dimension ``dim``."""
        return self.full_shape if dim is None else self.full_shape[dim]

    def __create_write_items__(self, fqn: str, block: Any) -> list[Any]:
        """Lists what to write: this block, or nothing if it is empty but the full tensor is not.

        ``fqn`` is the name of the tensor. ``block`` is not read.
        """
        from torch.distributed.checkpoint.metadata import (
            MetadataIndex,
            TensorProperties,
        )
        from torch.distributed.checkpoint.planner import (
            TensorWriteData,
            WriteItem,
            WriteItemType,
        )

        if not self.numel() and self.full_shape.numel():
            # It begins where another rank's block does, which would be taken for the same.
            return []
        (chunk,) = self.__create_chunk_list__()
        data = TensorWriteData(
            chunk=chunk,
            properties=TensorProperties.create_from_tensor(self._local()),
            size=self.full_shape,
        )
        index = MetadataIndex(fqn, self.offsets)
        return [WriteItem(index, WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[Any]:
        """Lists where the blocks of this rank are in the larger tensor: this block alone."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(self.offsets, self.lengths)]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Returns the block as a plain tensor that shares its memory, whatever the ``index``."""
        return self._local()

    def _local(self) -> Tensor:
        return self.as_subclass(Tensor)


def _append_crc(path: Path) -> None:
    """Appends the checksum of a file to it, and flushes it to the disk."""
    checksum = _compute_crc(path)
    with path.open("ab", buffering=0) as file:
        file.write(checksum.to_bytes(4, "little"))
        os.fsync(file.fileno())


def _check_crc(path: Path) -> None:
    """Raises ``ValueError`` unless a file exists and ends in the checksum of its other bytes."""
    if not path.exists() or _compute_crc(path) != _CRC_OF_SEALED:
        raise make_damage_error(path)


def _compute_crc(path: Path) -> int:
    """Computes the CRC-32 of a file, from a few megabytes at a time."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(2**22):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
