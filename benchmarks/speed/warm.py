"""How much sooner does a second process begin, if it compiles what an earlier one has compiled?

inductor keeps its graphs and kernels in a folder. The same step is compiled by two processes, one after the other, which share a
new folder: for the first one it is empty. Seconds are those of the processor in the first update, the C++ compiler's
included, less those of a later one.

compile=True          forward and backward passes of a microbatch, K = 4
whole step            ``ps.compile`` of the step, K = 4
stacked               the same of a stacked group, K = 16

    python -m benchmarks.speed.warm        writes benchmarks/results/warm.json
"""

import argparse
import json
import tempfile
from functools import partial
from typing import Any

import torch

import purestep as ps
from benchmarks.speed import peers, stacked, timing

WAYS = ["compile=True", "whole step", "stacked"]


def make_update(way: str) -> Any:
    """Makes a function that takes one update, which is not compiled yet."""
    optimizer = ps.optim.adamw(1e-3)
    problem = peers.gpt_problem(stacked.CONFIG)
    opt_state = optimizer.init(problem.params)
    group: Any = stacked.make_group(4)
    if way == "stacked":
        group = ps.stack(stacked.make_group(16))
    if way == "compile=True":
        loss_fn = problem.token_losses
        step: Any = ps.make_update_step(loss_fn, optimizer, compile=True)
    else:
        step = ps.compile(stacked.make_step(problem), fullgraph=True)
    return partial(step, problem.params, opt_state, group)


def measure(way: str) -> float:
    """Measures the seconds of the processor that the first update takes beyond a later one."""
    update = make_update(way)
    before = stacked.processor_seconds()
    update()
    first = stacked.processor_seconds() - before
    update()
    before = stacked.processor_seconds()
    update()
    return first - (stacked.processor_seconds() - before)


def measure_twice(way: str) -> dict[str, float]:
    """Measures a process that finds an empty folder, and one that finds what the first has left."""
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = (
            timing.launch(
                "benchmarks.speed.warm", "--way", way, TORCHINDUCTOR_CACHE_DIR=folder
            )
            for _ in range(2)
        )
    return {"cold": cold, "warm": warm, "ratio": warm / cold}


def main() -> None:
    """Measures all ways, prints, and writes the report."""
    parser = timing.arguments(__doc__, repeats=1, launches=1)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.report:
        torch.set_num_threads(1)
        options.report.write_text(json.dumps(measure(options.way)))
        return
    report = {}
    for way in WAYS:
        report[way] = measure_twice(way)
        print(
            f"{way:>12}: {report[way]['cold']:5.1f} s of the processor to compile, "
            f"{report[way]['warm']:5.1f} in a second process: {report[way]['ratio']:.2f}",
            flush=True,
        )
    timing.write(options.results, "warm", report)


if __name__ == "__main__":
    main()
