"""Tests checkpoints of many ranks: loading on other numbers of ranks, and what all refuse together."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.device_mesh import DeviceMesh

import purestep as ps
from purestep.checkpoint.folder import Block
from purestep.testing.processes import World, values
from tests.checkpoint_states import assert_same_bits, zeros_like
from tests.memory import LiveBytes
from tests.sharded_checkpoints import (
    FAULTY_RANK,
    call_on_all_ranks,
    catch_error,
    full_state,
    group_of_one,
    limit_file_size,
    list_files,
    load_sharded,
    make_axis,
    save_sharded,
)

SMALL = {
    "w": torch.zeros(5, 3),
    "n": torch.tensor(1),
    "b": torch.ones(2),
}
OTHER = {
    "w": torch.zeros(5, 4),
    "n": torch.tensor(1.0),
    "x": torch.zeros(4),
}
LARGE = 2**18
ROOT = Path(__file__).parent.parent
LOCAL = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_any_number_of_ranks_loads_what_others_save(
    three: World, world: World, path: Path
) -> None:
    """Loads it on three ranks, on one, and by torch; and loads shards of a file."""
    call_on_all_ranks(world, save_sharded, path)
    like = zeros_like(full_state())
    state: dict[str, Any] = dict(ps.state_dict(like))
    load_distributed(state, checkpoint_id=path, no_dist=True)
    assert_same_bits(state, ps.state_dict(full_state()))

    call_on_all_ranks(three, load_sharded, path)
    call_on_all_ranks(three, load_sharded, path, "dp", 1)
    assert_same_bits(ps.checkpoint.load(path, zeros_like(full_state())), full_state())

    other = path.with_name("other")
    call_on_all_ranks(three, save_sharded, other, "dp", 1)
    call_on_all_ranks(world, load_sharded, other, "shard")
    assert list_files(path.parent) == {"state", "other"}
    assert list_files(other) == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "__2_0.distcp",
    }

    file = path.with_name("file")
    ps.checkpoint.save(file, full_state())
    call_on_all_ranks(three, load_sharded, file)
    call_on_all_ranks(world, load_sharded, file, "shard", 1)


def peaks(_: int, path: Path) -> tuple[int, int, int]:
    """Measures the bytes that saving, exporting and loading make."""
    state = {str(i): ps.shard(torch.ones(256, 256), make_axis()) for i in range(8)}

    def measure(act: Callable[..., Any], path: Path) -> int:
        with LiveBytes() as live:
            result = act(path, state)
        del result
        return live.peak

    saved = measure(ps.checkpoint.save, path)
    exported = measure(ps.checkpoint.export_safetensors, path.with_name("model"))
    loaded = measure(ps.checkpoint.load, path)
    return saved, exported, loaded


def test_nothing_is_held_but_pieces(three: World, path: Path) -> None:
    """Holds shards alone; only the first rank of an export holds full tensors."""
    shard = 86 * 256 * 4
    full = 256 * 256 * 4
    messages = 3 * 8 * 2**10
    for saved, exported, loaded in call_on_all_ranks(three, peaks, path):
        assert saved < messages, "messages alone, less than a KiB for each piece"
        assert exported < 8.1 * full + 2.1 * full, "all, and one in the making"
        assert loaded < 10.1 * shard, "eight, what is read, and what was read before"
    exported_state = safetensors.torch.load_file(path.with_name("model"))
    assert_same_bits(exported_state, {str(i): torch.ones(256, 256) for i in range(8)})


# In the background.


ENDS = ["", "raise ValueError", "dist.destroy_process_group()"]
PROGRAMS = f"""
import gc, os, sys, torch, torch.distributed as dist, purestep as ps, torch._dynamo
import torch.distributed.checkpoint.state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
# Else each child looks through all that was imported as it ends, for a second.
gc.freeze()
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
    """Ends while it saves in the background: the save is complete if the group still exists."""
    program = [sys.executable, "-c", PROGRAMS, str(tmp_path)]
    run = subprocess.run(
        program, cwd=ROOT, env=LOCAL, capture_output=True, text=True, timeout=60
    )
    assert run.stdout == "[0, 0, 1, 1, 0, 0]\n", run.stderr
    for number in range(2):
        folder = tmp_path / f"{number}"
        loaded = ps.checkpoint.load(folder, [torch.zeros(LARGE)] * 8)
        assert_same_bits(loaded, [torch.ones(LARGE)] * 8)


# What is refused, on every rank.


def sharded(tree: Any) -> Any:
    return ps.shard(tree, make_axis())


def with_number(rank: int) -> Any:
    """Makes a state with an int on one rank, which is no tensor."""
    number = 1 if rank == FAULTY_RANK else torch.tensor(1)
    return sharded({"w": torch.ones(3)}) | {"n": number}


def save_small(_: int, path: Path) -> None:
    ps.checkpoint.save(path, sharded(SMALL))


def save_earlier_step(_: int, path: Path) -> None:
    ps.checkpoint.save_step(path, 1, sharded(SMALL))


def save_other_names(rank: int, path: Path) -> None:
    name = "x" if rank == FAULTY_RANK else "w"
    ps.checkpoint.save(path, sharded({name: torch.ones(1)}))


def save_short_shard(_: int, path: Path) -> None:
    short = ps.Shard(torch.ones(2), make_axis(), (3,))
    ps.checkpoint.save(path, {"w": short})


def save_simulated(_: int, path: Path) -> None:
    simulated = ps.Shard(torch.ones(3), ps.LocalAxis(), (3,))
    ps.checkpoint.save(path, {"w": simulated})


def save_much(_: int, path: Path) -> None:
    ps.checkpoint.save(path / "state", sharded([torch.randn(10**5)]))


def save_behind(_: int, path: Path) -> None:
    with ps.checkpoint.AsyncCheckpointer() as background:
        background.save_step(path, 1, sharded([torch.randn(10**5)]))


def export_number(rank: int, path: Path) -> None:
    ps.checkpoint.export_safetensors(path, with_number(rank))


def export_much(_: int, path: Path) -> None:
    ps.checkpoint.export_safetensors(path / "state", sharded({"w": torch.randn(10**5)}))


ACTS: dict[str, Callable[[int, Path], Any]] = {
    "save": save_small,
    "load": lambda rank, path: ps.checkpoint.load(path, sharded(SMALL)),
    "load other": lambda rank, path: ps.checkpoint.load(path, sharded(OTHER)),
    "export": lambda rank, path: ps.checkpoint.export_safetensors(path, sharded(SMALL)),
    "save an earlier step": save_earlier_step,
    "save a number": lambda rank, path: ps.checkpoint.save(path, with_number(rank)),
    "load a number": lambda rank, path: ps.checkpoint.load(path, with_number(rank)),
    "export a number": export_number,
    "save other names": save_other_names,
    "save a short piece": save_short_shard,
    "save simulated": save_simulated,
    "save much": save_much,
    "save behind": save_behind,
    "export much": export_much,
}


def attempt(
    rank: int, act: str, path: Path, full: int | None = None
) -> tuple[str, str]:
    """Returns the error of an act; the disk of one rank may be full."""
    with limit_file_size(5000) if rank == full else nullcontext():
        return catch_error(lambda: ACTS[act](rank, path))


@pytest.mark.parametrize("act", ["save much", "save behind", "export much"])
def test_a_full_disk_of_one_rank_reaches_all(
    act: str, three: World, path: Path
) -> None:
    path.mkdir()
    full = 0 if act == "export much" else FAULTY_RANK
    errors = call_on_all_ranks(three, attempt, act, path, full)
    for rank, (error, text) in enumerate(errors):
        # The first rank exports alone, and the others hear of its error.
        expected = "RankError" if full == 0 < rank else "OSError"
        assert error == expected
        assert re.search(rf"{path}.*cannot be written \(", text)
        assert "File too large" in text or "rank 1: " in text
    assert not list_files(path)


def test_ctrl_c_while_shards_are_written_is_no_error_of_the_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's writer turns each exception into one that any rank can raise."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Block, "__get_tensor_shard__", interrupt)
    with group_of_one(), pytest.raises(KeyboardInterrupt):
        ps.checkpoint.save(path, sharded(torch.ones(3)))
    assert list_files(path.parent) == set()


def test_a_name_that_is_taken_is_refused(three: World, path: Path) -> None:
    """Refuses to replace another file or folder, and to write a folder below a file."""
    mine = path.with_name("mine")
    mine.mkdir()
    (mine / "thesis").write_text("")
    ps.checkpoint.save(path, torch.tensor(1.0))
    reasons = {
        mine: "Directory not empty",
        path: "Not a directory",
        mine / "thesis" / "state": "Not a directory",
    }
    for target, reason in reasons.items():
        for error, text in call_on_all_ranks(three, attempt, "save", target):
            assert error in ("OSError", "RankError")
            assert reason in text
    assert list_files(mine) == {"thesis"}
    assert list_files(path.parent) == {"state", "mine"}
    assert ps.checkpoint.load(path, torch.tensor(0.0)) == 1

    folder = path.with_name("folder")
    call_on_all_ranks(three, save_sharded, folder)
    with pytest.raises(OSError, match=r"folder cannot be written \(Is a directory\)"):
        ps.checkpoint.save(folder, torch.tensor(1.0))
    assert folder.stat().st_mode == mine.stat().st_mode
    assert_same_bits(ps.checkpoint.load(folder, zeros_like(full_state())), full_state())


def test_every_difference_is_named_on_every_rank(three: World, path: Path) -> None:
    call_on_all_ranks(three, save_small, path)
    ps.checkpoint.save(path.with_name("file"), SMALL)
    for name in ("state", "file"):
        saved = path.with_name(name)
        lines = [
            f"{saved} does not fit like: build like as the saved tree was",
            "tree['b'] is torch.float32 of shape (2,); like has no such leaf",
            "tree['n'] is torch.int64 of shape (); like has torch.float32 of shape ()",
            "tree['w'] is torch.float32 of shape (5, 3); like has torch.float32 of shape (5, 4)",
            "tree['x'] is missing; like has torch.float32 of shape (4,)",
        ]
        for error, text in call_on_all_ranks(three, attempt, "load other", saved):
            assert error == "ValueError"
            assert text == "\n  ".join(lines)


def corruptions(content: bytes) -> Iterator[bytes]:
    """Yields contents that lack a byte, have one more, or one flipped bit in every seventh byte."""
    yield content[:-1]
    yield content + b"\0"
    yield b"\0" + content
    yield b""
    for index in range(0, len(content), 7):
        byte = bytes([content[index] ^ 1 << index % 8])
        yield content[:index] + byte + content[index + 1 :]


def test_each_changed_missing_or_further_byte_is_noticed(
    three: World, path: Path
) -> None:
    """Notices it in any file of the folder; and what one rank finds, all refuse."""

    def assert_refused() -> None:
        with pytest.raises(ValueError, match=r"state.* is no checkpoint .* changed"):
            ps.checkpoint.load(path, SMALL)

    call_on_all_ranks(three, save_small, path)
    for file in [*path.iterdir()]:
        content = file.read_bytes()
        for corrupted in corruptions(content):
            file.write_bytes(corrupted)
            assert_refused()
        file.unlink()
        assert_refused()
        if file.name == "__1_0.distcp":
            for error, text in call_on_all_ranks(three, attempt, "load", path):
                assert error in ("ValueError", "RankError")
                assert f"{file} is no checkpoint" in text
        file.write_bytes(content)
    ps.checkpoint.load(path, SMALL)


NO_STATE = {
    "save a number": r"tree\['n'\] is int, no tensor",
    "load a number": r"tree\['n'\] is int, no tensor",
    "export a number": "'n' is int, no tensor",
    "save other names": r"rank 1 differs .* tree\['w'\], torch.float32 of shape \(1,\): ",
    "save a short piece": r"tree\['w'\].local has shape \(2,\), but this rank's piece of",
    "save simulated": r"a Shard over LocalAxis\(\) is not saved by processes",
}


@pytest.mark.parametrize("act", NO_STATE)
def test_what_is_no_state_of_all_ranks_is_refused(
    act: str, three: World, path: Path
) -> None:
    if act == "load a number":
        ps.checkpoint.save(path, {"w": torch.ones(3), "n": torch.tensor(1)})
    on_one_rank = "number" in act
    is_type_error = on_one_rank or "simulated" in act
    for rank, (error, text) in enumerate(call_on_all_ranks(three, attempt, act, path)):
        expected = "TypeError" if is_type_error else "ValueError"
        if on_one_rank and rank != FAULTY_RANK:
            expected = "RankError"
        assert error == expected
        assert re.search(NO_STATE[act], text)
    assert list_files(path.parent) <= {"state"}


def test_different_paths_on_different_ranks_are_refused(
    three: World, path: Path
) -> None:
    one = path.with_name("one")
    two = path.with_name("two")
    for act, words in ("save", ": give all ranks one"), ("load", ", [0-9a-f]{8}: "):
        errors = values(three.run(attempt, [act] * 3, [one, two, one]))
        for error, text in errors:
            assert error == "ValueError"
            assert re.search(f"rank 1 differs from rank 0 in .*/(one|two){words}", text)
        # For the next act, which loads: two different states.
        ps.checkpoint.save(one, SMALL | {"w": torch.full((5, 3), 0.0)})
        ps.checkpoint.save(two, SMALL | {"w": torch.full((5, 3), 1.0)})
    assert list_files(path.parent) == {"one", "two"}


def save_in_own_folder(rank: int, path: Path) -> tuple[str, str]:
    """Saves to one relative path in a working directory of the rank's own."""
    own = path / str(rank)
    own.mkdir(parents=True)
    with chdir(own):
        return catch_error(lambda: save_small(rank, Path("state")))


def test_ranks_that_write_to_different_folders_are_refused(
    three: World, path: Path
) -> None:
    """As on disks that the ranks do not share: no checkpoint without the files of the others."""
    errors = call_on_all_ranks(three, save_in_own_folder, path)
    for rank, (error, text) in enumerate(errors):
        assert error == ("RankError" if rank else "OSError")
        assert "__1_0.distcp is missing" in text
        assert "give all ranks one path, on a disk that they share" in text
    assert list_files(path / "0") == set()


def test_pieces_that_no_processes_hold_are_refused(path: Path) -> None:
    """Refuses shards of simulated ranks, and of a process group that has been destroyed."""
    with group_of_one():
        state = {"w": ps.shard(torch.ones(3), make_axis())}
    threads = ps.testing.ThreadAxis(2)

    def save_on_thread(w: Tensor) -> None:
        ps.checkpoint.save(path, {"w": ps.shard(w, threads)})

    for act in (
        lambda: ps.checkpoint.save(path, state),
        lambda: ps.checkpoint.load(path, state),
        lambda: ps.checkpoint.export_safetensors(path, state),
        lambda: threads.map(save_on_thread)([torch.ones(3)] * 2),
    ):
        with pytest.raises(ValueError, match="process group has not been initialized"):
            act()


def save_steps(_: int, folder: Path) -> None:
    """Saves five steps, the last where a killed save left an unfinished folder."""
    for step in range(5):
        if step == 4 and make_axis().rank == 0:
            unfinished = folder / f"{step:08}.unfinished"
            unfinished.mkdir()
            (unfinished / "__7_0.distcp").write_text("killed")
        state = sharded(torch.full((5,), float(step)))
        ps.checkpoint.save_step(folder, step, state, 2)


def test_ranks_keep_the_last_ones(three: World, tmp_path: Path) -> None:
    call_on_all_ranks(three, save_steps, tmp_path)
    assert list_files(tmp_path) == {"00000003", "00000004"}
    last = tmp_path / "00000004"
    assert ps.checkpoint.latest_checkpoint(tmp_path) == last
    assert "__7_0.distcp" not in list_files(last)
    loaded = ps.checkpoint.load(last, torch.zeros(5))
    assert torch.equal(loaded, torch.full((5,), 4.0))
    for error, text in call_on_all_ranks(
        three, attempt, "save an earlier step", tmp_path
    ):
        assert error == "ValueError"
        assert re.search("holds step 4, which is later than 1", text)


def load_part_of_part(_: int, path: Path) -> None:
    """Loads shards in shards, along one dimension and along two."""
    grid = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    dp, tp = ps.MeshAxis(grid, "dp"), ps.MeshAxis(grid, "tp")
    full = torch.arange(48.0).view(8, 6)
    for dim in (0, 1):
        expected = ps.shard(ps.shard(full, tp, dim), dp)
        like = zeros_like(expected)
        assert_same_bits(ps.checkpoint.load(path, {"w": like})["w"], expected)


def test_a_file_is_loaded_into_shards_in_shards(world: World, path: Path) -> None:
    ps.checkpoint.save(path, {"w": torch.arange(48.0).view(8, 6)})
    call_on_all_ranks(world, load_part_of_part, path)
