"""Trains a classifier so that nobody can tell who was in its data: accuracy against noise, and against what the noise promises.

``per_example`` clips the gradient of every example, and adds noise to their sum, once a step. Whoever sees the parameters after T updates
on all examples can tell two sets of data that differ in one example apart no better than (ε, δ) allows:

    ρ = T · (2 clip)² / 2 (noise · clip)² = 2 T / noise²        ε = ρ + 2 √(ρ ln 1/δ)        [Bun and Steinke, 2016]

The picture shows that the same promise costs the less accuracy, the more examples there are to hide among.

    python -m purestep.examples.differential_privacy
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import purestep as ps
from purestep.examples import picture

Params = dict[str, Tensor]
Batch = dict[str, Tensor]

CLASSES = 10
FEATURES = 20
WIDTH = 32
SIZES = (300, 1200, 4800)  # examples to train on
NOISES = (0.0, 3.0, 6.0, 12.0, 24.0, 48.0, 96.0, 192.0)
SEEDS = 2
CLIP = 1.0
DELTA = 1e-5
OPTIMIZER = ps.optim.sgd(1.0, momentum=0.8)


def people(number: int, seed: int) -> Batch:
    """Points around the ten centres, which are the same for all seeds."""
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (number,), generator=generator)
    x = centres[labels] + 1.2 * torch.randn(number, FEATURES, generator=generator)
    return {"x": x, "labels": labels}


def init(generator: torch.Generator) -> Params:
    """One hidden layer."""
    return {
        "in": torch.randn(FEATURES, WIDTH, generator=generator) / FEATURES**0.5,
        "bias": torch.zeros(WIDTH),
        "out": torch.randn(WIDTH, CLASSES, generator=generator) / WIDTH**0.5,
    }


def apply(params: Params, x: Tensor) -> Tensor:
    """Logits of the classes."""
    return torch.tanh(x @ params["in"] + params["bias"]) @ params["out"]


def loss_fn(params: Params, batch: Batch) -> Tensor:
    """Cross entropy of each example."""
    return ps.losses.cross_entropy(apply(params, batch["x"]), batch["labels"])


def train(data: Batch, noise: float, steps: int, seed: int) -> Params:
    """The parameters after so many updates on all of the data, in microbatches of 300 examples."""
    generator = torch.Generator().manual_seed(1000 + seed)
    params, group = init(generator), ps.split(data, k=len(data["x"]) // 300)
    update_step = ps.make_update_step(
        loss_fn,
        OPTIMIZER,
        normalize="grads",
        grad_and_value=ps.per_example(clip=CLIP, noise=noise, generator=generator),
    )
    opt_state = OPTIMIZER.init(params)
    for _ in range(steps):
        params, opt_state, _ = update_step(params, opt_state, group)
    return params


def accuracy(params: Params) -> float:
    """On people who were not trained on."""
    test = people(4000, seed=SEEDS)
    return float((apply(params, test["x"]).argmax(-1) == test["labels"]).double().mean())


def mean_accuracy(examples: int, noise: float, steps: int) -> float:
    """That of a few runs, each with people and noise of its own."""
    runs = [train(people(examples, seed), noise, steps, seed) for seed in range(SEEDS)]
    return sum(map(accuracy, runs)) / SEEDS


def epsilon(noise: float, steps: int) -> float:
    """What so many updates promise; infinite without noise."""
    rho = 2 * steps / noise**2 if noise else math.inf
    return rho + 2 * math.sqrt(rho * math.log(1 / DELTA))


def draw(path: Path, steps: int, found: dict[int, list[float]]) -> None:
    """Accuracy over the noise on the left, over ε on the right."""
    figure, (left, right) = picture.panels(
        "The noise that an accuracy bears", "What it costs to be hidden among others", sharey=True
    )
    promises = [epsilon(noise, steps) for noise in NOISES[1:]]
    for (examples, accuracies), color in zip(
        found.items(), (picture.ORANGE, picture.GREEN, picture.BLUE), strict=True
    ):
        without, *noisy = accuracies
        for axes, over in ((left, NOISES[1:]), (right, promises)):
            axes.semilogx(over, noisy, "o-", color=color, linewidth=1.8, markersize=4)
            axes.axhline(without, color=color, linestyle=":", linewidth=1)
        at = min(range(len(noisy)), key=lambda i: abs(noisy[i] - 0.5))
        words = f"N = {examples:,}"
        picture.say(right, words, (promises[at], noisy[at]), color, xytext=(9, -5))
    left.annotate("without noise", (NOISES[-1], 0.92), ha="right", va="bottom", color=picture.GREY)
    for axes in (left, right):
        axes.axhline(1 / CLASSES, color="0.8", linewidth=1, zorder=0)
    left.annotate("chance", (NOISES[1], 0.1), va="bottom", color=picture.GREY)
    left.set_ylim(0, 1)
    left.set_xticks(NOISES[1:], [f"{noise:g}" for noise in NOISES[1:]], minor=False)
    left.minorticks_off()
    left.set_ylabel("accuracy on others")
    left.set_xlabel("noise, in clips")
    right.set_xticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
    right.minorticks_off()
    right.set_xlabel("ε of (ε, 10⁻⁵): to the left it is harder to tell who was there")
    picture.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> dict[int, list[float]]:
    """Trains with each noise on data of each size; prints, draws and returns the accuracies."""
    options = picture.parse(__doc__, "differential_privacy", 30, arguments)
    found = {
        examples: [mean_accuracy(examples, noise, options.steps) for noise in NOISES]
        for examples in SIZES
    }
    print("examples | accuracy with noise of " + ", ".join(f"{noise:g}" for noise in NOISES))
    for examples, accuracies in found.items():
        print(f"{examples:8} | " + ", ".join(f"{each:.3f}" for each in accuracies))
    print("       ε | " + ", ".join(f"{epsilon(noise, options.steps):.2g}" for noise in NOISES))
    draw(options.picture, options.steps, found)
    return found


if __name__ == "__main__":
    main()
