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
from purestep.examples import mlp, picture
from purestep.examples.mlp import Params

Batch = dict[str, Tensor]

RUNS = 64
POINTS = 64  # on each of two spirals
WIDTH = 16


class Comparison(NamedTuple):
    """Holds the rates, the losses of runs trained together and one by one, and the seconds.

    The losses are of shape (rates, updates), each before its update.
    """

    rates: Tensor
    together: Tensor
    alone: Tensor
    seconds_together: float
    seconds_alone: float


def make_spirals() -> list[Batch]:
    """Draws points on two spirals that wind around each other; returns them in two microbatches.

    Labels are the number of the spiral. Each call draws the same points.
    """
    generator = torch.Generator().manual_seed(0)
    num_points = 2 * POINTS
    noise = torch.rand(num_points, generator=generator, dtype=torch.float64)
    radius = noise.sqrt() * 3 * math.pi
    label = torch.arange(num_points) % 2
    angle = radius + math.pi * label
    horizontal = radius * angle.cos()
    vertical = radius * angle.sin()
    x = torch.stack([horizontal, vertical], -1) / 5
    batch = {"x": x, "labels": label}
    return ps.split(batch, k=2)


def init() -> Params:
    """Draws float64 parameters of a network with two hidden layers, the same at each call."""
    widths = (2, WIDTH, WIDTH, 2)
    generator = torch.Generator().manual_seed(1)
    return mlp.init(widths, generator)


def loss_fn(params: Params, batch: Batch) -> Tensor:
    """Computes the cross entropy of each point."""
    logits = mlp.apply(params, batch["x"])
    return ps.losses.cross_entropy(logits, batch["labels"])


def train_one_by_one(rates: Tensor, steps: int) -> Tensor:
    """Trains a run for each rate, one after the other; returns the losses, ``(rates, steps)``."""
    group = make_spirals()
    curves = []
    for rate in rates.tolist():
        optimizer = ps.optim.adamw(rate)
        update_step = ps.make_update_step(loss_fn, optimizer)
        params = init()
        opt_state = optimizer.init(params)
        losses = []
        for _ in range(steps):
            params, opt_state, metrics = update_step(params, opt_state, group)
            losses.append(metrics.loss)
        curves.append(torch.stack(losses))
    return torch.stack(curves)


def train_together(rates: Tensor, steps: int) -> Tensor:
    """Trains all rates at once by ``torch.vmap``; returns the losses, ``(rates, steps)``."""
    group = make_spirals()
    start = init()

    def begin(rate: Tensor) -> Any:
        optimizer = ps.optim.adamw(rate)
        return start, optimizer.init(start)

    def update(rate: Tensor, params: Params, opt_state: Any) -> Any:
        optimizer = ps.optim.adamw(rate)
        update_step = ps.make_update_step(loss_fn, optimizer)
        params, opt_state, metrics = update_step(params, opt_state, group)
        return params, opt_state, metrics.loss

    params, opt_state = torch.vmap(begin)(rates)
    update_all = torch.vmap(update)
    losses = []
    for _ in range(steps):
        params, opt_state, loss = update_all(rates, params, opt_state)
        losses.append(loss)
    return torch.stack(losses, 1)


def measure(steps: int) -> Comparison:
    """Trains at 64 learning rates, together and one by one, and times both ways."""
    rates = torch.logspace(-4, 0.5, RUNS, dtype=torch.float64)
    # Neither should pay for what happens once.
    train_together(rates[:2], 2)
    train_one_by_one(rates[:2], 2)

    begin = time.perf_counter()
    together = train_together(rates, steps)
    middle = time.perf_counter()
    alone = train_one_by_one(rates, steps)
    end = time.perf_counter()
    return Comparison(
        rates,
        together,
        alone,
        seconds_together=middle - begin,
        seconds_alone=end - middle,
    )


def plot_together(axes: Any, result: Comparison) -> None:
    """Plots the losses of the runs trained together, over the rate, in three of the updates."""
    rates = result.rates.tolist()
    middle = RUNS // 2
    num_steps = result.together.shape[1]
    some = max(1, num_steps // 10)
    more = max(1, num_steps // 3)
    for step, alpha, shift, side in [
        (some, 0.35, (0, 9), "center"),
        (more, 0.6, (30, 5), "left"),
        (num_steps, 1.0, (-6, 0), "right"),
    ]:
        losses = result.together[:, step - 1].tolist()
        picture.plot_line(axes, rates, losses, picture.BLUE, alpha=alpha)
        picture.annotate(
            axes,
            f"in update {step}",
            (rates[middle], losses[middle]),
            picture.BLUE,
            shift,
            alpha=alpha,
            ha=side,
        )


def plot_alone(axes: Any, result: Comparison) -> None:
    """Plots the last losses of the runs trained one by one, over the rate."""
    rates = result.rates.tolist()
    losses = result.alone[:, -1].tolist()
    middle = RUNS // 2
    axes.plot(rates, losses, "o", color=picture.ORANGE, fillstyle="none")
    picture.annotate(
        axes,
        "○ the same, one run after the other",
        (rates[middle], losses[middle]),
        picture.ORANGE,
        shift=(-6, -16),
        ha="right",
    )


def plot(path: Path, result: Comparison) -> None:
    """Plots the loss over the learning rate, trained both ways, and saves the picture."""
    figure, (axes,) = picture.make_panels(
        f"{RUNS} learning rates in one program, in {result.seconds_together:.1f} "
        f"seconds; one run after the other, they take {result.seconds_alone:.1f}"
    )
    plot_together(axes, result)
    plot_alone(axes, result)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss per point")
    picture.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> Comparison:
    """Trains both ways; prints a summary, saves a picture, and returns the losses and times.

    The picture goes to the file that ``--picture`` names, by default "ensembles.png".
    """
    parser = picture.make_parser(__doc__, "ensembles", 150)
    options = parser.parse_args(arguments)
    result = measure(options.steps)
    final = result.together[:, -1]
    best = int(final.argmin())
    print(
        f"best of {RUNS} learning rates: {result.rates[best]:.1e}, "
        f"loss {final[best]:.1e}"
    )
    print(
        f"seconds: {result.seconds_together:.1f} together, "
        f"{result.seconds_alone:.1f} one by one"
    )
    difference = (result.together - result.alone).abs()
    relative = difference / result.alone
    largest = relative.amax(1)
    num_stable = int((largest < 1e-9).sum())
    print(
        f"losses within 1e-9 of each other: {num_stable} runs; "
        "the others amplify rounding"
    )
    plot(options.picture, result)
    return result


if __name__ == "__main__":
    main()
