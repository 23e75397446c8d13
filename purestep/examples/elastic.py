"""Lets a program live under ``torchrun``: ranks meet, agree, and leave together.

    torchrun --nproc-per-node 2 --max-restarts 3 -m purestep.examples.docstrings --checkpoint state

When a process dies, ``torchrun`` ends the others too and starts all of them again, from the top of
the program.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

import purestep as ps

TIMEOUT = timedelta(minutes=2)

Result = TypeVar("Result")


@contextmanager
def join_processes() -> Iterator[ps.MeshAxis]:
    """Yields an axis over all processes of ``torchrun``, on the host.

    It joins them in a gloo process group. At the end of the context, all ranks wait for each other
    and leave the process group. After an error, they do not.
    """
    store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
    # The store outlives processes: without a prefix, it still says where dead ones listened.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"attempt_{attempt}", store),
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
    )
    yield ps.MeshAxis(init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)), "dp")
    # Not in a finally: after an error, the others would be waited for in vain.
    _leave_together()


def _leave_together() -> None:
    dist.barrier()
    dist.destroy_process_group()


def exit_now(code: int, message: str = "") -> NoReturn:
    """Ends the process at once, without cleanup; rank 0 alone prints the message, to stderr."""
    if message and os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a process group's thread that frees a tensor as Python ends aborts the process.
    os._exit(code)


def run_or_exit_together(function: Callable[[], Result]) -> Result:
    """Calls a function that succeeds or fails on all ranks together, and returns its result.

    After an ``OSError``, ``ValueError`` or ``RankError``, the ranks wait for each other and leave
    the process group. Rank 0 prints the error, and all end with exit code 1. Other errors are
    raised.
    """
    try:
        return function()
    except (OSError, ValueError, ps.RankError) as error:
        _leave_together()
        exit_now(1, str(error))
