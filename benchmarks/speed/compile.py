"""What does compiling buy, and what does it cost, when all rows are equally long, and when they are not?

purestep with `compile=True` and the loop by hand around a compiled loss, beside themselves uncompiled. Two kinds of groups
of 8 microbatches: fixed, where all rows have 64 bytes; and ragged, where each microbatch of each group has a length of
its own. Six groups come first, which compile what there is to compile, without a cache; then all ways are timed in turn
on the last of them.

seconds to compile        what the first groups take beyond what they take later
graphs                    how many graphs dynamo made of them (`unique_graphs`)

    python -m benchmarks.speed.compile        writes benchmarks/results/compile.{json,png}
"""

import argparse
import json
import random
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed import peers, timing
from support.torch_private import count_graphs, reset_graph_count

KINDS = ["fixed", "ragged"]
WAYS = [peers.BY_HAND, peers.PURE, peers.BY_HAND_COMPILED, peers.PURE_COMPILED]
COLD = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
FIRST = 6


def groups_of(kind: str, options: argparse.Namespace) -> list[list[peers.Batch]]:
    """Groups to begin with: of one length, or each of lengths of its own."""
    draw = random.Random(0)
    context = peers.CONFIG.context
    k = options.microbatches
    lengths = [
        [context] * k if kind == "fixed" else [draw.randint(context // 4, context) for _ in range(k)]
        for _ in range(FIRST)
    ]  # fmt: skip
    return [
        peers.group_of(k, options.rows, of, seed) for seed, of in enumerate(lengths)
    ]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One kind of groups: seconds of the first groups, graphs, and seconds of the last group once all is compiled."""
    [kind] = options.kinds
    problem = peers.gpt_problem(peers.CONFIG)
    groups = groups_of(kind, options)
    makers = peers.ways_without(options.leave_out)
    ways, beginning, graphs = {}, {}, {}
    for name in [way for way in WAYS if way in makers]:
        torch.compiler.reset()
        reset_graph_count()
        ways[name] = makers[name](problem)
        beginning[name] = [
            timing.seconds_of(partial(ways[name].update, group)) for group in groups
        ]
        graphs[name] = count_graphs()
    calls = {name: partial(way.update, groups[-1]) for name, way in ways.items()}
    seconds = timing.in_turn(calls, options.repeats)
    return {"beginning": beginning, "graphs": graphs, "seconds": seconds}


def joined(launches: list[dict[str, Any]]) -> dict[str, Any]:
    """One table of several launches."""
    table = timing.joined(
        [part["seconds"] for part in launches], [peers.BY_HAND, peers.BY_HAND_COMPILED]
    )
    beginning = {
        way: statistics.median(sum(part["beginning"][way]) for part in launches)
        for way in table["seconds"]
    }
    return table | {
        "graphs": launches[0]["graphs"],
        "seconds to compile": {
            way: max(0.0, total - FIRST * table["seconds"][way])
            for way, total in beginning.items()
        },
    }  # fmt: skip


def graphs_of(table: dict[str, Any], way: str) -> str:
    """How often a way was compiled, in words."""
    number = table["graphs"][way]
    return {0: "not compiled", 1: "1 graph"}.get(number, f"{number} graphs")


def draw(path: Path, tables: dict[str, dict[str, Any]]) -> None:
    """Milliseconds per update, seconds to compile and graphs, for each kind of groups."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = dict(zip(WAYS, ["#f0b090", "#90c0e0", "#d55e00", "#0072b2"], strict=True))
    figure, rows = pyplot.subplots(
        len(tables), 2, figsize=(10, 2.1 * len(tables)), dpi=150, layout="constrained", squeeze=False
    )  # fmt: skip
    for (kind, table), (times, costs) in zip(tables.items(), rows, strict=True):
        ways = list(table["seconds"])
        shades = [colors[way] for way in ways]
        drawn = times.barh(
            ways, [1e3 * table["seconds"][way] for way in ways], color=shades
        )
        ratios = table["ratio"][peers.BY_HAND]
        times.bar_label(drawn, [f"{ratios[way]:.2f}×" for way in ways], padding=3)
        times.set_ylabel(f"{kind} lengths")
        seconds = table["seconds to compile"]
        drawn = costs.barh(ways, [seconds[way] for way in ways], color=shades)
        costs.bar_label(drawn, [graphs_of(table, way) for way in ways], padding=3)
        costs.set_yticks([])
        for axes in (times, costs):
            axes.invert_yaxis()
            axes.margins(x=0.25)
            axes.spines[["top", "right"]].set_visible(False)
    rows[-1][0].set_xlabel("milliseconds per update")
    rows[-1][1].set_xlabel("seconds to compile")
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Measures each kind in fresh processes, prints, draws."""
    parser = timing.arguments(__doc__, repeats=12, launches=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4, help="in a microbatch")
    options = parser.parse_args()
    if options.report:
        options.report.write_text(json.dumps(measure(options)))
        return

    tables = {}
    for kind in options.kinds:
        launches = [
            timing.launch("benchmarks.speed.compile", "--kinds", kind, **COLD)
            for _ in range(options.launches)
        ]
        tables[kind] = joined(launches)
        timing.show(f"{kind} lengths", tables[kind])
        for way, seconds in tables[kind]["seconds to compile"].items():
            print(
                f"  {way}: {graphs_of(tables[kind], way)}, {seconds:.1f} s to compile"
            )
    draw(timing.write(options.results, "compile", {"tables": tables}), tables)


if __name__ == "__main__":
    main()
