"""Checkpoints: what comes back, what is refused, and who may die in the middle."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import purestep as ps
from proofs.devices import lazy
from purestep import tree
from tests.hazards import Bomb, room
from tests.held_by_ranks import axis
from tests.memory import LiveBytes
from tests.states import COMPLEX, anything, assert_same_bits, noise, zeros

ROOT = Path(__file__).parent.parent


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


def test_safetensors_opens_it(path: Path) -> None:
    state = anything()
    ps.checkpoint.save(path, state)
    assert_same_bits(safetensors.torch.load_file(path), ps.state_dict(state))
    assert_same_bits(ps.load_state_dict(zeros(state), safetensors.torch.load_file(path)), state)


def test_devices_follow_like(path: Path) -> None:
    state = {"w": torch.randn(3), "n": torch.tensor(2)}
    there = {"w": state["w"].to(lazy()), "n": state["n"]}
    ps.checkpoint.save(path, there)
    assert_same_bits(ps.checkpoint.load(path, zeros(state)), state)
    found = ps.checkpoint.load(path, zeros(there))
    assert [found[name].device.type for name in "wn"] == ["lazy", "cpu"]
    assert_same_bits(tree.map(Tensor.cpu, found), state)


def test_what_is_held_in_memory(path: Path) -> None:
    """Copies of the leaves that lie otherwise; and what is loaded, with one leaf more."""
    size = 4 * 2**18
    rows, columns = torch.randn(4, 2**16), torch.randn(4, 2**8, 2**8).transpose(1, 2)
    for state, most in [([*rows], 0), ([*columns], size)]:
        with LiveBytes() as live:
            ps.checkpoint.save(path, state)
        assert live.peak == most
        with LiveBytes() as live:
            found = ps.checkpoint.load(path, state)
        assert live.peak <= size + size // 4
        assert_same_bits(found, state)


def test_state_in_pieces_of_an_optimizer_of_torch(path: Path) -> None:
    """Counts stand beside the pieces, in a ``Shard`` that holds a dict."""
    place: Any = {"init_method": f"file://{path}.store", "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("gloo", **place)
    try:
        optimizer = ps.optim.from_torch(torch.optim.Adam)
        params = {"w": noise(torch.float32, 4, 3), "v": torch.ones(3)}
        whole, pieces = (optimizer.init(p) for p in (params, ps.shard(params, axis())))
        ps.checkpoint.save(path, tree.map(torch.ones_like, pieces))
        for like in (whole, pieces):
            found = ps.checkpoint.load(path, like)
            assert tree.flatten(found)[1] == tree.flatten(like)[1]
            assert_same_bits(found, tree.map(torch.ones_like, like))
    finally:
        torch.distributed.destroy_process_group()


# Files that are something else.


def test_every_difference_is_named(path: Path) -> None:
    ps.checkpoint.save(path, {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(())})
    with pytest.raises(ValueError, match="does not fit like") as refusal:
        ps.checkpoint.load(path, {"b": torch.ones(3, 1), "c": torch.tensor(1), "d": torch.ones(1)})
    assert str(refusal.value).split("\n  ") == [
        f"{path} does not fit like: build like as the saved tree was",
        "tree['a'] is torch.float32 of shape (2,); like has no such leaf",
        "tree['b'] is torch.float32 of shape (3,); like has torch.float32 of shape (3, 1)",
        "tree['c'] is torch.float32 of shape (); like has torch.int64 of shape ()",
        "tree['d'] is missing; like has torch.float32 of shape (1,)",
    ]


def assert_refused(path: Path, like: Any) -> None:
    with pytest.raises(
        ValueError, match=r"state is no checkpoint .* cut short or changed"
    ) as refusal:
        ps.checkpoint.load(path, like)
    assert str(path) in str(refusal.value)


STATE = {"w": torch.arange(5.0), "flags": torch.tensor([True, False, True]), "n": torch.tensor(3)}


def test_no_flipped_bit_changes_what_comes_back(path: Path) -> None:
    """Refused by the file's name, but for those of a word that nothing depends on."""
    ps.checkpoint.save(path, STATE)
    whole = path.read_bytes()
    accepted, refusals = set(), []
    for place in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            try:
                found = ps.checkpoint.load(path, STATE)
            except ValueError as refusal:
                refusals.append(str(refusal))
            else:
                assert_same_bits(found, STATE)
                accepted.add(place)
    assert all(str(path) in refusal for refusal in refusals)
    note = whole.index(b'"format":"pt"')
    assert accepted <= {*range(note, note + len(b'"format":"pt"'))}


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


def test_what_is_no_checkpoint_is_refused_and_not_run(path: Path) -> None:
    bomb = path.with_name("bomb")
    pickled = pickle.dumps(Bomb(bomb))
    path.write_bytes(pickled)
    assert_refused(path, STATE)
    torch.save({"w": Bomb(bomb)}, path)
    assert_refused(path, STATE)
    safetensors.torch.save_file(ps.state_dict(STATE), path)
    assert_refused(path, STATE)
    assert not bomb.exists()
    pickle.loads(pickled)
    assert bomb.exists()
    path.unlink()
    with pytest.raises(FileNotFoundError, match="state"):
        ps.checkpoint.load(path, STATE)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", [*COMPLEX, torch.float4_e2m1fn_x2])
def test_a_dtype_that_no_file_holds_is_refused(dtype: torch.dtype, path: Path) -> None:
    with pytest.raises(TypeError, match=r"tree\['q'\] is torch.* of shape \(2,\), a dtype that"):
        ps.checkpoint.save(path, {"q": torch.empty(2, dtype=dtype)})
    assert not [*path.parent.iterdir()]


def test_export_writes_what_others_read(path: Path) -> None:
    """Tensors that share memory, or lie otherwise, too; names that others would mistake are refused."""
    w = noise(torch.bfloat16, 7, 3)
    model = {"wte.weight": w, "head": w, "rows": w.T, "b": noise(torch.float32)}
    ps.checkpoint.export(path, model)
    assert_same_bits(safetensors.torch.load_file(path), model)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"
    one = torch.ones(2)
    refused: list[tuple[Any, str]] = [
        ([model], "with names .* and here is <class 'list'>"),
        ({"a": {"b": 1}}, "a is dict, no tensor"),
        ({"a": {"b": one, "c": one}}, "a is dict, no tensor"),
        ({"__metadata__": one}, "and here is '__metadata__'"),
        ({0: one, "0": one}, "and here is 0"),
        ({None: one}, "and here is None"),
    ]
    for wrong, text in refused:
        with pytest.raises(TypeError, match=text):
            ps.checkpoint.export(path, wrong)
    assert_same_bits(safetensors.torch.load_file(path), model)


# Saves that do not end well.


@pytest.mark.parametrize("size", [0, 100, 5000, 4 * 10**5])
def test_a_full_disk_leaves_the_last_one(size: int, path: Path) -> None:
    ps.checkpoint.save(path, STATE)
    large = {"w": torch.randn(10**5)}
    with (
        room(size),
        pytest.raises(OSError, match=r"state cannot be written \(.*File too large.*has room"),
    ):
        ps.checkpoint.save(path, large)
    assert [*path.parent.iterdir()] == [path]
    assert_same_bits(ps.checkpoint.load(path, STATE), STATE)


def test_what_cannot_be_written_is_refused_and_leaves_all_as_it_was(path: Path) -> None:
    path.write_text("old")
    for place, reason in [
        (path.parent / "nowhere" / "state", "No such file or directory"),
        (path / "state", "Not a directory"),
        (path.parent, "Is a directory"),
    ]:
        with pytest.raises(OSError, match=rf"cannot be written \({reason}\): name") as refusal:
            ps.checkpoint.save(place, STATE)
        assert str(place) in str(refusal.value)
    assert [*path.parent.iterdir()] == [path]
    assert path.read_text() == "old"


def test_two_savers_at_once(path: Path) -> None:
    """At every moment, a reader finds a whole one, of one of them."""
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
