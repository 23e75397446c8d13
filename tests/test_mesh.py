"""``MeshAxis`` over real processes: its dimensions, and pieces that are DTensors'."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import purestep as ps
from proofs.ranks import Run
from proofs.strategies import assert_same
from purestep import tree
from purestep.testing.processes import World, values

pytestmark = pytest.mark.timeout(120)


def pieces_as_dtensors(axis: ps.MeshAxis) -> None:
    """Trees go to DTensors and back: with fewer rows than ranks, or along another dimension."""
    for shape, dim in (((6, 2), 0), ((8,), 0), ((2, 5), 1), ((3, 2), 0)):
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        pieces = {"w": ps.shard(whole, axis, dim), "scale": torch.ones(())}
        made = ps.to_dtensor(pieces)
        w: Any = distribute_tensor(whole, axis.mesh, [Shard(dim)])
        theirs = {"w": w, "scale": torch.ones(())}
        assert made["w"].placements == theirs["w"].placements
        assert torch.equal(made["w"].full_tensor(), whole)
        for dtensors in (made, theirs):
            assert_same(ps.from_dtensor(dtensors, axis), pieces)
            assert_same(ps.unshard(ps.from_dtensor(dtensors, axis))["w"], whole)
        back = ps.from_dtensor(made, axis)["w"].local
        assert back.data_ptr() == pieces["w"].local.data_ptr(), "without a copy"
    replicated = distribute_tensor(torch.ones(3), axis.mesh, [Replicate()])
    assert type(ps.from_dtensor(replicated, axis)) is Tensor


def test_pieces_are_those_of_dtensors(processes: Run) -> None:
    """The last ranks of four hold less, or nothing."""
    processes(pieces_as_dtensors)


@cache
def grid() -> DeviceMesh:
    """Four ranks, two by two."""
    return DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "cp"))


def refusals(rank: int) -> None:
    """DTensors on another mesh, a Shard on none, and what is no axis of a mesh."""
    theirs = distribute_tensor(torch.ones(4, 4), grid(), [Shard(0), Shard(1)])
    part = theirs.redistribute(placements=[Shard(0), Replicate()])
    dp, line = (
        ps.MeshAxis(grid(), "dp"),
        DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",)),
    )
    nameless, local = (
        DeviceMesh("cpu", [0, 1, 2, 3]),
        ps.shard(torch.ones(2), ps.LocalAxis()),
    )
    make: Any = ps.MeshAxis
    several = "MeshAxis(dims={}) must name one or several different dimensions of the mesh, in its order: ('dp', 'cp')"
    one_axis = "a Shard lies on one axis, here MeshAxis('dp'"
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: ps.from_dtensor({"w": theirs}, dp), one_axis),
        (lambda: ps.from_dtensor(part, ps.MeshAxis(line, "dp")), one_axis),
        (lambda: ps.to_dtensor(local), "Shard over LocalAxis() cannot be a DTensor"),
        *((partial(make, grid(), dims), several.format(dims)) for dims in (("tp",), ("cp", "dp"), ("dp", "dp"), ())),
        (lambda: ps.MeshAxis(nameless, "dp"), 'mesh_dim_names=("dp",)'),
        (lambda: ps.psum(torch.ones(2), cast(Any, grid())), 'ps.MeshAxis(mesh, "dp")'),
        *((partial(make, grid(), "dp", bucket_bytes=size), f"bucket_bytes={size} must be a whole number") for size in (0, 8.0)),
    ]  # fmt: skip
    for act, message in refused:
        with pytest.raises((TypeError, ValueError)) as info:
            act()
        assert message in str(info.value)


def axes_of_a_grid(rank: int) -> None:
    """Axes over two dimensions and over one."""
    dp, cp = divmod(rank, 2)
    for dims, shown, place, total in [
        (("dp", "cp"), "'dp', 'cp', 4", rank, 1111),
        ("dp", "'dp', 2", dp, 101 * 10**cp),
        ("cp", "'cp', 2", cp, 11 * 100**dp),
        (["cp"], "'cp', 2", cp, 11 * 100**dp),
    ]:
        axis = ps.MeshAxis(grid(), dims)
        assert repr(axis) == f"MeshAxis({shown} ranks)"
        assert (axis.rank, int(axis.index)) == (place, place)
        assert ps.psum(torch.tensor(10**rank), axis) == total
        assert ps.all_gather(axis.index, axis).tolist() == list(range(axis.size))
    assert (
        ps.MeshAxis(grid(), "cp")
        == ps.MeshAxis(grid(), "cp")
        != ps.MeshAxis(grid(), "dp")
    )


def sum_through_local_parts(rank: int) -> None:
    """Distributed params that share the memory of their gradients."""
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    params = [distribute_tensor(torch.zeros(2), mesh, [Replicate()]) for _ in range(3)]

    def loss_fn(p: list[Any], x: Tensor) -> Tensor:
        return (x * torch.stack([leaf.to_local() for leaf in p]).sum(0)).sum(1)

    grads, *_ = ps.accumulate(
        loss_fn, params, [torch.ones(1, 2)] * 3, weight_fn=lambda x: x[:, 0]
    )
    assert [leaf.to_local().tolist() for leaf in tree.leaves(grads)] == [[3, 3]] * 3


@pytest.mark.parametrize("program", [refusals, axes_of_a_grid, sum_through_local_parts])
def test_on_every_rank(world: World, program: Callable[[int], None]) -> None:
    values(world.run(program))
