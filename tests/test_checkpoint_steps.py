"""Checkpoints that are named by steps, of which the last ones are kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import purestep as ps
from purestep.testing.processes import World
from tests.held_by_ranks import axis, refused, together


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    folder, state = tmp_path / "run", {"w": torch.ones(1)}
    assert ps.checkpoint.latest(folder) is None
    ps.checkpoint.save_step(folder, 5, state)
    for name in ("notes", "7", "00000001.txt"):
        (folder / name).write_text("mine")
    for step in (7, 20, 20, 100000000):
        ps.checkpoint.save_step(folder, step, state, keep=2)
    names = {"00000020", "100000000", "notes", "7", "00000001.txt"}
    assert {file.name for file in folder.iterdir()} == names
    assert ps.checkpoint.latest(folder) == folder / "100000000"
    with pytest.raises(
        ValueError, match=r"run holds step 100000000, which is later than 30: remove"
    ):
        ps.checkpoint.save_step(folder, 30, state)
    wrong: list[Any] = [(True, 1), (1.0, 1), (1, 0), (1, None)]
    for step, keep in wrong:
        with pytest.raises(ValueError, match=r"must be a whole number, [01] or more"):
            ps.checkpoint.save_step(folder, step, state, keep)
    assert {file.name for file in folder.iterdir()} == names
    with pytest.raises(OSError, match=r"notes cannot be written \(File exists\)"):
        ps.checkpoint.save_step(folder / "notes", 1, state)


def test_what_a_killed_program_left_goes_with_its_step(tmp_path: Path) -> None:
    """Nothing else does: what belongs to a later step may be in the making."""
    left, kept = ["00000004.0123abcd", "00000002"], ["00000005.0123abcd", "00000006", "mine", "7"]
    for name in [*left, *kept]:
        (tmp_path / f"{name}.unfinished").mkdir()
    (tmp_path / f"{left[0]}.unfinished" / "new").write_text("killed")
    (tmp_path / "00000003.unfinished").write_text("a file that was to be removed")
    ps.checkpoint.save_step(tmp_path, 5, {"w": torch.ones(1)})
    names = {"00000005", *(f"{name}.unfinished" for name in kept)}
    assert {file.name for file in tmp_path.iterdir()} == names


def test_ranks_keep_the_last_ones(three: World, tmp_path: Path) -> None:
    together(three, save_steps, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"00000003", "00000004"}
    assert not (tmp_path / "00000004" / "__7_0.distcp").exists()
    last = ps.checkpoint.latest(tmp_path)
    assert last
    assert torch.equal(ps.checkpoint.load(last, torch.zeros(5)), torch.full((5,), 4.0))
    for kind, text in together(three, save_earlier, tmp_path):
        assert kind == "ValueError"
        assert re.search("holds step 4, which is later than 1", text)


def save_steps(_: int, folder: Path) -> None:
    """What a killed save of the last step left is no part of it."""
    for step in range(5):
        if step == 4 and axis().rank == 0:
            (folder / f"{step:08}.unfinished").mkdir()
            (folder / f"{step:08}.unfinished" / "__7_0.distcp").write_text("killed")
        ps.checkpoint.save_step(folder, step, ps.shard(torch.full((5,), float(step)), axis()), 2)


def save_earlier(_: int, folder: Path) -> tuple[str, str]:
    """Before the last one."""
    state = ps.shard(torch.zeros(5), axis())
    return refused(lambda: ps.checkpoint.save_step(folder, 1, state))
