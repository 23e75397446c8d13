"""What a program needs to live under ``torchrun``: ranks that meet, and state that outlives them.

    torchrun --nproc-per-node 2 --max-restarts 3 -m purestep.examples.docstrings --checkpoint state.pt

When a process dies, ``torchrun`` ends the others too and starts all of them again, from the top of the program.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

import purestep as ps
from purestep import tree

TIMEOUT = timedelta(minutes=2)

Settings: TypeAlias = Mapping[str, str | int | float]
"""What a run is made with, by name."""

Result = TypeVar("Result")


@contextmanager
def processes() -> Iterator[ps.MeshAxis]:
    """The processes of ``torchrun`` as one axis, which they leave together unless there is an error.

    ``SystemExit`` is for all ranks at once: whatever only one of them meets with is an exception.
    """
    store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
    # The store lives as long as torchrun: without a prefix, it still says where dead processes listened.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"attempt_{attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        yield ps.MeshAxis(init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)), "dp")
    except SystemExit:
        _leave_together()
        raise
    # Not in a finally: after an error, the others would be waited for in vain.
    _leave_together()


def _leave_together() -> None:
    dist.barrier()
    dist.destroy_process_group()


def end_interrupted(line: str) -> NoReturn:
    """Ends the process after Ctrl-C with the exit code that shells know; rank 0 alone prints the line."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: as Python takes down a group that was left in the middle of a collective, gloo may abort.
    os._exit(130)


def from_rank_0(axis: ps.MeshAxis, function: Callable[[], Result]) -> Result:
    """What the function gives on rank 0, on every rank; it runs nowhere else.

    Where it raises, every rank ends, and rank 0 says why in one line: nobody waits for one that has left.
    """
    answer: list[Any] = [None, None]
    if axis.rank == 0:
        try:
            answer = [function(), None]
        except (OSError, ValueError) as error:
            answer = [None, str(error)]
    dist.broadcast_object_list(answer)
    result, refusal = answer
    if refusal is not None:
        _refuse(axis, refusal)
    return cast("Result", result)


def check_alike(axis: ps.MeshAxis, settings: Settings) -> None:
    """Ends every rank, rank 0 with one line, where they were not all started with the same settings."""
    heard: list[Any] = [None] * axis.size
    dist.all_gather_object(heard, dict(settings))
    for rank, theirs in enumerate(heard):
        name = difference(heard[0], theirs)
        if name is not None:
            _refuse(
                axis,
                f"rank 0 was started with {_said(name, heard[0])}, rank {rank} with {_said(name, theirs)}: "
                "start all of them with the same",
            )


def _refuse(axis: ps.MeshAxis, reason: str) -> NoReturn:
    sys.exit(reason if axis.rank == 0 else 1)


def difference(ours: Settings, theirs: Settings) -> str | None:
    """The first name under which the two differ.

    >>> difference({"steps": 180, "dtype": "float64"}, {"steps": 180, "dtype": "float32"})
    'dtype'
    """
    names = {**ours, **theirs}
    return next((name for name in names if ours.get(name) != theirs.get(name)), None)


def _said(name: str, settings: Settings) -> str:
    return f"{name}={settings[name]!r}" if name in settings else f"no {name}"


def resume(path: Path | None, settings: Settings, state: Any) -> Any:
    """What was saved, or the ``state`` given where nothing was; refused where nothing could be saved later."""
    if path is None:
        return state
    check_writable(path)
    return load(path, settings, like=state) if path.exists() else state


def save(path: Path, settings: Settings, state: Any) -> None:
    """Writes a tree of tensors, and the settings of the run that it belongs to."""
    tensors = dict(zip(tree.paths(state, "state"), tree.leaves_of(state), strict=True))
    with replacing(path) as file:
        torch.save({"settings": dict(settings), "state": tensors}, file)


def load(path: Path, settings: Settings, like: Any) -> Any:
    """The tree that was saved, whose structure, shapes and dtypes must be those of ``like``.

    Refused where it was made with different settings: it would go on as a run that nobody has asked for.
    """
    try:
        saved = torch.load(path, weights_only=True)
        found, tensors = saved["settings"], saved["state"]
    except Exception as error:
        raise ValueError(
            f"{path} is no checkpoint of this program, or not a whole one; remove it, or name a different file. "
            f"What torch.load says: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error
    name = difference(settings, found)
    if name is not None:
        raise ValueError(
            f"{path} is of a run with {_said(name, found)}, but this one has {_said(name, settings)}: "
            "give it the same to go on, or name a different file to begin anew"
        )
    leaves, structure = tree.flatten(like)
    expected = dict(zip(tree.paths(like, "state"), map(tree.kind, leaves), strict=True))
    kinds = {name: tree.kind(tensor) for name, tensor in tensors.items()}
    if kinds != expected:
        name, _ = sorted(expected.items() ^ kinds.items())[0]
        raise ValueError(
            f"{path} is of another run: its {name} is {kinds.get(name, 'missing')} and should be "
            f"{expected.get(name, 'missing')}; remove it, or name a different file"
        )
    return tree.unflatten(structure, [tensors[name] for name in expected])


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of ``path`` when the block is through; Ctrl-C waits for that.

    For the main thread, which is where Python handles signals. Whenever the program ends, there is a whole file,
    the old or the new one. After an error there is nothing else; what a process leaves that is killed,
    ``check_writable`` clears away at the next start.
    """
    unfinished = _unfinished(path)
    pressed: list[int] = []
    # torch.save would turn a KeyboardInterrupt into an error of its own.
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
        signal.signal(signal.SIGINT, before)
    if pressed:
        signal.raise_signal(signal.SIGINT)


def check_writable(path: Path) -> None:
    """Raises, before any work is done, what ``replacing`` would raise after it."""
    try:
        _unfinished(path).open("wb").close()
        _unfinished(path).unlink()
        if path.is_dir():
            raise IsADirectoryError(None, "Is a directory")
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error.strerror}): name a file in a folder that is there, and yours to write to"
        ) from error


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.unfinished")


def fingerprint(params: Any) -> str:
    """The first 12 hexadecimal digits of the SHA-256 of all parameters: equal for equal bits."""
    digest = hashlib.sha256()
    for leaf in tree.leaves_of(params):
        digest.update(leaf.contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]
