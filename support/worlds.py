"""Runs programs on ranks: threads of this process, or processes.

A program is a function ``program(axis, *args)`` at the top of a module, with one entry of every argument for
each rank. It runs on threads and on processes alike, and an exception in any rank is raised.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

import purestep as ps
from purestep.testing.processes import World, values
from purestep.torch_private import flatten_mesh

NUM_PROCESSES = 4
"""How many processes stay up."""


class Grid(NamedTuple):
    """A mesh of two dimensions: an axis along each, and one over both."""

    first: ps.Axis
    second: ps.Axis
    both: ps.Axis


class Ranks(NamedTuple):
    """The ranks of a program: ``size`` in one dimension, or a grid with this many rows (processes: of all)."""

    size: int
    bucket_bytes: int = 1 << 20
    rows: int = 0


def on_threads(
    ranks: Ranks, program: Callable[..., Any], *args: Sequence[Any]
) -> list[Any]:
    """Runs the program on threads; returns the ranks' results.

    Raises AssertionError in place of a RankError or a ValueError.
    """
    world = ps.testing.ThreadAxis(ranks.size, bucket_bytes=ranks.bucket_bytes)
    axis: ps.Axis | Grid = world
    if ranks.rows:
        first, second = world.split(ranks.rows, ranks.size // ranks.rows)
        axis = Grid(first, second, world)
    try:
        return world.map(partial(program, axis))(*args)
    except (ps.RankError, ValueError) as error:
        raise AssertionError("the ranks cannot go on together") from error


def on_processes(
    world: World, ranks: Ranks, program: Callable[..., Any], *args: Sequence[Any]
) -> list[Any]:
    """Runs the program on the first ``ranks.size`` processes of a world; the others stay idle."""
    local_args: list[Any] = [()] * ranks.size
    if args:
        local_args = list(zip(*args, strict=True))
    local_args += [None] * (world.size - ranks.size)
    results = world.run(
        _take_part,
        [ranks] * world.size,
        [program] * world.size,
        local_args,
    )
    return values(results)[: ranks.size]


def _take_part(_: int, ranks: Ranks, program: Callable[..., Any], args: Any) -> Any:
    # Process groups are made by all processes together, idle ones included, so all are made now.
    _make_meshes()
    if args is None:
        return None
    return program(_make_axis(ranks), *args)


@cache
def _make_meshes() -> dict[int | str, DeviceMesh]:
    meshes: dict[int | str, DeviceMesh] = {}
    for size in range(1, NUM_PROCESSES + 1):
        meshes[size] = DeviceMesh("cpu", list(range(size)), mesh_dim_names=("dp",))
    for rows in (1, 2):
        ranks = torch.arange(NUM_PROCESSES).view(rows, -1)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "other"))
        flatten_mesh(mesh[("dp", "other")])
        meshes[f"{rows} rows"] = mesh
    return meshes


@cache
def _make_axis(ranks: Ranks) -> Any:
    meshes = _make_meshes()
    if not ranks.rows:
        return ps.MeshAxis(meshes[ranks.size], "dp", bucket_bytes=ranks.bucket_bytes)
    mesh = meshes[f"{ranks.rows} rows"]
    dims: list[Any] = ["dp", "other", ("dp", "other")]
    axes = [ps.MeshAxis(mesh, dim, bucket_bytes=ranks.bucket_bytes) for dim in dims]
    return Grid(*axes)
