"""States in pieces: how ranks save and load them, and what each of them hears."""

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import purestep as ps
from purestep import tree
from purestep.testing.processes import World, values
from tests.states import DTYPES, assert_same_bits, noise, zeros

BAD = 1
"""The rank that goes wrong."""


def whole() -> Any:
    """All kinds of leaves: shorter than the ranks are many, empty, without a dimension, of any dtype and memory order."""
    return {
        "w": noise(torch.float32, 5, 3),
        "columns": noise(torch.float64, 6, 4).T,
        "short": noise(torch.bfloat16, 1, 2),
        "empty": noise(torch.float32, 0, 3),
        "by dtype": {
            dtype: noise(dtype, 4, 2) for dtype in DTYPES if not dtype.is_complex
        },
        "step": torch.tensor(7),
        "layers": [noise(torch.float32, 7), None],
    }


def axis(dims: str = "dp") -> ps.MeshAxis:
    """All ranks; or of four, ``"shard"``: two of them, beside two replicas."""
    world = list(range(dist.get_world_size()))
    if dims == "dp":
        return ps.MeshAxis(DeviceMesh("cpu", world, mesh_dim_names=("dp",)), "dp")
    mesh = DeviceMesh(
        "cpu", [world[:2], world[2:]], mesh_dim_names=("replica", "shard")
    )
    return ps.MeshAxis(mesh, dims)


@contextmanager
def group_of_one() -> Iterator[None]:
    """This process is a process group."""
    dist.init_process_group(
        "gloo", store=vars(dist)["HashStore"](), rank=0, world_size=1
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def together(world: World, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What the function returns on each rank."""
    return values(world.run(function, *([argument] * world.size for argument in args)))


def refused(act: Callable[[], Any]) -> tuple[str, str]:
    """The kind and the text of an error."""
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was refused")


def files(folder: Path) -> set[str]:
    """What is in a folder."""
    return {file.name for file in folder.iterdir()}


@contextmanager
def room(size: int) -> Iterator[None]:
    """No file may become larger: as on a full disk, writing fails in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def save(_: int, path: Path, dims: str = "dp", dim: int = 0) -> None:
    """All of it in pieces."""
    ps.checkpoint.save(path, in_pieces(whole(), axis(dims), dim))


def in_pieces(state: Any, axis: ps.Axis, dim: int) -> Any:
    """Cut along a dimension, as far as tensors have it."""
    return tree.map(
        lambda leaf: ps.shard(leaf, axis, dim) if leaf.ndim > dim else leaf, state
    )


def load(_: int, path: Path, dims: str = "dp", dim: int = 0) -> None:
    """Into pieces of other values, which are checked."""
    like = in_pieces(zeros(whole()), axis(dims), dim)
    found = ps.checkpoint.load(path, like)
    expected = in_pieces(whole(), axis(dims), dim)
    assert tree.flatten(found)[1] == tree.flatten(like)[1]
    assert_same_bits(tree.leaves(found), tree.leaves(expected))
    for one, two in zip(tree.leaves(found), tree.leaves(like), strict=True):
        assert one.stride() == two.stride()
