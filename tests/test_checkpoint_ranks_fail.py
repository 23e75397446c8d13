"""Checkpoints of many ranks that do not end well: a full disk, a place that is taken, SIGKILL."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
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
    for kind, text in together(three, save_with_little_room, path, way):
        assert kind == "OSError"
        rank = 0 if way == "export" else BAD
        assert re.match(rf"{path}/\w+ cannot be written \(rank {rank}: File too large\)", text)
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
    mine = path.with_name("mine")
    mine.mkdir()
    (mine / "thesis").write_text("")
    for place, reason in [
        (path / "nowhere", "No such file or directory"),
        (mine, "Is a directory"),
        (mine / "thesis" / "state", "Not a directory"),
    ]:
        for kind, text in together(three, save_to, place):
            assert kind == "OSError"
            assert text.startswith(f"{place} cannot be written (rank 0: {reason}): name")
    assert [file.name for file in mine.iterdir()] == ["thesis"]
    assert [*path.parent.iterdir()] == [mine]


def test_a_folder_replaces_a_file_or_a_folder_and_keeps_rights_and_links(
    three: World, path: Path
) -> None:
    ps.checkpoint.save(path, torch.tensor(1.0))
    path.chmod(0o700)
    latest = path.with_name("latest")
    latest.symlink_to(path.name)
    for file in ("state.0123abcd.unfinished", "state.0123abcd.folder/__0_0.distcp"):
        (path.parent / file).parent.mkdir(exist_ok=True)
        (path.parent / file).write_text("killed")
    for _ in range(2):
        together(three, save, latest)
        assert latest.is_symlink()
        assert path.stat().st_mode & 0o777 == 0o700
        assert {file.name for file in path.parent.iterdir()} == {"latest", "state"}
        assert_same_bits(ps.checkpoint.load(latest, zeros(whole())), whole())
    with pytest.raises(OSError, match=r"state cannot be written \(Is a directory\)"):
        ps.checkpoint.save(path, torch.tensor(1.0))


def test_there_is_a_whole_one_at_every_moment(three: World, path: Path) -> None:
    together(three, save_again_and_again, path)
    ended = threading.Event()
    missing = 0

    def watch() -> None:
        nonlocal missing
        while not ended.is_set():
            missing += not (path / "checksums").exists()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        together(three, save_again_and_again, path)
    finally:
        ended.set()
        watcher.join()
    assert missing == 0


def save_again_and_again(_: int, path: Path) -> None:
    """Over the one before."""
    for _ in range(20):
        ps.checkpoint.save(path, [ps.shard(torch.ones(3), axis())])


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
