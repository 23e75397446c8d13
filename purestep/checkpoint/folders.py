"""A folder for a tree whose tensors are spread over ranks, through ``torch.distributed.checkpoint``, which reads it, too.

Each rank writes a file with its pieces, and one rank ``.metadata``, which says where each piece is. The sizes and checksums of
all these files are in ``checksums``, a file in the format of ``ps.checkpoint.save``, which is written last.

This module takes seconds to import, and is imported where it is used.
"""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata as records
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from purestep import state
from purestep.checkpoint import files
from purestep.checkpoint.ranks import (
    Group,
    check_same,
    explained,
    is_first,
    joint,
    together,
    words,
)
from purestep.checkpoint.whole import SUMS, File, naming, replaced_folder
from purestep.sharding import to_dtensor
from purestep.state import Slot

METADATA = ".metadata"
AS_IT_IS: Any = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


def write(path: File, slots: Mapping[str, Slot], group: Group) -> None:
    """Writes what all ranks have, together: each its pieces, and what all of them hold one of them."""
    spread = to_dtensor(dict(slots))
    with naming(path), ExitStack() as published:

        def begin() -> Path | None:
            return published.enter_context(replaced_folder(path)) if is_first(group) else None

        folder, *_ = together(group, begin)
        assert folder is not None
        _write_pieces(folder, spread, group)
        sums = together(group, lambda: {path.name: _sum(path) for path in _own(folder, group)})

        def publish() -> None:
            if is_first(group):
                _check_seen(folder, sums)
                files.write(
                    folder / SUMS,
                    {name: torch.tensor(s) for each in sums for name, s in each.items()},
                )
                published.close()

        together(group, publish)


class _Writer(filesystem.FileSystemWriter):
    """The writer of ``torch.distributed.checkpoint``, which says what the system says, and not the name of a folder that will be renamed."""

    def storage_meta(self) -> None:
        return None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # Where a file cannot be written, torch.save says at what place of it.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _write_pieces(folder: Path, spread: dict[str, Tensor], group: Group) -> None:
    try:
        with explained():
            save(
                spread,
                storage_writer=_Writer(folder),
                planner=DefaultSavePlanner(**AS_IT_IS),
                process_group=group,
            )
    except CheckpointException as error:
        failures = {
            rank: ("OSError" if isinstance(each, OSError) else type(each).__name__, words(each))
            for rank, (each, _) in error.failures.items()
        }
        raise joint(failures) from error


def _own(folder: Path, group: Group) -> list[Path]:
    """The files that this rank has written."""
    own = [*folder.glob(f"__{dist.get_rank(group)}_*")]
    return [*own, folder / METADATA] if is_first(group) else own


def _sum(path: Path) -> list[int]:
    """How many bytes a file has, and their checksum."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(files.CHUNK):
            checksum = zlib.crc32(chunk, checksum)
        return [file.tell(), checksum]


def _check_seen(folder: Path, sums: list[dict[str, list[int]]]) -> None:
    for rank, each in enumerate(sums):
        for name in each:
            if not (folder / name).exists():
                raise OSError(
                    f"rank 0 does not see {name} of rank {rank}: name a folder that all ranks share"
                )


def read(path: File, slots: Mapping[str, Slot], group: Group) -> dict[str, Slot]:
    """What is in a folder, in fresh memory: of each tensor that is spread, this rank's piece."""
    folder = Path(path)
    check_same(path, together(group, lambda: _check_sums(folder, group)))
    fresh: dict[str, Slot] = {}

    def fill() -> None:
        metadata = _read_metadata(folder)
        found = {name: _kind(entry) for name, entry in metadata.state_dict_metadata.items()}
        state.check_fit(found, slots, os.fspath(path))
        fresh.update((name, state.empty_like(slot)) for name, slot in slots.items())
        reader, planner = filesystem.FileSystemReader(folder), DefaultLoadPlanner(**AS_IT_IS)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        planner.set_up_planner(to_dtensor(fresh), metadata)
        reader.read_data(planner.create_local_plan(), planner).wait()

    together(group, fill)
    return fresh


def _kind(entry: Any) -> str:
    if isinstance(entry, records.TensorStorageMetadata):
        return f"{entry.properties.dtype} of shape {tuple(entry.size)}"
    return "no tensor"


def _check_sums(folder: Path, group: Group) -> int:
    """The checksum of all of a folder, after this rank has looked at its share of the files."""
    try:
        sums, checksum = files.read_all(folder / SUMS)
    except FileNotFoundError as error:
        raise files.damaged(folder) from error
    mine = slice(dist.get_rank(group), None, dist.get_world_size(group)) if group else slice(None)
    for name in [*sums][mine]:
        path = folder / name
        try:
            if path.name != name or sums[name].tolist() != _sum(path):
                raise files.damaged(path)
        except FileNotFoundError as error:
            raise files.damaged(path) from error
    return checksum


class _Records(pickle.Unpickler):
    """Makes records that say what is where, and runs nothing else: a pickle may name any function."""

    def find_class(self, module: str, name: str) -> Any:
        if module in (records.__name__, filesystem.__name__) and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum)):
                return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in {("torch", "Size"), ("torch.serialization", "_get_layout")}:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no record")


def _read_metadata(folder: Path) -> records.Metadata:
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Records(file).load()
    except Exception as error:  # as many kinds as there are ways to be no pickle
        raise files.damaged(path) from error
    if not isinstance(metadata, records.Metadata):
        raise files.damaged(path)
    return metadata
