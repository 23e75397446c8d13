"""The examples as users start them: real processes, which may be killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from purestep import tree
from purestep.examples import elastic

ROOT = Path(__file__).parent.parent
TRAINING = ["-m", "purestep.examples.docstrings", "--steps", "80", "--examples", "4"]
PATIENCE = 120  # seconds, on a machine that is busy with other tests
LOOPBACK = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": socket.if_nameindex()[0][1]}


class Run:
    """A program under ``torchrun`` on two ranks, and what it has printed."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        with self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, "--nproc-per-node", "2", *arguments],
                stdout=stdout, stderr=stderr, env=os.environ | LOOPBACK, cwd=ROOT,
            )  # fmt: skip

    @property
    def stdout(self) -> str:
        return self._stdout.read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        return self._stderr.read_text(encoding="utf-8")

    @property
    def fingerprints(self) -> set[str]:
        return set(re.findall(r"^parameters sha256 ([0-9a-f]{12})$", self.stdout, re.M))

    def workers(self) -> set[int]:
        """The living processes whose parent is ``torchrun``, as /proc says."""
        found = set()
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it has ended since
                state, parent, *_ = stat.read_text().rpartition(")")[2].split()
                if int(parent) == self.process.pid and state != "Z":
                    found.add(int(stat.parent.name))
        return found

    def wait_until(self, happened: Callable[[], bool]) -> None:
        """Waits for what has to happen before the program ends."""
        deadline = time.monotonic() + PATIENCE
        while not happened():
            assert self.process.poll() is None, f"it ended first\n{self.stderr}"
            assert time.monotonic() < deadline, f"it did not happen\n{self.stderr}"
            time.sleep(0.01)


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[Run]:
    """A run that has ended when the block has, whatever happens in it."""
    run = Run(folder, *arguments)
    try:
        yield run
    finally:
        run.process.terminate()
        try:
            run.process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            run.process.kill()
            run.process.wait()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    with running(tmp_path_factory.mktemp("undisturbed"), *TRAINING) as run:
        assert run.process.wait(timeout=PATIENCE) == 0, run.stderr
    return run


def test_rank_0_alone_speaks_and_nothing_complains(undisturbed: Run) -> None:
    said = ["docstrings of", "from step 0 to 80 over 2 ranks", "loss ", "over 2 ranks\n", "sha256"]
    counts = [undisturbed.stdout.count(words) for words in said]
    assert counts == [1, 1, 1, 2, 1], undisturbed.stdout
    bar = re.compile(r" *\d+%\|.*|")
    complaints = [
        line for line in re.split(r"[\r\n]", undisturbed.stderr) if not bar.fullmatch(line)
    ]
    assert not complaints


def kill_after_a_save(run: Run, rank: int, checkpoint: Path) -> None:
    """Kills a rank as soon as its attempt has saved, and waits until all of them are gone."""

    def saved() -> int:
        return checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0

    earlier = saved()
    run.wait_until(lambda: saved() > earlier)
    attempt = run.workers()
    os.kill(sorted(attempt)[rank], signal.SIGKILL)
    run.wait_until(lambda: not attempt & run.workers())


def test_a_killed_run_ends_in_the_same_bits(undisturbed: Run, tmp_path: Path) -> None:
    checkpoint = tmp_path / "state.pt"
    resumable = [*TRAINING, "--checkpoint", str(checkpoint), "--save-every", "2"]

    with running(tmp_path, "--max-restarts", "2", *resumable) as run:
        for rank in (1, 0):
            kill_after_a_save(run, rank, checkpoint)
        assert run.process.wait(timeout=PATIENCE) == 0, run.stderr

    first, second, third = map(int, re.findall(r"^from step (\d+)", run.stdout, re.M))
    assert 0 == first < second < third < 80
    assert run.fingerprints == undisturbed.fingerprints != set()


def test_a_checkpoint_holds_what_was_saved(tmp_path: Path) -> None:
    state = (
        {"w": torch.randn(3, 2, dtype=torch.float64), "layers": [torch.ones(2)]},
        torch.tensor(7),
    )
    elastic.save(tmp_path / "state.pt", state)
    loaded = elastic.load(tmp_path / "state.pt", like=tree.map(torch.zeros_like, state))
    assert elastic.fingerprint(loaded) == elastic.fingerprint(state)
    assert list(tmp_path.iterdir()) == [tmp_path / "state.pt"]


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    elastic.save(tmp_path / "state.pt", {"w": torch.ones(2), "b": torch.ones(1)})
    with pytest.raises(
        ValueError, match=r"\['b'\] is .*float32 .* should be .*float64 of shape \(1,\)"
    ):
        elastic.load(tmp_path / "state.pt", like={"w": torch.ones(2), "b": torch.ones(1).double()})
    with pytest.raises(
        ValueError, match=r"another run: .*\['b'\] is .*float32 .* should be missing"
    ):
        elastic.load(tmp_path / "state.pt", like={"w": torch.ones(2)})
