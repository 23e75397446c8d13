"""Tests checkpoints of one process: what is loaded, what is refused, and kills in the middle."""

import os
import pickle
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from torch import Tensor

import purestep as ps
from purestep import checkpoint, tree
from support.devices import get_device
from support.programs import run_program
from tests.checkpoint_states import (
    UNSUPPORTED_DTYPES,
    assert_same_bits,
    random_bits,
    state_of_all_dtypes,
    zeros_like,
)
from tests.memory import LiveBytes
from tests.sharded_checkpoints import (
    group_of_one,
    limit_file_size,
    list_files,
    make_axis,
)

ROOT = Path(__file__).parent.parent
STATE = {
    "w": torch.arange(5.0),
    "flags": torch.tensor([True, False, True]),
    "n": torch.tensor(3),
}


def check_load_fails(path: Path, state: Any, message: str) -> None:
    """Checks that loading raises this error."""
    with pytest.raises(ValueError, match=message):
        checkpoint.load(path, state)


STATES: list[Any] = [
    state_of_all_dtypes(),
    {},
    None,
    torch.tensor(1.5),
    [torch.ones(0)],
]


@pytest.mark.parametrize("state", STATES)
def test_a_saved_state_is_loaded_to_the_bit(state: Any, path: Path) -> None:
    """By safetensors alone, too; no other file is left."""
    like = zeros_like(state)

    checkpoint.save(path, state)
    loaded = checkpoint.load(str(path), like)

    assert_same_bits(loaded, state)
    assert not tree.any_requires_grad(loaded)
    leaves = zip(tree.leaves(loaded), tree.leaves(like), strict=True)
    for loaded_leaf, like_leaf in leaves:
        assert loaded_leaf.stride() == like_leaf.stride()
    assert_same_bits(safetensors.torch.load_file(path), ps.state_dict(state))
    assert list(path.parent.iterdir()) == [path]


def test_devices_follow_like(path: Path) -> None:
    w = STATE["w"]
    n = STATE["n"]
    state = {"w": w.to(get_device()), "n": n}

    checkpoint.save(path, state)
    loaded = checkpoint.load(path, zeros_like(state))

    loaded_w = loaded["w"]
    loaded_n = loaded["n"]
    assert loaded_w.device.type == get_device().type
    assert loaded_n.device.type == "cpu"
    assert_same_bits(loaded_w.cpu(), w)
    assert_same_bits(loaded_n, n)


STATE_BYTES = 4 * 2**18
ROWS = list(torch.randn(4, 2**16))
COLUMNS = list(torch.randn(4, 2**8, 2**8).transpose(1, 2))


@pytest.mark.parametrize(
    ("state", "bytes_to_save"), [(ROWS, 0), (COLUMNS, STATE_BYTES)]
)
def test_memory_to_save_and_to_load(
    state: list[Tensor], bytes_to_save: int, path: Path
) -> None:
    """Saving copies leaves that are not contiguous.

    Loading takes the loaded state, and one leaf more.
    """
    with LiveBytes() as live:
        checkpoint.save(path, state)
    assert live.peak == bytes_to_save

    with LiveBytes() as live:
        loaded = checkpoint.load(path, state)
    assert live.peak <= STATE_BYTES + STATE_BYTES // 4
    assert_same_bits(loaded, state)


def test_memory_to_save_in_the_background(path: Path) -> None:
    """One copy of the state, to which later saves write again."""
    ones = [torch.ones(3)] * 4
    with checkpoint.AsyncCheckpointer() as background:
        with LiveBytes() as live:
            background.save(path, ROWS)
        assert live.peak == STATE_BYTES
        with LiveBytes() as live:
            background.save(path, ROWS)
        assert live.peak == 0
        background.save(path, ones)

    loaded = checkpoint.load(path, [torch.zeros(3)] * 4)
    assert_same_bits(loaded, ones)


def test_a_sharded_state_of_an_optimizer_of_torch(path: Path) -> None:
    """Counts lie next to the shards, in a ``Shard`` that holds a dict."""
    optimizer = ps.optim.from_torch(torch.optim.Adam)
    params = {"w": random_bits(torch.float32, 4, 3), "v": torch.ones(3)}
    with group_of_one():
        full = optimizer.init(params)
        sharded = optimizer.init(ps.shard(params, make_axis()))
        checkpoint.save(path, tree.map(torch.ones_like, sharded))
        for like in (full, sharded):
            loaded = checkpoint.load(path, like)
            _, loaded_structure = tree.flatten(loaded)
            _, structure = tree.flatten(like)
            assert loaded_structure == structure
            assert_same_bits(loaded, tree.map(torch.ones_like, like))


def test_each_changed_missing_or_further_byte_is_noticed(path: Path) -> None:
    """Except in a word on which nothing depends."""
    checkpoint.save(path, STATE)
    content = path.read_bytes()
    unused_word = b'"format":"pt"'
    start = content.index(unused_word)
    unused = range(start, start + len(unused_word))
    damaged = [content + b"\0", b"\0" + content]
    for i, byte in enumerate(content):
        before = content[:i]
        damaged.append(before)
        if i not in unused:
            changed = bytes([byte ^ 1 << i % 8])
            damaged.append(before + changed + content[i + 1 :])
    for damaged_content in damaged:
        path.write_bytes(damaged_content)
        check_load_fails(path, STATE, re.escape(str(path)))


def test_the_checksum_covers_the_bytes_before_an_empty_tensor(path: Path) -> None:
    """Given a null pointer, crc32 begins again at 0."""
    state = {
        "w": torch.ones(100),
        "x": torch.empty(0),
        "y": torch.ones(3),
        "z": torch.empty(2, 0),
    }
    checkpoint.save(path, state)
    assert_same_bits(checkpoint.load(path, state), state)
    content = bytearray(path.read_bytes())
    size_of_tensors = 4 * (100 + 3)
    for i in range(len(content) - size_of_tensors, len(content)):
        content[i] ^= 64
        path.write_bytes(content)
        check_load_fails(path, state, re.escape(str(path)))
        content[i] ^= 64


class Bomb(NamedTuple):
    """Makes a folder when it is unpickled."""

    folder: Path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_a_file_that_is_no_checkpoint_is_refused_and_not_run(path: Path) -> None:
    bomb = path.with_name("bomb")
    damaged = r"state is no checkpoint .* cut short or changed"

    path.write_bytes(pickle.dumps(Bomb(bomb)))
    check_load_fails(path, STATE, damaged)
    torch.save({"w": Bomb(bomb)}, path)
    check_load_fails(path, STATE, damaged)
    assert not bomb.exists()

    safetensors.torch.save_file(ps.state_dict(STATE), path)
    check_load_fails(path, STATE, damaged)

    path.unlink()
    with pytest.raises(FileNotFoundError, match="state"):
        checkpoint.load(path, STATE)


def test_a_path_that_cannot_be_read_is_no_missing_file(path: Path) -> None:
    """A program that starts anew where no file is must not do so here."""
    checkpoint.save(path, STATE)
    with pytest.raises(NotADirectoryError, match="state/below"):
        checkpoint.load(path / "below", STATE)


def test_export_writes_what_other_libraries_read(path: Path) -> None:
    """Also tensors that share memory, or are not contiguous."""
    w = random_bits(torch.bfloat16, 7, 3)
    model = {
        "wte.weight": w,
        "head": w,
        "rows": w.T,
        "b": random_bits(torch.float32),
    }

    checkpoint.export_safetensors(path, model)

    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"
    assert_same_bits(safetensors.torch.load_file(path), model)


NOT_EXPORTED: list[tuple[Any, str]] = [
    ({"a": {"b": torch.ones(2)}}, "'a' is dict, no tensor"),
    ({"a": None}, "'a' is NoneType, no tensor"),
    (
        {"__metadata__": torch.ones(2)},
        "'__metadata__' is the name of something else",
    ),
    ({0: torch.ones(2)}, "has the key 0: names in files are texts"),
    ({"w": torch.ones(2), 0: None}, "has the key 0"),
    ([("w", torch.ones(2))], "must be a dict of tensors by name, got list"),
    ("model", "got str: pass the params"),
]


@pytest.mark.parametrize(("model", "message"), NOT_EXPORTED)
def test_export_refuses(model: Any, message: str, path: Path) -> None:
    """Refuses what other libraries would mistake, and keeps the file that is there."""
    checkpoint.export_safetensors(path, STATE)
    with pytest.raises(TypeError, match=message):
        checkpoint.export_safetensors(path, model)
    assert_same_bits(safetensors.torch.load_file(path), STATE)


NO_ROOM = r"state .*File too large.*has room"
NO_DTYPE = "Unknown dtype .*Supported dtypes"


def check_save_fails(path: Path, message: str, save: Callable[[], Any]) -> None:
    """Checks that saving fails, and leaves the state that was saved before alone."""
    checkpoint.save(path, STATE)
    message = rf"(?=.* cannot be written \(.*\): name a file).*{message}"
    with pytest.raises(OSError, match=message):
        save()
    assert list(path.parent.iterdir()) == [path]
    assert_same_bits(checkpoint.load(path, STATE), STATE)


@pytest.mark.parametrize("size", [0, 100, 5000, 4 * 10**5])
def test_a_full_disk(size: int, path: Path) -> None:
    def save() -> None:
        with limit_file_size(size):
            checkpoint.save(path, {"w": torch.randn(10**5)})

    check_save_fails(path, NO_ROOM, save)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", [*UNSUPPORTED_DTYPES, torch.float4_e2m1fn_x2])
def test_a_dtype_that_no_file_holds(dtype: torch.dtype, path: Path) -> None:
    tensor = torch.empty(2, dtype=dtype)
    check_save_fails(path, NO_DTYPE, lambda: checkpoint.save(path, tensor))


WRONG_PATHS: list[tuple[Callable[[Path], Path], str]] = [
    (
        lambda path: path.parent / "nowhere" / "state",
        r"nowhere/state .*No such file",
    ),
    (lambda path: path / "state", r"state/state .*Not a directory"),
    (lambda path: path.parent, r"Is a directory.*with Shard makes a folder"),
]


@pytest.mark.parametrize(("make_path", "message"), WRONG_PATHS)
def test_a_path_that_cannot_be_written(
    make_path: Callable[[Path], Path], message: str, path: Path
) -> None:
    wrong_path = make_path(path)
    check_save_fails(path, message, lambda: checkpoint.save(wrong_path, STATE))


def test_the_background_saves_the_state_at_the_call(path: Path) -> None:
    """Later writes to the state are not saved; T16 proves it of shards on ranks."""
    paths = [path.with_name("file0"), path.with_name("file1")]
    state = {"w": torch.ones(1000)}
    with checkpoint.AsyncCheckpointer() as background:
        for file in paths:
            background.save(file, state)
            state["w"].mul_(2)

    for number, file in enumerate(paths):
        loaded = checkpoint.load(file, {"w": torch.zeros(1000)})
        expected = torch.full((1000,), 2.0**number)
        assert torch.equal(loaded["w"], expected)


def test_errors_of_the_background_are_raised_once(path: Path) -> None:
    """By the next call, by ``wait``, or at the end of the block."""
    nowhere = path / "nowhere"
    background = checkpoint.AsyncCheckpointer()

    background.save(nowhere, STATE)
    with pytest.raises(OSError, match="nowhere cannot be written"):
        background.wait()
    background.wait()

    background.save(nowhere, STATE)
    with pytest.raises(OSError, match="nowhere cannot be written"):
        background.save(path, STATE)
    background.wait()

    with pytest.raises(OSError, match="nowhere"), background:
        background.save(nowhere, STATE)


def test_errors_of_the_block_go_before_those_of_the_background(path: Path) -> None:
    """The save that is in progress is completed."""
    background = checkpoint.AsyncCheckpointer()
    for file in (path / "nowhere", path):
        background.save(file, STATE)
        with pytest.raises(KeyboardInterrupt), background:
            raise KeyboardInterrupt
    assert_same_bits(checkpoint.load(path, STATE), STATE)


def test_the_background_refuses_at_the_call(path: Path) -> None:
    background = checkpoint.AsyncCheckpointer()
    with pytest.raises(TypeError, match=r"tree\['w'\] is int, no tensor"):
        background.save(path, {"w": 1})
    with pytest.raises(ValueError, match="step=-1 must be a whole number, 0 or more"):
        background.save_step(path, -1, STATE)


def test_two_savers_at_once(path: Path) -> None:
    """At every moment, a reader finds the full state of one of them."""
    ones = torch.ones(10**5)
    states = [0 * ones, ones, 2 * ones, 3 * ones]
    checkpoint.save(path, states[0])

    def save_often(state: Any) -> None:
        for _ in range(15):
            checkpoint.save(path, state)

    with ThreadPoolExecutor(4) as pool:
        savers = [pool.submit(save_often, state) for state in states]
        while not all(saver.done() for saver in savers):
            loaded = checkpoint.load(path, states[0])
            assert loaded.unique().numel() == 1
    for saver in savers:
        assert saver.result() is None
    assert list(path.parent.iterdir()) == [path]


def test_permissions_and_links_stay(path: Path) -> None:
    """A private file stays private, and a link points to the new state.

    A new file has the permissions of any other.
    """
    link = path.with_name("latest")
    plain = path.with_name("plain")
    plain.write_text("")
    link.symlink_to(path.name)

    checkpoint.save(link, torch.tensor(1.0))
    assert path.stat().st_mode == plain.stat().st_mode

    path.chmod(0o600)
    checkpoint.save(link, torch.tensor(2.0))
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    assert checkpoint.load(path, torch.tensor(0.0)) == 2
    assert set(path.parent.iterdir()) == {path, link, plain}


LEFT_BY_KILLED_PROGRAMS = ["00000004.0123abcd.unfinished", "00000003.unfinished"]
NO_STEPS = [
    "999999999.0123abcd.unfinished",
    "mine.unfinished",
    "7.unfinished",
    "00000001-copy.unfinished",
]
FILES_OF_OTHERS = ["notes", "7", "00000001.txt", "00000002.unfinished"]


def test_the_last_steps_are_kept(tmp_path: Path) -> None:
    """Other files stay, and what a killed program left is removed with its step."""
    folder = tmp_path / "run"
    state = {"w": torch.ones(1)}
    assert checkpoint.latest_checkpoint(folder) is None
    checkpoint.save_step(folder, 5, state)
    for name in [*LEFT_BY_KILLED_PROGRAMS, *NO_STEPS]:
        (folder / name).mkdir()
    (folder / LEFT_BY_KILLED_PROGRAMS[0] / "new").write_text("killed")
    for name in FILES_OF_OTHERS:
        (folder / name).write_text("mine")

    for step in (7, 20, 20, 21):
        checkpoint.save_step(folder, step, state, keep=9)
    with checkpoint.AsyncCheckpointer() as background:
        background.save_step(folder, 100000000, state)

    steps = {"00000020", "00000021", "100000000"}
    others = {"notes", "7", "00000001.txt"}
    assert list_files(folder) == steps | others | set(NO_STEPS)
    assert checkpoint.latest_checkpoint(folder) == folder / "100000000"
    with pytest.raises(OSError, match=r"notes cannot be written \(File exists\)"):
        checkpoint.save_step(folder / "notes", 1, state)


def test_a_folder_that_a_killed_save_left_stops_no_later_save(tmp_path: Path) -> None:
    """A resumed run saves that step as a file; later the file gets the name of the folder."""
    left = tmp_path / "00000001.unfinished"
    left.mkdir()
    (left / "__0_0.distcp").write_text("killed")

    for step in (1, 2, 3):
        checkpoint.save_step(tmp_path, step, STATE, keep=1)

    assert list_files(tmp_path) == {"00000003"}


NO_NUMBER = "must be a whole number, [01] or more"
LATER = r"run holds step 100000000, which is later than 30: .*remove what is later"
WRONG_STEPS: list[dict[str, Any]] = [
    {"step": True, "keep": 1, "message": NO_NUMBER},
    {"step": 1.0, "keep": 1, "message": NO_NUMBER},
    {"step": 1, "keep": 0, "message": NO_NUMBER},
    {"step": 1, "keep": None, "message": NO_NUMBER},
    {"step": 30, "keep": 1, "message": LATER},
]


@pytest.mark.parametrize("case", WRONG_STEPS)
def test_save_step_refuses(case: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    state = {"w": torch.ones(1)}
    checkpoint.save_step(folder, 21, state, keep=9)
    checkpoint.save_step(folder, 100000000, state, keep=9)
    before = list_files(folder)

    with pytest.raises(ValueError, match=case["message"]):
        checkpoint.save_step(folder, case["step"], state, case["keep"])

    assert list_files(folder) == before


def test_programs_that_save_in_one_folder(tmp_path: Path) -> None:
    """Each removes files that the others may have removed."""
    state = {"w": torch.ones(3)}

    def save(step: int) -> None:
        checkpoint.save_step(tmp_path, step, state, keep=1)

    with ThreadPoolExecutor(4) as pool:
        for step in range(20):
            results = pool.map(save, [step] * 4)
            assert list(results) == [None] * 4
    assert list_files(tmp_path) == {"00000019"}


@pytest.mark.timeout(240)
def test_killed_again_and_again_it_ends_in_the_same_bits(tmp_path: Path) -> None:
    """Tests T16 with processes: SIGKILL of one or all at random, also while they save."""
    command = ["-m", "tests.killed_training", str(tmp_path)]
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run = run_program(command, ROOT, variables, timeout=200)
    assert run.returncode == 0, run.stderr
    report = r"killed 8 times, (\d+) of them in the middle .* same bits\n"
    match = re.fullmatch(report, run.stdout)
    assert match
    killed_in_the_middle = int(match[1])
    assert killed_in_the_middle >= 3, "half were to be"
