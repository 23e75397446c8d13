"""Learns where to begin: a few updates learn a sinusoid from ten of its points [Finn et al., 2017].

The inner loop is an update step, and so is the outer one, whose loss runs the inner one on each of
its tasks. The picture shows what two initialisations become in a few updates. One was learned
through the update. The other was trained in the ordinary way on the same tasks: its best answer is
the mean of all sinusoids, zero.

    python -m purestep.examples.maml
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import purestep as ps
from purestep.examples import mlp, picture
from purestep.examples.mlp import Params

Batch = dict[str, Tensor]

WIDTH = 40
SHOTS = 10  # points of a sinusoid that are given
TASKS = 25  # sinusoids in an outer update
RATE = 0.02  # of the inner updates
UPDATES = 2  # of a task, through which is learned
MOST = 10  # updates of a task in the picture


def apply(params: Params, x: Tensor) -> Tensor:
    """A number for each."""
    return mlp.apply(params, x[..., None]).squeeze(-1)


def loss_fn(params: Params, batch: Batch) -> Tensor:
    """The squared error of each point."""
    return ps.losses.mse(apply(params, batch["x"]), batch["y"])


def sinusoids(number: int, generator: torch.Generator) -> Batch:
    """Of amplitudes from 0.1 to 5 and any phase: points to learn from, and as many to predict."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(
            shape, generator=generator, dtype=torch.float64
        )

    amplitude, phase = uniform(0.1, 5, number, 1), uniform(0, 2 * math.pi, number, 1)
    x, ask = uniform(-5, 5, number, SHOTS), uniform(-5, 5, number, SHOTS)
    return {
        "amplitude": amplitude, "phase": phase, "x": x, "y": amplitude * torch.sin(x - phase),
        "ask": ask, "answer": amplitude * torch.sin(ask - phase),
    }  # fmt: skip


def adapted(
    params: Params, task: Batch, updates: int, rate: float | Tensor = RATE
) -> list[Params]:
    """The parameters before the first update on the points of one task, and after each."""
    optimizer = ps.optim.sgd(rate)
    update_step = ps.make_update_step(
        loss_fn, optimizer, weight_fn=lambda batch: torch.ones_like(batch["y"])
    )
    opt_state, path = optimizer.init(params), [params]
    for _ in range(updates):
        params, opt_state, _ = update_step(
            params, opt_state, [{"x": task["x"], "y": task["y"]}]
        )
        path.append(params)
    return path


def errors(
    params: Params, tasks: Batch, updates: int, rate: float | Tensor = RATE
) -> Tensor:
    """The squared errors of each task's points to be found, (tasks, updates + 1, points)."""

    def of_task(task: Batch) -> Tensor:
        asked = {"x": task["ask"], "y": task["answer"]}
        return torch.stack(
            [loss_fn(at, asked) for at in adapted(params, task, updates, rate)]
        )

    found: Tensor = torch.vmap(of_task)(tasks)
    return found


def learn(updates: int, steps: int) -> Params:
    """Parameters that are good after so many updates of a task; 0: after ordinary training."""
    generator = torch.Generator().manual_seed(0)
    params = mlp.init((1, WIDTH, WIDTH, 1), generator, gain=math.sqrt(2))
    rate = ps.optim.warmup_cosine_decay_schedule(
        0.0, 1e-2, steps // 40 + 1, steps + 1, 5e-4
    )
    optimizer = ps.optim.adamw(rate, weight_decay=0.0)
    update_step = ps.make_update_step(
        lambda params, tasks: errors(params, tasks, updates)[:, -1],
        optimizer,
        weight_fn=lambda tasks: torch.ones_like(tasks["answer"]),
    )
    opt_state = optimizer.init(params)
    for _ in tqdm(range(steps), unit="outer update"):
        params, opt_state, _ = update_step(
            params, opt_state, [sinusoids(TASKS, generator)]
        )
    return params


def best_rate(params: Params, tasks: Batch) -> Tensor:
    """The rate with which these parameters have the least error in the end, of 24."""
    rates = torch.logspace(-4, -0.5, 24, dtype=torch.float64)
    ends = torch.vmap(lambda rate: errors(params, tasks, MOST, rate)[:, -1].mean())(
        rates
    )
    return rates[ends.nan_to_num(nan=torch.inf).argmin()]


def draw(
    path: Path,
    curves: dict[str, tuple[Params, float | Tensor]],
    task: Batch,
    found: list[Tensor],
) -> None:
    """One sinusoid on the left, the errors of many on the right."""
    figure, (left, right) = picture.panels(
        f"A sinusoid never seen before, after {UPDATES} updates",
        f"{len(found[0])} such sinusoids: mean squared error",
    )
    x = torch.linspace(-5, 5, 200, dtype=torch.float64)
    left.plot(
        x, task["amplitude"] * torch.sin(x - task["phase"]), color="0.8", linewidth=5
    )
    for (name, (params, rate)), (color, away), errors_of in zip(
        curves.items(), [(picture.ORANGE, -13), (picture.BLUE, 13)], found, strict=True
    ):
        left.plot(
            x,
            apply(adapted(params, task, UPDATES, rate)[-1], x),
            color=color,
            linewidth=1.8,
        )
        means = errors_of.mean((0, 2))
        right.plot(means, "o-", color=color, linewidth=1.8, markersize=4)
        at = (MOST, float(means[MOST]))
        picture.say(right, name, at, color, xytext=(0, away), ha="right")
    left.plot(
        task["x"],
        task["y"],
        "o",
        color="black",
        label=f"the {SHOTS} points that are given",
    )
    left.legend(
        frameon=False, loc="lower left", bbox_to_anchor=(0, -0.2), handletextpad=0
    )
    right.set_ylim(0)
    right.set_xticks(range(0, MOST + 1, 2))
    right.set_xlabel("update")
    picture.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> list[Tensor]:
    """Learns both initialisations; prints, draws and returns their errors on unseen tasks."""
    options = picture.parser(__doc__, "maml", 2000).parse_args(arguments)
    generator = torch.Generator().manual_seed(1)
    plain, learned = learn(0, options.steps), learn(UPDATES, options.steps)
    rate = best_rate(plain, sinusoids(200, generator))
    curves: dict[str, tuple[Params, float | Tensor]] = {
        f"trained in the ordinary way, its best rate {rate:.2g}": (plain, rate),
        f"learned through {UPDATES} updates": (learned, RATE),
    }
    unseen = sinusoids(500, generator)
    found = [errors(params, unseen, MOST, rate) for params, rate in curves.values()]
    for name, each in zip(curves, found, strict=True):
        means = each.mean((0, 2))
        print(
            f"error on {len(each)} unseen sinusoids, {name}: {means[0]:.2f}, "
            f"after {UPDATES} updates {means[UPDATES]:.2f}, after {MOST} {means[MOST]:.2f}"
        )
    largest = int(unseen["amplitude"].argmax())
    draw(options.picture, curves, {k: v[largest] for k, v in unseen.items()}, found)
    return found


if __name__ == "__main__":
    main()
