"""What does one update of a small network cost, where hardly anything is left to compute?

A network of three layers and 6,922 parameters, 32 rows in a microbatch, AdamW, float32. All ways are checked to arrive
at the same parameters, and report the loss and the norm of the gradients.

one, four         one and four microbatches: by hand, torch.func, purestep as it is, compiled and compiled as a whole, JAX; and a
                  step of thirty lines, which has purestep's arithmetic and keeps none of its promises: what is above it, they cost
few, many         an ensemble of 16 and of 128 such networks on the same rows: one after the other by hand, ``torch.vmap``
                  of the step, the same compiled, and JAX's
own               what the step itself adds: purestep less the loop by hand, with the same kernels, on 6 to 600 leaves of 64
                  elements and 1 to 16 microbatches, as a sum of a cost per step, per microbatch, per leaf, and
                  per leaf and microbatch

Figures are of blocks of updates of one way, since a training loop finds its caches warm. Thousands of leaves are a table of
`benchmarks/speed/step.py`.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.overhead        writes benchmarks/results/overhead.{json,png}
"""

import argparse
import functools
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import purestep as ps
from benchmarks.speed import peers, step, timing
from purestep import tree
from purestep.torch_private import foreach, fused_adamw_

SIZES = [32, 64, 64, 10]
ROWS, BLOCK = 32, 30
UNCHECKED = "thirty lines, unchecked"
WHOLE = "purestep, whole step compiled"
BY_TORCH = "the same by torch.compile"
VMAP, VMAP_COMPILED = "purestep, vmap", "purestep, vmap, compiled"
MICROBATCHES, LEAVES = [1, 2, 4, 8, 16], [6, 60, 600]
COSTS = ["step", "microbatch", "leaf", "leaf and microbatch"]


def mlp(params: Any, x: Any, relu: Callable[[Any], Any]) -> Any:
    """Logits, in torch or in JAX."""
    *hidden, last = params
    for layer in hidden:
        x = relu(x @ layer["weight"] + layer["bias"])
    return x @ last["weight"] + last["bias"]


def init(seed: int) -> Any:
    """Parameters."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "weight": torch.randn(before, after, generator=generator) / before**0.5,
            "bias": torch.zeros(after),
        }
        for before, after in itertools.pairwise(SIZES)
    ]


def problem_of(params: Any) -> peers.Problem:
    """The network, as purestep, the loop by hand and JAX take it."""

    def token_losses(params: Any, batch: peers.Batch) -> Tensor:
        return ps.losses.cross_entropy(
            mlp(params, batch["tokens"], torch.relu), batch["labels"]
        )

    def loss_sum(params: Any, batch: peers.Batch) -> Tensor:
        logits = mlp(params, batch["tokens"], torch.relu)
        return functional.cross_entropy(logits, batch["labels"], reduction="sum")

    def logits_in_jax(params: Any, x: Any) -> Any:
        import jax

        return mlp(params, x, jax.nn.relu)

    return peers.Problem(params, token_losses, loss_sum, logits_in_jax)


def group_of(k: int) -> list[peers.Batch]:
    """K microbatches of random rows."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "tokens": torch.randn(ROWS, SIZES[0], generator=generator),
            "labels": torch.randint(0, SIZES[-1], (ROWS,), generator=generator),
        }
        for _ in range(k)
    ]


def compiled(step: Any) -> Any:
    """The whole step as one graph."""
    return ps.compile(step, fullgraph=True)


def by_torch_compile(step: Any) -> Any:
    """The same by ``torch.compile`` alone."""
    compile: Any = torch.compile
    return compile(step, fullgraph=True, isolate_recompiles=True)


def unchecked(problem: peers.Problem) -> peers.Way:
    """Thirty lines: counts, seeds, sums, a norm, and the fused kernel. Nothing is checked, copied or kept apart."""
    params, structure = tree.flatten(tree.map(Tensor.clone, problem.params))
    mu, nu = [[torch.zeros_like(leaf) for leaf in params] for _ in range(2)]
    steps = [torch.zeros(()) for _ in params]
    b1, b2 = peers.BETAS

    def update(group: list[peers.Batch]) -> peers.Metrics:
        weights = [batch["labels"] != -100 for batch in group]
        num_tokens = torch.stack([weight.sum() for weight in weights]).sum()
        loss: Any = 0
        grads: list[Any] = [None] * len(params)
        for batch, weight in zip(group, weights, strict=True):
            leaves = [leaf.detach().requires_grad_() for leaf in params]
            losses = problem.token_losses(tree.unflatten(structure, leaves), batch)
            seed = (weight / num_tokens).to(losses.dtype)
            for leaf, grad in zip(leaves, grads, strict=True):
                leaf.grad = grad
            torch.autograd.backward(losses, seed)
            grads = [leaf.grad for leaf in leaves]
            loss = loss + torch.dot(losses.detach(), seed)
        norm = peers.norm_of(grads)
        if num_tokens > 0:
            foreach("add_")(steps, 1)
            fused_adamw_(
                params, grads, mu, nu, [], steps, lr=peers.LEARNING_RATE, beta1=b1, beta2=b2, eps=peers.EPS,
                weight_decay=peers.WEIGHT_DECAY, amsgrad=False, maximize=False,
            )  # fmt: skip
        return peers.Metrics(loss, norm)

    return peers.Way(update, lambda: tree.unflatten(structure, params))


def one_after_the_other(problem: peers.Problem, members: int) -> peers.Way:
    """The loop by hand, for each member of an ensemble."""
    ways = [
        peers.by_hand(problem_of(tree.map(lambda leaf: leaf[member], problem.params)))  # noqa: B023
        for member in range(members)
    ]

    def update(group: list[peers.Batch]) -> peers.Metrics:
        return peers.Metrics(*zip(*(way.update(group) for way in ways), strict=True))

    def params() -> Any:
        return tree.map(
            lambda *leaves: torch.stack(leaves), *(way.params() for way in ways)
        )

    return peers.Way(update, params)


def alone_table(options: argparse.Namespace, k: int) -> timing.Seconds:
    """One network."""
    names = [
        peers.BY_HAND, "torch.func", peers.PURE_KEPT, peers.PURE,
        peers.BY_HAND_COMPILED, peers.PURE_COMPILED,
    ]  # fmt: skip
    first, *others = names
    makers = {first: peers.WAYS[first], UNCHECKED: unchecked}
    makers |= {name: peers.WAYS[name] for name in others}
    makers[WHOLE] = functools.partial(peers.purestep, around=compiled, donate=True)
    makers[BY_TORCH] = functools.partial(
        peers.purestep, around=by_torch_compile, donate=True
    )
    makers[peers.JAX] = peers.jax_optax
    return measured(options, problem_of(init(0)), makers, k, BLOCK)


def ensemble_table(options: argparse.Namespace, members: int) -> timing.Seconds:
    """Many networks at once."""
    stacked = tree.map(lambda *leaves: torch.stack(leaves), *map(init, range(members)))
    makers: dict[str, Callable[[peers.Problem], peers.Way]] = {
        peers.BY_HAND: functools.partial(one_after_the_other, members=members),
        VMAP: functools.partial(peers.purestep, ensemble=True),
        VMAP_COMPILED: functools.partial(
            peers.purestep, ensemble=True, around=compiled
        ),
        peers.JAX: functools.partial(peers.jax_optax, ensemble=True),
    }
    block = max(1, 2 * BLOCK // members)
    return measured(options, problem_of(stacked), makers, 1, block)


def measured(
    options: argparse.Namespace,
    problem: peers.Problem,
    makers: dict[str, Callable[[peers.Problem], peers.Way]],
    k: int,
    block: int,
) -> timing.Seconds:
    """Ways that are checked, then timed."""
    ways = {
        name: make(problem)
        for name, make in makers.items()
        if name not in options.leave_out
    }
    calls = step.checked(problem, ways, group_of(k))
    return timing.in_turn(calls, options.repeats, block=block)


def own_table(options: argparse.Namespace) -> timing.Seconds:
    """purestep and the loop by hand on many shapes of next to no arithmetic."""
    seconds: timing.Seconds = {}
    for leaves in LEAVES:
        problem = step.leaves_problem(leaves)
        ways = {name: peers.WAYS[name](problem) for name in (peers.BY_HAND, peers.PURE)}
        for k in MICROBATCHES:
            calls = step.updates(ways, step.leaves_group(k))
            block = max(1, BLOCK * LEAVES[0] // (leaves * k))
            taken = timing.in_turn(calls, options.repeats, warmup=2, block=block)
            seconds |= {cell(way, leaves, k): taken[way] for way in ways}
    return seconds


def cell(way: str, leaves: int, k: int) -> str:
    """The name of one measurement."""
    return f"{way}, {leaves} leaves, K = {k}"


def own_cost(launches: list[timing.Seconds]) -> dict[str, float]:
    """Microseconds that the step adds to the loop by hand: least squares, of errors as a share of the update's time."""
    rows, differences = [], []
    for leaves in LEAVES:
        for k in MICROBATCHES:
            pure, hand = (
                timing.flat(launch[cell(way, leaves, k)] for launch in launches)
                for way in (peers.PURE, peers.BY_HAND)
            )
            scale = statistics.median(pure)
            difference = statistics.median(
                p - h for p, h in zip(pure, hand, strict=True)
            )
            rows.append([each / scale for each in (1, k, leaves, leaves * k)])
            differences.append([1e6 * difference / scale])
    wanted = torch.tensor(differences, dtype=torch.float64)
    solution = torch.linalg.lstsq(
        torch.tensor(rows, dtype=torch.float64), wanted
    ).solution
    return dict(zip(COSTS, solution.flatten().tolist(), strict=True))


TABLES: dict[str, Callable[[argparse.Namespace], timing.Seconds]] = {
    "one": functools.partial(alone_table, k=1),
    "four": functools.partial(alone_table, k=4),
    "few": functools.partial(ensemble_table, members=16),
    "many": functools.partial(ensemble_table, members=128),
    "own": own_table,
}
TITLES = {
    "one": "One network, 1 microbatch",
    "four": "One network, 4 microbatches",
    "few": "16 networks",
    "many": "128 networks",
    "own": "Added to the loop by hand",
}


def draw(path: Path, tables: dict[str, Any], own: dict[str, float] | None) -> None:
    """A panel for each table: one network above, ensembles and the step's own cost below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    above = [name for name in ("one", "four") if name in tables]
    below = [name for name in ("few", "many") if name in tables] + (
        ["own"] if own else []
    )
    rows = [row for row in (above, below) if row]
    figure = pyplot.figure(figsize=(13, 3.3 * len(rows)), dpi=150, layout="constrained")
    strips = figure.subfigures(
        len(rows), 1, squeeze=False, height_ratios=[9, 6][: len(rows)]
    )
    panels: dict[str, Any] = {}
    for strip, row in zip(strips[:, 0], rows, strict=True):
        panels |= dict(
            zip(row, strip.subplots(1, len(row), squeeze=False)[0], strict=True)
        )
    for name, axes in panels.items():
        if name != "own":
            step.bars(axes, TITLES[name], tables[name])
            axes.set_xlabel("milliseconds per update")
    if own:
        axes = panels["own"]
        names = [f"per {cost}" for cost in own]
        drawn = axes.barh(names, list(own.values()), color=step.color_of(peers.PURE))
        axes.bar_label(drawn, [f"{value:.1f}" for value in own.values()], padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.35)
        axes.set_title(TITLES["own"], fontsize="medium", loc="left")
        axes.set_xlabel("microseconds")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Measures in fresh processes, prints, draws."""
    parser = timing.arguments(__doc__, repeats=20, launches=3)
    parser.add_argument(
        "--tables", nargs="+", choices=list(TABLES), default=list(TABLES)
    )
    options = parser.parse_args()
    if options.report:
        timing.same_cores()
        [name] = options.tables
        options.report.write_text(json.dumps(TABLES[name](options)))
        return

    tables: dict[str, Any] = {}
    own = None
    for name in options.tables:
        launches = [
            timing.launch("benchmarks.speed.overhead", "--tables", name)
            for _ in range(options.launches)
        ]
        if name == "own":
            own = own_cost(launches)
            print(f"\n{TITLES[name]}")
            for cost, value in own.items():
                print(f"  {value:8.2f} µs per {cost}")
            continue
        tables[name] = timing.joined(launches, [peers.BY_HAND, peers.JAX])
        timing.show(TITLES[name], tables[name])
    picture = timing.write(
        options.results, "overhead", {"tables": tables, "own, µs": own}
    )
    draw(picture, tables, own)


if __name__ == "__main__":
    main()
