"""Starts the examples as users do, in processes that may be killed."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import purestep as ps
from purestep.examples import docstrings, huggingface
from support.programs import Command, Program

ROOT = Path(__file__).parent.parent
FEW_STEPS = ["--steps", "12", "--examples", "4"]
DOCSTRINGS = ["--docstrings-of", str(Path(json.__file__).parent)]
OPTIONS = [*FEW_STEPS, *DOCSTRINGS]
TRAINING = ["-m", "purestep.examples.docstrings", *OPTIONS]
TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--local-addr",
    "127.0.0.1",
    "--nproc-per-node",
    "2",
]
PATIENCE = 120
"""Seconds to wait, on a machine that is busy with other tests."""
LOOPBACK = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": socket.if_nameindex()[0][1]}


def world(ranks: int) -> dict[str, str]:
    """Makes the environment that torchrun would, to start ranks without it and see how each ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        _, port = free.getsockname()
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
    }


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Restores the effect of Ctrl-C, which processes inherit: a shell may have turned it off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Run:
    """Runs a program in a new process, and reads what it prints."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        folder.mkdir(exist_ok=True)
        self._stdout = folder / "stdout"
        self._stderr = folder / "stderr"
        variables = os.environ | LOOPBACK | environment
        command = Command(arguments, ROOT, variables, self._stdout, self._stderr)
        self.process = Program(command)

    @property
    def stdout(self) -> str:
        return self._stdout.read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        return self._stderr.read_text(encoding="utf-8")

    @property
    def complaints(self) -> list[str]:
        """Lists the lines of stderr, but for the bar that shows progress."""
        bar = re.compile(r" *\d+%\|.*|")
        lines = re.split(r"[\r\n]", self.stderr)
        return [line for line in lines if not bar.fullmatch(line)]

    def matches(self, pattern: str) -> list[str]:
        """Returns the group of the pattern in each such line of stdout."""
        return re.findall(f"^{pattern}$", self.stdout, re.M)

    def workers(self) -> set[int]:
        """Finds the living processes whose parent is ``torchrun`` in /proc."""
        workers = set()
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it has ended since
                # The name before the last parenthesis may have any characters.
                _, _, fields = stat.read_text().rpartition(")")
                state, parent, *_ = fields.split()
                if int(parent) == self.process.pid and state != "Z":
                    workers.add(int(stat.parent.name))
        return workers

    def wait_until(self, happened: Callable[[], bool]) -> None:
        """Waits for a condition, which must hold before the program ends."""
        deadline = time.monotonic() + PATIENCE
        while not happened():
            assert self.process.poll() is None, f"it ended first\n{self.stderr}"
            assert time.monotonic() < deadline, f"it did not happen\n{self.stderr}"
            time.sleep(0.01)


@contextmanager
def running(folder: Path, *arguments: str, **environment: str) -> Iterator[Run]:
    """Starts a run, which ends with the block, whatever happens in it."""
    run = Run(folder, *arguments, **environment)
    try:
        yield run
    finally:
        run.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(timeout=40)
        run.process.kill()
        run.process.wait(timeout=PATIENCE)


@contextmanager
def two_ranks(folder: Path, *arguments: str) -> Iterator[list[Run]]:
    """Starts two ranks of one world."""
    environment = world(ranks=2)
    with (
        running(folder / "0", *arguments, **environment, RANK="0") as first,
        running(folder / "1", *arguments, **environment, RANK="1") as second,
    ):
        yield [first, second]


def ended(folder: Path, *arguments: str, **environment: str) -> Run:
    """Runs a program to its end, and checks that it succeeded."""
    with running(folder, *arguments, **environment) as run:
        assert run.process.wait(timeout=PATIENCE) == 0, run.stderr
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("undisturbed")
    return ended(folder, *TORCHRUN, *TRAINING)


def test_rank_0_alone_speaks_and_nothing_complains(undisturbed: Run) -> None:
    for words in (
        "docstrings of",
        "from step 0 to 12 over 2 ranks\n",
        "loss ",
        "sha256",
    ):
        assert undisturbed.stdout.count(words) == 1, undisturbed.stdout
    assert not undisturbed.complaints


def test_a_killed_run_ends_in_the_same_bits(undisturbed: Run, tmp_path: Path) -> None:
    """Kills the rank that saves as soon as it has saved."""
    checkpoint = tmp_path / "state"
    resumable = [*TRAINING, "--checkpoint", str(checkpoint), "--save-every", "2"]
    torchrun = [*TORCHRUN, "--max-restarts", "1"]

    with running(tmp_path, *torchrun, *resumable) as run:
        run.wait_until(lambda: ps.checkpoint.latest_checkpoint(checkpoint) is not None)
        attempt = run.workers()
        os.kill(min(attempt), signal.SIGKILL)
        run.wait_until(lambda: not attempt & run.workers())
        assert run.process.wait(timeout=PATIENCE) == 0, run.stderr

    first_start, second_start = run.matches(r"from step (\d+) .*")
    assert 0 == int(first_start) < int(second_start) < 12
    digest = "parameters sha256 ([0-9a-f]{12})"
    assert {*run.matches(digest)} == {*undisturbed.matches(digest)} != set()


def interrupt(*runs: Run) -> list[int]:
    """Sends Ctrl-C, which reaches all of them at once, and returns how they end."""
    for run in runs:
        run.process.send_signal(signal.SIGINT)
    return [run.process.wait(timeout=PATIENCE) for run in runs]


def test_an_interrupted_run_goes_on_over_other_ranks(
    undisturbed: Run, tmp_path: Path
) -> None:
    """Resumes sharded state on one rank, and prints the same losses."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    checkpoint = folder / "state"
    resumable = [
        *TRAINING,
        "--checkpoint",
        str(checkpoint),
        "--save-every",
        "4",
        "--shard",
        "microbatch",
    ]

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

    alone = {**world(ranks=1), "RANK": "0"}
    run = ended(tmp_path / "2", *resumable, "--max-tokens", "300", **alone)
    (step,) = run.matches(r"from step (\d+) to 12 over 1 ranks?")
    assert 0 < int(step) < 12
    loss = r"loss \S+ -> (\S+)"
    assert run.matches(loss)[-1] == undisturbed.matches(loss)[-1]
    megabytes = r".*keeps (\S+) MiB.*"
    assert undisturbed.matches(megabytes) == ["3.0"]
    assert first.matches(megabytes) == ["1.5"]
    assert run.matches(megabytes) == ["3.0"]


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
    training = [*TRAINING, "--checkpoint", str(checkpoint), "--steps", "13"]
    options = docstrings.parse_options(OPTIONS)
    optimizer, params = docstrings.make_optimizer_and_params(options, torch.Generator())
    state = (params, optimizer.init(params), torch.tensor(0), torch.tensor(0))
    data = docstrings.load_corpus(options.docstrings_of)
    settings = docstrings.encode_settings(docstrings.collect_settings(options, data))
    ps.checkpoint.save_step(checkpoint, 7, (settings, state))

    with two_ranks(tmp_path, *training) as (first, second):
        assert first.process.wait(timeout=PATIENCE) == 1
        assert second.process.wait(timeout=PATIENCE) == 1
    (line,) = first.complaints
    assert "state is of a run with steps=12, but this one has steps=13: " in line
    assert first.stdout == second.stdout == second.stderr == ""


def test_what_would_end_a_run_late_is_refused_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = str(tmp_path / "nowhere" / "picture.png")
    messages = {
        ("--picture", picture): "picture.png: [Errno 2] No such file or directory",
        ("--max-tokens", "8"): "no room for an example of 256",
        ("--docstrings-of", str(tmp_path)): "holds no Python file with a docstring",
        ("--save-every", "0"): "0 is less than 1",
        ("--checkpoint", "state"): "need torchrun",
        ("--shard", "step"): "need torchrun",
    }
    for arguments, message in messages.items():
        with pytest.raises(SystemExit):
            docstrings.parse_options(arguments)
        assert message in capsys.readouterr().err


def test_a_llama_and_a_lora_load_where_they_were_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.png"
    arguments = [
        "--steps",
        "3",
        "--lora-steps",
        "2",
        "--held-out",
        "6",
        *DOCSTRINGS,
        "--out",
        str(tmp_path),
        "--picture",
        str(picture),
    ]
    huggingface.main(arguments)
    output = capsys.readouterr().out
    for folder, loaded in {"llama": "LlamaForCausalLM", "lora": "PeftModel"}.items():
        line = rf"^{tmp_path / folder} loads as {loaded}, with the same [\d,]+ logits$"
        assert re.search(line, output, re.M), output
    assert picture.read_bytes().startswith(b"\x89PNG")

    losses = re.findall(
        r"^loss per token of .* held out: (\S+) -> (\S+)$", output, re.M
    )
    before = [float(loss) for loss, _ in losses]
    after = [float(loss) for _, loss in losses]
    # The Llama learns from both kinds of text.
    assert after[0] < before[0], output
    assert after[1] < before[1], output
    # The LoRA goes on where the Llama stopped.
    assert before[2:] == after[:2], output

    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    params, apply = ps.from_module(llama)
    text = {"input_ids": torch.arange(8)}
    huggingface.check_loaded(llama, params, apply, text, tmp_path)
    with torch.no_grad():
        llama.model.norm.weight[0] += 0.01
    with pytest.raises(AssertionError, match="the logits differ by 0"):
        huggingface.check_loaded(llama, params, apply, text, tmp_path)
