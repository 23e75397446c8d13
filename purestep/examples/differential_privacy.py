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
from typing import Any

import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.examples import mlp, picture
from purestep.examples.docstrings import relative_distance
from purestep.examples.mlp import Params
from purestep.types import LossFn, WeightFn

Batch = dict[str, Tensor]
Accuracies = dict[int, list[float]]
"""For each number of examples, the accuracy with each noise."""

CLASSES = 10
FEATURES = 20
WIDTH = 32
SIZES = (300, 1200, 4800)  # examples to train on
NOISES = (0.0, 3.0, 6.0, 12.0, 24.0, 48.0, 96.0, 192.0)
SEEDS = 2
CLIP = 1.0
DELTA = 1e-5
OPTIMIZER = ps.optim.sgd(1.0, momentum=0.8)
COLORS = (picture.ORANGE, picture.GREEN, picture.BLUE)


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
    """Makes one update of differentially private SGD; returns new params and optimizer state.

        g = (Σₑ gₑ · min(1, clip / ‖gₑ‖₂)  +  noise · clip · z) / batch_size,    z ~ N(0, 1)

    An example e is a row of a microbatch, and gₑ the gradient of its tokens' weighted losses
    [Abadi et al., 2016]. The sum runs over all examples of all ranks, so the cut does not matter.
    The noise is drawn once, from ``key``: a new one each step, kept secret, the same on every rank.
    ``batch_size`` is the expected number of examples: to divide by the true one would tell it.
    Gradients of at most ``chunk_size`` examples are computed at once.

    >>> group = [torch.tensor([[3.0, 4.0]]), torch.tensor([[0.5, 0.0]])]
    >>> sgd, w, key = ps.optim.sgd(1.0), torch.zeros(2), ps.random.key(0)
    >>> settings = {"clip": 2.5, "noise": 0.0, "batch_size": 2, "optimizer": sgd}
    >>> settings["weight_fn"] = lambda microbatch: torch.ones(len(microbatch))
    >>> new_w, _ = private_update_step(
    ...     w, sgd.init(w), group, key, loss_fn=lambda w, m: m @ w, **settings
    ... )
    >>> new_w  # The gradients are clipped to (1.5, 2) and (0.5, 0).
    tensor([-1., -1.])
    """

    def clip_grads(example: Any) -> Any:
        row = tree.map(lambda leaf: leaf[None], example)
        sums = ps.accumulate(loss_fn, params, [row], weight_fn=weight_fn)
        norm = tree.global_norm(sums.grads)
        factor = (clip / norm).clamp(max=1)
        # A row of padding adds zero, even if its gradient is NaN.
        has_tokens = sums.counts.num_tokens > 0

        def scale(grad: Tensor) -> Tensor:
            return torch.where(has_tokens, grad * factor, 0)

        return tree.map(scale, sums.grads)

    def sum_rows(grads: Tensor) -> Tensor:
        return grads.sum(0)

    # The gradient over no microbatches is zero.
    zero = ps.accumulate(loss_fn, params, [], weight_fn=weight_fn)
    total = zero.grads
    for microbatch in microbatches:
        leaves, structure = tree.flatten(microbatch)
        num_rows = len(leaves[0])
        for start in range(0, num_rows, chunk_size):
            stop = start + chunk_size
            chunk = [leaf[start:stop] for leaf in leaves]
            examples = tree.unflatten(structure, chunk)
            grads = torch.vmap(clip_grads, randomness="different")(examples)
            summed = tree.map(sum_rows, grads)
            total = tree.map(torch.add, total, summed)
    total = ps.psum(total, axis)

    leaves, structure = tree.flatten(total)
    keys = ps.random.split(key, len(leaves))
    noisy = []
    for leaf, leaf_key in zip(leaves, keys, strict=True):
        z = ps.random.normal(leaf_key, leaf.shape, leaf.dtype)
        noised = leaf + noise * clip * z
        noisy.append(noised / batch_size)
    grads = tree.unflatten(structure, noisy)
    return optimizer.update(grads, opt_state, params)


def sample_people(number: int, seed: int) -> Batch:
    """Draws points ``x`` around ten centres, and ``labels``, the number of each point's centre.

    The centres are the same for all seeds.
    """
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    generator.manual_seed(seed)
    labels = torch.randint(CLASSES, (number,), generator=generator)
    noise = torch.randn(number, FEATURES, generator=generator)
    x = centres[labels] + 1.2 * noise
    return {"x": x, "labels": labels}


def init(generator: torch.Generator) -> Params:
    """Draws float32 parameters of a network with one hidden layer."""
    widths = (FEATURES, WIDTH, CLASSES)
    return mlp.init(widths, generator, dtype=torch.float32)


def loss_fn(params: Params, batch: Batch) -> Tensor:
    """Computes the cross entropy of each example."""
    logits = mlp.apply(params, batch["x"])
    return ps.losses.cross_entropy(logits, batch["labels"])


def train(
    data: Batch,
    noise_multiplier: float,
    num_steps: int,
    seed: int,
    rows_per_microbatch: int = 300,
) -> Params:
    """Trains on all of the data in each update, cut into microbatches; returns the parameters.

    ``seed`` decides the initial parameters and the noise. ``noise_multiplier`` is the ``noise`` of
    ``private_update_step``.
    """
    num_examples = len(data["x"])
    group = ps.split(data, k=num_examples // rows_per_microbatch)
    key = ps.random.key(seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    params = init(generator)
    opt_state = OPTIMIZER.init(params)
    for step in range(num_steps):
        params, opt_state = private_update_step(
            params,
            opt_state,
            group,
            ps.random.fold_in(key, step),
            loss_fn=loss_fn,
            optimizer=OPTIMIZER,
            clip=CLIP,
            noise=noise_multiplier,
            batch_size=num_examples,
            chunk_size=300,
        )
    return params


def compute_accuracy(params: Params) -> float:
    """Computes the accuracy on 4000 people outside of the training data, the same at each call."""
    test = sample_people(4000, seed=SEEDS)
    logits = mlp.apply(params, test["x"])
    is_right = logits.argmax(-1) == test["labels"]
    return float(is_right.double().mean())


def compute_mean_accuracy(
    num_examples: int, noise_multiplier: float, num_steps: int
) -> float:
    """Trains ``SEEDS`` times, each with other people and other noise; returns the mean accuracy."""
    total = 0.0
    for seed in range(SEEDS):
        data = sample_people(num_examples, seed)
        params = train(data, noise_multiplier, num_steps, seed)
        total += compute_accuracy(params)
    return total / SEEDS


def compare_cuts(num_steps: int) -> float:
    """Returns how far a run on one microbatch ends from the same run on twelve, relative to ‖θ‖."""
    data = sample_people(1200, seed=0)
    one = train(data, 12.0, num_steps, seed=0, rows_per_microbatch=1200)
    twelve = train(data, 12.0, num_steps, seed=0, rows_per_microbatch=100)
    return relative_distance(twelve, one)


def compute_epsilon(noise_multiplier: float, num_steps: int) -> float:
    """Computes a bound of ε for the (ε, 10⁻⁵)-privacy of ``num_steps`` updates.

    Neighbours differ in one example that is replaced, and the sampling of examples is not counted.
    Without noise, ε is infinite.
    """
    if noise_multiplier == 0:
        return math.inf
    rho = 2 * num_steps / noise_multiplier**2
    return rho + 2 * math.sqrt(rho * math.log(1 / DELTA))


def print_accuracies(accuracies: Accuracies, epsilons: Sequence[float]) -> None:
    """Prints a row of accuracies for each size of the data, and the ε of each column."""
    head = ", ".join(f"{noise:g}" for noise in NOISES)
    print(f"examples | accuracy with noise of {head}")
    for num_examples, values in accuracies.items():
        row = ", ".join(f"{value:.3f}" for value in values)
        print(f"{num_examples:8} | {row}")
    row = ", ".join(f"{epsilon:.2g}" for epsilon in epsilons)
    print(f"       ε | {row}")


def plot_accuracies(axes: Any, x: Sequence[float], accuracies: Accuracies) -> None:
    """Plots a curve over ``x`` for each size of the data, and a grey line at chance.

    The first accuracy of a size is without noise: it becomes a dotted line, and has no ``x``.
    """
    curves = zip(accuracies.values(), COLORS, strict=True)
    for values, color in curves:
        without_noise, *with_noise = values
        picture.plot_line(axes, x, with_noise, color, marker="o")
        axes.axhline(without_noise, color=color, linestyle=":", linewidth=1)
    axes.axhline(1 / CLASSES, color="0.8", linewidth=1, zorder=0)
    axes.set_xscale("log")


def label_noises(axes: Any) -> None:
    """Labels the panel of accuracies over the noise."""
    noises = NOISES[1:]
    axes.annotate(
        "without noise",
        (noises[-1], 0.92),
        color=picture.GREY,
        ha="right",
        va="bottom",
    )
    axes.annotate(
        "chance",
        (noises[0], 1 / CLASSES),
        color=picture.GREY,
        va="bottom",
    )
    axes.set_ylim(0, 1)
    labels = [f"{noise:g}" for noise in noises]
    axes.set_xticks(noises, labels)
    axes.minorticks_off()
    axes.set_ylabel("accuracy on others")
    axes.set_xlabel("noise, in clips")


def label_epsilons(
    axes: Any, epsilons: Sequence[float], accuracies: Accuracies
) -> None:
    """Labels the panel of accuracies over ε, and each curve where it is nearest to 0.5.

    ``epsilons`` belong to the accuracies with noise: all but the first of each size.
    """
    curves = zip(accuracies.items(), COLORS, strict=True)
    for (num_examples, values), color in curves:
        _, *with_noise = values
        distances = [abs(value - 0.5) for value in with_noise]
        nearest = distances.index(min(distances))
        picture.annotate(
            axes,
            f"N = {num_examples:,}",
            (epsilons[nearest], with_noise[nearest]),
            color,
            shift=(9, -5),
        )
    ticks = [0.3, 1, 3, 10, 30]
    labels = [str(tick) for tick in ticks]
    axes.set_xticks(ticks, labels)
    axes.minorticks_off()
    axes.set_xlabel("ε of (ε, 10⁻⁵): to the left it is harder to tell who was there")


def main(arguments: Sequence[str] | None = None) -> Accuracies:
    """Trains with each noise on data of each size; prints, plots and returns the accuracies.

    Also prints how far apart two cuts of the same data end.
    """
    parser = picture.make_parser(__doc__, "differential_privacy", 30)
    options = parser.parse_args(arguments)
    accuracies: Accuracies = {}
    for num_examples in SIZES:
        accuracies[num_examples] = [
            compute_mean_accuracy(num_examples, noise, options.steps)
            for noise in NOISES
        ]
    epsilons = [compute_epsilon(noise, options.steps) for noise in NOISES]
    print_accuracies(accuracies, epsilons)
    difference = compare_cuts(options.steps)
    print(f"one microbatch or 12, with noise: {difference:.0e} of ‖θ‖ apart")

    figure, (left_axes, right_axes) = picture.make_panels(
        "The noise that an accuracy bears",
        "What it costs to be hidden among others",
        sharey=True,
    )
    plot_accuracies(left_axes, NOISES[1:], accuracies)
    label_noises(left_axes)
    plot_accuracies(right_axes, epsilons[1:], accuracies)
    label_epsilons(right_axes, epsilons[1:], accuracies)
    picture.save(figure, options.picture)
    return accuracies


if __name__ == "__main__":
    main()
