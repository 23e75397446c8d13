"""Trains a classifier that hides who was in its data: accuracy against noise, and its promise.

``private_update_step`` is the program to copy. It clips the gradient of every example, adds noise
to their sum once a step, and hands that to the optimizer. Two sets of data differ in one example.
The parameters after T updates on all examples tell them apart no better than (ε, δ) allows:

    ρ = T · (2 clip)² / 2 (noise · clip)² = 2 T / noise²
    ε = ρ + 2 √(ρ ln 1/δ)                                            [Bun and Steinke, 2016]

The picture shows that the same promise costs less accuracy among more examples.

    python -m purestep.examples.differential_privacy
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.examples import mlp, picture
from purestep.examples.docstrings import distance
from purestep.examples.mlp import Params
from purestep.types import LossFn, WeightFn

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


def private_update_step(
    params: Any,
    opt_state: Any,
    microbatches: Sequence[Any],
    key: Tensor,
    *,
    loss_fn: LossFn,
    optimizer: ps.optim.Optimizer,
    clip: float,
    noise: float,
    batch_size: float,
    weight_fn: WeightFn = ps.label_weights,
    axis: ps.Axis = ps.LocalAxis(),
    chunk_size: int = 64,
) -> tuple[Any, Any]:
    """One update of differentially private SGD [Abadi et al., 2016]: new params, optimizer state.

        g = (Σₑ gₑ · min(1, clip / ‖gₑ‖₂)  +  noise · clip · z) / batch_size,    z ~ N(0, 1)

    An example e is a row of a microbatch, and gₑ the gradient of its tokens' weighted losses. The
    sum runs over all examples of all ranks, so the cut does not matter. The noise is drawn once,
    from ``key``: a new one each step, kept secret, the same on every rank. ``batch_size`` is the
    expected number of examples: to divide by the true one would tell it. Gradients of
    ``chunk_size`` examples are held at once.

    >>> group = [torch.tensor([[3.0, 4.0]]), torch.tensor([[0.5, 0.0]])]
    >>> sgd, w, key = ps.optim.sgd(1.0), torch.zeros(2), ps.random.key(0)
    >>> how = {"weight_fn": lambda m: torch.ones(len(m)), "clip": 2.5, "batch_size": 2}
    >>> private_update_step(  # clipped to (1.5, 2) and (0.5, 0)
    ...     w, sgd.init(w), group, key, loss_fn=lambda w, m: m @ w, optimizer=sgd, noise=0.0, **how
    ... )[0]
    tensor([-1., -1.])
    """

    def clipped(example: Any) -> Any:
        row = tree.map(lambda leaf: leaf[None], example)
        sums = ps.accumulate(loss_fn, params, [row], weight_fn=weight_fn)
        factor = (clip / tree.global_norm(sums.grads)).clamp(max=1)
        present = (
            sums.counts.num_tokens > 0
        )  # a row of padding adds zero, whatever is in it
        return tree.map(lambda grad: torch.where(present, grad * factor, 0), sums.grads)

    total = ps.accumulate(loss_fn, params, [], weight_fn=weight_fn).grads  # zeros
    for microbatch in microbatches:
        leaves, structure = tree.flatten(microbatch)
        for start in range(0, len(leaves[0]), chunk_size):
            chunk = [leaf[start : start + chunk_size] for leaf in leaves]
            each = torch.vmap(clipped, randomness="different")(
                tree.unflatten(structure, chunk)
            )
            total = tree.map(lambda so_far, grads: so_far + grads.sum(0), total, each)

    sums, structure = tree.flatten(ps.psum(total, axis))
    keys = ps.random.split(key, len(sums))
    drawn = [
        ps.random.normal(k, g.shape, g.dtype) for k, g in zip(keys, sums, strict=True)
    ]
    noisy = [
        (g + noise * clip * z) / batch_size for g, z in zip(sums, drawn, strict=True)
    ]
    return optimizer.update(tree.unflatten(structure, noisy), opt_state, params)


def people(number: int, seed: int) -> Batch:
    """Points around the ten centres, which are the same for all seeds."""
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (number,), generator=generator)
    x = centres[labels] + 1.2 * torch.randn(number, FEATURES, generator=generator)
    return {"x": x, "labels": labels}


def init(generator: torch.Generator) -> Params:
    """One hidden layer."""
    return mlp.init((FEATURES, WIDTH, CLASSES), generator, dtype=torch.float32)


def loss_fn(params: Params, batch: Batch) -> Tensor:
    """Cross entropy of each example."""
    return ps.losses.cross_entropy(mlp.apply(params, batch["x"]), batch["labels"])


def train(data: Batch, noise: float, steps: int, seed: int, rows: int = 300) -> Params:
    """The parameters after so many updates on all of the data, in microbatches of ``rows``."""
    examples, key = len(data["x"]), ps.random.key(seed)
    params = init(torch.Generator().manual_seed(1000 + seed))
    group, opt_state = ps.split(data, k=examples // rows), OPTIMIZER.init(params)
    update_step = partial(
        private_update_step,
        loss_fn=loss_fn,
        optimizer=OPTIMIZER,
        clip=CLIP,
        chunk_size=300,
    )
    for step in range(steps):
        params, opt_state = update_step(
            params,
            opt_state,
            group,
            ps.random.fold_in(key, step),
            noise=noise,
            batch_size=examples,
        )
    return params


def accuracy(params: Params) -> float:
    """On people outside of the training data."""
    test = people(4000, seed=SEEDS)
    return float(
        (mlp.apply(params, test["x"]).argmax(-1) == test["labels"]).double().mean()
    )


def mean_accuracy(examples: int, noise: float, steps: int) -> float:
    """The mean of a few runs, each with other people and other noise."""
    runs = [train(people(examples, seed), noise, steps, seed) for seed in range(SEEDS)]
    return sum(map(accuracy, runs)) / SEEDS


def apart(steps: int) -> float:
    """How far two cuts of one batch end from each other, as a part of ‖θ‖: into 1, and into 12."""
    data = people(1200, seed=0)
    one, twelve = (train(data, 12.0, steps, 0, rows) for rows in (1200, 100))
    return distance(twelve, one)


def epsilon(noise: float, steps: int) -> float:
    """What so many updates promise; infinite without noise."""
    rho = 2 * steps / noise**2 if noise else math.inf
    return rho + 2 * math.sqrt(rho * math.log(1 / DELTA))


def draw(path: Path, steps: int, found: dict[int, list[float]]) -> None:
    """Accuracy over the noise on the left, over ε on the right."""
    figure, (left, right) = picture.panels(
        "The noise that an accuracy bears",
        "What it costs to be hidden among others",
        sharey=True,
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
    left.annotate(
        "without noise", (NOISES[-1], 0.92), ha="right", va="bottom", color=picture.GREY
    )
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
    options = picture.parser(__doc__, "differential_privacy", 30).parse_args(arguments)
    found = {
        examples: [mean_accuracy(examples, noise, options.steps) for noise in NOISES]
        for examples in SIZES
    }
    print(
        "examples | accuracy with noise of "
        + ", ".join(f"{noise:g}" for noise in NOISES)
    )
    for examples, accuracies in found.items():
        print(f"{examples:8} | " + ", ".join(f"{each:.3f}" for each in accuracies))
    print(
        "       ε | "
        + ", ".join(f"{epsilon(noise, options.steps):.2g}" for noise in NOISES)
    )
    print(f"one microbatch or 12, with noise: {apart(options.steps):.0e} of ‖θ‖ apart")
    draw(options.picture, options.steps, found)
    return found


if __name__ == "__main__":
    main()
