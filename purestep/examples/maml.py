"""Learns where to begin: a few updates learn a sinusoid from ten of its points [Finn et al., 2017].

The inner loop is an update step, and so is the outer one, whose loss runs the inner one on each of
its tasks. The picture shows what two initialisations become in a few updates. One was learned
through the update. The other was trained in the ordinary way on the same tasks: its best answer is
the mean of all sinusoids, zero.

    python -m purestep.examples.maml
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

import purestep as ps
from purestep.examples import mlp, picture
from purestep.examples.mlp import Params

Batch = dict[str, Tensor]

WIDTH = 40
SHOTS = 10  # points of a sinusoid to learn from
TASKS = 25  # sinusoids in an outer update
RATE = 0.02  # of the inner updates
UPDATES = 2  # of a task, through which the initialisation is learned
MAX_UPDATES = 10  # updates of a task in the picture
COLORS = (picture.ORANGE, picture.BLUE)


class Start(NamedTuple):
    """Holds an initialisation, and the learning rate with which it adapts."""

    params: Params
    rate: float | Tensor


def apply(params: Params, x: Tensor) -> Tensor:
    """Predicts a number for each number in ``x``; the shape stays."""
    columns = mlp.apply(params, x[..., None])
    return columns.squeeze(-1)


def loss_fn(params: Params, batch: Batch) -> Tensor:
    """Computes the squared error of each point."""
    predicted = apply(params, batch["x"])
    return ps.losses.mse(predicted, batch["y"])


def weight_fn(batch: Batch) -> Tensor:
    """Gives each point the weight 1."""
    return torch.ones_like(batch["y"])


def sample_uniform(
    low: float, high: float, shape: tuple[int, int], generator: torch.Generator
) -> Tensor:
    """Draws a float64 tensor of uniform numbers from ``low`` to ``high``."""
    noise = torch.rand(shape, generator=generator, dtype=torch.float64)
    return low + (high - low) * noise


def evaluate_sinusoid(x: Tensor, amplitude: Tensor, phase: Tensor) -> Tensor:
    """Evaluates amplitude · sin(x − phase)."""
    return amplitude * torch.sin(x - phase)


def sample_tasks(num_tasks: int, generator: torch.Generator) -> Batch:
    """Draws sinusoids of amplitudes from 0.1 to 5 and any phase.

    Each has ``SHOTS`` points to learn from, its support, and as many to predict, its query. Leaves
    are ``amplitude`` and ``phase`` of shape (tasks, 1), and ``support_x``, ``support_y``,
    ``query_x`` and ``query_y`` of shape (tasks, ``SHOTS``).
    """
    of_task = (num_tasks, 1)
    of_points = (num_tasks, SHOTS)
    amplitude = sample_uniform(0.1, 5, of_task, generator)
    phase = sample_uniform(0, 2 * math.pi, of_task, generator)
    support = sample_uniform(-5, 5, of_points, generator)
    query = sample_uniform(-5, 5, of_points, generator)
    return {
        "amplitude": amplitude,
        "phase": phase,
        "support_x": support,
        "support_y": evaluate_sinusoid(support, amplitude, phase),
        "query_x": query,
        "query_y": evaluate_sinusoid(query, amplitude, phase),
    }


def adapt(start: Start, task: Batch, num_updates: int) -> list[Params]:
    """Trains on one task's support by SGD; returns its params before and after each update."""
    optimizer = ps.optim.sgd(start.rate)
    update_step = ps.make_update_step(loss_fn, optimizer, weight_fn=weight_fn)
    support = {"x": task["support_x"], "y": task["support_y"]}
    group = [support]
    params = start.params
    opt_state = optimizer.init(params)
    path = [params]
    for _ in range(num_updates):
        params, opt_state, _ = update_step(params, opt_state, group)
        path.append(params)
    return path


def compute_errors(start: Start, tasks: Batch, num_updates: int) -> Tensor:
    """Adapts to each task; returns query errors, squared, ``(tasks, num_updates + 1, points)``."""

    def compute_task_errors(task: Batch) -> Tensor:
        query = {"x": task["query_x"], "y": task["query_y"]}
        errors = []
        for params in adapt(start, task, num_updates):
            errors.append(loss_fn(params, query))
        return torch.stack(errors)

    errors: Tensor = torch.vmap(compute_task_errors)(tasks)
    return errors


def learn_initialization(num_updates: int, num_steps: int) -> Params:
    """Learns parameters that have little error after ``num_updates`` of adaptation to a task.

    With 0 updates, this is ordinary training. ``num_steps`` counts the outer updates. The initial
    params and the tasks are the same in each call. Shows a progress bar.
    """
    generator = torch.Generator().manual_seed(0)
    widths = (1, WIDTH, WIDTH, 1)
    gain = math.sqrt(2)
    params = mlp.init(widths, generator, gain)
    learning_rate = ps.optim.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=1e-2,
        warmup_steps=num_steps // 40 + 1,
        decay_steps=num_steps + 1,
        end_value=5e-4,
    )
    optimizer = ps.optim.adamw(learning_rate, weight_decay=0.0)

    def outer_loss_fn(params: Params, tasks: Batch) -> Tensor:
        start = Start(params, RATE)
        errors = compute_errors(start, tasks, num_updates)
        return errors[:, -1]

    def outer_weight_fn(tasks: Batch) -> Tensor:
        return torch.ones_like(tasks["query_y"])

    update_step = ps.make_update_step(
        outer_loss_fn, optimizer, weight_fn=outer_weight_fn
    )
    opt_state = optimizer.init(params)
    for _ in tqdm(range(num_steps), unit="outer update"):
        tasks = sample_tasks(TASKS, generator)
        params, opt_state, _ = update_step(params, opt_state, [tasks])
    return params


def find_best_rate(params: Params, tasks: Batch) -> Tensor:
    """Returns the one of 24 rates with the least mean error after ``MAX_UPDATES`` of adaptation."""

    def compute_final_error(rate: Tensor) -> Tensor:
        start = Start(params, rate)
        errors = compute_errors(start, tasks, MAX_UPDATES)
        return errors[:, -1].mean()

    rates = torch.logspace(-4, -0.5, 24, dtype=torch.float64)
    errors = torch.vmap(compute_final_error)(rates)
    # Too large a rate diverges, and ends in NaN.
    errors = errors.nan_to_num(nan=torch.inf)
    return rates[errors.argmin()]


def select_largest(tasks: Batch) -> Batch:
    """Returns the task with the largest amplitude, without the dimension of tasks."""
    largest = int(tasks["amplitude"].argmax())
    task = {}
    for name, leaf in tasks.items():
        task[name] = leaf[largest]
    return task


def average_errors(errors: Tensor) -> Tensor:
    """Averages errors of shape (tasks, updates, points) over tasks and points."""
    return errors.mean((0, 2))


def plot_fits(axes: Any, starts: Sequence[Start], task: Batch) -> None:
    """Plots a task's sinusoid, its support, and each start's fit after ``UPDATES`` updates."""
    x = torch.linspace(-5, 5, 200, dtype=torch.float64)
    sinusoid = evaluate_sinusoid(x, task["amplitude"], task["phase"])
    axes.plot(x, sinusoid, color="0.8", linewidth=5)
    for start, color in zip(starts, COLORS, strict=True):
        *_, adapted = adapt(start, task, UPDATES)
        predicted = apply(adapted, x)
        picture.plot_line(axes, x, predicted, color)
    axes.plot(
        task["support_x"],
        task["support_y"],
        "o",
        color="black",
        label=f"the {SHOTS} points that are given",
    )
    axes.legend(
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(0, -0.2),
        handletextpad=0,
    )


def plot_errors(axes: Any, errors: Mapping[str, Tensor]) -> None:
    """Plots the mean error of each start, by name, over the updates of a task."""
    updates = range(MAX_UPDATES + 1)
    heights = [-13, 13]  # of the names, below and above their curves
    for i, name in enumerate(errors):
        color = COLORS[i]
        shift = (0, heights[i])
        means = average_errors(errors[name]).tolist()
        picture.plot_line(axes, updates, means, color, marker="o")
        picture.annotate_end(axes, name, updates, means, color, shift)
    axes.set_ylim(0)
    axes.set_xticks(updates[::2])
    axes.set_xlabel("update")


def print_errors(errors: Mapping[str, Tensor]) -> None:
    """Prints each start's mean error before adaptation, after ``UPDATES``, and ``MAX_UPDATES``.

    Each tensor has one start's errors: the first dimension runs over tasks, and the second over
    numbers of updates, from 0. ``average_errors`` takes the mean.
    """
    for name, values in errors.items():
        means = average_errors(values)
        print(
            f"error on {len(values)} unseen sinusoids, {name}: {means[0]:.2f}, "
            f"after {UPDATES} updates {means[UPDATES]:.2f}, "
            f"after {MAX_UPDATES} {means[MAX_UPDATES]:.2f}"
        )


def main(arguments: Sequence[str] | None = None) -> list[Tensor]:
    """Learns one initialisation in the ordinary way, and one through the update, and compares both.

    Prints, plots and returns their errors on unseen tasks, of shape (tasks, updates + 1, points).
    The picture is written to ``--picture``.
    """
    parser = picture.make_parser(__doc__, "maml", 2000)
    options = parser.parse_args(arguments)
    plain = learn_initialization(0, options.steps)
    learned = learn_initialization(UPDATES, options.steps)
    generator = torch.Generator().manual_seed(1)
    tasks = sample_tasks(200, generator)
    rate = find_best_rate(plain, tasks)
    starts = {
        f"trained in the ordinary way, its best rate {rate:.2g}": Start(plain, rate),
        f"learned through {UPDATES} updates": Start(learned, RATE),
    }
    unseen = sample_tasks(500, generator)
    errors = {}
    for name, start in starts.items():
        errors[name] = compute_errors(start, unseen, MAX_UPDATES)
    print_errors(errors)

    figure, (left_axes, right_axes) = picture.make_panels(
        f"A sinusoid never seen before, after {UPDATES} updates",
        f"{len(unseen['phase'])} such sinusoids: mean squared error",
    )
    task = select_largest(unseen)
    plot_fits(left_axes, list(starts.values()), task)
    plot_errors(right_axes, errors)
    picture.save(figure, options.picture)
    return list(errors.values())


if __name__ == "__main__":
    main()
