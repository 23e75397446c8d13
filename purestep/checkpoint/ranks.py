"""What ranks do together, so that whatever goes wrong on one of them is an error on all, and on none of them a wait."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

from purestep import tree as trees
from purestep.axis import MeshAxis, RankError
from purestep.checkpoint.whole import File
from purestep.state import Slot, kind
from purestep.tree.shard import is_shard
from purestep.types import Tree

T = TypeVar("T")

Group: TypeAlias = Any
"""A process group; None where there is one process, or each acts for itself."""


class LostError(RankError):
    """The group is of no more use, and whoever waits for this rank there waits in vain."""


KINDS: dict[str, type[Exception]] = {"OSError": OSError, "ValueError": ValueError, "TypeError": TypeError}  # fmt: skip
"""The errors that arrive as what they are."""


def world(tree: Tree) -> Group:
    """All processes, where some tensor is spread over them."""
    axes = [node.axis for node in trees.flatten(tree, is_shard)[0] if is_shard(node)]
    for axis in axes:
        if not isinstance(axis, MeshAxis):
            raise TypeError(
                f"a Shard over {axis}, which is no ps.MeshAxis, is neither saved nor loaded: take ps.unshard(tree), whose "
                "tensors are whole"
            )
        if dist.group.WORLD is None:
            raise ValueError(
                f"a Shard over {axis} is neither saved nor loaded once its process group has ended: do so before "
                "torch.distributed.destroy_process_group()"
            )
    return dist.group.WORLD if axes else None


def is_first(group: Group) -> bool:
    """Whether this rank does what one of them has to do."""
    return group is None or dist.get_rank(group) == 0


def together(group: Group, act: Callable[[], T]) -> list[T]:
    """What ``act`` returns on each rank, on every rank; what it raises on some, too.

    Raised is what this rank raises where all raise the same, and otherwise an error that names the ranks.
    """
    if group is None:
        return [act()]
    error: BaseException | None = None
    try:
        said: tuple[str, Any] = "", act()
    except BaseException as caught:
        error = caught
        kinds = (name for name, kind in KINDS.items() if isinstance(error, kind))
        said = next(kinds, type(error).__name__), words(error)
    heard: list[Any] = [None] * dist.get_world_size(group)
    try:
        with explained():
            dist.all_gather_object(heard, said, group=group)
        failures = {rank: failure for rank, failure in enumerate(heard) if failure[0]}
        alike = len(failures) == len(heard) and len({*heard}) == 1
        if error is not None and (alike or not isinstance(error, Exception)):
            raise error
        if failures:
            raise joint(failures) from error
    finally:
        error = None  # which holds this very frame, and the group
    return [value for _, value in heard]


def agreed(group: Group, slots_of: Callable[[], dict[str, Slot]], path: File) -> dict[str, Slot]:
    """What this rank saves; refused on all ranks where it is not the same on all of them, but for the values."""
    slots: dict[str, Slot] = {}
    lines: list[str] = []

    def describe() -> int:
        slots.update(slots_of())
        lines.extend(f"{name} is {kind(slot)}" for name, slot in slots.items())
        lines.append(f"it goes to {os.fspath(path)}")
        return zlib.crc32("\n".join(lines).encode())

    if len({*together(group, describe)}) > 1:
        first, *others = together(group, lambda: lines)
        for rank, found in enumerate(others, 1):
            if found != first:
                raise ValueError(
                    f"rank {rank} does not save what rank 0 saves: {_first_of(found, first)}, and on rank 0 {_first_of(first, found)}; "
                    "give all ranks one path, and trees of one structure"
                )
    return slots


def _first_of(ours: list[str], theirs: list[str]) -> str:
    return next((each for each in ours if each not in theirs), "there is no more")


def check_same(path: File, checksums: Sequence[int]) -> None:
    """Refuses to load different checkpoints on different ranks."""
    for rank, checksum in enumerate(checksums):
        if checksum != checksums[0]:
            raise ValueError(
                f"{os.fspath(path)} is not the same on rank {rank} as on rank 0: name the same file, or folder, of a disk that "
                "all ranks share"
            )


def words(error: BaseException) -> str:
    """What an error says, without what will be said around it."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def joint(failures: Mapping[int, tuple[str, str]]) -> Exception:
    """One error for those of several ranks, each of which is a kind and a text."""
    kinds = {kind for kind, _ in failures.values()}
    made = KINDS.get(kinds.pop(), RankError) if len(kinds) == 1 else RankError
    shown = [
        f"rank {rank}: {text if made is not RankError else f'{kind}: {text}'}"
        for rank, (kind, text) in failures.items()
    ]
    return made("; ".join(shown))


@contextmanager
def explained() -> Iterator[None]:
    """A broken connection, in words that say what to look for."""
    try:
        yield
    except RuntimeError as error:
        what, *_ = str(error).split("\n")
        raise LostError(
            "ranks could not save or load together: most likely another rank has died, and its own output tells why. End the "
            "process, and start again from the last checkpoint, as torchrun --max-restarts does. What the backend says: "
            f"{what}"
        ) from error
