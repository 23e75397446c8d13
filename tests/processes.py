"""Programs on axes over the processes of ``world``, which ``tests/conftest.py`` holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import purestep as ps
from purestep.testing.processes import World, values

SIZE = 4


@cache
def mesh() -> DeviceMesh:
    """All ranks of the process's world along one dimension."""
    size = torch.distributed.get_world_size()
    return DeviceMesh("cpu", list(range(size)), mesh_dim_names=("dp",))


@cache
def grid() -> DeviceMesh:
    """Four ranks, two by two."""
    return DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "cp"))


def on_all(rank: int, program: Callable[..., Any], bucket_bytes: int, *args: Any) -> Any:
    """``program(axis, *args)`` on the axis over all ranks."""
    return program(ps.MeshAxis(mesh(), "dp", bucket_bytes=bucket_bytes), *args)


def processes(
    world: World, program: Callable[..., Any], *args: Sequence[Any], bucket_bytes: int = 1 << 20
) -> list[Any]:
    """What ``program(axis, *args of its rank)`` returns on every process."""
    every = world.size
    return values(world.run(on_all, [program] * every, [bucket_bytes] * every, *args))
