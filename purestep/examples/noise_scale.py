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
from purestep.examples.differential_privacy import Batch, init, loss_fn, people
from purestep.examples.mlp import Params
from purestep.types import LossFn, WeightFn

OPTIMIZER = ps.optim.sgd(0.1)
EXAMPLES = 4800
SIZES = (32, 96, 64, 64)  # of the microbatches of a step
WINDOWS = 12


class NoiseScale(NamedTuple):
    """tr Σ and ‖G‖², both unbiased. One step's ‖G‖² may be negative: average, then divide.

    >>> NoiseScale(torch.tensor(6.0), torch.tensor(2.0)).scale
    tensor(3.)
    """

    trace: Tensor
    squared_norm: Tensor

    @property
    def scale(self) -> Tensor:
        """tr Σ / ‖G‖², in tokens."""
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
    """One update and the noise scale of its gradients: new params, optimizer state, both parts.

    A token's gradient has the mean G and the covariance Σ. Of K microbatches with nₖ tokens and
    mean gradients gₖ, and of their mean g over all N tokens:

        E (Σₖ nₖ ‖gₖ‖² − N ‖g‖²) = (K − 1) tr Σ          E ‖g‖² = ‖G‖² + tr Σ / N

    K counts microbatches with tokens, over all ranks: two at least, drawn independently. Weights
    are 0 and 1.

    >>> group = [torch.tensor([2.0, 4.0]), torch.tensor([6.0])]
    >>> sgd, w = ps.optim.sgd(0.5), torch.tensor(0.0)
    >>> how = {"loss_fn": lambda w, x: w * x, "weight_fn": torch.ones_like, "optimizer": sgd}
    >>> *_, found = measured_update_step(w, sgd.init(w), group, **how)
    >>> found.trace  # 2 · 3² + 1 · 6² - 3 · 4²
    tensor(6., dtype=torch.float64)
    """
    total = ps.psum(ps.count_tokens(microbatches, weight_fn), axis)
    num_tokens, num_microbatches = total
    grads = ps.accumulate(
        loss_fn, params, [], weight_fn=weight_fn, total=total
    ).grads  # zeros
    squares = torch.zeros_like(num_tokens, dtype=torch.float64)
    for microbatch in microbatches:
        here = ps.accumulate(
            loss_fn, params, [microbatch], weight_fn=weight_fn, total=total
        )
        grads = tree.map(torch.add, grads, here.grads)
        # here.grads is nₖ gₖ / N; a microbatch without tokens adds zero.
        norm = num_tokens * tree.global_norm(here.grads).double()
        squares = squares + norm**2 / here.counts.num_tokens.clamp(min=1)

    grads, squares = ps.psum((grads, squares), axis)
    square = tree.global_norm(grads).double() ** 2
    trace = (squares - num_tokens * square) / (num_microbatches - 1)
    params, opt_state = optimizer.update(grads, opt_state, params)
    return params, opt_state, NoiseScale(trace, square - trace / num_tokens)


def direct(params: Params, data: Batch) -> NoiseScale:
    """The noise scale of all of the data, from the gradient of every example: exact."""

    def gradient(x: Tensor, label: Tensor) -> Params:
        def loss(params: Params) -> Tensor:
            return loss_fn(params, {"x": x[None], "labels": label[None]}).sum()

        grads: Params = torch.func.grad(loss)(params)
        return grads

    grads = tree.leaves(torch.vmap(gradient)(data["x"], data["labels"]))
    trace = sum(grad.double().var(0, correction=0).sum() for grad in grads)
    squared_norm = sum(grad.double().mean(0).square().sum() for grad in grads)
    return NoiseScale(torch.as_tensor(trace), torch.as_tensor(squared_norm))


def measure(steps: int) -> list[tuple[float, float, float]]:
    """Of each window of steps: its middle, the mean estimate's scale, and the direct one there."""
    generator = torch.Generator().manual_seed(0)
    params, data, found = init(generator), people(EXAMPLES, seed=0), []
    opt_state, window = OPTIMIZER.init(params), max(2, steps // WINDOWS)
    for number in range(max(1, steps // window)):
        estimates = []
        for step in range(window):
            if step == window // 2:
                expected = direct(params, data)
            rows = torch.randint(EXAMPLES, (sum(SIZES),), generator=generator).split(
                SIZES
            )
            group = [{name: leaf[each] for name, leaf in data.items()} for each in rows]
            params, opt_state, estimate = measured_update_step(
                params, opt_state, group, loss_fn=loss_fn, optimizer=OPTIMIZER
            )
            estimates.append(estimate)
        mean = NoiseScale(
            *(torch.stack(each).mean() for each in zip(*estimates, strict=True))
        )
        found.append(
            ((number + 0.5) * window, float(mean.scale), float(expected.scale))
        )
    return found


def draw(path: Path, found: list[tuple[float, float, float]]) -> None:
    """Both noise scales over the steps."""
    figure, (axes,) = picture.panels("The noise scale grows while the model learns")
    steps, estimates, expected = zip(*found, strict=True)
    axes.semilogy(steps, expected, color=picture.GREY, linewidth=1.8)
    axes.semilogy(steps, estimates, "o", color=picture.BLUE)
    corner = (steps[-1], min(expected))
    words = "gradients of all examples"
    picture.say(axes, words, corner, picture.GREY, xytext=(-6, 22), ha="right")
    words = f"● gradients of {len(SIZES)} microbatches"
    picture.say(axes, words, corner, picture.BLUE, xytext=(-6, 4), ha="right")
    axes.set_xlabel("updates")
    axes.set_ylabel("noise scale, in examples")
    picture.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> list[tuple[float, float, float]]:
    """Trains and measures; prints, draws and returns the noise scales."""
    options = picture.parser(__doc__, "noise_scale", 240).parse_args(arguments)
    found = measure(options.steps)
    print("update | noise scale of microbatches | of all examples")
    for step, estimate, expected in found:
        print(f"{step:6.0f} | {estimate:27.0f} | {expected:15.0f}")
    draw(options.picture, found)
    return found


if __name__ == "__main__":
    main()
