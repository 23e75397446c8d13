"""Learns a learning rate for each layer, by gradient descent through training.

A run of 20 updates is a function of its learning rates, and ``torch.func`` differentiates the loss
at its end by them. The outer loop is an update step, too: its parameters are the logarithms of the
rates, its microbatch is a few whole runs, and its "token" is a run.

The picture shows what the rates become. On new data and initial parameters they train further in
the same number of updates than the best single rate for all layers.

    python -m purestep.examples.hypergradients
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import purestep as ps
from purestep import tree
from purestep.examples import mlp, picture
from purestep.examples.mlp import Params

Batch = dict[str, Tensor]
Rates = dict[str, Tensor]

WIDTHS = [4, 64, 8, 64, 1]
LAYERS = [f"layer {i}" for i in range(1, len(WIDTHS))]
UPDATES = 20
ROWS = 32  # in a microbatch, of which an update has two
RUNS = 4  # in an outer update
MOMENTUM = 0.9


def loss_fn(params: Params, batch: Batch) -> Tensor:
    """Computes the squared error of each row."""
    column = mlp.apply(params, batch["x"])
    predicted = column.squeeze(-1)
    return ps.losses.mse(predicted, batch["y"])


def weight_fn(batch: Batch) -> Tensor:
    """Gives each row the weight 1."""
    return torch.ones_like(batch["y"])


def make_optimizer(rates: Rates) -> ps.optim.Optimizer:
    """Makes SGD with momentum that trains each layer at its rate; ``rates`` has all layers."""
    optimizers = {}
    for layer, rate in rates.items():
        optimizers[layer] = ps.optim.sgd(rate, momentum=MOMENTUM)
    return ps.optim.partition(optimizers, LAYERS)


def train(rates: Rates, run: Any) -> Tensor:
    """Trains one run; returns the loss before each update, then the final loss on unseen rows.

    All are in one tensor, of shape ``(UPDATES + 1,)``. Derivatives by the rates flow through it.
    ``run`` is one of ``sample_run``.
    """
    optimizer = make_optimizer(rates)
    update_step = ps.make_update_step(loss_fn, optimizer, weight_fn=weight_fn)
    params = run["params"]
    opt_state = optimizer.init(params)
    num_batches = UPDATES + 1
    *batches, unseen = ps.split(run["batches"], k=num_batches)
    losses = []
    for batch in batches:
        group = ps.split(batch, k=2)
        params, opt_state, metrics = update_step(params, opt_state, group)
        losses.append(metrics.loss)
    final_loss = loss_fn(params, unseen).mean()
    return torch.stack([*losses, final_loss])


def sample_run(generator: torch.Generator) -> Any:
    """Draws a run, as a dict of "params", the initial ones, and "batches".

    "batches" is a dict of float64 rows ``x`` and ``y``, where y is a function of x that is made of
    waves. The rows are not cut into batches yet: there are ``2 * ROWS`` for each update and for one
    unseen batch.
    """
    num_batches = UPDATES + 1
    num_rows = 2 * ROWS * num_batches
    x = torch.randn(num_rows, 4, generator=generator, dtype=torch.float64)
    a, b, c, _ = x.unbind(-1)
    y = torch.sin(2 * a) * b + torch.cos(c)
    return {
        "params": mlp.init(WIDTHS, generator),
        "batches": {"x": x, "y": y},
    }


def sample_runs(num_runs: int, generator: torch.Generator) -> Any:
    """Draws runs, and stacks their leaves along a new first dimension."""
    runs = [sample_run(generator) for _ in range(num_runs)]

    def stack(*leaves: Tensor) -> Tensor:
        return torch.stack(leaves)

    return tree.map(stack, *runs)


def compute_losses(log_rates: Rates, runs: Any) -> Tensor:
    """Trains all stacked runs at once; returns the losses of ``train``, ``(runs, UPDATES + 1)``.

    ``runs`` are those of ``sample_runs``. All have the same rates, whose logarithms it takes.
    """
    rates = tree.map(torch.exp, log_rates)
    train_all = torch.vmap(train, in_dims=(None, 0))
    losses: Tensor = train_all(rates, runs)
    return losses


def compute_final_losses(log_rates: Rates, runs: Any) -> Tensor:
    """Trains all stacked runs at once; returns the loss of each on unseen rows, ``(runs,)``."""
    losses = compute_losses(log_rates, runs)
    return losses[:, -1]


def weight_runs(runs: Any) -> Tensor:
    """Returns the weight 1 for each of the stacked runs."""
    num_runs = len(runs["batches"]["x"])
    return torch.ones(num_runs)


def share_rate(log_rate: Tensor) -> Rates:
    """Returns a dict with the same logarithm of a rate for every layer."""
    return dict.fromkeys(LAYERS, log_rate)


def find_best_single_rate(runs: Any) -> Rates:
    """Returns the logarithm of the best of 16 single rates, under the name of every layer.

    The 16 logarithms lie evenly from -7 to -2. The best one has the least mean final loss over the
    runs; NaN counts as infinite. ``runs`` is what ``compute_final_losses`` takes.
    """

    def compute_mean_loss(log_rate: Tensor) -> Tensor:
        log_rates = share_rate(log_rate)
        return compute_final_losses(log_rates, runs).mean()

    candidates = torch.linspace(-7.0, -2.0, 16, dtype=torch.float64)
    losses = torch.vmap(compute_mean_loss)(candidates)
    # Runs at too large a rate diverge, and end in NaN.
    losses = losses.nan_to_num(nan=torch.inf)
    best = losses.argmin()
    return share_rate(candidates[best])


def learn_rates(
    log_rates: Rates, num_steps: int, generator: torch.Generator
) -> list[Rates]:
    """Learns the logarithms of the rates by AdamW, on ``RUNS`` new runs in each outer update.

    Returns the initial ones, then those after each update. Shows a progress bar.
    """
    optimizer = ps.optim.adamw(0.1, weight_decay=0.0)
    update_step = ps.make_update_step(
        compute_final_losses,
        optimizer,
        weight_fn=weight_runs,
    )
    opt_state = optimizer.init(log_rates)
    path = [log_rates]
    for _ in tqdm(range(num_steps), unit="outer update"):
        group = [sample_runs(RUNS, generator)]
        log_rates, opt_state, _ = update_step(log_rates, opt_state, group)
        path.append(log_rates)
    return path


def plot_rates(axes: Any, path: list[Rates]) -> None:
    """Plots the rate of each layer over the outer updates; ``path`` has the logarithms."""
    styles = [
        (picture.BLUE, 5),
        (picture.GREEN, -5),
        (picture.ORANGE, 5),
        (picture.GREY, -5),
    ]
    steps = range(len(path))
    for i, layer in enumerate(LAYERS):
        color, height = styles[i]
        logs = [log_rates[layer] for log_rates in path]
        rates = torch.stack(logs).exp().tolist()
        picture.plot_line(axes, steps, rates, color)
        end = (steps[-1], rates[-1])
        shift = (6, height)
        picture.annotate(axes, layer, end, color, shift)
    axes.set_yscale("log")
    axes.set_xlabel("outer update")
    axes.set_ylabel("learning rate")


def plot_losses(axes: Any, single: Tensor, learned: Tensor) -> None:
    """Plots the mean loss of unseen runs over the updates, without and with learned rates."""
    updates = range(UPDATES + 1)
    middle = UPDATES // 2
    for losses, text, color in [
        (single, "the best single rate", picture.ORANGE),
        (learned, "a rate for each layer, learned", picture.BLUE),
    ]:
        means = losses.mean(0).tolist()
        picture.plot_line(axes, updates, means, color)
        point = (middle, means[middle])
        picture.annotate(axes, text, point, color, shift=(0, 18))
    axes.set_xticks(updates[::5])
    axes.set_xlabel("update")
    axes.set_ylabel("mean squared error")


def print_rates(single: Rates, learned: Rates) -> None:
    """Prints the rate of each layer before and after learning, from their logarithms."""
    for layer in LAYERS:
        old = single[layer].exp()
        new = learned[layer].exp()
        print(f"{layer}: learning rate {old:.4f} -> {new:.4f}")


def print_gain(before: Tensor, after: Tensor) -> None:
    """Prints the mean final losses without and with learned rates, and their mean difference.

    The difference has its standard error. Both tensors are of shape ``(runs, UPDATES + 1)``.
    """
    final_before = before[:, -1]
    final_after = after[:, -1]
    gain = final_before - final_after
    error = gain.std() / len(gain) ** 0.5
    print(
        f"loss of {len(gain)} unseen runs: "
        f"{final_before.mean():.3f} with the best single rate, "
        f"{final_after.mean():.3f} with a rate for each layer; "
        f"the difference is {gain.mean():.3f} ± {error:.3f}"
    )


def main(arguments: Sequence[str] | None = None) -> tuple[Tensor, Tensor]:
    """Learns rates; prints, plots and returns the losses of unseen runs without and with them.

    Both results are of shape ``(runs, UPDATES + 1)``. The picture is written to ``--picture``.
    """
    parser = picture.make_parser(__doc__, "hypergradients", 60)
    options = parser.parse_args(arguments)
    generator = torch.Generator().manual_seed(0)
    runs = sample_runs(96, generator)
    single = find_best_single_rate(runs)
    path = learn_rates(single, options.steps, generator)
    learned = path[-1]
    unseen = sample_runs(64, generator)
    before = compute_losses(single, unseen)
    after = compute_losses(learned, unseen)

    print_rates(single, learned)
    print_gain(before, after)

    figure, (left_axes, right_axes) = picture.make_panels(
        "Learning rates, learned through training",
        f"{len(before)} runs on data never seen before",
    )
    plot_rates(left_axes, path)
    plot_losses(right_axes, before, after)
    picture.save(figure, options.picture)
    return before, after


if __name__ == "__main__":
    main()
