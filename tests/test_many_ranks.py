"""As many processes as a small cluster has GPUs: steps on pieces are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import purestep as ps
from purestep import tree
from purestep.testing.processes import World, values
from tests.layers import GATHERS, WIDTH, network, ones, rows

pytestmark = pytest.mark.timeout(120)

TOKENS = 32  # a power of two, so that nothing is rounded
SGD = ps.optim.sgd(0.5, momentum=0.5)


def params() -> dict[str, Any]:
    """Pieces of 16 rows, of fewer rows than ranks, of one column; and a scalar on every rank."""
    return {
        "layers": network(2),
        "few": torch.arange(1.0, 6).double(),
        "wide": torch.ones(3, WIDTH).double(),
        "scale": torch.tensor(2.0).double(),
    }


def loss_of_whole(params: Any, x: Tensor) -> Tensor:
    for layer in params["layers"]:
        x = torch.relu(x @ layer) * 0.125
    scale = params["scale"] * params["few"].sum() * params["wide"].sum()
    return x.square().sum(-1) * scale


def loss_of_pieces(params: Any, x: Tensor) -> Tensor:
    return loss_of_whole(ps.unshard(params), x)


def held_by(rank: int, size: int, gather: str) -> list[Tensor]:
    """Rows of all ranks: in no microbatch, in one, or in several; in one where the loss gathers."""
    cuts = [0, 2, *range(2, size), TOKENS]  # two on the first rank, none on the second
    mine = rows(TOKENS)[cuts[rank] : cuts[rank + 1]]
    if gather == "loss":
        return [mine]
    return [*mine.split(7 if rank else 1)] if len(mine) else []


def steps_of(rank: int, shape: tuple[int, int]) -> list[Any]:
    """The second step each way, from the same start, of pieces over all ranks and over a row."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))
    both, row = ps.MeshAxis(mesh, ("replica", "shard")), ps.MeshAxis(mesh, "shard")
    found = []
    for over in (both, row):
        for gather in GATHERS:
            loss_fn = loss_of_pieces if gather == "loss" else loss_of_whole
            step = ps.make_update_step(loss_fn, SGD, weight_fn=ones, axis=both, gather=gather)
            start = ps.shard(params(), over)
            for _ in range(2):
                new = step(start, SGD.init(start), held_by(rank, both.size, gather))
            found.append((ps.unshard(new[:2]), new[2].loss, new[2].grad_norm))
    return found


@pytest.mark.parametrize("shape", [(3, 3), (2, 6)])
def test_steps_of_many_processes(shape: tuple[int, int]) -> None:
    step = ps.make_update_step(loss_of_whole, SGD, weight_fn=ones)
    *new, metrics = step(params(), SGD.init(params()), [rows(TOKENS)])
    assert metrics.grad_norm > 1
    expected = tree.leaves_of((tuple(new), metrics.loss, metrics.grad_norm))
    size = shape[0] * shape[1]
    with World(size) as world:
        for found in values(world.run(steps_of, [shape] * size)):
            assert len(found) == 2 * len(GATHERS)
            for each in found:
                assert all(map(torch.equal, tree.leaves_of(each), expected))
