"""Ranks for proofs and tests: threads of this process, and processes of their own.

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
from purestep.torch_private import flattened

LARGEST = 4


class Grid(NamedTuple):
    """A mesh of two dimensions: an axis along each, and one over both."""

    first: ps.Axis
    second: ps.Axis
    both: ps.Axis


class Ranks(NamedTuple):
    """What a program runs on: ``size`` ranks, or a grid of them with so many rows (processes: of all)."""

    size: int
    bucket_bytes: int = 1 << 20
    rows: int = 0


def on_threads(
    ranks: Ranks, program: Callable[..., Any], *args: Sequence[Any]
) -> list[Any]:
    """The program on threads."""
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
    """The program on the first ``ranks.size`` processes of a world; the others have nothing to do."""
    columns: list[Any] = list(zip(*args, strict=True)) if args else [()] * ranks.size
    columns += [None] * (world.size - ranks.size)
    results = world.run(
        _take_part, [ranks] * world.size, [program] * world.size, columns
    )
    return values(results)[: ranks.size]


def _take_part(_: int, ranks: Ranks, program: Callable[..., Any], column: Any) -> Any:
    # Groups are made by all processes together, so all of them are made now.
    _meshes()
    return None if column is None else program(_axis_of(ranks), *column)


@cache
def _meshes() -> dict[int | str, DeviceMesh]:
    sizes, everyone = range(1, LARGEST + 1), torch.arange(LARGEST)
    meshes: dict[int | str, DeviceMesh] = {
        n: DeviceMesh("cpu", list(range(n)), mesh_dim_names=("dp",)) for n in sizes
    }
    for rows in (1, 2):
        ranks = everyone.view(rows, -1)
        meshes[f"{rows} rows"] = grid = DeviceMesh(
            "cpu", ranks, mesh_dim_names=("dp", "other")
        )
        flattened(grid[("dp", "other")])
    return meshes


@cache
def _axis_of(ranks: Ranks) -> Any:
    rows = ranks.rows
    mesh = _meshes()[f"{rows} rows" if rows else ranks.size]
    dims: list[Any] = ["dp", "other", ("dp", "other")] if rows else ["dp"]
    axes = [ps.MeshAxis(mesh, each, bucket_bytes=ranks.bucket_bytes) for each in dims]
    return Grid(*axes) if rows else axes[0]
