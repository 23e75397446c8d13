"""What does one update cost, and what do others take for it?

Four tables, each of ways measured in turn:

gpt         all ways of `benchmarks/speed/peers.py` on a GPT of 4M parameters, 8 microbatches of 4 rows of 64 bytes; checked to
            arrive at the same parameters before they are timed
large       25M parameters and a quarter of the tokens, so that the optimizer has a large share
leaves      2,000 leaves of 64 elements, next to no arithmetic: what is left is the cost of each leaf. Each way has a process of
            its own, and they take turns; --together has all of them in one
optimizer   AdamW alone on 100M parameters, and plain passes in place that move the same bytes: 28 per parameter
            (gradients read, parameters and both moments read and written)

    python -m benchmarks.speed.step        writes benchmarks/results/step.{json,png}
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import purestep as ps
from benchmarks.speed import peers, timing
from purestep import tree

FUSED, FOREACH, TRAFFIC = "torch.optim, fused", "by hand, foreach", "the same bytes"
AGAINST = {
    "gpt": [peers.BY_HAND, peers.BY_HAND_COMPILED, peers.JAX],
    "large": [peers.BY_HAND],
    "leaves": [FOREACH],
    "optimizer": [FUSED, TRAFFIC],
}
LEAVES, ELEMENTS = 2000, 64
LEAF = 1000, 1000  # of the parameters that the optimizer alone has


def updates(
    ways: dict[str, peers.Way], group: list[peers.Batch]
) -> dict[str, Callable[[], object]]:
    """What is timed: an update of each way."""
    return {name: partial(way.update, way.data(group)) for name, way in ways.items()}


def checked(
    problem: peers.Problem, ways: dict[str, peers.Way], group: list[peers.Batch]
) -> dict[str, Callable[[], object]]:
    """The same, of ways that have arrived at the same parameters after two updates."""
    calls = updates(ways, group)
    for _ in range(2):
        for call in calls.values():
            call()
    distances = peers.check(problem, ways, group)
    away = ", ".join(f"{name} {distance:.1e}" for name, distance in distances.items())
    print(f"  distances from {peers.BY_HAND}, of the distance travelled: {away}")
    return calls


def gpt_table(options: argparse.Namespace) -> timing.Seconds:
    """All ways, checked and then timed."""
    group = peers.group_of(options.microbatches, options.rows, [peers.CONFIG.context])
    problem = peers.gpt_problem(peers.CONFIG)
    makers = peers.ways_without(options.leave_out)
    ways = {name: make(problem) for name, make in makers.items()}
    return timing.in_turn(checked(problem, ways, group), options.repeats)


def large_table(options: argparse.Namespace) -> timing.Seconds:
    """The optimizer's share."""
    problem = peers.gpt_problem(peers.LARGE)
    group = peers.group_of(
        options.microbatches, max(1, options.rows // 4), [peers.LARGE.context]
    )
    makers = peers.ways_without(options.leave_out)
    names = [name for name in (peers.BY_HAND, peers.PURE) if name in makers]
    ways = {name: makers[name](problem) for name in names}
    return timing.in_turn(updates(ways, group), options.repeats)


def leaves_problem(number: int = LEAVES) -> peers.Problem:
    """Linear regression on the mean of many small leaves."""

    def token_losses(leaves: list[Tensor], batch: peers.Batch) -> Tensor:
        features: Tensor = batch["tokens"]
        return (features @ torch.stack(leaves).mean(0) - batch["labels"]) ** 2

    def loss_sum(leaves: list[Tensor], batch: peers.Batch) -> Tensor:
        return token_losses(leaves, batch).sum()

    generator = torch.Generator().manual_seed(0)
    leaves = torch.randn(number, ELEMENTS, generator=generator).to(timing.device())
    return peers.Problem(list(leaves), token_losses, loss_sum)


def leaves_group(k: int) -> list[peers.Batch]:
    """K times one microbatch for them."""
    device = timing.device()
    one = {"tokens": torch.randn(16, ELEMENTS, device=device), "labels": torch.ones(16, device=device)}  # fmt: skip
    return [one] * k


LEAVES_WAYS: dict[str, Callable[[peers.Problem], peers.Way]] = {
    FOREACH: partial(peers.by_hand, foreach=True),
    peers.BY_HAND: peers.by_hand,
    peers.PURE: partial(peers.purestep, donate=True),
}


def leaves_update(options: argparse.Namespace, name: str) -> Callable[[], object]:
    """An update of one way."""
    way = LEAVES_WAYS[name](leaves_problem())
    return updates({name: way}, leaves_group(options.microbatches))[name]


def leaves_table(options: argparse.Namespace) -> timing.Seconds:
    """The cost of each leaf, in a process for each way: thousands of small allocations depend on what else a process holds."""
    if options.together:
        calls = {name: leaves_update(options, name) for name in LEAVES_WAYS}
        return timing.in_turn(calls, options.repeats)
    return timing.in_processes(
        "benchmarks.speed.step", list(LEAVES_WAYS), options.repeats
    )


def optimizer_table(options: argparse.Namespace) -> timing.Seconds:
    """AdamW alone, and the traffic that it cannot do without."""
    count = max(1, round(options.parameters / (LEAF[0] * LEAF[1])))
    grads = [torch.randn(LEAF, device=timing.device()) for _ in range(count)]
    theirs = [torch.randn(LEAF, device=timing.device()) for _ in range(count)]
    for leaf, grad in zip(theirs, grads, strict=True):
        leaf.grad = grad
    fused = peers.torch_adamw(theirs)
    own = ps.optim.adamw(
        peers.LEARNING_RATE, *peers.BETAS, peers.EPS, peers.WEIGHT_DECAY
    )
    state = tree.map(Tensor.clone, (theirs, own.init(theirs)))
    assert own.update_ is not None
    update_ = own.update_
    fused.step()
    moments = [
        (fused.state[leaf]["exp_avg"], fused.state[leaf]["exp_avg_sq"])
        for leaf in theirs
    ]

    def purestep() -> None:
        nonlocal state
        state = update_(grads, state[1], state[0], None)

    def traffic() -> None:
        for leaf, grad, (mu, nu) in zip(theirs, grads, moments, strict=True):
            leaf.add_(grad, alpha=0.0)
            mu.mul_(1.0)
            nu.mul_(1.0)

    calls = {FUSED: fused.step, peers.PURE: purestep, TRAFFIC: traffic}
    return timing.in_turn(calls, options.repeats)


TABLES: dict[str, Callable[[argparse.Namespace], timing.Seconds]] = {
    "gpt": gpt_table,
    "large": large_table,
    "leaves": leaves_table,
    "optimizer": optimizer_table,
}


def titles(options: argparse.Namespace) -> dict[str, str]:
    """What each table is of."""
    k = options.microbatches
    return {
        "gpt": f"GPT, 4M parameters, {k} x {options.rows} x {peers.CONFIG.context} tokens",
        "large": f"GPT, 25M parameters, {k} x {max(1, options.rows // 4)} x {peers.LARGE.context} tokens",
        "leaves": f"{LEAVES:,} leaves of {ELEMENTS} elements, {k} microbatches",
        "optimizer": f"AdamW alone, {options.parameters / 1e6:.0f}M parameters",
    }


def measure(options: argparse.Namespace) -> dict[str, timing.Seconds]:
    """All tables, each in fresh processes."""
    measured = {}
    for name in options.tables:
        launches = [
            timing.launch("benchmarks.speed.step", "--tables", name)
            for _ in range(options.launches)
        ]
        measured[name] = timing.joined(launches, AGAINST[name])
        timing.show(titles(options)[name], measured[name])
    return measured


def color_of(way: str) -> str:
    """Blue is purestep, red the loop by hand, grey everyone else."""
    if way.startswith("purestep"):
        return "#0072b2"
    return "#d55e00" if way.startswith(("by hand", "torch.optim")) else "0.6"


def bars(axes: Any, title: str, table: dict[str, Any]) -> None:
    """Milliseconds of each way, labelled with the ratio to the first."""
    ways = list(table["seconds"])
    values = [1e3 * table["seconds"][way] for way in ways]
    drawn = axes.barh(ways, values, color=[color_of(way) for way in ways])
    ratios = table["ratio"][next(iter(table["ratio"]))]
    axes.bar_label(drawn, [f"{ratios[way]:.2f}×" for way in ways], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(title, fontsize="medium", loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def draw(path: Path, measured: dict[str, Any], names: dict[str, str]) -> None:
    """A panel for each table; the first takes the left half."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first, *others = measured
    mosaic: Any = [[first, other] for other in others] or [[first]]
    figure, panels = pyplot.subplot_mosaic(
        mosaic, figsize=(11, 4.8), dpi=150, layout="constrained",
        gridspec_kw={"height_ratios": [len(measured[row[-1]]["seconds"]) for row in mosaic]},
    )  # fmt: skip
    for name, axes in panels.items():
        bars(axes, names[str(name)], measured[str(name)])
    for name in (first, mosaic[-1][-1]):
        panels[name].set_xlabel("milliseconds per update")
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Measures in fresh processes, prints, draws."""
    parser = timing.arguments(__doc__, repeats=12, launches=4)
    parser.add_argument(
        "--tables", nargs="+", choices=list(TABLES), default=list(TABLES)
    )
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--rows", type=int, default=4, help="of 64 bytes in a microbatch"
    )
    parser.add_argument(
        "--parameters", type=float, default=1e8, help="of the optimizer alone"
    )
    parser.add_argument(
        "--together", action="store_true", help="the ways of 'leaves' in one process"
    )
    parser.add_argument("--serve", choices=list(LEAVES_WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        timing.serve(leaves_update(options, options.serve))
        return
    if options.report:
        timing.same_cores()
        [name] = options.tables
        options.report.write_text(json.dumps(TABLES[name](options)))
        return

    measured = measure(options)
    picture = timing.write(options.results, "step", {"tables": measured})
    draw(picture, measured, titles(options))


if __name__ == "__main__":
    main()
