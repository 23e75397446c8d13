"""How the benchmarks measure: all ways in turn, in a new order each time, in several fresh processes.

Where a process's memory comes to lie makes a difference of one or two percent that lasts as long as the process, so
figures are medians over all repeats of several launches, and ratios are of calls that were made in the same turn.
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent.with_name("results")
Seconds = dict[str, list[float]]


def device() -> torch.device:
    """Where to measure: the GPU when there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronise() -> None:
    """Waits for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def same_cores() -> None:
    """Everyone gets as many cores as torch has threads; JAX takes all that the process may use. Call it first of all."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[: torch.get_num_threads()])


def seconds_of(call: Callable[[], object], block: int = 1) -> float:
    """How long one call takes, until its results are there; the mean of a ``block`` of them."""
    synchronise()
    start = time.perf_counter()
    for _ in range(block):
        call()
    synchronise()
    return (time.perf_counter() - start) / block


def in_turn(
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    warmup: int = 1,
    block: int = 1,
) -> Seconds:
    """Seconds of each call: all in turn, in an order drawn anew for each repeat, after a warm-up that does not count.

    A ``block`` of calls each time is for short ones: a training loop finds its caches warm.
    """
    draw = random.Random(0)
    seconds: Seconds = {way: [] for way in calls}
    gc.collect()
    gc.disable()
    for repeat in range(warmup + repeats):
        for way in draw.sample(list(calls), len(calls)):
            taken = seconds_of(calls[way], block)
            if repeat >= warmup:
                seconds[way].append(taken)
    gc.enable()
    return seconds


def in_processes(module: str, ways: Sequence[str], repeats: int) -> Seconds:
    """The same of ways that have a process each, as in training, where none finds memory as another has left it.

    ``module``, called as we were and with ``--serve WAY``, answers by ``serve``.
    """
    draw = random.Random(0)
    seconds: Seconds = {way: [] for way in ways}
    with contextlib.ExitStack() as stack:
        servers = {
            way: stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", module, *sys.argv[1:], "--serve", way],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
                )
            )
            for way in ways
        }  # fmt: skip
        for repeat in range(1 + repeats):
            for way in draw.sample(list(ways), len(ways)):
                taken = _asked(servers[way])
                if repeat:
                    seconds[way].append(taken)
    return seconds


def _asked(server: subprocess.Popen[str]) -> float:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write("\n")
    return float(server.stdout.readline())


def serve(call: Callable[[], object]) -> None:
    """Tells how long one call takes, for each line that comes."""
    call()
    gc.collect()
    gc.disable()
    for _ in sys.stdin:
        print(seconds_of(call), flush=True)


def joined(launches: list[Seconds], against: Sequence[str]) -> dict[str, Any]:
    """Medians over several launches, and of the paired ratios to each way of ``against``, of all and of each launch."""

    def ratios(way: str, base: str) -> list[list[float]]:
        return [
            [t / b for t, b in zip(launch[way], launch[base], strict=True)]
            for launch in launches
        ]

    ways = list(launches[0])
    pairs = {
        base: {way: ratios(way, base) for way in ways}
        for base in against
        if base in ways
    }
    return {
        "seconds": {way: statistics.median(flat(launch[way] for launch in launches)) for way in ways},
        "ratio": {
            base: {way: statistics.median(flat(values)) for way, values in of.items()}
            for base, of in pairs.items()
        },
        "ratio of each launch": {
            base: {way: [statistics.median(v) for v in values] for way, values in of.items()}
            for base, of in pairs.items()
        },
    }  # fmt: skip


def flat(lists: Iterable[list[float]]) -> list[float]:
    """One list of several."""
    return list(itertools.chain.from_iterable(lists))


def show(title: str, table: dict[str, Any]) -> None:
    """Prints a table of ``joined``: a line for each way, a column for each way that it is compared to."""
    print(f"\n{title}")
    bases = list(table["ratio"])
    width = max(len(way) for way in table["seconds"])
    print(f"  {'':{width}}  {'ms':>9}" + "".join(f"  of {base:<26}" for base in bases))
    for way, seconds in table["seconds"].items():
        ratios = [
            f"  {table['ratio'][base][way]:5.3f} ({spread(table['ratio of each launch'][base][way])})"
            for base in bases
        ]
        print(
            f"  {way:{width}}  {1e3 * seconds:9.4g}"
            + "".join(f"{r:<31}" for r in ratios)
        )


def spread(values: list[float]) -> str:
    """From the least launch to the greatest."""
    return f"{min(values):.3f} to {max(values):.3f}"


def arguments(doc: str | None, repeats: int, launches: int) -> argparse.ArgumentParser:
    """The options that all of these benchmarks have."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawTextHelpFormatter
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=int, default=repeats, help="of each way in a launch"
    )
    parser.add_argument(
        "--launches", type=int, default=launches, help="fresh processes"
    )
    parser.add_argument("--leave-out", nargs="*", default=[], help="names of ways")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write")
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    return parser


def launch(module: str, *extra: str, **environment: str) -> Any:
    """What this module, called as we were and with more arguments, writes to --report in a fresh process."""
    return _reported([module], extra, environment)


def launch_ranks(number: int, module: str, *extra: str, **environment: str) -> Any:
    """The same of so many processes of one thread each, the ranks of one group; the first of them writes."""
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
    return _reported(
        [*torchrun, "-m", module], extra, {"OMP_NUM_THREADS": "1", **environment}
    )


def _reported(
    module: list[str], extra: Sequence[str], environment: Mapping[str, str]
) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [
            sys.executable,
            "-m",
            *module,
            *sys.argv[1:],
            *extra,
            "--report",
            str(path),
        ]
        subprocess.run(
            command, check=True, timeout=3600, env={**os.environ, **environment}
        )
        return json.loads(path.read_text())


def about() -> dict[str, Any]:
    """What was measured on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "torch": torch.__version__, "machine": platform.machine(), "gpu": gpu,
        "threads": torch.get_num_threads(),
    }  # fmt: skip


def write(folder: Path, name: str, report: dict[str, Any]) -> Path:
    """Writes the report; returns where its picture goes."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / f"{name}.json").write_text(json.dumps(about() | report, indent=1))
    print(f"\nreport: {folder / f'{name}.json'}")
    return folder / f"{name}.png"
