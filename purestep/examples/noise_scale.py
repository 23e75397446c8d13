"""Measures how large a batch is worth its cost: the noise scale of gradients while a model trains.

``measured_update_step`` is the program to copy. It makes an ordinary update, and learns the noise
from the gradients of the microbatches, computed anyway [McCandlish et al., 2018]. Batches of fewer
tokens than the noise scale are mostly noise; batches of many more waste tokens.

The picture shows the estimate, averaged over steps, beside the noise scale that the gradients of
all single examples give: it grows while the model learns.

    python -m purestep.examples.noise_scale
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.examples import picture
from purestep.examples.differential_privacy import Batch, init, loss_fn, sample_people
from purestep.examples.mlp import Params
from purestep.types import LossFn, WeightFn

OPTIMIZER = ps.optim.sgd(0.1)
EXAMPLES = 4800
SIZES = (32, 96, 64, 64)  # of the microbatches of a step
WINDOWS = 12


class NoiseScale(NamedTuple):
    """Holds estimates of tr Σ and ‖G‖², both unbiased.

    One step's ‖G‖² may be negative: average, then divide.

    >>> NoiseScale(torch.tensor(6.0), torch.tensor(2.0)).scale
    tensor(3.)
    """

    trace: Tensor
    squared_norm: Tensor

    @property
    def scale(self) -> Tensor:
        """Returns the noise scale tr Σ / ‖G‖², in tokens, which is negative where ‖G‖² is."""
        return self.trace / self.squared_norm


def measured_update_step(
    params: Any,
    opt_state: Any,
    microbatches: Sequence[Any],
    *,
    loss_fn: LossFn,
    optimizer: ps.optim.Optimizer,
    weight_fn: WeightFn = ps.label_weights,
    axis: ps.Axis = ps.LocalAxis(),
) -> tuple[Any, Any, NoiseScale]:
    """Makes one update and measures its noise; returns params, optimizer state and ``NoiseScale``.

    A token's gradient has the mean G and the covariance Σ. Of K microbatches with nₖ tokens and
    mean gradients gₖ, and of their mean g over all N tokens:

        E (Σₖ nₖ ‖gₖ‖² − N ‖g‖²) = (K − 1) tr Σ          E ‖g‖² = ‖G‖² + tr Σ / N

    K counts microbatches with tokens, over all ranks: two at least, drawn independently. With
    fewer, ``squared_norm`` is not finite. With one, the update is right; with none, the optimizer
    updates by zero gradients. Weights must be 0 or 1, which is not checked.

    >>> group = [torch.tensor([2.0, 4.0]), torch.tensor([6.0])]
    >>> sgd, w = ps.optim.sgd(0.5), torch.tensor(0.0)
    >>> settings = {"optimizer": sgd, "weight_fn": torch.ones_like}
    >>> w, opt_state, noise = measured_update_step(
    ...     w, sgd.init(w), group, loss_fn=lambda w, x: w * x, **settings
    ... )
    >>> noise.trace  # 2 · 3² + 1 · 6² - 3 · 4²
    tensor(6., dtype=torch.float64)
    """
    counts = ps.count_tokens(microbatches, weight_fn)
    total = ps.psum(counts, axis)
    num_tokens, num_microbatches = total

    def accumulate(group: Sequence[Any]) -> ps.GradSums:
        return ps.accumulate(loss_fn, params, group, weight_fn=weight_fn, total=total)

    # The gradient over no microbatches is zero.
    grads = accumulate([]).grads
    squares = torch.zeros_like(num_tokens, dtype=torch.float64)
    for microbatch in microbatches:
        sums = accumulate([microbatch])
        grads = tree.map(torch.add, grads, sums.grads)
        # sums.grads is nₖ gₖ / N; a microbatch without tokens adds zero.
        norm = num_tokens * tree.global_norm(sums.grads).double()
        divisor = sums.counts.num_tokens.clamp(min=1)
        squares = squares + norm**2 / divisor

    grads, squares = ps.psum((grads, squares), axis)
    square = tree.global_norm(grads).double() ** 2
    trace = (squares - num_tokens * square) / (num_microbatches - 1)
    squared_norm = square - trace / num_tokens
    params, opt_state = optimizer.update(grads, opt_state, params)
    return params, opt_state, NoiseScale(trace, squared_norm)


def compute_noise_scale(params: Params, data: Batch) -> NoiseScale:
    """Computes the exact noise scale of all of the data, from the gradient of every example."""

    def compute_example_loss(params: Params, example: Batch) -> Tensor:
        batch = tree.map(lambda leaf: leaf[None], example)
        return loss_fn(params, batch).sum()

    grad_fn = torch.func.grad(compute_example_loss)
    grad_of_each = torch.vmap(grad_fn, in_dims=(None, 0))
    grads = grad_of_each(params, data)
    trace = torch.zeros((), dtype=torch.float64)
    squared_norm = torch.zeros((), dtype=torch.float64)
    for leaf in tree.leaves(grads):
        grad = leaf.double()
        trace += grad.var(0, correction=0).sum()
        squared_norm += grad.mean(0).square().sum()
    return NoiseScale(trace, squared_norm)


def average(estimates: Sequence[NoiseScale]) -> NoiseScale:
    """Averages ``trace`` and ``squared_norm`` by themselves: a mean of ratios would be biased."""
    traces = [estimate.trace for estimate in estimates]
    squared_norms = [estimate.squared_norm for estimate in estimates]
    return NoiseScale(
        torch.stack(traces).mean(),
        torch.stack(squared_norms).mean(),
    )


def sample_group(data: Batch, generator: torch.Generator) -> list[Batch]:
    """Draws one step's microbatches, of ``SIZES`` rows, from ``data`` with replacement.

    ``data`` must have ``EXAMPLES`` rows.
    """
    num_rows = sum(SIZES)
    rows = torch.randint(EXAMPLES, (num_rows,), generator=generator)
    group = []
    for chosen in rows.split(SIZES):
        microbatch = {name: leaf[chosen] for name, leaf in data.items()}
        group.append(microbatch)
    return group


class Window(NamedTuple):
    """Holds a window of steps: its middle, the scale estimated over all of it, and the exact scale.

    The exact scale is that of the middle.
    """

    step: float
    estimate: float
    expected: float


def measure(num_steps: int) -> list[Window]:
    """Trains; returns the estimated and the exact noise scale for each window of steps.

    The estimate is that of the averaged ``NoiseScale``; the exact one is of the window's middle. A
    window has two steps at least, and there is one at least. Steps that fill no window are not
    made.
    """
    generator = torch.Generator().manual_seed(0)
    params = init(generator)
    opt_state = OPTIMIZER.init(params)
    data = sample_people(EXAMPLES, seed=0)
    window_size = max(2, num_steps // WINDOWS)
    num_windows = max(1, num_steps // window_size)
    windows = []
    for i in range(num_windows):
        estimates = []
        for step in range(window_size):
            if step == window_size // 2:
                expected = compute_noise_scale(params, data)
            group = sample_group(data, generator)
            params, opt_state, estimate = measured_update_step(
                params,
                opt_state,
                group,
                loss_fn=loss_fn,
                optimizer=OPTIMIZER,
            )
            estimates.append(estimate)
        mean = average(estimates)
        window = Window(
            step=(i + 0.5) * window_size,
            estimate=float(mean.scale),
            expected=float(expected.scale),
        )
        windows.append(window)
    return windows


def plot(path: Path, windows: list[Window]) -> None:
    """Plots both noise scales over the steps, writes the picture to a file, and prints its path."""
    figure, (axes,) = picture.make_panels(
        "The noise scale grows while the model learns"
    )
    steps = [window.step for window in windows]
    expected = [window.expected for window in windows]
    estimates = [window.estimate for window in windows]
    picture.plot_line(axes, steps, expected, picture.GREY)
    axes.plot(steps, estimates, "o", color=picture.BLUE)
    corner = (steps[-1], min(expected))
    picture.annotate(
        axes,
        "gradients of all examples",
        corner,
        picture.GREY,
        shift=(-6, 22),
        ha="right",
    )
    picture.annotate(
        axes,
        f"● gradients of {len(SIZES)} microbatches",
        corner,
        picture.BLUE,
        shift=(-6, 4),
        ha="right",
    )
    axes.set_yscale("log")
    axes.set_xlabel("updates")
    axes.set_ylabel("noise scale, in examples")
    picture.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> list[Window]:
    """Trains and measures; prints and returns the noise scales, and plots them to ``--picture``."""
    parser = picture.make_parser(__doc__, "noise_scale", 240)
    options = parser.parse_args(arguments)
    windows = measure(options.steps)
    print("update | noise scale of microbatches | of all examples")
    for step, estimate, expected in windows:
        print(f"{step:6.0f} | {estimate:27.0f} | {expected:15.0f}")
    plot(options.picture, windows)
    return windows


if __name__ == "__main__":
    main()
