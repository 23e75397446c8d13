"""Learns a learning rate for each layer, by gradient descent through training.

A run of 20 updates is a function of its learning rates, and ``torch.func`` differentiates the loss
at its end by them. The outer loop is an update step, too: its parameters are the logarithms of the
rates, its microbatch is a few whole runs, and its "token" is a run.

The picture shows what the rates become. On new data and initial parameters they train further in
the same number of updates than the best single rate for all layers.

    python -m purestep.examples.hypergradients
"""

from collections.abc import Sequence
from pathlib import Path
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
    """The squared error of each row."""
    return ps.losses.mse(mlp.apply(params, batch["x"]).squeeze(-1), batch["y"])


def train(rates: Rates, run: Any) -> Tensor:
    """The loss of each update, and at last that of rows which were not trained on."""
    params, batches = run["params"], run["batches"]
    optimizer = ps.optim.partition(
        LAYERS,
        {name: ps.optim.sgd(rate, momentum=MOMENTUM) for name, rate in rates.items()},
    )
    update_step = ps.make_update_step(
        loss_fn, optimizer, weight_fn=lambda m: torch.ones_like(m["y"])
    )
    opt_state, losses = optimizer.init(params), []
    *trained_on, last = (
        {"x": x, "y": y} for x, y in zip(batches["x"], batches["y"], strict=True)
    )
    for batch in trained_on:
        params, opt_state, metrics = update_step(
            params, opt_state, ps.split(batch, k=2)
        )
        losses.append(metrics.loss)
    return torch.stack([*losses, loss_fn(params, last).mean()])


def runs(number: int, generator: torch.Generator) -> Any:
    """Initial parameters, and rows of a function that is made of waves, for so many runs."""
    each = []
    for _ in range(number):
        x = torch.randn(
            UPDATES + 1, 2 * ROWS, WIDTHS[0], generator=generator, dtype=torch.float64
        )
        y = torch.sin(2 * x[..., 0]) * x[..., 1] + torch.cos(x[..., 2])
        each.append(
            {"params": mlp.init(WIDTHS, generator), "batches": {"x": x, "y": y}}
        )
    return tree.map(lambda *leaves: torch.stack(leaves), *each)


def losses_of(log_rates: Rates, some: Any) -> Tensor:
    """Those of each run: before each update, and after the last on rows that are new."""
    losses: Tensor = torch.vmap(lambda run: train(tree.map(torch.exp, log_rates), run))(
        some
    )
    return losses


def in_all_layers(log_rate: Tensor) -> Rates:
    """The same rate."""
    return dict.fromkeys(LAYERS, log_rate)


def best_single(some: Any) -> Rates:
    """The logarithm of the rate that, in all layers, ends lowest: of 16, in one program."""
    candidates = torch.linspace(-7.0, -2.0, 16, dtype=torch.float64)
    ends = torch.vmap(lambda rate: losses_of(in_all_layers(rate), some)[:, -1].mean())
    best = ends(candidates).nan_to_num(nan=torch.inf).argmin()
    return in_all_layers(candidates[best])


def learn(log_rates: Rates, steps: int, generator: torch.Generator) -> list[Rates]:
    """The logarithms of the rates: to begin with, and after each outer update."""
    optimizer = ps.optim.adamw(0.1, weight_decay=0.0)
    update_step = ps.make_update_step(
        lambda log_rates, some: losses_of(log_rates, some)[:, -1],
        optimizer,
        weight_fn=lambda some: torch.ones(len(some["batches"]["x"])),
    )
    path, opt_state = [log_rates], optimizer.init(log_rates)
    for _ in tqdm(range(steps), unit="outer update"):
        log_rates, opt_state, _ = update_step(
            log_rates, opt_state, [runs(RUNS, generator)]
        )
        path.append(log_rates)
    return path


def draw(path: Path, rates: list[Rates], single: Tensor, learned: Tensor) -> None:
    """The rates on the left, on the right what they are good for."""
    figure, (left, right) = picture.panels(
        "Learning rates, learned through training",
        f"{len(single)} runs on data never seen before",
    )
    for i, name in enumerate(LAYERS):
        values = [float(each[name].exp()) for each in rates]
        color = (picture.BLUE, picture.GREEN, picture.ORANGE, picture.GREY)[i]
        left.semilogy(values, color=color, linewidth=1.8)
        picture.say(
            left,
            name,
            (len(values) - 1, values[-1]),
            color,
            xytext=(6, (5, -5, 5, -5)[i]),
        )
    left.set_xlabel("outer update")
    left.set_ylabel("learning rate")
    for losses, words, color in [
        (single, "the best single rate", picture.ORANGE),
        (learned, "a rate for each layer, learned", picture.BLUE),
    ]:
        right.plot(losses.mean(0), color=color, linewidth=1.8)
        at = (UPDATES // 2, float(losses.mean(0)[UPDATES // 2]))
        picture.say(right, words, at, color, xytext=(0, 18))
    right.set_xticks(range(0, UPDATES + 1, 5))
    right.set_xlabel("update")
    right.set_ylabel("mean squared error")
    picture.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> tuple[Tensor, Tensor]:
    """Learns rates; prints, draws and returns the losses of unseen runs without and with them."""
    options = picture.parser(__doc__, "hypergradients", 60).parse_args(arguments)
    generator = torch.Generator().manual_seed(0)
    single = best_single(runs(96, generator))
    rates = learn(single, options.steps, generator)
    unseen = runs(64, generator)
    before, after = losses_of(single, unseen), losses_of(rates[-1], unseen)
    for name in LAYERS:
        print(
            f"{name}: learning rate {single[name].exp():.4f} -> {rates[-1][name].exp():.4f}"
        )
    gain = before[:, -1] - after[:, -1]
    error = gain.std() / len(gain) ** 0.5
    print(
        f"loss of {len(gain)} unseen runs: {before[:, -1].mean():.3f} with the best single rate, "
        f"{after[:, -1].mean():.3f} with a rate for each layer; "
        f"the difference is {gain.mean():.3f} ± {error:.3f}"
    )
    draw(options.picture, rates, before, after)
    return before, after


if __name__ == "__main__":
    main()
