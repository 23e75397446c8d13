"""Checkpoints of one process: what comes back, what is refused, and who may die in the middle."""

import os
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from torch import Tensor

import purestep as ps
from proofs.devices import device
from purestep import tree
from tests.held_by_ranks import axis, files, group_of_one, room
from tests.memory import LiveBytes
from tests.states import COMPLEX, anything, assert_same_bits, noise, zeros

ROOT = Path(__file__).parent.parent
STATE = {
    "w": torch.arange(5.0),
    "flags": torch.tensor([True, False, True]),
    "n": torch.tensor(3),
}
DAMAGED = r"state is no checkpoint .* cut short or changed"


@pytest.mark.parametrize(
    "state", [anything(), {}, None, torch.tensor(1.5), [torch.ones(0)]]
)
def test_what_is_saved_comes_back_to_the_bit(state: Any, path: Path) -> None:
    """By safetensors alone, too; and nothing else is left."""
    ps.checkpoint.save(path, state)
    found = ps.checkpoint.load(str(path), zeros(state))
    assert_same_bits(found, state)
    assert not tree.any_requires_grad(found)
    for one, two in zip(tree.leaves(found), tree.leaves(zeros(state)), strict=True):
        assert one.stride() == two.stride()
    assert_same_bits(safetensors.torch.load_file(path), ps.state_dict(state))
    assert [*path.parent.iterdir()] == [path]


def test_devices_follow_like(path: Path) -> None:
    there = {"w": STATE["w"].to(device()), "n": STATE["n"]}
    ps.checkpoint.save(path, there)
    found = ps.checkpoint.load(path, zeros(there))
    assert [found[name].device.type for name in "wn"] == [device().type, "cpu"]
    assert_same_bits(tree.map(Tensor.cpu, found), tree.map(Tensor.cpu, there))


def test_what_is_held_in_memory(path: Path) -> None:
    """Copies of the leaves that lie otherwise; what is loaded, with one leaf more; one copy of the state in the background."""
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
    with ps.checkpoint.AsyncCheckpointer() as background:
        for most in (size, 0):  # Into the same memory.
            with LiveBytes() as live:
                background.save(path, [*rows])
            assert live.peak == most
        background.save(path, [torch.ones(3)] * 4)
    assert_same_bits(
        ps.checkpoint.load(path, [torch.zeros(3)] * 4), [torch.ones(3)] * 4
    )


def test_state_in_pieces_of_an_optimizer_of_torch(path: Path) -> None:
    """Counts stand beside the pieces, in a ``Shard`` that holds a dict."""
    optimizer = ps.optim.from_torch(torch.optim.Adam)
    params = {"w": noise(torch.float32, 4, 3), "v": torch.ones(3)}
    with group_of_one():
        whole, pieces = (optimizer.init(p) for p in (params, ps.shard(params, axis())))
        ps.checkpoint.save(path, tree.map(torch.ones_like, pieces))
        for like in (whole, pieces):
            found = ps.checkpoint.load(path, like)
            assert tree.flatten(found)[1] == tree.flatten(like)[1]
            assert_same_bits(found, tree.map(torch.ones_like, like))


def test_each_changed_missing_or_further_byte_is_noticed(path: Path) -> None:
    """But for a word on which nothing depends."""
    ps.checkpoint.save(path, STATE)
    content = path.read_bytes()
    before, word, _ = content.partition(b'"format":"pt"')
    changes = [content + b"\0", b"\0" + content]
    for place, byte in enumerate(content):
        changes.append(content[:place])
        if not len(before) <= place < len(before + word):
            changed = bytes([byte ^ 1 << place % 8])
            changes.append(content[:place] + changed + content[place + 1 :])
    for change in changes:
        path.write_bytes(change)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            ps.checkpoint.load(path, STATE)


def test_the_checksum_covers_what_stands_before_an_empty_tensor(path: Path) -> None:
    """Of a null pointer, crc32 begins again at 0."""
    state = {
        "w": torch.ones(100),
        "x": torch.empty(0),
        "y": torch.ones(3),
        "z": torch.empty(2, 0),
    }
    ps.checkpoint.save(path, state)
    assert_same_bits(ps.checkpoint.load(path, state), state)
    content = bytearray(path.read_bytes())
    for place in range(len(content) - 4 * 103, len(content)):
        content[place] ^= 64
        path.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            ps.checkpoint.load(path, state)
        content[place] ^= 64


class Bomb(NamedTuple):
    """To unpickle this makes a folder."""

    folder: Path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_what_is_no_checkpoint_is_refused_and_not_run(path: Path) -> None:
    bomb = path.with_name("bomb")
    path.write_bytes(pickle.dumps(Bomb(bomb)))
    plain = partial(safetensors.torch.save_file, ps.state_dict(STATE), path)
    for write in (lambda: None, partial(torch.save, {"w": Bomb(bomb)}, path), plain):
        write()
        with pytest.raises(ValueError, match=DAMAGED):
            ps.checkpoint.load(path, STATE)
    assert not bomb.exists()
    path.unlink()
    with pytest.raises(FileNotFoundError, match="state"):
        ps.checkpoint.load(path, STATE)


def test_export_writes_what_others_read(path: Path) -> None:
    """Tensors that share memory, or lie otherwise, too; what others would mistake is refused."""
    w, one = noise(torch.bfloat16, 7, 3), torch.ones(2)
    model = {"wte.weight": w, "head": w, "rows": w.T, "b": noise(torch.float32)}
    ps.checkpoint.export_safetensors(path, model)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"
    refusals: dict[str, Any] = {
        "'a' is dict, no tensor": {"a": {"b": one}}, "'a' is NoneType, no tensor": {"a": None},
        "'__metadata__' is the name of something else": {"__metadata__": one}, "'int' object": {0: one},
    }  # fmt: skip
    for text, wrong in refusals.items():
        with pytest.raises(TypeError, match=text):
            ps.checkpoint.export_safetensors(path, wrong)
    assert_same_bits(safetensors.torch.load_file(path), model)


def full_disk(path: Path, size: int) -> None:
    with room(size):
        ps.checkpoint.save(path, {"w": torch.randn(10**5)})


FAILS: list[tuple[Any, str]] = [
    *((lambda path, size=size: full_disk(path, size), r"state .*File too large.*has room") for size in (0, 100, 5000, 4 * 10**5)),
    (lambda path: ps.checkpoint.save(path.parent / "nowhere" / "state", STATE), r"nowhere/state .*No such file"),
    (lambda path: ps.checkpoint.save(path / "state", STATE), r"state/state .*Not a directory"),
    (lambda path: ps.checkpoint.save(path.parent, STATE), r"Is a directory.*with Shard makes a folder"),
    *((lambda path, d=d: ps.checkpoint.save(path, torch.empty(2, dtype=d)), "Unknown dtype .*Supported dtypes") for d in (*COMPLEX, torch.float4_e2m1fn_x2)),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize(("act", "text"), FAILS)
def test_what_cannot_be_written_leaves_all_as_it_was(
    act: Any, text: str, path: Path
) -> None:
    ps.checkpoint.save(path, STATE)
    with pytest.raises(
        OSError, match=rf"(?=.* cannot be written \(.*\): name a file).*{text}"
    ):
        act(path)
    assert [*path.parent.iterdir()] == [path]
    assert_same_bits(ps.checkpoint.load(path, STATE), STATE)


def test_what_is_saved_in_the_background_is_what_it_was(path: Path) -> None:
    """Though it is written to; T16 says so of pieces on ranks."""
    with ps.checkpoint.AsyncCheckpointer() as background:
        state = {"w": torch.ones(1000)}
        for number in range(2):
            background.save(path.with_name(f"file{number}"), state)
            state["w"].mul_(2)
    for number in range(2):
        found = ps.checkpoint.load(
            path.with_name(f"file{number}"), {"w": torch.zeros(1000)}
        )
        assert torch.equal(found["w"], torch.full((1000,), 2.0**number))


def test_what_goes_wrong_in_the_background_is_raised_once(path: Path) -> None:
    """By the next call, by ``wait``, or at the end of the block, unless that has an error."""
    nowhere, background = path / "nowhere", ps.checkpoint.AsyncCheckpointer()
    for act in (background.wait, lambda: background.save(path, STATE)):
        background.save(nowhere, STATE)
        with pytest.raises(OSError, match="nowhere cannot be written"):
            act()
        background.wait()
    with pytest.raises(OSError, match="nowhere"), background:
        background.save(nowhere, STATE)

    for place in (nowhere, path):
        background.save(place, STATE)
        with pytest.raises(KeyboardInterrupt), background:
            raise KeyboardInterrupt
    assert_same_bits(ps.checkpoint.load(path, STATE), STATE)
    with pytest.raises(TypeError, match=r"tree\['w'\] is int, no tensor"):
        background.save(path, {"w": 1})
    with pytest.raises(ValueError, match="step=-1 must be a whole number, 0 or more"):
        background.save_step(path, -1, STATE)


def test_two_savers_at_once(path: Path) -> None:
    """At every moment, a reader finds a whole one, of one of them."""
    states = [torch.full((10**5,), float(i)) for i in range(4)]
    ps.checkpoint.save(path, states[0])

    def go_on(state: Any) -> None:
        for _ in range(15):
            ps.checkpoint.save(path, state)

    with ThreadPoolExecutor(4) as pool:
        savers = [pool.submit(go_on, state) for state in states]
        while not all(saver.done() for saver in savers):
            assert ps.checkpoint.load(path, states[0]).unique().numel() == 1
    assert [saver.result() for saver in savers] == [None] * 4
    assert [*path.parent.iterdir()] == [path]


def test_rights_and_links_stay(path: Path) -> None:
    """A private file stays private, ``latest -> state`` points to what is new, and a new file is as any."""
    latest, plain = path.with_name("latest"), path.with_name("plain")
    plain.write_text("")
    latest.symlink_to(path.name)
    ps.checkpoint.save(latest, torch.tensor(1.0))
    assert path.stat().st_mode == plain.stat().st_mode
    path.chmod(0o600)
    ps.checkpoint.save(latest, torch.tensor(2.0))
    assert latest.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    assert ps.checkpoint.load(path, torch.tensor(0.0)) == 2
    assert {*path.parent.iterdir()} == {path, latest, plain}


def test_the_last_steps_are_kept(tmp_path: Path) -> None:
    """What is not a checkpoint stays, and what a killed program left goes with its step."""
    folder, state = tmp_path / "run", {"w": torch.ones(1)}
    assert ps.checkpoint.latest_checkpoint(folder) is None
    ps.checkpoint.save_step(folder, 5, state)
    left = ["00000004.0123abcd", "00000003"]
    kept = ["999999999.0123abcd", "mine", "7"]
    for name in [*left, *kept]:
        (folder / f"{name}.unfinished").mkdir()
    (folder / f"{left[0]}.unfinished" / "new").write_text("killed")
    for name in ("notes", "7", "00000001.txt", "00000002.unfinished"):
        (folder / name).write_text("mine")
    for step in (7, 20, 20, 21):
        ps.checkpoint.save_step(folder, step, state, keep=9)
    with ps.checkpoint.AsyncCheckpointer() as background:
        background.save_step(folder, 100000000, state)
    expected = {"00000020", "00000021", "100000000", "notes", "7", "00000001.txt"}
    expected |= {f"{name}.unfinished" for name in kept}
    assert files(folder) == expected
    assert ps.checkpoint.latest_checkpoint(folder) == folder / "100000000"
    wrong: list[tuple[Any, Any, str]] = [
        *((*pair, "must be a whole number, [01] or more") for pair in [(True, 1), (1.0, 1), (1, 0), (1, None)]),
        (30, 1, r"run holds step 100000000, which is later than 30: remove"),
    ]  # fmt: skip
    for step, keep, text in wrong:
        with pytest.raises(ValueError, match=text):
            ps.checkpoint.save_step(folder, step, state, keep)
    assert files(folder) == expected
    with pytest.raises(OSError, match=r"notes cannot be written \(File exists\)"):
        ps.checkpoint.save_step(folder / "notes", 1, state)


def test_programs_that_save_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    """Each removes what the others may have removed."""
    with ThreadPoolExecutor(4) as pool:
        for step in range(20):
            save = partial(
                ps.checkpoint.save_step, tmp_path, step, {"w": torch.ones(3)}, keep=1
            )
            assert [*pool.map(lambda _, save=save: save(), range(4))] == [None] * 4
    assert files(tmp_path) == {"00000019"}


@pytest.mark.timeout(240)
def test_killed_again_and_again_it_ends_in_the_same_bits(tmp_path: Path) -> None:
    """T16 with processes: SIGKILL of one or all at random moments, also in the middle of a save."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.mortal", str(tmp_path)],
        capture_output=True, text=True, timeout=200, cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    said = re.fullmatch(
        r"killed 24 times, (\d+) of them in the middle .* same bits\n", run.stdout
    )
    assert said
    assert int(said[1]) >= 8, "ten were to be"
