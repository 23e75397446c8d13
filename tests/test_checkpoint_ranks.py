"""Checkpoints of many ranks: what comes back, on how many of them, what is refused, and what goes wrong on one of them."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh

import purestep as ps
from purestep import tree
from purestep.checkpoint import background, files
from purestep.checkpoint.ranks import LostError, together as meet
from purestep.testing.processes import DeadRankError, World, values
from tests.memory import LiveBytes
from tests.test_checkpoint import Bomb, room
from tests.test_state import assert_same_bits, noise, zeros

ROOT = Path(__file__).parent.parent
BAD = 1
"""The rank that goes wrong."""


@pytest.fixture(scope="module")
def four() -> Iterator[World]:
    """Four ranks that stay up."""
    with World(4) as world:
        yield world


@pytest.fixture(scope="module")
def three() -> Iterator[World]:
    """Three that do."""
    with World(3) as world:
        yield world


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


def whole() -> Any:
    """All kinds of leaves: shorter than the ranks are many, empty, without a dimension, of any dtype and memory order."""
    return {
        "w": noise(torch.float32, 5, 3),
        "columns": noise(torch.float64, 6, 4).T,
        "short": noise(torch.bfloat16, 1, 2),
        "empty": noise(torch.float32, 0, 3),
        "by dtype": {dtype: noise(dtype, 4, 2) for dtype in files.DTYPES if not dtype.is_complex},
        "step": torch.tensor(7),
        "layers": [noise(torch.float32, 7), None],
    }


def axis(dims: str = "dp") -> ps.MeshAxis:
    """All ranks; or of four, ``"shard"``: two of them, beside two replicas."""
    world = list(range(dist.get_world_size()))
    if dims == "dp":
        return ps.MeshAxis(DeviceMesh("cpu", world, mesh_dim_names=("dp",)), "dp")
    mesh = DeviceMesh("cpu", [world[:2], world[2:]], mesh_dim_names=("replica", "shard"))
    return ps.MeshAxis(mesh, dims)


def together(world: World, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What the function returns on each rank."""
    return values(world.run(function, *([argument] * world.size for argument in args)))


def refused(act: Callable[[], Any]) -> tuple[str, str]:
    """The kind and the text of an error."""
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was refused")


def save(_: int, path: Path, dims: str = "dp", dim: int = 0) -> None:
    """All of it in pieces."""
    ps.checkpoint.save(path, in_pieces(whole(), axis(dims), dim))


def in_pieces(state: Any, axis: ps.Axis, dim: int) -> Any:
    """Cut along a dimension, as far as tensors have it."""
    return tree.map(lambda leaf: ps.shard(leaf, axis, dim) if leaf.ndim > dim else leaf, state)


def load(_: int, path: Path, dims: str = "dp", dim: int = 0) -> None:
    """Into pieces of other values, which are checked."""
    like = in_pieces(zeros(whole()), axis(dims), dim)
    found = ps.checkpoint.load(path, like)
    expected = in_pieces(whole(), axis(dims), dim)
    assert tree.flatten(found)[1] == tree.flatten(like)[1]
    assert_same_bits(tree.leaves_of(found), tree.leaves_of(expected))
    for one, two in zip(tree.leaves_of(found), tree.leaves_of(like), strict=True):
        assert one.stride() == two.stride()


def test_any_number_of_ranks_loads_what_any_number_saves(
    three: World, four: World, path: Path
) -> None:
    together(four, save, path)
    together(three, load, path)
    together(three, load, path, "dp", 1)
    found = ps.checkpoint.load(path, zeros(whole()))
    assert_same_bits(found, whole())
    assert found["columns"].stride() == whole()["columns"].stride()
    together(three, save, path, "dp", 1)
    together(four, load, path, "shard")
    assert [*path.parent.iterdir()] == [path]
    assert {file.name for file in path.iterdir()} == {
        ".metadata", "checksums", *(f"__{rank}_0.distcp" for rank in range(3))
    }  # fmt: skip


def test_ranks_load_pieces_of_a_file(three: World, four: World, path: Path) -> None:
    ps.checkpoint.save(path, whole())
    together(three, load, path)
    together(four, load, path, "shard", 1)


def test_what_replicas_hold_is_written_once(four: World, path: Path) -> None:
    together(four, save_large, path)
    sizes = [file.stat().st_size for file in path.glob("*.distcp")]
    assert sum(sizes) < 1.1 * 4 * (LARGE + LARGE // 4)
    assert max(sizes) < 0.6 * 4 * (LARGE + LARGE // 4), "shared among the ranks"
    like = {"pieces": torch.zeros(LARGE), "whole": [torch.zeros(LARGE // 16)] * 4}
    found = ps.checkpoint.load(path, like)
    assert_same_bits(found, large())


LARGE = 2**18


def large() -> Any:
    """A tensor to be cut, and others."""
    return {
        "pieces": noise(torch.float32, LARGE),
        "whole": [noise(torch.float32, LARGE // 16) for _ in range(4)],
    }


def save_large(_: int, path: Path) -> None:
    """Pieces over two of four ranks."""
    state = large()
    ps.checkpoint.save(path, state | {"pieces": ps.shard(state["pieces"], axis("shard"))})


def test_nothing_is_held_but_pieces(three: World, path: Path) -> None:
    piece, largest = 171 * 512 * 4, 512 * 512 * 4
    for saved, exported, loaded in together(three, peaks, path):
        assert saved < 0.1 * piece
        assert exported < 3.1 * largest, "one tensor, and the steps to it"
        assert loaded < 10.1 * piece, "eight, what is read, and what was read before"
    found = safetensors.torch.load_file(path.with_name("model"))
    assert len(found) == 8
    assert all(torch.equal(tensor, torch.ones(512, 512)) for tensor in found.values())


def peaks(_: int, path: Path) -> tuple[int, ...]:
    """Bytes that saving, exporting and loading make."""
    state = {str(i): ps.shard(torch.ones(512, 512), axis()) for i in range(8)}

    def peak(act: Callable[..., Any], *args: Any) -> int:
        with LiveBytes() as live:
            kept = act(*args)
        del kept
        return live.peak

    return (
        peak(ps.checkpoint.save, path, state),
        peak(ps.checkpoint.export, path.with_name("model"), state),
        peak(ps.checkpoint.load, path, state),
    )


def test_torch_reads_it(three: World, path: Path) -> None:
    together(three, save, path)
    reader, planner = FileSystemReader(path), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    state: dict[str, Any] = dict(ps.state_dict(zeros(whole())))
    assert metadata.state_dict_metadata.keys() == state.keys()
    planner.set_up_planner(state, metadata)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    assert_same_bits(state, ps.state_dict(whole()))


# What is refused.


def test_every_difference_is_named_on_every_rank(three: World, path: Path) -> None:
    alone = {"w": torch.zeros(5, 3), "n": torch.tensor(1), "b": torch.ones(2)}
    with_pieces = together(three, save_other, path)
    ps.checkpoint.save(path.with_name("file"), alone)
    del with_pieces
    for name in ("state", "file"):
        text = [
            f"{path.with_name(name)} does not fit like:",
            "tree['b'] has no place",
            "tree['n'] is torch.int64 of shape (), and torch.float32 of shape () was expected",
            "tree['w'] is torch.float32 of shape (5, 3), and torch.float32 of shape (5, 4) was expected",
            "tree['x'] is missing",
        ]
        for said in together(three, load_other, path.with_name(name)):
            assert said == ("ValueError", "\n  ".join(text))


def save_other(_: int, path: Path) -> None:
    """A small one."""
    state = {"w": torch.zeros(5, 3), "n": torch.tensor(1), "b": torch.ones(2)}
    ps.checkpoint.save(path, ps.shard(state, axis()))


def load_other(_: int, path: Path) -> tuple[str, str]:
    """What differs in names, shapes and dtypes."""
    like = {"w": torch.zeros(5, 4), "n": torch.tensor(1.0), "x": torch.zeros(4)}
    return refused(lambda: ps.checkpoint.load(path, ps.shard(like, axis())))


def test_each_changed_missing_or_further_byte_is_noticed(three: World, path: Path) -> None:
    """Whichever file of the folder it is in."""
    together(three, save_other, path)
    like = {"w": torch.zeros(5, 3), "n": torch.tensor(1), "b": torch.ones(2)}
    ps.checkpoint.load(path, like)
    for file in [*path.iterdir()]:
        content = file.read_bytes()
        changes = [content[:-1], content + b"\0", b"\0" + content, b""]
        for place in range(0, len(content), 7):
            changes.append(
                content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]
            )
        for change in changes:
            file.write_bytes(change)
            with pytest.raises(ValueError, match=r"state.* is no checkpoint .* changed"):
                ps.checkpoint.load(path, like)
        file.unlink()
        with pytest.raises(ValueError, match=r"state.* is no checkpoint .* changed"):
            ps.checkpoint.load(path, like)
        file.write_bytes(content)
    ps.checkpoint.load(path, like)


def test_what_one_rank_finds_damaged_all_refuse(three: World, path: Path) -> None:
    together(three, save_other, path)
    file = path / "__2_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    said = together(three, load_damaged, path)
    assert len({*said}) == 1
    assert re.fullmatch(r"rank \d: .*/__2_0.distcp is no checkpoint .*", said[0][1])
    assert said[0][0] == "ValueError"
    for name in ("nowhere", "text"):
        (path.parent / "text").write_text("text")
        kind, text = together(three, load_damaged, path.with_name(name))[BAD]
        assert kind == {"nowhere": "FileNotFoundError", "text": "ValueError"}[name]
        assert str(path.with_name(name)) in text


def load_damaged(_: int, path: Path) -> tuple[str, str]:
    """What would fit."""
    like = {"w": torch.zeros(5, 3), "n": torch.tensor(1), "b": torch.ones(2)}
    return refused(lambda: ps.checkpoint.load(path, ps.shard(like, axis())))


def test_different_checkpoints_on_different_ranks_are_refused(three: World, path: Path) -> None:
    paths = [path.with_name(name) for name in ("one", "two", "one")]
    for number, place in enumerate(paths[:2]):
        state = {"w": torch.full((5, 3), float(number)), "n": torch.tensor(1), "b": torch.ones(2)}
        ps.checkpoint.save(place, state)
    for kind, text in values(three.run(load_damaged, paths)):
        assert kind == "ValueError"
        assert re.search(r"is not the same on rank 1 as on rank 0", text)
    for kind, text in values(three.run(save_to, paths)):
        assert kind == "ValueError"
        assert re.search(r"rank 1 does not save what rank 0 saves: it goes to .*two, and on rank 0 it goes", text)  # fmt: skip
    for kind, text in together(three, save_different, path):
        assert kind == "ValueError"
        assert re.search(r"rank 1 does not .*: tree\['x'\] is torch.float32 of shape \(1,\)", text)
    assert not path.exists()


def save_to(_: int, path: Path) -> tuple[str, str]:
    """One tensor."""
    return refused(lambda: ps.checkpoint.save(path, ps.shard([torch.ones(3)], axis())))


def save_different(rank: int, path: Path) -> tuple[str, str]:
    """A tensor of which one rank has another name."""
    state = {"x" if rank == BAD else "w": ps.shard(torch.ones(1), axis())}
    return refused(lambda: ps.checkpoint.save(path, state))


def test_nothing_in_a_folder_is_run(three: World, path: Path) -> None:
    """Even one whose checksums are right."""
    together(three, save_other, path)
    sums, _ = files.read_all(path / "checksums")
    bomb = path.with_name("bomb")
    pickled = pickle.dumps(Bomb(bomb))
    like = {"w": torch.zeros(5, 3), "n": torch.tensor(1), "b": torch.ones(2)}
    for forged in (pickled, b"", pickle.dumps(7), pickle.dumps(os.system), pickle.dumps(Path)):
        (path / ".metadata").write_bytes(forged)
        size, checksum = len(forged), zlib.crc32(forged)
        files.write(path / "checksums", sums | {".metadata": torch.tensor([size, checksum])})
        with pytest.raises(ValueError, match=r"state/.metadata is no checkpoint"):
            ps.checkpoint.load(path, like)
    assert not bomb.exists()


def test_pieces_that_are_no_pieces_are_refused(path: Path) -> None:
    threads = ps.testing.ThreadAxis(2)

    def save(rank: Tensor) -> tuple[str, str]:
        return refused(lambda: ps.checkpoint.save(path, {"w": ps.shard(torch.ones(3), threads)}))

    for kind, text in threads.map(save)([torch.tensor(0), torch.tensor(1)]):
        assert kind == "TypeError"
        assert text.startswith(
            "a Shard over ThreadAxis(2), which is no ps.MeshAxis, is neither saved"
        )


def test_ranks_that_have_parted_save_nothing(path: Path) -> None:
    place: Any = {"init_method": f"file://{path}.store", "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **place)
    state = {"w": ps.shard(torch.ones(3), axis())}
    dist.destroy_process_group()
    for act in (ps.checkpoint.save, ps.checkpoint.load, ps.checkpoint.export):
        with pytest.raises(ValueError, match=r"a Shard over MeshAxis\('dp', 1 rank\) .* has ended"):
            act(path, state)


def test_a_piece_of_another_length_is_refused(three: World, path: Path) -> None:
    for kind, text in together(three, save_wrong, path):
        assert kind == "ValueError"
        assert re.match(r"tree\['w'\].piece is torch.float32 of shape \(2,\), and .* holds \(1,\)", text)  # fmt: skip


def test_what_one_rank_may_not_save_all_refuse(three: World, path: Path) -> None:
    for kind, text in together(three, save_number, path):
        assert kind == "TypeError"
        assert text.startswith("rank 1: tree['n'] is int, no tensor")
    for kind, text in together(three, load_number, path):
        assert kind == "TypeError"
        assert text.startswith("rank 1: tree['n'] is int, no tensor")


def save_number(rank: int, path: Path) -> tuple[str, str]:
    """No tensor, on one rank."""
    state = {"w": ps.shard(torch.ones(3), axis()), "n": 1 if rank == BAD else torch.tensor(1)}
    return refused(lambda: ps.checkpoint.save(path, state))


def load_number(rank: int, path: Path) -> tuple[str, str]:
    """Into no tensor, on one rank."""
    state = {"w": ps.shard(torch.ones(3), axis()), "n": 1 if rank == BAD else torch.tensor(1)}
    return refused(lambda: ps.checkpoint.load(path, state))


def save_wrong(_: int, path: Path) -> tuple[str, str]:
    """Two of three, on each."""
    return refused(lambda: ps.checkpoint.save(path, {"w": ps.Shard(torch.ones(2), axis(), (3,))}))


# Saves that do not end well.


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


# In the background.


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


# One after the other.


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


def test_ranks_keep_the_last_ones(three: World, tmp_path: Path) -> None:
    together(three, save_steps, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"00000003", "00000004"}
    last = ps.checkpoint.latest(tmp_path)
    assert last
    assert torch.equal(ps.checkpoint.load(last, torch.zeros(5)), torch.full((5,), 4.0))
    for kind, text in together(three, save_earlier, tmp_path):
        assert kind == "ValueError"
        assert re.search("holds step 4, which is later than 1", text)


def save_steps(_: int, folder: Path) -> None:
    """What was left of one that was killed goes with the next, whichever step that is."""
    for step in range(5):
        if step == 2 and axis().rank == 0:
            (folder / "00000000.0123abcd.unfinished").write_text("killed")
            (folder / "00000000.0123abcd.folder").mkdir()
        ps.checkpoint.save_step(folder, step, ps.shard(torch.full((5,), float(step)), axis()), 2)


def save_earlier(_: int, folder: Path) -> tuple[str, str]:
    """Before the last one."""
    state = ps.shard(torch.zeros(5), axis())
    return refused(lambda: ps.checkpoint.save_step(folder, 1, state))


# For other tools, and from them.


def test_safetensors_of_others_and_for_others(three: World, path: Path) -> None:
    model = {"wte.weight": noise(torch.bfloat16, 7, 3), "b": noise(torch.float32), "a.b": noise(torch.float16, 2)}  # fmt: skip
    foreign = path.with_name("foreign")
    safetensors.torch.save_file(model, foreign, {"format": "pt"})
    together(three, take_in_and_give_out, foreign, path)
    assert_same_bits(safetensors.torch.load_file(path), model)
    ps.checkpoint.export(foreign, model)
    assert_same_bits(safetensors.torch.load_file(foreign), model)
    with safetensors.safe_open(foreign, "pt") as file:
        assert file.metadata()["format"] == "pt"
    for wrong, text in [([model], "not list"), ({"a": {"b": 1}}, "a is dict, no tensor")]:
        with pytest.raises(TypeError, match=text):
            ps.checkpoint.export(path, wrong)  # type: ignore[arg-type]


def take_in_and_give_out(_: int, foreign: Path, path: Path) -> None:
    """One tensor after the other."""
    over = axis()
    with safetensors.safe_open(foreign, "pt") as file:
        params = {name: ps.shard(file.get_tensor(name), over) for name in file.keys()}  # noqa: SIM118
    ps.checkpoint.export(path, params)
