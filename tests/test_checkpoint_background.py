"""Checkpoints that are saved in the background: of what, into which memory, and who hears when it goes wrong."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import purestep as ps
from purestep.checkpoint import background
from purestep.checkpoint.ranks import LostError, together as meet
from purestep.testing.processes import DeadRankError, World
from tests.held_by_ranks import LARGE, axis, together
from tests.memory import LiveBytes
from tests.states import assert_same_bits, noise, zeros


def test_what_is_saved_in_the_background_is_what_it_was(three: World, path: Path) -> None:
    together(three, save_in_background, path)
    for name in ("pieces", "file"):
        found = ps.checkpoint.load(path.with_name(name), {"w": torch.zeros(1000)})
        assert torch.equal(found["w"], torch.full((1000,), 2.0))


def save_in_background(rank: int, path: Path) -> None:
    """Twice, while somebody writes to it, and all meet over their own group."""
    state = {"w": ps.shard(torch.ones(1000), axis())}
    alone = {"w": torch.ones(1000)}
    with ps.checkpoint.Background() as background, ps.checkpoint.Background() as other:
        for _ in range(2):
            background.save(path.with_name("pieces"), state)
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
    """Also by one that waits for another, which has heard of it, and does something else."""
    with World(3, timeout=40) as world:
        results = world.run(die_in_a_save, [path] * 3)
    assert [type(result) for result in results] == [ps.RankError, ps.RankError, DeadRankError]
    found = ps.checkpoint.load(path, [torch.zeros(3 * LARGE)])
    assert_same_bits(found, [torch.ones(3 * LARGE)])
    ps.checkpoint.check_writable(path)
    assert [*path.parent.glob("state*")] == [path]


def die_in_a_save(rank: int, path: Path) -> None:
    """The last rank dies while it writes; the first one does something else until the other has heard of it."""
    state = ps.shard([torch.ones(3 * LARGE)], axis())
    heard = path.with_name("heard")

    def die() -> None:
        while not [*path.parent.glob("*.folder/__2_0.distcp")]:
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    saving = ps.checkpoint.Background()
    saving.save(path, state)
    saving.wait()
    if rank == 2:
        threading.Thread(target=die, daemon=True).start()
    saving.save(path, state)
    if rank == 0:
        wait_for(heard)
    try:
        saving.wait()
    finally:
        heard.touch()


def test_who_is_lost_leaves_those_who_wait_for_it(path: Path) -> None:
    with World(2, timeout=40) as world:
        results = world.run(lose, [path] * 2)
    assert [type(result) for result in results] == [ps.RankError, ps.RankError]


def lose(rank: int, path: Path) -> None:
    """What a rank sees that alone knows of a death: the other waits for it in the same group."""

    def write(_: Any, __: Any, group: Any) -> None:
        if rank == 0:
            raise LostError("another rank has died")
        meet(group, lambda: None)

    monkey = pytest.MonkeyPatch()
    monkey.setattr(background, "write", write)
    heard = path.with_name("heard")
    saving = ps.checkpoint.Background()
    saving.save(path, ps.shard([torch.ones(3)], axis()))
    if rank == 0:
        wait_for(heard)
    try:
        saving.wait()
    finally:
        heard.touch()


def wait_for(path: Path) -> None:
    """Until it is there."""
    until = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < until, "nobody has heard of it"
        time.sleep(0.01)
