"""Ranks for the proofs: threads of this process, and processes of their own that stay up.

A program is a function ``program(axis, *args)`` at the top of a module, with one entry of every argument for
each rank. It runs on threads and on processes alike, and an exception in any rank is raised.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import purestep as ps

LARGEST = 4
TIMEOUT = 60.0


class Grid(NamedTuple):
    """A mesh of two dimensions: an axis along each, and one over both."""

    first: ps.Axis
    second: ps.Axis
    both: ps.Axis


class Ranks(NamedTuple):
    """What a program runs on: ``size`` ranks, or a grid of 2 by 2."""

    size: int
    bucket_bytes: int
    grid: bool = False


def on_threads(ranks: Ranks, program: Callable[..., Any], *args: Sequence[Any]) -> list[Any]:
    """The program on threads."""
    world = ps.testing.ThreadAxis(ranks.size, bucket_bytes=ranks.bucket_bytes)
    axis: ps.Axis | Grid = world
    if ranks.grid:
        first, second = world.split(2, 2)
        axis = Grid(first, second, world)
    try:
        return world.map(partial(program, axis))(*args)
    except (ps.RankError, ValueError) as error:
        raise AssertionError("the ranks cannot go on together") from error


class Processes:
    """Processes in one gloo group. Fewer ranks are a part of it; the others wait for the next program."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    def __call__(
        self, ranks: Ranks, program: Callable[..., Any], *args: Sequence[Any]
    ) -> list[Any]:
        """The program on processes."""
        columns = list(zip(*args, strict=True)) if args else [()] * ranks.size
        taking_part = self._connections[: ranks.size]
        for connection, column in zip(taking_part, columns, strict=True):
            connection.send((ranks, program, column))
        results = []
        for rank, connection in enumerate(taking_part):
            if not connection.poll(TIMEOUT):
                raise TimeoutError(f"rank {rank} has not answered for {TIMEOUT} s")
            results.append(connection.recv())
        for rank, (_, error) in enumerate(results):
            if error:
                raise RuntimeError(f"rank {rank} failed:\n{error}")
        return [result for result, _ in results]


@contextmanager
def processes() -> Iterator[Processes]:
    """``LARGEST`` processes, for as long as the context lasts."""
    context = get_context("spawn")
    pairs = [context.Pipe() for _ in range(LARGEST)]
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=_work, args=(rank, f"{folder}/store", theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for worker in workers:
            worker.start()
        try:
            yield Processes([ours for ours, _ in pairs])
            for ours, _ in pairs:
                ours.send(None)
            for worker in workers:
                worker.join(TIMEOUT)
        finally:
            for worker in workers:
                worker.kill()
    codes = [worker.exitcode for worker in workers]
    assert codes == [0] * LARGEST, f"the processes ended with {codes}"


def _work(rank: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=LARGEST,
        timeout=timedelta(seconds=TIMEOUT),
    )
    # Groups are made by all processes together, so all of them are made now.
    meshes = {n: DeviceMesh("cpu", list(range(n)), mesh_dim_names=("dp",)) for n in range(1, 5)}
    grid = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "other"))
    grid[("dp", "other")]._flatten()

    @cache
    def axis_of(ranks: Ranks) -> Any:
        if not ranks.grid:
            return ps.MeshAxis(meshes[ranks.size], "dp", bucket_bytes=ranks.bucket_bytes)
        dims: list[Any] = ["dp", "other", ("dp", "other")]
        return Grid(*(ps.MeshAxis(grid, d, bucket_bytes=ranks.bucket_bytes) for d in dims))

    while (task := connection.recv()) is not None:
        ranks, program, column = task
        try:
            answer = program(axis_of(ranks), *column), ""
        except Exception:
            answer = None, traceback.format_exc()
        connection.send(answer)
    dist.barrier()
    dist.destroy_process_group()
