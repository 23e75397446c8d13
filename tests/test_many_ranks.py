"""As many processes as a small cluster has GPUs: steps on pieces are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import purestep as ps
from proofs import models
from proofs.ranks import GATHERS, alone, copied, evened, program_of
from proofs.strategies import OPTIMIZERS, Batch, Case, assert_same, cut, integer_batch
from proofs.theorem import PURESTEP
from proofs.worlds import Grid
from purestep.testing.processes import World, values

pytestmark = pytest.mark.timeout(120)


def wide_case() -> Case:
    """Pieces of several rows, of fewer rows than ranks, and none; N is a power of two."""
    generator = torch.Generator().manual_seed(0)
    wide = [models.integers((20,), generator) for _ in range(3)]
    hidden = {"weight": models.integers((models.FEATURES, 20), generator), "biases": wide[:2]}
    shifts = models.integers((2,), generator, size=1)
    params = {"hidden": hidden, "out": wide[2:], "shifts": shifts}
    batch = integer_batch(torch.ones(16, 2, dtype=torch.int64), generator)
    return Case(params, batch, "momentum", OPTIMIZERS["momentum"].init(params), 0)


def groups_on(size: int) -> list[list[Batch]]:
    """Two microbatches on the first rank, none on the second, one or a long one on the others."""
    rows = [[[0], [1]], [], *([[row]] for row in range(2, size - 1)), [list(range(size - 1, 16))]]
    return [cut(wide_case().batch, rank) for rank in rows]


def steps_of(rank: int, shape: tuple[int, int]) -> list[Any]:
    """A step each way, of pieces over all ranks and over a row of them."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))
    both, row = ps.MeshAxis(mesh, ("replica", "shard")), ps.MeshAxis(mesh, "shard")
    case, groups = wide_case(), groups_on(both.size)
    found = []
    for axis in (both, Grid(both, row, both)):
        for gather in GATHERS:
            program = program_of(PURESTEP, case, models.integer_loss, {}, gather)
            mine = evened(groups, case) if gather.startswith("loss") else groups
            found.append(program(axis, *copied(case), mine[rank]))
    return found


@pytest.mark.parametrize("shape", [(3, 3), (2, 6)])
def test_steps_of_many_processes(shape: tuple[int, int]) -> None:
    size = shape[0] * shape[1]
    expected = alone(PURESTEP, wide_case(), groups_on(size), aux=False)
    assert expected[2].grad_norm > 1
    with World(size) as world:
        for found in values(world.run(steps_of, [shape] * size)):
            assert_same(found, [expected] * 2 * len(GATHERS))
