"""What does it cost to divide by the number of tokens, as parameters grow?

The question of torchtune #2515, where a pass that scaled the gradients took 42.5 ms of each step of an 8B model. A deep linear
network has little else to do for each parameter: 2 microbatches of a few tokens. Four ways, in turn:

by hand                   each loss is divided, so 1/N enters with the seed of the backward pass
by hand, a pass           gradients of sums, and then `p.grad *= 1 / N`: as torchtune did
purestep, "loss"          `normalize="loss"`: N is counted first, and weights / N is the seed
purestep, "grads"         `normalize="grads"`: N is known last, and one pass divides the gradients in place

    python -m benchmarks.speed.normalize        writes benchmarks/results/normalize.{json,png}
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed import peers, timing

PASS, LOSS, GRADS = "by hand, a pass", 'purestep, "loss"', 'purestep, "grads"'
WAYS: dict[str, Callable[[peers.Problem], peers.Way]] = {
    peers.BY_HAND: peers.by_hand,
    PASS: peers.torchtune,
    LOSS: partial(peers.purestep, donate=True, normalize="loss"),
    GRADS: partial(peers.purestep, donate=True, normalize="grads"),
}
EXTRA_PASSES = {
    peers.BY_HAND: 0,
    PASS: 2,
    LOSS: 0,
    GRADS: 2,
}  # one that reads, one that writes
COLORS = {peers.BY_HAND: "#e69f00", PASS: "#d55e00", LOSS: "#0072b2", GRADS: "#56b4e9"}
WIDTH = 512


def problem_of(millions: int) -> peers.Problem:
    """A deep linear network of so many million parameters."""

    def token_losses(layers: list[Tensor], batch: peers.Batch) -> Tensor:
        x: Tensor = batch["tokens"]
        for layer in layers:
            x = x @ layer
        return (x.sum(-1) - batch["labels"]) ** 2

    def loss_sum(layers: list[Tensor], batch: peers.Batch) -> Tensor:
        return token_losses(layers, batch).sum()

    generator = torch.Generator().manual_seed(0)
    depth = round(millions * 1e6 / WIDTH**2)
    layers = [
        torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        for _ in range(depth)
    ]
    layers = [layer.to(timing.device()) for layer in layers]
    return peers.Problem(layers, token_losses, loss_sum)


def measure(options: argparse.Namespace) -> timing.Seconds:
    """All ways on a network of one size."""
    [millions] = options.millions
    problem, device = problem_of(millions), timing.device()
    group = [
        {
            "tokens": torch.randn(options.tokens, WIDTH, device=device),
            "labels": torch.ones(options.tokens, device=device),
        }
        for _ in range(options.microbatches)
    ]
    makers = {
        name: make for name, make in WAYS.items() if name not in options.leave_out
    }
    ways = {name: make(problem) for name, make in makers.items()}
    calls = {name: partial(way.update, group) for name, way in ways.items()}
    return timing.in_turn(calls, options.repeats, warmup=2)


def draw(path: Path, millions: list[int], tables: list[dict[str, Any]]) -> None:
    """What each way takes beyond the loop that divides the loss, and the bytes that it moves for it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, traffic) = pyplot.subplots(
        1, 2, figsize=(10, 3.8), dpi=150, layout="constrained"
    )  # fmt: skip
    for way in tables[0]["seconds"]:
        ratios = [100 * (table["ratio"][peers.BY_HAND][way] - 1) for table in tables]
        times.plot(millions, ratios, "o-", color=COLORS[way], label=way)
        gigabytes = [4e-3 * EXTRA_PASSES[way] * size for size in millions]
        traffic.plot(
            millions, gigabytes, "o-", color=COLORS[way], label=way,
            linewidth=5 if way == peers.BY_HAND else 1.8,
        )  # fmt: skip
    times.axhline(0, color="0.8", linewidth=1, zorder=0)
    times.set_ylabel("time of an update, % above the loop by hand")
    traffic.set_ylabel("gigabytes moved to normalise")
    for axes in (times, traffic):
        axes.set_xscale("log", base=2)
        axes.set_xticks(millions, [f"{size}M" for size in millions])
        axes.set_xlabel("parameters")
        axes.spines[["top", "right"]].set_visible(False)
    traffic.legend(frameon=False)
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Measures each size in fresh processes, prints, draws."""
    parser = timing.arguments(__doc__, repeats=15, launches=4)
    parser.add_argument("--millions", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16, help="in a microbatch")
    options = parser.parse_args()
    if options.report:
        options.report.write_text(json.dumps(measure(options)))
        return

    tables = []
    for size in options.millions:
        launches = [
            timing.launch("benchmarks.speed.normalize", "--millions", str(size))
            for _ in range(options.launches)
        ]
        tables.append(timing.joined(launches, [peers.BY_HAND]))
        timing.show(f"{size}M parameters", tables[-1])
        for way, passes in EXTRA_PASSES.items():
            print(
                f"  {way}: {passes} more passes over gradients, {4 * passes * size} MB"
            )
    report = {
        "millions": options.millions,
        "tables": tables,
        "extra passes": EXTRA_PASSES,
    }
    draw(timing.write(options.results, "normalize", report), options.millions, tables)


if __name__ == "__main__":
    main()
