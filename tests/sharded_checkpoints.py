"""Saves and loads sharded states on ranks, and returns the error of each of them."""

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import purestep as ps
from purestep import tree
from purestep.testing.processes import World, values
from tests.checkpoint_states import DTYPES, assert_same_bits, random_bits, zeros_like

FAULTY_RANK = 1
"""The faulty rank."""


def full_state() -> Any:
    """Makes a full state, with leaves of any dtype, memory order and shape.

    Some have fewer rows than there are ranks, some are empty or scalars.
    """
    return {
        "w": random_bits(torch.float32, 5, 3),
        "columns": random_bits(torch.float64, 6, 4).T,
        "short": random_bits(torch.bfloat16, 1, 2),
        "empty": random_bits(torch.float32, 0, 3),
        "by dtype": {
            dtype: random_bits(dtype, 4, 2) for dtype in DTYPES if not dtype.is_complex
        },
        "step": torch.tensor(7),
        "layers": [random_bits(torch.float32, 7), None],
    }


def make_axis(dims: str = "dp") -> ps.MeshAxis:
    """Makes an axis of all ranks; or ``"shard"``, of two of four, beside two replicas."""
    ranks = list(range(dist.get_world_size()))
    if dims == "dp":
        flat = DeviceMesh("cpu", ranks, mesh_dim_names=("dp",))
        return ps.MeshAxis(flat, "dp")
    names = ("replica", "shard")
    grid = DeviceMesh("cpu", [ranks[:2], ranks[2:]], mesh_dim_names=names)
    return ps.MeshAxis(grid, dims)


@contextmanager
def group_of_one() -> Iterator[None]:
    """Makes this process a process group."""
    store = vars(dist)["HashStore"]()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def call_on_all_ranks(
    world: World, function: Callable[..., Any], *args: Any
) -> list[Any]:
    """Calls the function with the same arguments on each rank, and returns the results."""
    args_of_ranks = [[arg] * world.size for arg in args]
    return values(world.run(function, *args_of_ranks))


def catch_error(act: Callable[[], Any]) -> tuple[str, str]:
    """Returns the class and the text of an error."""
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was refused")


def list_files(folder: Path) -> set[str]:
    """Lists the names in a folder."""
    return {file.name for file in folder.iterdir()}


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Limits the size of files: as on a full disk, writing fails in the middle."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    _, hard_limit = limits
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard_limit))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def save_sharded(_: int, path: Path, dims: str = "dp", dim: int = 0) -> None:
    """Saves the state, sharded."""
    state = shard_state(full_state(), make_axis(dims), dim)
    ps.checkpoint.save(path, state)


def shard_state(state: Any, axis: ps.Axis, dim: int) -> Any:
    """Shards a state along a dimension, as far as tensors have it."""

    def shard(leaf: Tensor) -> Any:
        return ps.shard(leaf, axis, dim) if leaf.ndim > dim else leaf

    return tree.map(shard, state)


def load_sharded(_: int, path: Path, dims: str = "dp", dim: int = 0) -> None:
    """Loads the state into shards of zeros, and checks it."""
    like = shard_state(zeros_like(full_state()), make_axis(dims), dim)
    loaded = ps.checkpoint.load(path, like)
    expected = shard_state(full_state(), make_axis(dims), dim)
    assert tree.flatten(loaded)[1] == tree.flatten(like)[1]
    loaded_leaves = tree.leaves(loaded)
    like_leaves = tree.leaves(like)
    assert_same_bits(loaded_leaves, tree.leaves(expected))
    for leaf, like_leaf in zip(loaded_leaves, like_leaves, strict=True):
        assert leaf.stride() == like_leaf.stride()
