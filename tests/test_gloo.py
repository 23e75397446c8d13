"""gloo's two workers share a string: what purestep asks of it keeps to names that cannot hurt."""

import os
import subprocess
import sys
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile

import purestep as ps
from tests.held_by_ranks import group_of_one

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


def test_the_names_of_collectives_are_short() -> None:
    """Of an update over sharded params, in each way to gather them, and of one without."""
    with group_of_one():
        axis = ps.MeshAxis(init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), "dp")
        sgd, whole = ps.optim.sgd(0.1), {"w": torch.ones(4, 3), "b": torch.ones(4)}
        group = [torch.ones(2, 3)] * 2

        def loss_of(p: Any, x: torch.Tensor) -> torch.Tensor:
            return (x @ p["w"].T + p["b"]).sum(-1)

        def unsharded_loss(p: Any, x: torch.Tensor) -> torch.Tensor:
            return loss_of(ps.unshard(p), x)

        with profile() as prof:
            for gather in ("step", "microbatch", "loss"):
                how: Any = {"weight_fn": lambda x: torch.ones(len(x)), "axis": axis}
                loss_fn = unsharded_loss if gather == "loss" else loss_of
                step = ps.make_update_step(loss_fn, sgd, gather=gather, **how)
                for params in (ps.shard(whole, axis), whole):
                    if gather != "loss" or params is not whole:
                        step(params, sgd.init(params), group)
    names = {
        event.key for event in prof.key_averages() if event.key.startswith("c10d::")
    }
    assert "c10d::_allgather_base_" in names
    assert names <= SAFE


def test_many_gathers_in_flight() -> None:
    """With the longer name, this ended in SIGSEGV or SIGABRT within seconds."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", IN_FLIGHT, "4"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-500:]
