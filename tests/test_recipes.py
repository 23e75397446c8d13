"""Compares recipes of research with gradients by hand, for any cut: GANs, differential privacy, the noise scale."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import purestep as ps
from purestep import tree
from purestep.examples.differential_privacy import (
    init,
    loss_fn,
    private_update_step,
    sample_people,
)
from purestep.examples.noise_scale import compute_noise_scale, measured_update_step
from purestep.testing.bounds import rounding_bound
from support.strategies import cut_batch

Batch = dict[str, Tensor]
ROWS = 5
SGD = ps.optim.sgd(1.0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Draws from a normal distribution, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def assert_within(
    actual: Tensor, terms: list[Tensor], sizes: list[Tensor], total: float
) -> None:
    """Checks a sum of terms over the total, up to a hundred roundings of each term's size."""
    expected = torch.stack(terms).sum(0) / total
    size = torch.stack(sizes).sum(0) / total
    bound = rounding_bound(100 + len(terms), torch.float64) * size
    assert ((actual - expected).abs() <= bound).all()


def gradient(loss_fn: Any, params: Any, group: list[Batch], *tokens: int) -> Any:
    """Computes the gradient of a loss with one token a row, or with so many."""

    def weight_fn(m: Batch) -> Tensor:
        return torch.ones(len(m["x"]), *tokens)

    total = ps.count_tokens(group, weight_fn)
    sums = ps.accumulate(loss_fn, params, group, weight_fn=weight_fn, total=total)
    return sums.grads


def discriminator_loss(d: Tensor, g: Tensor, m: Batch) -> Tensor:
    """Computes two losses for each row: of a real one, and of a generated one."""
    real = m["x"] @ d
    fake = m["z"] @ g @ d
    losses = [functional.softplus(-real), functional.softplus(fake)]
    return torch.stack(losses, -1)


CUTS = [
    [[0, 1, 2, 3, 4]],
    [[0, 3], [4], [1, 2]],
    [[], [2, 1, 0], [4, 3]],
]


@pytest.mark.parametrize("rows", CUTS)
def test_gan(rows: list[list[int]]) -> None:
    """Each player's gradient, the generator's through the discriminator; the other is a constant.

    Discriminator: Σ −σ(−d·x) x + σ(d·y) y over 2 N, with y = z G. Generator: Σ −σ(−d·y) z ⊗ d
    over N.
    """
    g = normal(3, 2).requires_grad_()
    d = normal(2, seed=1).requires_grad_()
    batch = {
        "x": normal(ROWS, 2, seed=2),
        "z": normal(ROWS, 3, seed=3),
    }
    group = cut_batch(batch, rows)
    d_leaf = d.detach()
    g_leaf = g.detach()

    def loss_of_d(d: Tensor, m: Batch) -> Tensor:
        return discriminator_loss(d, g, m)

    def loss_of_g(g: Tensor, m: Batch) -> Tensor:
        return functional.softplus(-(m["z"] @ g @ d))

    of_d = gradient(loss_of_d, d_leaf, group, 2)
    of_g = gradient(loss_of_g, g_leaf, group)
    assert g.grad is d.grad is None
    assert not of_d.requires_grad
    assert not of_g.requires_grad

    hand_d = []
    sizes_d = []
    hand_g = []
    sizes_g = []
    d_size = d_leaf.abs()
    for x, z in zip(batch["x"], batch["z"], strict=True):
        y = z @ g_leaf
        # A generated row is a sum of products itself, and so is the sigmoid's argument.
        y_size = z.abs() @ g_leaf.abs()
        hand_d.append(-torch.sigmoid(-(d_leaf @ x)) * x)
        hand_d.append(torch.sigmoid(d_leaf @ y) * y)
        sizes_d.append((1 + d_size @ x.abs()) * x.abs())
        sizes_d.append((1 + d_size @ y_size) * y_size)
        hand_g.append(-torch.sigmoid(-(d_leaf @ y)) * z.outer(d_leaf))
        sizes_g.append((1 + d_size @ y_size) * z.abs().outer(d_size))
    assert_within(of_d, hand_d, sizes_d, 2 * ROWS)
    assert_within(of_g, hand_g, sizes_g, ROWS)


NAN = float("nan")
DATA = {
    "x": torch.tensor(
        [
            [[1, 2], [2, 2]],
            [[0, 1], [9, 9]],
            [[NAN, 7], [7, 7]],
            [[48, 64], [5, 5]],
        ]
    ).double(),
    "c": torch.tensor(
        [
            [8, 4],
            [0, 9],
            [NAN, 7],
            [192, 5],
        ]
    ).double(),
    "weight": torch.tensor(
        [
            [1, 1],
            [3, 0],
            [0, 0],
            [1, 0],
        ]
    ),
}
"""Rows of two tokens, with gradients (3, 4, 12), (0, 3, 0), padding, and (48, 64, 192)."""


def private_step(
    group: list[Batch], elements: int = 2, noise: float = 0.0, **settings: Any
) -> Batch:
    """Returns the params after a step, where the gradient of a token is (x, c)."""

    def linear_loss(p: Batch, m: Batch) -> Tensor:
        return m["x"] @ p["w"] + m["c"] * p["b"]

    params = {
        "w": torch.zeros(elements).double(),
        "b": torch.zeros(()).double(),
    }
    new, _ = private_update_step(
        params,
        SGD.init(params),
        group,
        ps.random.key(0),
        clip=6.5,
        noise=noise,
        batch_size=4,
        loss_fn=linear_loss,
        optimizer=SGD,
        weight_fn=lambda m: m["weight"],
        **settings,
    )
    return new


def on_three_threads(run: Callable[..., Any], groups: list[Any]) -> Any:
    """Runs on three ranks, and returns what all of them return."""
    axis = ps.testing.ThreadAxis(3)
    run_ranks = axis.map(lambda group: run(group, axis=axis))
    first, *others = run_ranks(groups)
    assert all(str(other) == str(first) for other in others)
    return first


def private_step_of_three(noise: float) -> Batch:
    group = cut_batch(DATA, [[2, 3], [0], [1]])
    return private_step(group, noise=noise)


def private_step_on_threads(noise: float) -> Batch:
    groups = [
        cut_batch(DATA, [[0, 3]]),
        [],
        cut_batch(DATA, [[1], [2]]),
    ]
    return on_three_threads(partial(private_step, noise=noise), groups)


PRIVATE_STEPS: dict[str, Callable[[float], Batch]] = {
    "one": lambda noise: private_step([DATA], noise=noise),
    "three": private_step_of_three,
    "one by one": lambda noise: private_step([DATA], noise=noise, chunk_size=1),
    "threads": private_step_on_threads,
}


@pytest.mark.parametrize("way", PRIVATE_STEPS)
def test_private_steps_clip_by_hand(way: str) -> None:
    """Clips each row's gradient over the whole tree, to the bit: all numbers are small and dyadic."""
    new = PRIVATE_STEPS[way](0.0)
    noisy = PRIVATE_STEPS[way](0.25)
    assert (-4 * new["w"]).tolist() == [1.5 + 0 + 1.5, 2 + 3 + 2]
    assert -4 * new["b"] == 6 + 0 + 6

    same_key = private_step([DATA], noise=0.25)
    assert torch.equal(noisy["w"], same_key["w"]), "it depends on the key alone"
    assert not torch.equal(noisy["w"], new["w"])


def test_private_noise_comes_once() -> None:
    """Draws it with the deviation noise · clip, to five standard errors."""
    n = 200_000
    deviation = 0.25 * 6.5
    noise = 4 * private_step([], n, noise=0.25)["w"]
    assert abs(noise.mean()) < 5 * deviation / math.sqrt(n)
    # The variance of n squares of deviation σ is 2 σ⁴ / n.
    standard_error = deviation**2 * math.sqrt(2 / n)
    error = noise.square().mean() - deviation**2
    assert abs(error) < 5 * standard_error


TWO = torch.tensor([2.0, 4.0])
ONE = torch.tensor([6.0])
NONE = torch.zeros(0)
"""Microbatches of two tokens, one, and none."""


def measure(
    group: list[Tensor], axis: Any = ps.LocalAxis()
) -> tuple[Tensor, Tensor, Tensor]:
    """Measures a step over tokens whose gradient is their number: its params and estimates."""
    w = torch.tensor(1.0)
    w, _, estimate = measured_update_step(
        w,
        SGD.init(w),
        group,
        loss_fn=lambda w, x: w * x,
        optimizer=SGD,
        weight_fn=lambda x: x != 0,
        axis=axis,
    )
    ratio = estimate.trace / estimate.squared_norm
    assert axis.size > 1 or estimate.scale == ratio
    return w, estimate.trace, estimate.squared_norm


def measure_on_simulated_ranks() -> Any:
    axis = ps.VmapAxis(2)

    def measure_one(x: Tensor) -> Any:
        return measure([x], axis)

    run: Any = axis.map(measure_one, in_dims=0, out_dims=None)
    padded_one = torch.tensor([6.0, 0.0])
    return run(torch.stack([TWO, padded_one]))


MEASUREMENTS: dict[str, Callable[[], Any]] = {
    "one by one": lambda: measure([TWO, ONE]),
    "with empty ones": lambda: measure([torch.zeros(3), ONE, NONE, TWO]),
    "threads": lambda: on_three_threads(measure, [[TWO], [], [ONE]]),
    "simulated ranks": measure_on_simulated_ranks,
}


@pytest.mark.parametrize("way", MEASUREMENTS)
def test_the_noise_scale_by_hand(way: str) -> None:
    """Σ n g² = 2 · 3² + 1 · 6² = 54, N g² = 3 · 4² = 48, and K = 2; the update is by g = 4."""
    w, trace, squared_norm = MEASUREMENTS[way]()
    assert float(w) == 1 - 4
    assert float(trace) == 6.0
    assert float(squared_norm) == 14.0


@pytest.mark.parametrize("sizes", [(4, 4), (2, 5, 1)])
def test_the_estimates_of_the_noise_scale_are_those_of_all_examples(
    sizes: tuple[int, ...],
) -> None:
    """Compares the mean of many estimates with the direct one, to five standard errors."""
    steps = 400
    generator = torch.Generator().manual_seed(0)
    params = tree.map(Tensor.double, init(generator))
    data = sample_people(200, seed=0)
    data["x"] = data["x"].double()
    state = SGD.init(params)

    def draw_estimate() -> Tensor:
        rows = torch.randint(200, (sum(sizes),), generator=generator)
        group = [
            {name: leaf[part] for name, leaf in data.items()}
            for part in rows.split(sizes)
        ]
        *_, estimate = measured_update_step(
            params, state, group, loss_fn=loss_fn, optimizer=SGD
        )
        return torch.stack(estimate)

    estimates = torch.stack([draw_estimate() for _ in range(steps)])
    expected = torch.stack(compute_noise_scale(params, data))
    standard_errors = estimates.std(0) / steps**0.5
    error = (estimates.mean(0) - expected).abs()
    assert (error < 5 * standard_errors).all()
    # A bias of the size that is subtracted, tr Σ / N, would be seen.
    assert expected[0] / sum(sizes) > 10 * standard_errors[1]
