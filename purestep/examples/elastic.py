"""What a program needs to live under ``torchrun``: ranks that meet, and state that outlives them.

    torchrun --nproc-per-node 2 --max-restarts 3 -m purestep.examples.docstrings --checkpoint state.pt

When a process dies, ``torchrun`` ends the others too and starts all of them again, from the top of the program.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

import purestep as ps
from purestep import tree

TIMEOUT = timedelta(minutes=2)


@contextmanager
def processes() -> Iterator[ps.MeshAxis]:
    """The processes of ``torchrun`` as one axis, which they leave together unless there is an error."""
    store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
    # The store lives as long as torchrun: without a prefix, it still says where dead processes listened.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"attempt_{attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    yield ps.MeshAxis(init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)), "dp")
    # Not in a finally: after an error, the others would be waited for in vain.
    dist.barrier()
    dist.destroy_process_group()


def save(path: Path, state: Any) -> None:
    """Writes a tree of tensors. Whenever the process dies, there is a whole file: the old or the new one."""
    tensors = dict(zip(tree.paths(state, "state"), tree.leaves_of(state), strict=True))
    unfinished = path.with_name(f"{path.name}.unfinished")
    torch.save(tensors, unfinished)
    os.replace(unfinished, path)


def load(path: Path, like: Any) -> Any:
    """The tree that was saved, whose structure, shapes and dtypes must be those of ``like``."""
    tensors = torch.load(path, weights_only=True)
    leaves, structure = tree.flatten(like)
    expected = dict(zip(tree.paths(like, "state"), map(tree.kind, leaves), strict=True))
    found = {name: tree.kind(tensor) for name, tensor in tensors.items()}
    if found != expected:
        name, _ = sorted(expected.items() ^ found.items())[0]
        raise ValueError(
            f"{path} is of another run: its {name} is {found.get(name, 'missing')} and should be "
            f"{expected.get(name, 'missing')}; remove it, or name another file"
        )
    return tree.unflatten(structure, [tensors[name] for name in expected])


def fingerprint(params: Any) -> str:
    """The first 12 hexadecimal digits of the SHA-256 of all parameters: equal for equal bits."""
    digest = hashlib.sha256()
    for leaf in tree.leaves_of(params):
        digest.update(leaf.contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]
