"""``MeshAxis`` over real processes: its dimensions, and pieces that are DTensors'."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import purestep as ps
from proofs.ranks import Run
from purestep import tree
from purestep.testing.processes import World, values

pytestmark = pytest.mark.timeout(120)


@cache
def mesh() -> DeviceMesh:
    """All ranks along one dimension."""
    return DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",))


@cache
def grid() -> DeviceMesh:
    """The same, two by two."""
    return DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "cp"))


def as_dtensors(axis: ps.MeshAxis) -> list[bool]:
    """Trees go to DTensors and back: with fewer rows than ranks, or along another dimension."""
    found = []
    for shape, dim in (((6, 2), 0), ((8,), 0), ((2, 5), 1), ((3, 2), 0)):
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        given = {"w": ps.shard(whole, axis, dim), "scale": torch.ones(())}
        made = ps.to_dtensor(given)
        back = ps.from_dtensor(made, axis)
        theirs = distribute_tensor(whole, axis.mesh, [Shard(dim)])
        taken = ps.from_dtensor({"w": theirs, "scale": torch.ones(())}, axis)
        found += [
            made["w"].placements == theirs.placements and made["w"].shape == theirs.shape,
            torch.equal(made["w"].full_tensor(), whole),
            tree.flatten(back)[1] == tree.flatten(given)[1] == tree.flatten(taken)[1],
            back["w"].piece.data_ptr() == given["w"].piece.data_ptr(),
            torch.equal(taken["w"].piece, given["w"].piece),
            torch.equal(ps.unshard(taken)["w"], whole),
        ]
    replicated = distribute_tensor(torch.ones(3), axis.mesh, [Replicate()])
    return [*found, type(ps.from_dtensor(replicated, axis)) is Tensor]


def test_pieces_are_those_of_dtensors(processes: Run) -> None:
    """Without a copy there and back; the last ranks of four hold less, or nothing."""
    for found in processes(as_dtensors):
        assert all(found), found


def on_a_part(rank: int) -> list[str]:
    """With what DTensors on another mesh, and a Shard on none, are refused."""
    told = []
    theirs = distribute_tensor(torch.ones(4, 4), grid(), [Shard(0), Shard(1)])
    part = theirs.redistribute(placements=[Shard(0), Replicate()])
    for call in (
        lambda: ps.from_dtensor({"w": theirs}, ps.MeshAxis(grid(), "dp")),
        lambda: ps.from_dtensor(part, ps.MeshAxis(mesh(), "dp")),
        lambda: ps.to_dtensor(ps.shard(torch.ones(2), ps.LocalAxis())),
    ):
        try:
            call()
        except (TypeError, ValueError) as error:
            told.append(str(error))
    same_axis = ps.MeshAxis(grid(), "cp") == ps.MeshAxis(grid(), "cp") != ps.MeshAxis(grid(), "dp")
    return [*told, str(same_axis)]


def test_other_dtensors_are_refused(world: World) -> None:
    for two, part, local, same_axis in values(world.run(on_a_part)):
        assert "a Shard lies on one axis, here MeshAxis('dp'" in two
        assert "a Shard lies on one axis, here MeshAxis('dp'" in part
        assert "Shard over LocalAxis() cannot be a DTensor" in local
        assert same_axis == "True"


def construction(rank: int) -> dict[str, Any]:
    """Axes over two dimensions and over one, and what is refused."""
    refused = {}
    for name, arguments, bucket_bytes in [
        ("unknown", (grid(), "tp"), 1),
        ("out of order", (grid(), ("cp", "dp")), 1),
        ("twice", (grid(), ("dp", "dp")), 1),
        ("none", (grid(), ()), 1),
        ("nameless", (DeviceMesh("cpu", list(range(4))), "dp"), 1),
        ("bucket_bytes", (grid(), "dp"), 0),
        ("whole bytes", (grid(), "dp"), 8.0),
    ]:
        try:
            ps.MeshAxis(*arguments, bucket_bytes=bucket_bytes)  # type: ignore[arg-type]
        except ValueError as error:
            refused[name] = str(error)
    try:
        ps.psum(torch.ones(2), grid())  # type: ignore[arg-type]
    except TypeError as error:
        refused["no axis"] = str(error)
    axes = [ps.MeshAxis(grid(), dims) for dims in (("dp", "cp"), "dp", "cp", ["cp"])]
    return {
        "refused": refused,
        "axes": [(repr(axis), axis.size, axis.rank, int(axis.index)) for axis in axes],
        "order": ps.all_gather(torch.tensor(rank), axes[0]),
        "sums": [ps.psum(torch.tensor(10**rank), axis) for axis in axes],
    }


def test_construction(world: World) -> None:
    for rank, result in enumerate(values(world.run(construction))):
        dp, cp = divmod(rank, 2)
        assert result["axes"] == [
            ("MeshAxis('dp', 'cp', 4 ranks)", 4, rank, rank),
            ("MeshAxis('dp', 2 ranks)", 2, dp, dp),
            ("MeshAxis('cp', 2 ranks)", 2, cp, cp),
            ("MeshAxis('cp', 2 ranks)", 2, cp, cp),
        ]
        assert result["order"].tolist() == [0, 1, 2, 3]
        assert result["sums"] == [1111, 101 * 10**cp, 11 * 100**dp, 11 * 100**dp]
        refused = result["refused"]
        for name, dims in {
            "unknown": "('tp',)",
            "out of order": "('cp', 'dp')",
            "twice": "('dp', 'dp')",
            "none": "()",
        }.items():
            assert refused.pop(name).startswith(
                f"MeshAxis(dims={dims}) must name one or several different dimensions of the mesh, "
                "in its order: ('dp', 'cp')"
            )
        assert 'mesh_dim_names=("dp",)' in refused.pop("nameless")
        assert 'as in ps.MeshAxis(mesh, "dp")' in refused.pop("no axis")
        assert refused.pop("bucket_bytes").startswith("bucket_bytes=0 must be a whole number")
        assert refused.pop("whole bytes").startswith("bucket_bytes=8.0 must be a whole number")
        assert not refused


def summed_through_local_parts(rank: int) -> list[list[float]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [distribute_tensor(torch.zeros(2), mesh, [Replicate()]) for _ in range(3)]

    def loss_fn(p: list[Any], m: dict[str, Tensor]) -> Tensor:
        stacked = torch.stack([leaf.to_local() for leaf in p])
        return (m["x"] * stacked.sum(0)).sum(1)

    group = [{"x": torch.ones(1, 2)}] * 3
    grads, *_ = ps.accumulate(loss_fn, params, group, weight_fn=lambda m: torch.ones(len(m["x"])))
    return [grad.to_local().tolist() for grad in grads]


def test_distributed_params_that_share_the_memory_of_their_gradients(world: World) -> None:
    for result in values(world.run(summed_through_local_parts)):
        assert result == [[3, 3]] * 3
