"""How much memory does ``ps.remat`` save, and what time does it take?

A GPT of twelve layers on one microbatch of many tokens, so that activations outweigh parameters. For each way, in a fresh process: the
peak of memory during one update less what parameters, moments and data take, measured as in `benchmarks/speed/memory.py`. The
time of an update is measured in other processes, in which all ways take turns. Every way arrives at the same parameters, to
rounding, which is checked.

    python -m benchmarks.speed.remat        writes benchmarks/results/remat.{json,png}
"""

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import purestep as ps
from benchmarks.speed import peers, timing
from benchmarks.speed.memory import THRESHOLD, peak_on_gpu, peak_on_host
from purestep import tree
from purestep.examples import gpt

CONFIG = gpt.Config(context=256, layers=12, width=128, heads=4)


def problem(remat: bool) -> peers.Problem:
    """The GPT, its blocks under ``ps.remat`` or not; by hand, under torch's checkpoint."""
    given = peers.gpt_problem(CONFIG)

    def token_losses(params: Any, batch: Any) -> Tensor:
        logits = gpt.apply(CONFIG, params, batch["tokens"], remat=remat)
        return ps.losses.cross_entropy(logits, batch["labels"])

    def loss_sum(params: Any, batch: Any) -> Tensor:
        tokens = batch["tokens"]
        x = functional.embedding(tokens, params["embedding"]) + params["position"]
        for layer in params["layers"]:
            x = checkpoint(gpt.block, CONFIG, layer, x, use_reentrant=False)
        x = functional.layer_norm(x, x.shape[-1:]) * params["norm"]
        logits = (x @ params["embedding"].T).flatten(0, 1)
        return functional.cross_entropy(
            logits, batch["labels"].flatten(), reduction="sum"
        )

    return replace(
        given, token_losses=token_losses, loss_sum=loss_sum if remat else given.loss_sum
    )


WAYS: dict[str, Callable[[], peers.Way]] = {
    "by hand": lambda: peers.by_hand(problem(False)),
    "by hand, torch's checkpoint": lambda: peers.by_hand(problem(True)),
    "purestep": lambda: peers.purestep(problem(False), donate=True),
    "purestep, remat": lambda: peers.purestep(problem(True), donate=True),
    "purestep, compiled": lambda: peers.purestep(
        problem(False), donate=True, compile=True
    ),
}


def worker(options: argparse.Namespace) -> dict[str, float]:
    """One way: the peak of an update in bytes, the seconds of another, and what it has arrived at."""
    way = WAYS[options.way]()
    group = peers.group_of(1, options.rows, [CONFIG.context])
    for _ in range(2):
        way.update(group)
    gc.collect()
    measure = peak_on_gpu if torch.cuda.is_available() else peak_on_host
    peak = measure(lambda: way.update(group))
    arrived = torch.stack(
        [leaf.double().norm() for leaf in tree.leaves(way.params())]
    ).norm()
    return {"bytes": peak, "norm": arrived.item()}


def seconds_in_turn(options: argparse.Namespace) -> dict[str, list[float]]:
    """Of all ways, in one process."""
    group = peers.group_of(1, options.rows, [CONFIG.context])
    ways = {name: make() for name, make in WAYS.items()}
    calls = {name: partial(way.update, group) for name, way in ways.items()}
    return timing.in_turn(calls, options.repeats, warmup=2)


def draw(path: Path, table: dict[str, dict[str, float]]) -> None:
    """The peaks and the times, as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, 2, figsize=(8, 3), dpi=150, layout="constrained", sharey=True
    )
    ways = [*table][::-1]
    colours = [
        "#0072b2" if "remat" in way else "#d55e00" if "torch's" in way else "0.7"
        for way in ways
    ]
    for axes, (column, label, unit) in zip(
        panels,
        [
            ("bytes", "peak above the state, megabytes", 1e6),
            ("seconds", "seconds per update", 1),
        ],
        strict=True,
    ):
        axes.barh(ways, [table[way][column] / unit for way in ways], color=colours)
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Measures each way in fresh processes, prints, draws."""
    parser = timing.arguments(__doc__, repeats=12, launches=3)
    parser.add_argument(
        "--rows", type=int, default=4, help="of 256 bytes in the microbatch"
    )
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.report:
        measured = worker(options) if options.way else seconds_in_turn(options)
        options.report.write_text(json.dumps(measured))
        return

    launches: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.launches):
        for way, seen in launches.items():
            seen.append(
                timing.launch("benchmarks.speed.remat", "--way", way, **THRESHOLD)
            )
    table = {
        way: {key: statistics.median(each[key] for each in seen) for key in seen[0]}
        for way, seen in launches.items()
    }
    in_turn = [timing.launch("benchmarks.speed.remat") for _ in range(options.launches)]
    times = timing.joined(in_turn, ["purestep"])
    timing.show("time of an update", times)
    for way, row in table.items():
        base = table["purestep"]
        assert abs(row["norm"] / base["norm"] - 1) < 1e-3, f"{way} arrives elsewhere"
        print(
            f"{way:>28}: {row['bytes'] / 1e6:7.1f} MB ({row['bytes'] / base['bytes']:.2f})"
        )
        row["seconds"] = times["seconds"][way]
    report = {"table": table, "launches": launches, "times": times}
    draw(timing.write(options.results, "remat", report), table)


if __name__ == "__main__":
    main()
