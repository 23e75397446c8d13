"""How does the cost of one update grow?

microbatches   a small network (that of `benchmarks/speed/overhead.py`), 1 to 64 microbatches, beside the loop by hand
leaves         10 to 10,000 leaves of 64 elements, beside the loop by hand with foreach
ranks          a GPT of 3.2M parameters on 2 to 8 gloo processes of one thread each, beside DistributedDataParallel
               (that of `benchmarks/speed/ranks.py`, 1 microbatch of 1 row); more processes than cores wait for each other
conversation   what one rank does on the host beside its own update where 2 to 65,536 take part: an update on ranks that
               all bring the same, whose sums are products, less the same update alone
planning       `pack`, `balance` and `pack_documents` for groups of a thousand to a million examples

    python -m benchmarks.speed.scale        writes benchmarks/results/scale.{json,png}
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.speed import batching, overhead, peers, ranks, step, timing
from purestep.axis.primitives import COLLECTIVES
from purestep.axis.process import BUCKET_BYTES, ProcessAxis, Wait
from purestep.examples import gpt

MICROBATCHES = [1, 2, 4, 8, 16, 32, 64]
LEAVES = [10, 100, 1000, 10_000]
PROCESSES = [2, 4, 8]
RANKS = [2, 16, 128, 1024, 8192, 65_536]
EXAMPLES = [1000, 10_000, 100_000, 1_000_000]
CONVERSATION = "purestep, less an update alone"
Lines = dict[str, dict[str, list[float]]]
"""Seconds of each repeat, by line and by what it is drawn against."""


class Alike(ProcessAxis):
    """Ranks that all bring what this one brings: collectives without a network, so that the host's own work is left."""

    device = torch.device("cpu")
    rank = 0
    num_collectives = None

    def __init__(self, size: int) -> None:
        super().__init__(BUCKET_BYTES)
        self.size = size

    @property
    def process_group(self) -> Alike:
        """All meet here."""
        return self

    def run(self, op: str, x: Tensor) -> Tensor:
        """The law over ranks that are alike."""
        return COLLECTIVES[op].batch_rule(x, None, self.size)[0]

    def launch(self, x: Tensor, op: str = "psum") -> Wait:
        """The sum of equal terms; integers wrap as they would in the sum."""
        assert op == "psum"
        return partial(x.mul_, self.size)

    def complement(self, inner: ProcessAxis) -> Alike:
        """Nothing is spread over a part of it."""
        raise NotImplementedError(inner)


def microbatches_table(options: argparse.Namespace) -> Lines:
    """Against the number of microbatches."""
    problem = overhead.problem_of(overhead.init(0))

    def calls_of(k: int) -> dict[str, Callable[[], object]]:
        ways = {name: peers.WAYS[name](problem) for name in (peers.BY_HAND, peers.PURE)}
        return step.checked(problem, ways, overhead.group_of(k))

    return against(MICROBATCHES, calls_of, options)


def leaves_table(options: argparse.Namespace) -> Lines:
    """Against the number of leaves."""

    def calls_of(number: int) -> dict[str, Callable[[], object]]:
        problem = step.leaves_problem(number)
        ways = {
            step.FOREACH: peers.by_hand(problem, foreach=True),
            peers.PURE: peers.WAYS[peers.PURE](problem),
        }
        return step.updates(ways, step.leaves_group(1))

    return against(LEAVES, calls_of, options)


def conversation_table(options: argparse.Namespace) -> Lines:
    """Against the number of simulated ranks."""
    problem = overhead.problem_of(overhead.init(0))

    def calls_of(number: int) -> dict[str, Callable[[], object]]:
        ways = {
            peers.BY_HAND: peers.by_hand(problem),
            peers.PURE: peers.WAYS[peers.PURE](problem),
            CONVERSATION: peers.purestep(problem, axis=Alike(number), donate=True),
        }
        calls = step.checked(problem, ways, overhead.group_of(1))
        return {name: calls[name] for name in (peers.PURE, CONVERSATION)}

    lines = against(RANKS, calls_of, options)
    pairs = {x: zip(lines[CONVERSATION][x], alone, strict=True) for x, alone in lines[peers.PURE].items()}  # fmt: skip
    return {
        CONVERSATION: {
            x: [many - one for many, one in both] for x, both in pairs.items()
        }
    }


def planning_table(options: argparse.Namespace) -> Lines:
    """Against the number of examples."""
    lines: Lines = {}
    for number in EXAMPLES:
        for plan, seconds in batching.planner(number).items():
            lines.setdefault(plan, {})[str(number)] = [seconds]
    return lines


def against(
    sizes: Sequence[int],
    calls_of: Callable[[int], dict[str, Callable[[], object]]],
    options: argparse.Namespace,
) -> Lines:
    """Seconds of the calls for each size, in blocks of up to 30 that take a thirtieth of a second."""
    lines: Lines = {}
    for size in sizes:
        calls = calls_of(size)
        _, slowest = (max(map(timing.seconds_of, calls.values())) for _ in range(2))
        block = min(overhead.BLOCK, max(1, round(1 / 30 / slowest)))
        taken = timing.in_turn(calls, options.repeats, warmup=2, block=block)
        for name, seconds in taken.items():
            lines.setdefault(name, {})[str(size)] = seconds
    return lines


def ranks_table(options: argparse.Namespace) -> Lines:
    """Against the number of processes, each measured in a launch of its own."""
    lines: Lines = {}
    for number in PROCESSES:
        launched = timing.launch_ranks(number, "benchmarks.speed.scale")
        for name, seconds in launched.items():
            lines.setdefault(name, {})[str(number)] = seconds
    return lines


def rank(options: argparse.Namespace) -> None:
    """One process of those: both ways in turn, begun and ended together; the first one writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    params = gpt.init(ranks.CONFIG, torch.Generator().manual_seed(0))
    group = ranks.group_of(1, 1, torch.Generator().manual_seed(dist.get_rank()))
    ways = {
        "purestep": ranks.pure_step(params)[0],
        "DDP": ranks.ddp_step(params, synchronise=True)[0],
    }

    def together(update: ranks.Way) -> None:
        dist.barrier()
        update(group)
        dist.barrier()

    calls = {name: functools.partial(together, update) for name, update in ways.items()}
    seconds = timing.in_turn(calls, options.repeats, warmup=2)
    if dist.get_rank() == 0:
        options.report.write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


TABLES: dict[str, Callable[[argparse.Namespace], Lines]] = {
    "microbatches": microbatches_table,
    "leaves": leaves_table,
    "ranks": ranks_table,
    "conversation": conversation_table,
    "planning": planning_table,
}
TITLES = {
    "microbatches": ("Small network, one update", "microbatches"),
    "leaves": ("Next to no arithmetic, one update", "leaves"),
    "ranks": ("GPT of 3.2M parameters, one update", "processes on this machine"),
    "conversation": ("The conversation between ranks", "ranks, simulated"),
    "planning": ("Planning a group", "examples"),
}
LAUNCHED_ONCE = ["ranks", "planning"]
"""Those that start processes of their own, or take no time."""


def joined(launches: list[Lines]) -> dict[str, dict[str, float]]:
    """Medians over all launches."""
    return {
        line: {
            size: statistics.median(
                timing.flat(launch[line][size] for launch in launches)
            )
            for size in sizes
        }
        for line, sizes in launches[0].items()
    }


def written(value: float) -> str:
    """A number as people write it."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw(path: Path, tables: dict[str, dict[str, dict[str, float]]]) -> None:
    """A panel for each table: milliseconds, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    colors = {"pack": "#0072b2", "balance": "#009e73", "pack_documents": "#cc79a7"}
    columns = min(3, len(tables))
    rows = -(-len(tables) // columns)
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(4.2 * columns, 3.4 * rows), dpi=150, layout="constrained", squeeze=False
    )  # fmt: skip
    for axes in panels.flat[len(tables) :]:
        axes.set_axis_off()
    for axes, (name, lines) in zip(panels.flat, tables.items(), strict=False):
        highest_first = sorted(lines.items(), key=lambda item: -[*item[1].values()][-1])
        for position, (line, seconds) in enumerate(highest_first):
            sizes = [int(size) for size in seconds]
            # Where nothing is left of a difference, noise may be less than nothing.
            milliseconds = [1e3 * max(value, 1e-6) for value in seconds.values()]
            color = colors.get(line) or (
                "#0072b2" if line.startswith("purestep") else "#d55e00"
            )
            axes.plot(sizes, milliseconds, "o-", color=color, label=line, linewidth=1.8)
            axes.annotate(
                written(milliseconds[-1]), (sizes[-1], milliseconds[-1]), (5, 4 - 9 * position),
                textcoords="offset points", va="center", fontsize="small", color=color,
            )  # fmt: skip
        axes.set_xscale(
            "log", base=10 if sizes[-1] in (LEAVES[-1], EXAMPLES[-1]) else 2
        )
        axes.set_yscale("log")
        lowest, highest = axes.get_ylim()
        # What hardly grows is drawn so, and the legend has room.
        axes.set_ylim(min(lowest, highest / 100), 4 * highest)
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: written(y)))
        axes.set_xticks(sizes)
        axes.tick_params(labelsize="small")
        axes.minorticks_off()
        title, label = TITLES[name]
        axes.set_title(title, fontsize="medium", loc="left")
        axes.set_xlabel(label)
        axes.set_ylabel("milliseconds")
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small", loc="upper left")
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Measures in fresh processes, prints, draws."""
    parser = timing.arguments(__doc__, repeats=10, launches=2)
    parser.add_argument(
        "--tables", nargs="+", choices=list(TABLES), default=list(TABLES)
    )
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank(options)
        return
    if options.report:
        timing.same_cores()
        [name] = options.tables
        options.report.write_text(json.dumps(TABLES[name](options)))
        return

    tables = {}
    for name in options.tables:
        if name in LAUNCHED_ONCE:
            launches = [TABLES[name](options)]
        else:
            launches = [
                timing.launch(
                    "benchmarks.speed.scale", "--tables", name, OMP_NUM_THREADS="1"
                )
                for _ in range(options.launches)
            ]
        tables[name] = joined(launches)
        print(f"\n{TITLES[name][0]}, milliseconds against {TITLES[name][1]}")
        for line, seconds in tables[name].items():
            of_each = ", ".join(
                f"{size}: {1e3 * value:.4g}" for size, value in seconds.items()
            )
            print(f"  {line}: {of_each}")
    draw(timing.write(options.results, "scale", {"seconds": tables}), tables)


if __name__ == "__main__":
    main()
