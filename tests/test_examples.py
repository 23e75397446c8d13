"""The examples as users start them: real processes, which may be killed."""

import email
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import purestep as ps
from purestep.examples import docstrings, huggingface

ROOT = Path(__file__).parent.parent
OPTIONS = [
    "--steps",
    "24",
    "--examples",
    "4",
    "--docstrings-of",
    str(Path(email.__file__).parent),
]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
TORCHRUN += ["--nproc-per-node", "2"]
TRAINING = ["-m", "purestep.examples.docstrings", *OPTIONS]
PATIENCE = 120  # seconds, on a machine that is busy with other tests
LOOPBACK = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": socket.if_nameindex()[0][1]}


def world(ranks: int) -> dict[str, str]:
    """What torchrun would tell the ranks, to start them without it and see how each of them ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
    }


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Processes inherit what Ctrl-C does here, where a shell may have turned it off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Run:
    """A program in a process of its own, and what it has printed."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        folder.mkdir(exist_ok=True)
        self._out, self._err = folder / "stdout", folder / "stderr"
        with self._out.open("w") as out, self._err.open("w") as err:
            env = os.environ | LOOPBACK | environment
            command = [sys.executable, *arguments]
            self.process = subprocess.Popen(
                command, stdout=out, stderr=err, env=env, cwd=ROOT
            )

    @property
    def stdout(self) -> str:
        return self._out.read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        return self._err.read_text(encoding="utf-8")

    @property
    def complaints(self) -> list[str]:
        """What it says on stderr, but for the bar that shows progress."""
        bar = re.compile(r" *\d+%\|.*|")
        return [
            line for line in re.split(r"[\r\n]", self.stderr) if not bar.fullmatch(line)
        ]

    def found(self, pattern: str) -> list[str]:
        """What stands there in each such line of stdout."""
        return re.findall(f"^{pattern}$", self.stdout, re.M)

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
def running(folder: Path, *arguments: str, **environment: str) -> Iterator[Run]:
    """A run that has ended when the block has, whatever happens in it."""
    run = Run(folder, *arguments, **environment)
    try:
        yield run
    finally:
        run.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(timeout=40)
        run.process.kill()
        run.process.wait()


@contextmanager
def two_ranks(folder: Path, *arguments: str) -> Iterator[list[Run]]:
    """Two of them that meet."""
    meeting = world(ranks=2)
    with ExitStack() as both:
        ranks = (running(folder / r, *arguments, **meeting, RANK=r) for r in "01")
        yield [both.enter_context(each) for each in ranks]


def ended(folder: Path, *arguments: str, **environment: str) -> Run:
    """A run that has ended well."""
    with running(folder, *arguments, **environment) as run:
        assert run.process.wait(timeout=PATIENCE) == 0, run.stderr
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return ended(tmp_path_factory.mktemp("undisturbed"), *TORCHRUN, *TRAINING)


def test_rank_0_alone_speaks_and_nothing_complains(undisturbed: Run) -> None:
    said = ["docstrings of", "from step 0 to 24 over 2 ranks\n", "loss ", "sha256"]
    counts = [undisturbed.stdout.count(words) for words in said]
    assert counts == [1, 1, 1, 1], undisturbed.stdout
    assert not undisturbed.complaints


def test_a_killed_run_ends_in_the_same_bits(undisturbed: Run, tmp_path: Path) -> None:
    """The rank that saves is killed as soon as it has saved."""
    checkpoint = tmp_path / "state"
    resumable = [*TRAINING, "--checkpoint", str(checkpoint), "--save-every", "2"]

    with running(tmp_path, *TORCHRUN, "--max-restarts", "1", *resumable) as run:
        run.wait_until(lambda: ps.checkpoint.latest_checkpoint(checkpoint) is not None)
        attempt = run.workers()
        os.kill(min(attempt), signal.SIGKILL)
        run.wait_until(lambda: not attempt & run.workers())
        assert run.process.wait(timeout=PATIENCE) == 0, run.stderr

    first, second = map(int, run.found(r"from step (\d+) .*"))
    assert 0 == first < second < 24
    prints = [
        {*each.found("parameters sha256 ([0-9a-f]{12})")} for each in (run, undisturbed)
    ]
    assert prints[0] == prints[1] != set()


def interrupt(*runs: Run) -> list[int]:
    """Ctrl-C, which reaches all of them at once; and how they end."""
    for run in runs:
        run.process.send_signal(signal.SIGINT)
    return [run.process.wait(timeout=PATIENCE) for run in runs]


def test_an_interrupted_run_goes_on_over_other_ranks(
    undisturbed: Run, tmp_path: Path
) -> None:
    """With a part of the state on each, and the same losses, as they are printed."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    checkpoint = folder / "state"
    resumable = [*TRAINING, "--checkpoint", str(checkpoint), "--save-every", "4"]
    resumable += ["--shard", "microbatch"]

    with two_ranks(tmp_path, *resumable) as (first, second):
        first.wait_until(
            lambda: ps.checkpoint.latest_checkpoint(checkpoint) is not None
        )
        assert interrupt(first, second) == [130, 130], first.stderr + second.stderr
    assert first.complaints == [
        f"interrupted; the same command goes on from {checkpoint}"
    ]
    assert second.complaints == []
    assert list(folder.iterdir()) == [checkpoint]

    run = ended(
        tmp_path / "2", *resumable, "--max-tokens", "300", **world(ranks=1), RANK="0"
    )
    (step,) = map(int, run.found(r"from step (\d+) to 24 over 1 ranks?"))
    assert 0 < step < 24
    assert (
        run.found(r"loss \S+ -> (\S+)")[-1]
        == undisturbed.found(r"loss \S+ -> (\S+)")[-1]
    )
    kept = [each.found(r".*keeps (\S+) MiB.*") for each in (undisturbed, first, run)]
    assert kept == [["3.0"], ["1.5"], ["3.0"]]


def test_an_interrupted_comparison_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    program = ["-m", "purestep.examples.docstrings", "--picture", str(picture)]
    with running(tmp_path / "run", *program) as run:
        run.wait_until(lambda: "loss" in run.stderr)
        assert interrupt(run) == [130]
    assert run.complaints[-1] == "interrupted"
    assert "Traceback" not in run.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


def test_ranks_refuse_together_before_they_begin(tmp_path: Path) -> None:
    checkpoint = tmp_path / "state"
    training = [*TRAINING, "--checkpoint", str(checkpoint), "--steps", "25"]
    options = docstrings.parse(OPTIONS)
    optimizer, params = docstrings.begin(options, torch.Generator())
    begun = (params, optimizer.init(params), torch.tensor(0), torch.tensor(0))
    data = docstrings.docstrings(options.docstrings_of)
    settings = docstrings.written(docstrings.settings_of(options, data))
    ps.checkpoint.save_step(checkpoint, 7, (settings, begun))

    with two_ranks(tmp_path, *training) as (first, second):
        assert [run.process.wait(timeout=PATIENCE) for run in (first, second)] == [1, 1]
    (line,) = first.complaints
    assert re.search(
        "state is of a run with steps=24, but this one has steps=25: ", line
    ), line
    assert first.stdout == second.stdout == second.stderr == ""


def test_what_would_end_a_run_late_is_refused_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = str(tmp_path / "nowhere" / "picture.png")
    for arguments, message in {
        ("--picture", picture): "picture.png: [Errno 2] No such file or directory",
        ("--max-tokens", "8"): "no room for an example of 256",
        ("--docstrings-of", str(tmp_path)): "holds no Python file with a docstring",
        ("--save-every", "0"): "0 is less than 1",
        ("--checkpoint", "state"): "need torchrun",
        ("--shard", "step"): "need torchrun",
    }.items():
        with pytest.raises(SystemExit):
            docstrings.parse(arguments)
        assert message in capsys.readouterr().err


def test_a_llama_and_a_lora_load_where_they_were_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.png"
    fewer = ["--steps", "3", "--lora-steps", "2", "--held-out", "6", *OPTIONS[-2:]]
    huggingface.main([*fewer, "--out", str(tmp_path), "--picture", str(picture)])
    said = capsys.readouterr().out
    for folder, loaded in {"llama": "LlamaForCausalLM", "lora": "PeftModel"}.items():
        assert re.search(rf"^{tmp_path / folder} loads as {loaded}, with the same [\d,]+ logits$", said, re.M), said  # fmt: skip
    assert picture.read_bytes().startswith(b"\x89PNG")

    # The Llama learns from both kinds of text; the LoRA goes on where it stopped.
    found = re.findall(r"^loss per token of .* held out: (\S+) -> (\S+)$", said, re.M)
    begun, ended = [
        [float(each) for each in column] for column in zip(*found, strict=True)
    ]
    assert ended[0] < begun[0], said
    assert ended[1] < begun[1], said
    assert begun[2:] == ended[:2], said

    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    params, apply = ps.from_module(llama)
    text = {"input_ids": torch.arange(8)}
    huggingface.check_loaded(llama, params, apply, text, tmp_path)
    with torch.no_grad():
        llama.model.norm.weight[0] += 0.01
    with pytest.raises(AssertionError, match="the logits differ by 0"):
        huggingface.check_loaded(llama, params, apply, text, tmp_path)
