"""What the program runs on."""

import importlib.metadata
import platform
import subprocess
import sys

import torch

import purestep as ps
from benchmarks.gpu.entries import Run

PACKAGES = [
    "optree",
    "einops",
    "safetensors",
    "hypothesis",
    "pytest",
    "triton",
    "jax",
    "optax",
]
QUERY = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit,utilization.gpu"


def run_env(run: Run) -> None:
    """Names versions and the device, and computes a first sum there."""
    run.add(
        python=sys.version.split()[0],
        machine=platform.machine(),
        torch=torch.__version__,
        purestep=ps.__version__,
        packages={name: find_version(name) for name in PACKAGES},
    )
    if run.is_cuda:
        properties = torch.cuda.get_device_properties(0)
        run.add(
            gpu=properties.name,
            gpu_memory_gib=round(properties.total_memory / 2**30, 1),
            capability=f"{properties.major}.{properties.minor}",
            cuda=torch.version.cuda,
        )
        with run.attempt("nccl"):
            run.add(nccl=".".join(str(part) for part in torch.cuda.nccl.version()))
        run.add(nvidia_smi=query_driver())
    if run.device != "lazy":
        total = torch.ones(8, device=run.device).sum().item()
        run.check(computes=total == 8)


def find_version(package: str) -> str:
    """Returns the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def query_driver() -> str:
    """Returns what the driver says of the card, if it says anything."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=15, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as reason:
        return f"unknown: {reason}"
    return (result.stdout or result.stderr).strip()[:500]
