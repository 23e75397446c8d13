"""Trains a network with 64 learning rates at once: ``torch.vmap`` of the update step.

The picture shows the valley of the loss over the learning rate. The 64 runs one after the other
come out the same and take many times as long. (A rate too large for stable training amplifies what
rounding leaves between the two.)

    python -m purestep.examples.ensembles
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.examples import mlp, picture
from purestep.examples.mlp import Params

Batch = dict[str, Tensor]

RUNS = 64
POINTS = 64  # on each of two spirals
WIDTH = 16


class Found(NamedTuple):
    """The losses of each run after each update, both ways, and the seconds that these took."""

    rates: Tensor
    together: Tensor
    alone: Tensor
    seconds_together: float
    seconds_alone: float


def spirals() -> list[Batch]:
    """Points on two spirals that wind around each other, in two microbatches."""
    generator = torch.Generator().manual_seed(0)
    turn = (
        torch.rand(2 * POINTS, generator=generator, dtype=torch.float64).sqrt()
        * 3
        * math.pi
    )
    label = torch.arange(2 * POINTS) % 2
    angle = turn + math.pi * label
    x = torch.stack([turn * angle.cos(), turn * angle.sin()], -1) / 5
    return ps.split({"x": x, "labels": label}, k=2)


def init() -> Params:
    """Two hidden layers."""
    return mlp.init((2, WIDTH, WIDTH, 2), torch.Generator().manual_seed(1))


def loss_fn(params: Params, batch: Batch) -> Tensor:
    """Cross entropy of each point."""
    return ps.losses.cross_entropy(mlp.apply(params, batch["x"]), batch["labels"])


def one_by_one(rates: Tensor, steps: int) -> Tensor:
    """Run after run."""
    group, params = spirals(), init()
    losses = []
    for rate in rates.tolist():
        optimizer = ps.optim.adamw(rate)
        update_step = ps.make_update_step(loss_fn, optimizer)
        at, opt_state = params, optimizer.init(params)
        for _ in range(steps):
            at, opt_state, metrics = update_step(at, opt_state, group)
            losses.append(metrics.loss)
    return torch.stack(losses).view(len(rates), steps)


def together(rates: Tensor, steps: int) -> Tensor:
    """All runs in each operation."""
    group, params = spirals(), init()

    def update(rate: Tensor, at: Params, opt_state: Any) -> Any:
        update_step = ps.make_update_step(loss_fn, ps.optim.adamw(rate))
        at, opt_state, metrics = update_step(at, opt_state, group)
        return at, opt_state, metrics.loss

    opt_state = torch.vmap(lambda rate: ps.optim.adamw(rate).init(params))(rates)
    at = tree.map(lambda leaf: leaf.expand(len(rates), *leaf.shape), params)
    losses = []
    for _ in range(steps):
        at, opt_state, loss = torch.vmap(update)(rates, at, opt_state)
        losses.append(loss)
    return torch.stack(losses, 1)


def measure(steps: int) -> Found:
    """Both ways, each timed."""
    rates = torch.logspace(-4, 0.5, RUNS, dtype=torch.float64)
    for way in (together, one_by_one):
        way(rates[:2], 2)  # so that neither pays for what happens once
    begin = time.perf_counter()
    at_once = together(rates, steps)
    middle = time.perf_counter()
    alone = one_by_one(rates, steps)
    return Found(rates, at_once, alone, middle - begin, time.perf_counter() - middle)


def draw(path: Path, found: Found) -> None:
    """The valley of the loss over the learning rate."""
    figure, (axes,) = picture.panels(
        f"{RUNS} learning rates in one program, in {found.seconds_together:.1f} seconds; one run "
        f"after the other, they take {found.seconds_alone:.1f}"
    )
    rates, steps = found.rates.tolist(), found.together.shape[1]
    middle = RUNS // 2
    places: list[tuple[int, float, dict[str, Any]]] = [
        (max(1, steps // 10), 0.35, {"xytext": (0, 9), "ha": "center"}),
        (max(1, steps // 3), 0.6, {"xytext": (30, 5)}),
        (steps, 1.0, {"xytext": (-6, 0), "ha": "right"}),
    ]
    for step, alpha, how in places:
        losses = found.together[:, step - 1].tolist()
        axes.loglog(rates, losses, color=picture.BLUE, alpha=alpha, linewidth=1.8)
        at, words = (rates[middle], losses[middle]), f"after {step} updates"
        picture.say(axes, words, at, picture.BLUE, alpha=alpha, **how)
    alone = found.alone[:, -1].tolist()
    axes.plot(rates, alone, "o", color=picture.ORANGE, fillstyle="none")
    words = "○ the same, one run after the other"
    picture.say(axes, words, at, picture.ORANGE, xytext=(-6, -16), ha="right")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss per point")
    picture.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> Found:
    """Trains both ways; prints, draws and returns what came out."""
    options = picture.parser(__doc__, "ensembles", 150).parse_args(arguments)
    found = measure(options.steps)
    best = int(found.together[:, -1].argmin())
    apart = (found.together - found.alone).abs() / found.alone
    stable = int((apart.amax(1) < 1e-9).sum())
    loss = found.together[best, -1]
    print(f"best of {RUNS} learning rates: {found.rates[best]:.1e}, loss {loss:.1e}")
    print(
        f"seconds: {found.seconds_together:.1f} together, {found.seconds_alone:.1f} one by one"
    )
    print(
        f"losses within 1e-9 of each other: {stable} runs; the others amplify rounding"
    )
    draw(options.picture, found)
    return found


if __name__ == "__main__":
    main()
