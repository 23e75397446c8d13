"""Checkpoints that are saved in the background: of what, into which memory, and who hears when it goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import purestep as ps
from purestep.testing.processes import DeadRankError, World
from tests.held_by_ranks import LARGE, axis, together
from tests.memory import LiveBytes
from tests.states import assert_same_bits, noise, zeros


def test_what_is_saved_in_the_background_is_what_it_was(three: World, path: Path) -> None:
    together(three, save_in_background, path)
    for name in ("pieces1", "file"):
        found = ps.checkpoint.load(path.with_name(name), {"w": torch.zeros(1000)})
        assert torch.equal(found["w"], torch.full((1000,), 2.0))


def save_in_background(rank: int, path: Path) -> None:
    """Twice, while somebody writes to it, and all meet over their own group."""
    state = {"w": ps.shard(torch.ones(1000), axis())}
    alone = {"w": torch.ones(1000)}
    with ps.checkpoint.Background() as background, ps.checkpoint.Background() as other:
        for number in range(2):
            background.save(path.with_name(f"pieces{number}"), state)
            if rank == 0:
                other.save(path.with_name("file"), alone)
            state["w"].piece.mul_(2)
            alone["w"].mul_(2)
            for _ in range(20):
                assert ps.psum(torch.tensor([1.0]), axis()) == 3
    assert dist.get_world_size() == 3


def test_copies_are_made_into_the_same_memory(path: Path) -> None:
    state = [noise(torch.float32, 1000), noise(torch.float64, 8, 4).T]
    with ps.checkpoint.Background() as background:
        with LiveBytes() as live:
            background.save(path, state)
        assert live.peak == sum(leaf.nbytes for leaf in state)
        with LiveBytes() as live:
            background.save(path, state)
        assert live.peak == 0
        background.save(path, [torch.ones(3), torch.ones(2)])
        background.wait()
        assert_same_bits(
            ps.checkpoint.load(path, [torch.zeros(3), torch.zeros(2)]),
            [torch.ones(3), torch.ones(2)],
        )


def test_what_goes_wrong_in_the_background_is_raised_once(path: Path) -> None:
    nowhere, state = path / "nowhere", {"w": torch.ones(2)}
    background = ps.checkpoint.Background()
    background.save(nowhere, state)
    with pytest.raises(OSError, match="nowhere cannot be written"):
        background.wait()
    background.wait()
    background.save(nowhere, state)
    with pytest.raises(OSError, match="nowhere cannot be written"):
        background.save(path, state)
    background.save(path, state)
    background.wait()
    with pytest.raises(OSError, match="nowhere"), background:
        background.save(nowhere, state)

    def interrupted(path: Path) -> None:
        with background:
            background.save(path, zeros(state))
            raise KeyboardInterrupt

    for place in (nowhere, path):
        with pytest.raises(KeyboardInterrupt):
            interrupted(place)
    assert_same_bits(ps.checkpoint.load(path, state), zeros(state))
    with pytest.raises(TypeError, match=r"tree\['w'\] is int, no tensor"):
        background.save(path, {"w": 1})
    with pytest.raises(ValueError, match="step=-1 must be a whole number, 0 or more"):
        background.save_step(path, -1, state)


def test_a_rank_that_dies_is_heard_in_the_background(path: Path) -> None:
    with World(3, timeout=40) as world:
        results = world.run(die_in_a_save, [path] * 3)
    assert [type(result) for result in results] == [ps.RankError, ps.RankError, DeadRankError]
    found = ps.checkpoint.load(path, [torch.zeros(3 * LARGE)])
    assert_same_bits(found, [torch.ones(3 * LARGE)])
    assert [*path.parent.glob("state*")] == [path]


def die_in_a_save(rank: int, path: Path) -> None:
    """The last rank dies while it writes."""
    state = ps.shard([torch.ones(3 * LARGE)], axis())

    def die() -> None:
        while not [*path.parent.glob("*.unfinished/__2_0.distcp")]:
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    saving = ps.checkpoint.Background()
    saving.save(path, state)
    saving.wait()
    if rank == 2:
        threading.Thread(target=die, daemon=True).start()
    saving.save(path.with_name("state2"), state)
    saving.wait()


@pytest.mark.parametrize("end", ["", "raise ValueError", "dist.destroy_process_group()"])
def test_a_program_that_ends_keeps_its_exit_code(end: str, tmp_path: Path) -> None:
    """While it saves; and what it saves is whole, as long as the processes are joined."""
    program = [sys.executable, "-c", f"{ENDS}\n{end}", str(tmp_path)]
    ranks = [
        subprocess.Popen([*program, str(rank)], cwd=ROOT, env=LOCAL, stderr=subprocess.DEVNULL)
        for rank in range(2)
    ]
    assert [rank.wait(timeout=60) for rank in ranks] == [1 if "raise" in end else 0] * 2
    if "destroy" not in end:
        found = ps.checkpoint.load(tmp_path / "state", [torch.zeros(LARGE)] * 8)
        assert all(map(torch.equal, found, [torch.ones(LARGE)] * 8))


ROOT = Path(__file__).parent.parent
LOCAL = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
ENDS = f"""
import sys, torch, torch.distributed as dist, purestep as ps
from torch.distributed.device_mesh import init_device_mesh
folder, rank = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{{folder}}/store", rank=int(rank), world_size=2)
axis = ps.MeshAxis(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), "dp")
state = ps.shard([torch.ones({LARGE})] * 8, axis)
ps.checkpoint.Background().save(f"{{folder}}/state", state)
"""
