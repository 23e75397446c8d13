"""Two ranks over gloo that share the device, to the bit. NCCL wants a device for each rank."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import purestep as ps
from benchmarks.gpu.entries import Run, describe_error, dump, write_atomically
from benchmarks.gpu.exact import all_equal, leaves_of
from benchmarks.gpu.models import Batch
from benchmarks.gpu.processes import ROOT
from purestep import optim

SIZE = 2
SECONDS_FOR_RANKS = 80


def run_gloo(run: Run) -> None:
    """Takes exact steps on two processes, and adds what each of them finds."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [start_rank(rank, Path(folder), run.device) for rank in range(SIZE)]
        end = time.monotonic() + min(SECONDS_FOR_RANKS, run.seconds_left() - 5)
        for rank, process in enumerate(processes):
            name = f"rank {rank}"
            try:
                run.add(name, status=process.wait(max(end - time.monotonic(), 0.1)))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                run.add(name, error="it took too long")
        for rank in range(SIZE):
            read_rank(run, rank, Path(folder))


def start_rank(rank: int, folder: Path, device: str) -> subprocess.Popen[bytes]:
    """Starts this module as a rank."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.gloo",
        str(rank),
        str(folder),
        device,
    ]
    with log_file(folder, rank).open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)


def log_file(folder: Path, rank: int) -> Path:
    """Returns the file that holds what a rank prints."""
    return folder / f"{rank}.log"


def entries_file(folder: Path, rank: int) -> Path:
    """Returns the file that holds what a rank finds."""
    return folder / f"{rank}.json"


def read_rank(run: Run, rank: int, folder: Path) -> None:
    """Adds the entries of a rank."""
    name = f"rank {rank}"
    try:
        run.add(name, **json.loads(entries_file(folder, rank).read_text()))
    except FileNotFoundError:
        run.add(name, error=log_file(folder, rank).read_text(errors="replace")[-1000:])


def run_rank(rank: int, folder: Path, device: str) -> None:
    """Is one rank, and writes its entries after each comparison."""
    entries: dict[str, Any] = {}
    file = entries_file(folder, rank)
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=SIZE
    )
    mesh = init_device_mesh(device, (SIZE,), mesh_dim_names=("dp",))
    axis = ps.MeshAxis(mesh, "dp", bucket_bytes=1 << 12)
    for name, compare in make_comparisons(axis, rank, device).items():
        entries[name] = {}
        try:
            entries[name]["bits_of_one_rank"] = compare()
            if not entries[name]["bits_of_one_rank"]:
                entries[name]["error"] = "the bits are not those of one rank"
        except Exception as error:
            entries[name]["error"] = describe_error(error)
        write_atomically(file, dump(entries))
    with suppress(Exception):
        dist.barrier()
        dist.destroy_process_group()


def square_loss(params: Any, batch: Batch) -> Tensor:
    """Returns a loss of which nothing rounds."""
    return (batch["x"] @ params["w"] + params["b"]).square().sum(-1)


def count_inputs(batch: Batch) -> Tensor:
    """Weighs every row equally."""
    return torch.ones(len(batch["x"]), dtype=torch.bool, device=batch["x"].device)


def make_comparisons(axis: Any, rank: int, device: str) -> dict[str, Any]:
    """Returns comparisons with one rank that has all microbatches."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-3, 4, (16, 4), generator=generator).double().to(device)
    params = {"w": weights, "b": torch.zeros(4, dtype=torch.float64, device=device)}
    rows = torch.randint(-3, 4, (8, 16), generator=generator).double().to(device)
    batches = [{"x": part} for part in rows.split([5, 1, 2])]
    optimizer = optim.sgd(0.5)
    make = partial(ps.make_update_step, square_loss, optimizer, weight_fn=count_inputs)
    expected = leaves_of(make()(params, optimizer.init(params), batches)[0])
    uneven = batches[:2] if rank == 0 else batches[2:]
    idle = batches if rank == 0 else []

    def compare(
        group: list[Batch], *, is_sharded: bool = False, **settings: Any
    ) -> bool:
        start = ps.shard(params, axis) if is_sharded else params
        new = make(axis=axis, **settings)(start, optimizer.init(start), group)[0]
        return all_equal(leaves_of(ps.unshard(new) if is_sharded else new), expected)

    return {
        "uneven": partial(compare, uneven),
        "uneven, grads": partial(compare, uneven, normalize="grads"),
        "a rank without microbatches": partial(compare, idle),
        "shards": partial(compare, uneven, is_sharded=True, gather="step"),
        "shards, microbatch": partial(
            compare, uneven, is_sharded=True, gather="microbatch"
        ),
    }


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
