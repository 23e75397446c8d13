"""Checkpoints of many ranks: what comes back, on how many of them, what they refuse together, and what others read and write."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

import purestep as ps
from purestep.testing.processes import World, values
from tests.held_by_ranks import (
    BAD,
    axis,
    files,
    group_of_one,
    load,
    refused,
    room,
    save,
    together,
    whole,
)
from tests.memory import LiveBytes
from tests.states import assert_same_bits, zeros

SMALL = {"w": torch.zeros(5, 3), "n": torch.tensor(1), "b": torch.ones(2)}
OTHER = {"w": torch.zeros(5, 4), "n": torch.tensor(1.0), "x": torch.zeros(4)}
LARGE = 2**18
ROOT = Path(__file__).parent.parent
LOCAL = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_any_number_of_ranks_loads_what_others_save(
    three: World, world: World, path: Path
) -> None:
    """And torch does, and ranks load pieces of a file."""
    together(world, save, path)
    state: dict[str, Any] = dict(ps.state_dict(zeros(whole())))
    load_distributed(state, checkpoint_id=path, no_dist=True)
    assert_same_bits(state, ps.state_dict(whole()))
    together(three, load, path)
    together(three, load, path, "dp", 1)
    assert_same_bits(ps.checkpoint.load(path, zeros(whole())), whole())
    other = path.with_name("other")
    together(three, save, other, "dp", 1)
    together(world, load, other, "shard")
    assert files(path.parent) == {"state", "other"}
    assert files(other) == {".metadata", *(f"__{rank}_0.distcp" for rank in range(3))}
    file = path.with_name("file")
    ps.checkpoint.save(file, whole())
    together(three, load, file)
    together(world, load, file, "shard", 1)


def peaks(_: int, path: Path) -> list[int]:
    """Bytes that saving, exporting and loading make."""
    state = {str(i): ps.shard(torch.ones(256, 256), axis()) for i in range(8)}
    bytes_ = []
    for act, name in [("save", "state"), ("export", "model"), ("load", "state")]:
        with LiveBytes() as live:
            kept = getattr(ps.checkpoint, act)(path.with_name(name), state)
        del kept
        bytes_.append(live.peak)
    return bytes_


def test_nothing_is_held_but_pieces(three: World, path: Path) -> None:
    """And others read what is exported."""
    piece, largest = 86 * 256 * 4, 256 * 256 * 4
    for saved, exported, loaded in together(three, peaks, path):
        assert saved < 3 * 8 * 2**10, "messages alone, less than a KiB for each piece"
        assert exported < 8.1 * largest + 2.1 * largest, (
            "all, on the first, and one in the making"
        )
        assert loaded < 10.1 * piece, "eight, what is read, and what was read before"
    found = safetensors.torch.load_file(path.with_name("model"))
    assert_same_bits(found, {str(i): torch.ones(256, 256) for i in range(8)})


# In the background.


ENDS = ["", "raise ValueError", "dist.destroy_process_group()"]
PROGRAMS = f"""
import os, sys, torch, torch.distributed as dist, purestep as ps, torch._dynamo
import torch.distributed.checkpoint.state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
children = []
for number in range(6):
    children.append(os.fork())
    if children[-1]:
        continue
    folder, rank = f"{{sys.argv[1]}}/{{number // 2}}", number % 2
    dist.init_process_group("gloo", init_method=f"file://{{folder}}.store", rank=rank, world_size=2)
    axis = ps.MeshAxis(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), "dp")
    ps.checkpoint.AsyncCheckpointer().save(folder, ps.shard([torch.ones({LARGE})] * 8, axis))
    exec({ENDS}[number // 2])
    break
else:
    print([os.waitpid(child, 0)[1] >> 8 for child in children])
"""


def test_a_program_that_ends_keeps_its_exit_code(tmp_path: Path) -> None:
    """While it saves; and what it saves is whole, as long as the processes are joined."""
    program = [sys.executable, "-c", PROGRAMS, str(tmp_path)]
    run = subprocess.run(
        program, cwd=ROOT, env=LOCAL, capture_output=True, text=True, timeout=60
    )
    assert run.stdout == "[0, 0, 1, 1, 0, 0]\n", run.stderr
    for number in range(2):
        found = ps.checkpoint.load(tmp_path / f"{number}", [torch.zeros(LARGE)] * 8)
        assert_same_bits(found, [torch.ones(LARGE)] * 8)


# What is refused, on every rank.


def sharded(tree: Any) -> Any:
    return ps.shard(tree, axis())


def with_number(rank: int) -> Any:
    """A state that is none on one rank."""
    return sharded({"w": torch.ones(3)}) | {"n": 1 if rank == BAD else torch.tensor(1)}


def save_small(_: int, path: Path) -> None:
    ps.checkpoint.save(path, sharded(SMALL))


def save_behind(_: int, path: Path) -> None:
    with ps.checkpoint.AsyncCheckpointer() as background:
        background.save_step(path, 1, sharded([torch.randn(10**5)]))


ACTS: dict[str, Callable[[int, Path], Any]] = {
    "save": save_small,
    "load": lambda rank, path: ps.checkpoint.load(path, sharded(SMALL)),
    "load other": lambda rank, path: ps.checkpoint.load(path, sharded(OTHER)),
    "export": lambda rank, path: ps.checkpoint.export_safetensors(path, sharded(SMALL)),
    "save an earlier step": lambda rank, path: ps.checkpoint.save_step(path, 1, sharded(SMALL)),
    "save a number": lambda rank, path: ps.checkpoint.save(path, with_number(rank)),
    "load a number": lambda rank, path: ps.checkpoint.load(path, with_number(rank)),
    "save other names": lambda rank, path: ps.checkpoint.save(path, sharded({"x" if rank == BAD else "w": torch.ones(1)})),
    "save a short piece": lambda rank, path: ps.checkpoint.save(path, {"w": ps.Shard(torch.ones(2), axis(), (3,))}),
    "save simulated": lambda rank, path: ps.checkpoint.save(path, {"w": ps.Shard(torch.ones(3), ps.LocalAxis(), (3,))}),
    "save much": lambda rank, path: ps.checkpoint.save(path / "state", sharded([torch.randn(10**5)])),
    "save behind": save_behind,
    "export much": lambda rank, path: ps.checkpoint.export_safetensors(path / "state", sharded({"w": torch.randn(10**5)})),
}  # fmt: skip


def attempt(
    rank: int, act: str, path: Path, full: int | None = None
) -> tuple[str, str]:
    """The error of an act; on one rank the disk may be full."""
    with room(5000) if rank == full else nullcontext():
        return refused(lambda: ACTS[act](rank, path))


@pytest.mark.parametrize("act", ["save much", "save behind", "export much"])
def test_a_full_disk_of_one_rank_reaches_all(
    act: str, three: World, path: Path
) -> None:
    path.mkdir()
    full = 0 if act == "export much" else BAD
    for rank, (kind, text) in enumerate(together(three, attempt, act, path, full)):
        assert kind == ("RankError" if full == 0 < rank else "OSError")
        assert re.search(rf"{path}.*cannot be written \(", text)
        assert "File too large" in text or "rank 1: " in text
    assert not files(path)


def test_a_name_that_is_taken_is_refused(three: World, path: Path) -> None:
    """Of a file and of a folder; and a folder where no folder can be."""
    mine = path.with_name("mine")
    mine.mkdir()
    (mine / "thesis").write_text("")
    ps.checkpoint.save(path, torch.tensor(1.0))
    taken = (
        (mine, "Directory not empty"),
        (path, "Not a directory"),
        (mine / "thesis" / "state", "Not a directory"),
    )
    for place, reason in taken:
        for kind, text in together(three, attempt, "save", place):
            assert kind in ("OSError", "RankError")
            assert reason in text
    assert files(mine) == {"thesis"}
    assert files(path.parent) == {"state", "mine"}
    assert ps.checkpoint.load(path, torch.tensor(0.0)) == 1
    folder = path.with_name("folder")
    together(three, save, folder)
    with pytest.raises(OSError, match=r"folder cannot be written \(Is a directory\)"):
        ps.checkpoint.save(folder, torch.tensor(1.0))
    assert folder.stat().st_mode == mine.stat().st_mode
    assert_same_bits(ps.checkpoint.load(folder, zeros(whole())), whole())


def test_every_difference_is_named_on_every_rank(three: World, path: Path) -> None:
    together(three, save_small, path)
    ps.checkpoint.save(path.with_name("file"), SMALL)
    for name in ("state", "file"):
        text = [
            f"{path.with_name(name)} does not fit like: build like as the saved tree was",
            "tree['b'] is torch.float32 of shape (2,); like has no such leaf",
            "tree['n'] is torch.int64 of shape (); like has torch.float32 of shape ()",
            "tree['w'] is torch.float32 of shape (5, 3); like has torch.float32 of shape (5, 4)",
            "tree['x'] is missing; like has torch.float32 of shape (4,)",
        ]
        for said in together(three, attempt, "load other", path.with_name(name)):
            assert said == ("ValueError", "\n  ".join(text))


def test_each_changed_missing_or_further_byte_is_noticed(
    three: World, path: Path
) -> None:
    """Whichever file of the folder it is in; and what one rank finds, all refuse."""
    together(three, save_small, path)
    for file in [*path.iterdir()]:
        content = file.read_bytes()
        changes = [content[:-1], content + b"\0", b"\0" + content, b""]
        for place in range(0, len(content), 7):
            byte = bytes([content[place] ^ 1 << place % 8])
            changes.append(content[:place] + byte + content[place + 1 :])
        for change in [*changes, None]:
            file.unlink() if change is None else file.write_bytes(change)
            with pytest.raises(
                ValueError, match=r"state.* is no checkpoint .* changed"
            ):
                ps.checkpoint.load(path, SMALL)
        if file.name == "__1_0.distcp":
            for kind, text in together(three, attempt, "load", path):
                assert kind in ("ValueError", "RankError")
                assert f"{file} is no checkpoint" in text
        file.write_bytes(content)
    ps.checkpoint.load(path, SMALL)


NO_STATE = {
    "save a number": r"tree\['n'\] is int, no tensor",
    "load a number": r"tree\['n'\] is int, no tensor",
    "save other names": r"rank 1 differs .* tree\['w'\], torch.float32 of shape \(1,\): ",
    "save a short piece": r"tree\['w'\].local has shape \(2,\), but this rank's piece of",
    "save simulated": r"a Shard over LocalAxis\(\) cannot be a DTensor",
}


@pytest.mark.parametrize("act", NO_STATE)
def test_what_is_no_state_of_all_ranks_is_refused(
    act: str, three: World, path: Path
) -> None:
    if act == "load a number":
        ps.checkpoint.save(path, {"w": torch.ones(3), "n": torch.tensor(1)})
    for rank, (kind, said) in enumerate(together(three, attempt, act, path)):
        error = "TypeError" if "number" in act or "simulated" in act else "ValueError"
        assert kind == ("RankError" if "number" in act and rank != BAD else error)
        assert re.search(NO_STATE[act], said)
    assert files(path.parent) <= {"state"}


def test_different_paths_on_different_ranks_are_refused(
    three: World, path: Path
) -> None:
    paths = [path.with_name(name) for name in ("one", "two", "one")]
    for act, words in ("save", ": give all ranks one"), ("load", ", [0-9a-f]{8}: "):
        for kind, text in values(three.run(attempt, [act] * 3, paths)):
            assert kind == "ValueError"
            assert re.search(f"rank 1 differs from rank 0 in .*/(one|two){words}", text)
        for number, place in enumerate(paths[:2]):
            ps.checkpoint.save(place, SMALL | {"w": torch.full((5, 3), float(number))})
    assert files(path.parent) == {"one", "two"}


def test_pieces_that_no_processes_hold_are_refused(path: Path) -> None:
    """Those of simulated ranks, and of processes that have parted."""
    threads = ps.testing.ThreadAxis(2)
    with group_of_one():
        state = {"w": ps.shard(torch.ones(3), axis())}
    acts = (ps.checkpoint.save, ps.checkpoint.load, ps.checkpoint.export_safetensors)
    simulated = threads.map(
        lambda w: ps.checkpoint.save(path, {"w": ps.shard(w, threads)})
    )
    for act in (
        *(partial(act, path, state) for act in acts),
        lambda: simulated([torch.ones(3)] * 2),
    ):
        with pytest.raises(ValueError, match="process group has not been initialized"):
            act()


def save_steps(_: int, folder: Path) -> None:
    """What a killed save of the last step left is no part of it."""
    for step in range(5):
        if step == 4 and axis().rank == 0:
            (folder / f"{step:08}.unfinished").mkdir()
            (folder / f"{step:08}.unfinished" / "__7_0.distcp").write_text("killed")
        ps.checkpoint.save_step(folder, step, sharded(torch.full((5,), float(step))), 2)


def test_ranks_keep_the_last_ones(three: World, tmp_path: Path) -> None:
    together(three, save_steps, tmp_path)
    assert files(tmp_path) == {"00000003", "00000004"}
    last = tmp_path / "00000004"
    assert ps.checkpoint.latest_checkpoint(tmp_path) == last
    assert "__7_0.distcp" not in files(last)
    assert torch.equal(ps.checkpoint.load(last, torch.zeros(5)), torch.full((5,), 4.0))
    for kind, text in together(three, attempt, "save an earlier step", tmp_path):
        assert kind == "ValueError"
        assert re.search("holds step 4, which is later than 1", text)
