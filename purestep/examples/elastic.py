"""What a program needs to live under ``torchrun``: ranks that meet, agree, and leave together.

    torchrun --nproc-per-node 2 --max-restarts 3 -m purestep.examples.docstrings --checkpoint state

When a process dies, ``torchrun`` ends the others too and starts all of them again, from the top of
the program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

import purestep as ps

TIMEOUT = timedelta(minutes=2)

Settings: TypeAlias = Mapping[str, str | int | float]
"""What a run is made with, by name."""

Result = TypeVar("Result")


@contextmanager
def processes() -> Iterator[ps.MeshAxis]:
    """The processes of ``torchrun`` as one axis; without an error, they leave it together."""
    store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
    # The store outlives processes: without a prefix, it still says where dead ones listened.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"attempt_{attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    yield ps.MeshAxis(init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)), "dp")
    # Not in a finally: after an error, the others would be waited for in vain.
    _leave_together()


def _leave_together() -> None:
    dist.barrier()
    dist.destroy_process_group()


def end(code: int, line: str = "") -> NoReturn:
    """Ends the process with this exit code; rank 0 alone prints the line."""
    if line and os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a process group's thread that frees a tensor as Python ends aborts the process.
    os._exit(code)


def from_rank_0(function: Callable[[], Result]) -> Result:
    """What the function gives on rank 0, on every rank; it runs nowhere else.

    Where it raises, every rank ends, and rank 0 says why in one line.
    """
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer = [function(), None]
        except (OSError, ValueError) as error:
            answer = [None, str(error)]
    dist.broadcast_object_list(answer)
    result, refusal = answer
    if refusal is not None:
        _refuse(refusal)
    return cast("Result", result)


def on_every_rank(function: Callable[[], Result]) -> Result:
    """What the function gives on this rank. It raises on all ranks alike, and every rank ends."""
    try:
        return function()
    except (OSError, ValueError) as error:
        _refuse(str(error))


def check_alike(axis: ps.MeshAxis, settings: Settings) -> None:
    """Ends every rank, rank 0 with one line, unless all were started with the same settings."""
    heard: list[Any] = [None] * axis.size
    dist.all_gather_object(heard, dict(settings))
    for rank, theirs in enumerate(heard):
        name = difference(heard[0], theirs)
        if name is not None:
            _refuse(
                f"rank 0 was started with {said(name, heard[0])}, "
                f"rank {rank} with {said(name, theirs)}: start all of them with the same"
            )


def _refuse(reason: str) -> NoReturn:
    _leave_together()
    end(1, reason)


def difference(ours: Settings, theirs: Settings) -> str | None:
    """The first name under which the two differ.

    >>> difference({"steps": 180, "dtype": "float64"}, {"steps": 180, "dtype": "float32"})
    'dtype'
    """
    names = {**ours, **theirs}
    return next((name for name in names if ours.get(name) != theirs.get(name)), None)


def said(name: str, settings: Settings) -> str:
    """One setting as a message tells it.

    >>> said("steps", {"steps": 180}), said("steps", {})
    ('steps=180', 'no steps')
    """
    return f"{name}={settings[name]!r}" if name in settings else f"no {name}"
