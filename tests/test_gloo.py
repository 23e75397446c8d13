"""Tests that purestep calls only collectives of gloo with short names.

gloo's two workers share a string, which longer names corrupt.
"""

import os
import subprocess
import sys
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile

import purestep as ps
from tests.sharded_checkpoints import group_of_one

SAFE = {
    "c10d::allreduce_",
    "c10d::_allgather_base_",
    "c10d::reduce_scatter_tensor_coalesced_",
}
"""Operations whose names inside of gloo have at most 15 characters: these are ALLREDUCE, ALLGATHER
and REDUCE_SCATTER. ``all_gather_into_tensor`` is ALLGATHER_COALESCED."""

IN_FLIGHT = """
import sys, time
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import purestep as ps

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
pieces = ps.shard([torch.ones(2)] * 16, ps.MeshAxis(mesh, "dp", bucket_bytes=1))
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    whole = ps.unshard(pieces)
assert all(torch.equal(leaf, torch.ones(2)) for leaf in whole)
dist.destroy_process_group()
"""


def loss_of_full(params: Any, x: torch.Tensor) -> torch.Tensor:
    product = x @ params["w"].T + params["b"]
    return product.sum(-1)


def loss_of_sharded(params: Any, x: torch.Tensor) -> torch.Tensor:
    return loss_of_full(ps.unshard(params), x)


def run_steps() -> None:
    """Runs a step of sharded params, in each way to gather them, and of full ones."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    axis = ps.MeshAxis(mesh, "dp")
    sgd = ps.optim.sgd(0.1)
    full = {"w": torch.ones(4, 3), "b": torch.ones(4)}
    sharded = ps.shard(full, axis)
    group = [torch.ones(2, 3), torch.ones(2, 3)]

    def run_step(params: Any, gather: Any, loss_fn: Any = loss_of_full) -> None:
        step = ps.make_update_step(
            loss_fn,
            sgd,
            weight_fn=lambda x: torch.ones(len(x)),
            axis=axis,
            gather=gather,
        )
        step(params, sgd.init(params), group)

    run_step(sharded, "step")
    run_step(full, "step")
    run_step(sharded, "microbatch")
    run_step(full, "microbatch")
    run_step(sharded, "loss", loss_of_sharded)


def test_the_names_of_collectives_are_short() -> None:
    with group_of_one(), profile() as profiler:
        run_steps()

    names = {event.key for event in profiler.key_averages()}
    collectives = {name for name in names if name.startswith("c10d::")}
    assert "c10d::_allgather_base_" in collectives
    assert collectives <= SAFE


def test_many_gathers_in_flight() -> None:
    """With the longer name, this ended in SIGSEGV or SIGABRT within seconds."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", IN_FLIGHT, "2"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-500:]
