"""Checkpoints: what comes back, what is refused, and who may die in the middle."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import purestep as ps
from proofs.devices import lazy
from purestep import tree
from purestep.checkpoint import files
from tests.hazards import Bomb, room
from tests.memory import LiveBytes
from tests.states import anything, assert_same_bits, noise, zeros

ROOT = Path(__file__).parent.parent


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_what_is_saved_comes_back_to_the_bit(path: Path) -> None:
    state = anything()
    ps.checkpoint.save(path, state)
    found = ps.checkpoint.load(str(path), zeros(state))
    assert_same_bits(found, state)
    assert not tree.requires_grad(found)
    assert found["images"].stride() == state["images"].stride()
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize("state", [{}, None, torch.tensor(1.5), [torch.ones(0)]])
def test_any_tree_is_a_state(state: Any, path: Path) -> None:
    ps.checkpoint.save(path, state)
    assert_same_bits(ps.checkpoint.load(path, zeros(state)), state)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_safetensors_opens_it(path: Path) -> None:
    state = anything()
    for unknown in (torch.complex32, torch.complex128):
        del state["by dtype"][unknown]
    state["odd"] = noise(torch.int8, 3)
    ps.checkpoint.save(path, state)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    entries = json.loads(path.read_bytes()[8 : 8 + length])
    for name, tensor in ps.state_dict(state).items():
        assert (8 + length + entries[name]["data_offsets"][0]) % tensor.itemsize == 0, "aligned"
    assert_same_bits(safetensors.torch.load_file(path), ps.state_dict(state))
    assert_same_bits(ps.load_state_dict(zeros(state), safetensors.torch.load_file(path)), state)


def test_files_larger_than_a_chunk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = [noise(torch.float32, 5000), noise(torch.int8, 7), noise(torch.float64, 300, 7).T]
    monkeypatch.setattr(files, "CHUNK", 4096)
    ps.checkpoint.save(path, state)
    assert_same_bits(ps.checkpoint.load(path, zeros(state)), state)


def test_devices_follow_like(path: Path) -> None:
    state = {"w": torch.randn(3), "n": torch.tensor(2)}
    there = {"w": state["w"].to(lazy()), "n": state["n"]}
    ps.checkpoint.save(path, there)
    assert_same_bits(ps.checkpoint.load(path, zeros(state)), state)
    found = ps.checkpoint.load(path, zeros(there))
    assert [found[name].device.type for name in "wn"] == ["lazy", "cpu"]
    assert_same_bits(tree.map(Tensor.cpu, found), state)


def test_what_is_held_in_memory(path: Path) -> None:
    """One leaf at a time that lies otherwise; and what is loaded, once."""
    size = 4 * 2**16
    rows, columns = torch.randn(5, 2**16), torch.randn(4, 2**8, 2**8).transpose(1, 2)
    for state, most in [([*rows], 0), ([*columns], size)]:
        with LiveBytes() as live:
            ps.checkpoint.save(path, state)
        assert live.peak == most
        with LiveBytes() as live:
            found = ps.checkpoint.load(path, state)
        assert live.peak == most + sum(leaf.nbytes for leaf in found)


# Files that are something else.


def test_every_difference_is_named(path: Path) -> None:
    ps.checkpoint.save(path, {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(())})
    with pytest.raises(ValueError, match="does not fit like") as refusal:
        ps.checkpoint.load(path, {"b": torch.ones(3, 1), "c": torch.tensor(1), "d": torch.ones(1)})
    assert str(refusal.value).split("\n  ") == [
        f"{path} does not fit like:",
        "tree['a'] has no place",
        "tree['b'] is torch.float32 of shape (3,), and torch.float32 of shape (3, 1) was expected",
        "tree['c'] is torch.float32 of shape (), and torch.int64 of shape () was expected",
        "tree['d'] is missing",
    ]


def assert_refused(path: Path, like: Any) -> None:
    with pytest.raises(
        ValueError, match=r"state is no checkpoint .* cut short or changed"
    ) as refusal:
        ps.checkpoint.load(path, like)
    assert str(path) in str(refusal.value)


STATE = {"w": torch.arange(5.0), "flags": torch.tensor([True, False, True]), "n": torch.tensor(3)}


def test_each_flipped_bit_is_noticed(path: Path) -> None:
    ps.checkpoint.save(path, STATE)
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            assert_refused(path, STATE)


def test_each_missing_or_further_byte_is_noticed(path: Path) -> None:
    ps.checkpoint.save(path, STATE)
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        assert_refused(path, STATE)
    path.write_bytes(whole + b"\0")
    assert_refused(path, STATE)
    path.write_bytes(b"\0" + whole)
    assert_refused(path, STATE)


def test_a_file_cut_short_is_noticed_where_memory_holds_what_is_missing(path: Path) -> None:
    zero = {"w": torch.zeros(2**22)}
    ps.checkpoint.save(path, zero)
    os.truncate(path, 2**22)
    assert_refused(path, zero)


def test_nothing_in_a_file_is_run(path: Path) -> None:
    bomb = path.with_name("bomb")
    pickled = pickle.dumps(Bomb(bomb))
    path.write_bytes(pickled)
    assert_refused(path, STATE)
    torch.save({"w": Bomb(bomb)}, path)
    assert_refused(path, STATE)
    safetensors.torch.save_file(STATE, path)
    assert_refused(path, STATE)
    assert not bomb.exists()
    pickle.loads(pickled)
    assert bomb.exists()


@pytest.mark.parametrize(
    "text",
    ["", "}", '},"x":1}', '},"x":{}}', '},"x":[]}', '},"x":{"dtype":"?","shape":[]}}', '},"x":' + "[" * 10**5],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_a_forged_header_is_refused(text: str, path: Path) -> None:
    """Even one whose checksum is right."""
    header = files.START + files.BLANK + b'"' + text.encode()
    sealed = files.START + b"%08x" % zlib.crc32(header) + header[len(files.START) + 8 :]
    path.write_bytes(len(sealed).to_bytes(8, "little") + sealed)
    assert_refused(path, STATE)


def test_what_is_no_file_is_named(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="state"):
        ps.checkpoint.load(path, STATE)


def test_a_dtype_that_no_file_holds_is_refused(path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"tree\['q'\] is torch.float4_e2m1fn_x2 of shape \(2,\), a dtype"
    ):
        ps.checkpoint.save(
            path, {"q": torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}
        )
    assert not path.exists()


# Saves that do not end well.


def contents(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


def test_a_file_is_replaced_as_a_whole_or_not_at_all(path: Path) -> None:
    path.write_text("old")

    def write(error: BaseException) -> None:
        with ps.checkpoint.replacing(path) as file:
            file.write(b"ne")
            assert len(contents(path.parent)) == 2
            raise error

    for error in (OSError("No space left on device"), KeyboardInterrupt(), ValueError("mine")):
        with pytest.raises(type(error)):
            write(error)
        assert contents(path.parent) == {"state": "old"}
    with ps.checkpoint.replacing(path) as file:
        file.write(b"new")
    assert contents(path.parent) == {"state": "new"}


@pytest.mark.parametrize("size", [0, 100, 5000, 4 * 10**5])
def test_a_full_disk_leaves_the_last_one(size: int, path: Path) -> None:
    ps.checkpoint.save(path, STATE)
    large = {"w": torch.randn(10**5)}
    with (
        room(size),
        pytest.raises(
            OSError, match=r"state cannot be written \(File too large\): .* has room"
        ) as refusal,
    ):
        ps.checkpoint.save(path, large)
    assert refusal.value.errno == errno.EFBIG
    assert [*path.parent.iterdir()] == [path]
    assert_same_bits(ps.checkpoint.load(path, STATE), STATE)


def test_what_cannot_be_written_is_refused_early(path: Path) -> None:
    path.write_text("old")
    for refuse in (ps.checkpoint.check_writable, lambda where: ps.checkpoint.save(where, STATE)):
        with pytest.raises(OSError, match=r"nowhere/state cannot be written \(No such file"):
            refuse(path.parent / "nowhere" / "state")
        with pytest.raises(OSError, match=r"cannot be written \(Not a directory\)"):
            refuse(path / "state")
        with pytest.raises(OSError, match=r"cannot be written \(Is a directory\)"):
            refuse(path.parent)
    ps.checkpoint.check_writable(path)
    ps.checkpoint.check_writable(path.with_name("new"))
    assert contents(path.parent) == {"state": "old"}


def test_leftovers_go_and_nothing_else_does(path: Path) -> None:
    others = [
        "state.unfinished",
        "state.0123abcX.unfinished",
        "other.0123abcd.unfinished",
        "state0123abcd.unfinished",
    ]
    for name in ["state.0123abcd.unfinished", *others]:
        path.with_name(name).write_text("killed")
    for write in (ps.checkpoint.check_writable, lambda where: ps.checkpoint.save(where, STATE)):
        path.with_name("state.0123abcd.unfinished").write_text("killed")
        write(path)
        assert {file.name for file in path.parent.iterdir()} - {"state"} == {*others}


def test_what_is_being_written_is_no_leftover(path: Path) -> None:
    with ps.checkpoint.replacing(path) as file:
        file.write(b"slow")
        ps.checkpoint.check_writable(path)
        ps.checkpoint.save(path, STATE)
        assert_same_bits(ps.checkpoint.load(path, STATE), STATE)
    assert contents(path.parent) == {"state": "slow"}


def test_two_savers_at_once(path: Path) -> None:
    """Whoever reads finds a whole one, of one of them, at every moment."""
    states = [{"w": torch.full((10**5,), float(i))} for i in range(4)]
    ps.checkpoint.save(path, states[0])
    errors: list[BaseException] = []

    def go_on(state: Any) -> None:
        try:
            for _ in range(15):
                ps.checkpoint.save(path, state)
        except BaseException as error:
            errors.append(error)

    savers = [threading.Thread(target=go_on, args=[state]) for state in states]
    for saver in savers:
        saver.start()
    while any(saver.is_alive() for saver in savers):
        (w,) = ps.checkpoint.load(path, states[0]).values()
        assert w.unique().numel() == 1
    for saver in savers:
        saver.join()
    assert not errors
    assert [*path.parent.iterdir()] == [path]


def test_what_is_replaced_keeps_its_rights_and_links_to_it(path: Path) -> None:
    """A private file stays private, and ``latest -> state`` goes on pointing to what is new."""
    latest = path.with_name("latest")
    latest.symlink_to(path.name)
    ps.checkpoint.save(latest, torch.tensor(1.0))
    assert latest.is_symlink()
    path.chmod(0o600)
    ps.checkpoint.save(latest, torch.tensor(2.0))
    assert latest.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    assert ps.checkpoint.load(path, torch.tensor(0.0)) == 2
    assert len([*path.parent.iterdir()]) == 2


def test_rights_are_those_of_any_new_file(path: Path) -> None:
    ps.checkpoint.save(path, STATE)
    path.with_name("plain").write_text("")
    assert path.stat().st_mode == path.with_name("plain").stat().st_mode


@pytest.mark.timeout(240)
def test_killed_again_and_again_it_ends_in_the_same_bits(tmp_path: Path) -> None:
    """T16 with processes: SIGKILL at random moments, also in the middle of a save."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.mortal", str(tmp_path)],
        capture_output=True, text=True, timeout=200, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    said = re.fullmatch(r"killed 20 times, (\d+) of them in the middle .* same bits\n", run.stdout)
    assert said
    assert int(said[1]) >= 8, "ten were to be"
