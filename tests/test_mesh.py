"""``MeshAxis`` over real processes: its dimensions, and shards that are DTensors'."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import purestep as ps
from purestep import tree
from purestep.nn.tensor_parallel import axis_of
from purestep.testing import ThreadAxis
from purestep.testing.processes import World, values
from support.ranks import Run
from support.strategies import assert_same

pytestmark = pytest.mark.timeout(120)


def check_shards_as_dtensors(axis: ps.MeshAxis, shape: torch.Size, dim: int) -> None:
    """Converts a shard to a DTensor and back, and compares both with torch's."""
    full = torch.arange(float(shape.numel())).view(shape)
    shards = {"w": ps.shard(full, axis, dim), "scale": torch.ones(())}
    theirs: Any = distribute_tensor(full, axis.mesh, [Shard(dim)])

    ours = ps.to_dtensor(shards)
    assert ours["w"].placements == theirs.placements
    assert torch.equal(ours["w"].full_tensor(), full)

    for dtensors in (ours, {"w": theirs, "scale": torch.ones(())}):
        restored = ps.from_dtensor(dtensors, axis)
        assert_same(restored, shards)
        assert_same(ps.unshard(restored)["w"], full)

    restored = ps.from_dtensor(ours, axis)
    pointer = restored["w"].local.data_ptr()
    assert pointer == shards["w"].local.data_ptr(), "without a copy"


def check_dtensors(axis: ps.MeshAxis) -> None:
    """Converts trees with fewer rows than ranks, or sharded along another dimension."""
    check_shards_as_dtensors(axis, torch.Size([6, 2]), dim=0)
    check_shards_as_dtensors(axis, torch.Size([8]), dim=0)
    check_shards_as_dtensors(axis, torch.Size([2, 5]), dim=1)
    check_shards_as_dtensors(axis, torch.Size([3, 2]), dim=0)
    replicated = distribute_tensor(torch.ones(3), axis.mesh, [Replicate()])
    assert type(ps.from_dtensor(replicated, axis)) is Tensor


def test_shards_are_those_of_dtensors(processes: Run) -> None:
    """The last ranks of four hold less, or nothing."""
    processes(check_dtensors)


@cache
def grid() -> DeviceMesh:
    """Makes a mesh of four ranks, two by two."""
    return DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "cp"))


def list_refused_dtensors() -> list[tuple[Callable[[], Any], str]]:
    """Lists conversions of DTensors on another mesh, and of a Shard on none."""
    line = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",))
    on_grid = distribute_tensor(torch.ones(4, 4), grid(), [Shard(0), Shard(1)])
    on_one_dim: DTensor = on_grid.redistribute(placements=[Shard(0), Replicate()])
    local = ps.shard(torch.ones(2), ps.LocalAxis())
    one_axis = "a Shard lies on one axis, here MeshAxis('dp'"
    return [
        (
            lambda: ps.from_dtensor({"w": on_grid}, ps.MeshAxis(grid(), "dp")),
            one_axis,
        ),
        (
            lambda: ps.from_dtensor(on_one_dim, ps.MeshAxis(line, "dp")),
            one_axis,
        ),
        (
            lambda: ps.to_dtensor(local),
            "Shard over LocalAxis() cannot be a DTensor",
        ),
    ]


def list_refused_axes() -> list[tuple[Callable[[], Any], str]]:
    """Lists calls with what is no axis of a mesh, or no mesh with names."""
    nameless = DeviceMesh("cpu", [0, 1, 2, 3])
    several = (
        "MeshAxis(dims={}) must name one or several different dimensions of the mesh,"
        " in its order: ('dp', 'cp')"
    )
    make: Any = ps.MeshAxis
    refused: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: ps.MeshAxis(nameless, "dp"),
            'mesh_dim_names=("dp",)',
        ),
        (
            lambda: make("cpu", "dp"),
            "MeshAxis takes a DeviceMesh, got str",
        ),
        (
            lambda: ps.psum(torch.ones(2), cast(Any, grid())),
            'ps.MeshAxis(mesh, "dp")',
        ),
    ]
    for dims in (("tp",), ("cp", "dp"), ("dp", "dp"), ()):
        act = partial(make, grid(), dims)
        refused.append((act, several.format(dims)))
    for size in (0, 8.0):
        act = partial(make, grid(), "dp", bucket_bytes=size)
        refused.append((act, f"bucket_bytes={size} must be a whole number"))
    return refused


def check_refusals(rank: int) -> None:
    for act, message in list_refused_dtensors() + list_refused_axes():
        with pytest.raises((TypeError, ValueError)) as info:
            act()
        assert message in str(info.value)


class GridAxis(NamedTuple):
    """An axis of the grid as one rank sees it; ``total`` is its psum of 10 ** rank."""

    dims: str | Sequence[str]
    shown: str
    rank: int
    total: int


def check_axes_of_a_grid(rank: int) -> None:
    """Compares axes over two dimensions and over one."""
    dp, cp = divmod(rank, 2)
    sum_over_dp = 101 * 10**cp
    sum_over_cp = 11 * 100**dp
    for case in (
        GridAxis(("dp", "cp"), shown="'dp', 'cp', 4", rank=rank, total=1111),
        GridAxis("dp", shown="'dp', 2", rank=dp, total=sum_over_dp),
        GridAxis("cp", shown="'cp', 2", rank=cp, total=sum_over_cp),
        GridAxis(["cp"], shown="'cp', 2", rank=cp, total=sum_over_cp),
    ):
        axis = ps.MeshAxis(grid(), case.dims)
        assert repr(axis) == f"MeshAxis({case.shown} ranks)"
        assert axis.rank == case.rank
        assert int(axis.index) == case.rank
        assert ps.psum(torch.tensor(10**rank), axis) == case.total
        indices = ps.all_gather(axis.index, axis)
        assert indices.tolist() == list(range(axis.size))

    nameless = axis_of(DeviceMesh("cpu", [0, 1, 2, 3]))
    assert repr(nameless) == "MeshAxis('tp', 4 ranks)"
    assert ps.psum(torch.tensor(10**rank), nameless) == 1111

    cp_axis = ps.MeshAxis(grid(), "cp")
    assert cp_axis == ps.MeshAxis(grid(), "cp")
    assert cp_axis != ps.MeshAxis(grid(), "dp")


def check_axes_of_two_meshes(rank: int) -> None:
    """Raises where an axis of another mesh has the names, but not the ranks, of a dimension."""
    other_grid = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "cp"))
    both = ps.MeshAxis(grid(), ("dp", "cp"))
    with pytest.raises(ValueError, match="make both axes of one mesh"):
        both.complement(ps.MeshAxis(other_grid, "cp"))
    dp_axis = ps.MeshAxis(grid(), "dp")
    cp_axis = ps.MeshAxis(grid(), "cp")
    nameless = ThreadAxis(2)  # It has no dimensions.
    for axis, inner in [(both, both), (dp_axis, cp_axis), (both, nameless)]:
        with pytest.raises(ValueError, match="not one or several of its dimensions"):
            axis.complement(inner)
    dp = both.complement(ps.MeshAxis(grid(), "cp"))
    assert dp.global_ranks == {rank, (rank + 2) % 4}
    with pytest.raises(ValueError, match="make both axes of one mesh"):
        both.complement(ps.MeshAxis(other_grid, "cp"))


def check_sums_through_local_parts(rank: int) -> None:
    """Accumulates gradients of distributed params that share their memory."""
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    params = []
    for _ in range(3):
        zeros = torch.zeros(2)
        params.append(distribute_tensor(zeros, mesh, [Replicate()]))

    def loss_fn(p: list[Any], x: Tensor) -> Tensor:
        local = torch.stack([leaf.to_local() for leaf in p])
        return (x * local.sum(0)).sum(1)

    def weight_fn(x: Tensor) -> Tensor:
        return x[:, 0]

    group = [torch.ones(1, 2)] * 3
    grads, *_ = ps.accumulate(loss_fn, params, group, weight_fn=weight_fn)

    local_grads = [leaf.to_local().tolist() for leaf in tree.leaves(grads)]
    assert local_grads == [[3, 3]] * 3


@pytest.mark.parametrize(
    "program",
    [
        check_refusals,
        check_axes_of_a_grid,
        check_axes_of_two_meshes,
        check_sums_through_local_parts,
    ],
)
def test_on_every_rank(world: World, program: Callable[[int], None]) -> None:
    values(world.run(program))
