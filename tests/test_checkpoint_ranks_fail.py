"""Checkpoints of many ranks that do not end well: a full disk, a place that is taken, SIGKILL."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import purestep as ps
from purestep.testing.processes import World
from tests.hazards import room
from tests.held_by_ranks import BAD, axis, refused, save, save_to, together, whole
from tests.states import assert_same_bits, zeros

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("way", ["save", "save_step", "Background", "export"])
def test_a_full_disk_of_one_rank_reaches_all(way: str, three: World, path: Path) -> None:
    path.mkdir()
    alone = 0 if way == "export" else None
    for rank, (kind, text) in enumerate(together(three, save_with_little_room, path, way)):
        assert kind == ("OSError" if alone in (None, rank) else "RankError")
        assert "cannot be written (" in text
        assert "File too large" in text or "rank 1: " in text
        assert str(path) in text
    assert not [*path.iterdir()]


def save_with_little_room(rank: int, path: Path, way: str) -> tuple[str, str]:
    """There is none on one rank; of an export, on the rank that writes."""
    state = {"w": ps.shard(torch.randn(10**5), axis())}

    def act() -> None:
        if way == "save":
            ps.checkpoint.save(path / "state", state)
        elif way == "export":
            ps.checkpoint.export(path / "state", state)
        elif way == "save_step":
            ps.checkpoint.save_step(path, 1, state)
        else:
            with ps.checkpoint.Background() as background:
                background.save_step(path, 1, state)

    if rank != (0 if way == "export" else BAD):
        return refused(act)
    with room(5000):
        return refused(act)


def test_what_cannot_be_written_leaves_all_as_it_was(three: World, path: Path) -> None:
    """A name that is taken, above all: folders get a new one each time."""
    mine = path.with_name("mine")
    mine.mkdir()
    (mine / "thesis").write_text("")
    ps.checkpoint.save(path, torch.tensor(1.0))
    for place, reason in [
        (path.parent / "nowhere" / "state", "No such file or directory"),
        (mine, "it exists"),
        (path, "it exists"),
        (mine / "thesis" / "state", "Not a directory"),
    ]:
        for kind, text in together(three, save_to, place):
            assert kind == "OSError"
            assert text.startswith(f"{place} cannot be written ({reason}): name a file in a folder")
            assert "give each a different name" in text
    assert [file.name for file in mine.iterdir()] == ["thesis"]
    assert {*path.parent.iterdir()} == {path, mine}
    assert ps.checkpoint.load(path, torch.tensor(0.0)) == 1


def test_a_file_takes_no_folders_place_and_no_folder_anothers(three: World, path: Path) -> None:
    together(three, save, path)
    for kind, text in together(three, save_to, path):
        assert kind == "OSError"
        assert text.startswith(f"{path} cannot be written (it exists)")
    with pytest.raises(OSError, match=r"state cannot be written \(Is a directory\): .* with Shard"):
        ps.checkpoint.save(path, torch.tensor(1.0))
    assert [*path.parent.iterdir()] == [path]
    path.with_name("plain").mkdir()
    assert path.stat().st_mode == path.with_name("plain").stat().st_mode
    assert_same_bits(ps.checkpoint.load(path, zeros(whole())), whole())


@pytest.mark.timeout(240)
def test_ranks_killed_again_and_again_end_in_the_same_bits(tmp_path: Path) -> None:
    """T16 with ranks: SIGKILL of one or of all at random moments, also in the middle of a save."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.mortal_ranks", str(tmp_path)],
        capture_output=True, text=True, timeout=200, cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    said = re.fullmatch(r"killed 20 times, (\d+) of them in the middle .* same bits\n", run.stdout)
    assert said
    assert int(said[1]) >= 8, "ten were to be"
