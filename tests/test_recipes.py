"""Recipes of research whose gradient is written down by hand, and whatever the cut: GANs, differential privacy, the noise scale."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import purestep as ps
from proofs.strategies import cut
from purestep import tree
from purestep.examples.differential_privacy import (
    init,
    loss_fn,
    people,
    private_update_step,
)
from purestep.examples.noise_scale import direct, measured_update_step
from purestep.testing.bounds import gamma

Batch = dict[str, Tensor]
ROWS = 5
SGD = ps.optim.sgd(1.0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def assert_within(
    found: Tensor, terms: list[Tensor], sizes: list[Tensor], total: float
) -> None:
    """The sum of the terms over the total, but for a hundred roundings of each term's size."""
    expected, size = (
        torch.stack(terms).sum(0) / total,
        torch.stack(sizes).sum(0) / total,
    )
    assert (
        (found - expected).abs() <= gamma(100 + len(terms), torch.float64) * size
    ).all()


def gradient(loss_fn: Any, params: Any, group: list[Batch], *tokens: int) -> Any:
    """Of a loss for each row, or of so many tokens in each."""

    def weight_fn(m: Batch) -> Tensor:
        return torch.ones(len(m["x"]), *tokens)

    total = ps.count_tokens(group, weight_fn)
    return ps.accumulate(loss_fn, params, group, weight_fn=weight_fn, total=total).grads


def discriminator_loss(d: Tensor, g: Tensor, m: Batch) -> Tensor:
    """Two tokens for each row: a real one, and a generated one."""
    real, fake = m["x"] @ d, m["z"] @ g @ d
    return torch.stack([functional.softplus(-real), functional.softplus(fake)], -1)


CUTS = [[[*range(ROWS)]], [[0, 3], [4], [1, 2]], [[], [2, 1, 0], [4, 3]]]


@pytest.mark.parametrize("rows", CUTS)
def test_gan(rows: list[list[int]]) -> None:
    """Each player's gradient, the generator's through the discriminator; the other is a constant.

    Discriminator: Σ −σ(−d·x) x + σ(d·y) y over 2 N, with y = z G. Generator: Σ −σ(−d·y) z ⊗ d
    over N.
    """
    g, d = normal(3, 2).requires_grad_(), normal(2, seed=1).requires_grad_()
    batch = {"x": normal(ROWS, 2, seed=2), "z": normal(ROWS, 3, seed=3)}
    group, own_d, own_g = cut(batch, rows), d.detach(), g.detach()
    of_d = gradient(lambda d, m: discriminator_loss(d, g, m), own_d, group, 2)
    of_g = gradient(lambda g, m: functional.softplus(-(m["z"] @ g @ d)), own_g, group)
    assert g.grad is d.grad is None
    assert not of_d.requires_grad
    assert not of_g.requires_grad

    hand_d, sizes_d, hand_g, sizes_g = [], [], [], []
    for x, z in zip(batch["x"], batch["z"], strict=True):
        y, size = z @ own_g, z.abs() @ own_g.abs()
        hand_d += [-torch.sigmoid(-(own_d @ x)) * x, torch.sigmoid(own_d @ y) * y]
        # A generated row is a sum of products itself, and so is what the sigmoid is of.
        sizes_d += [
            (1 + own_d.abs() @ x.abs()) * x.abs(),
            (1 + own_d.abs() @ size) * size,
        ]
        hand_g.append(-torch.sigmoid(-(own_d @ y)) * z.outer(own_d))
        sizes_g.append((1 + own_d.abs() @ size) * z.abs().outer(own_d.abs()))
    assert_within(of_d, hand_d, sizes_d, 2 * ROWS)
    assert_within(of_g, hand_g, sizes_g, ROWS)


NAN = float("nan")
DATA = {
    "x": torch.tensor(
        [[[1, 2], [2, 2]], [[0, 1], [9, 9]], [[NAN, 7], [7, 7]], [[48, 64], [5, 5]]]
    ).double(),
    "c": torch.tensor([[8, 4], [0, 9], [NAN, 7], [192, 5]]).double(),
    "weight": torch.tensor([[1, 1], [3, 0], [0, 0], [1, 0]]),
}
"""Rows of two tokens, with gradients (3, 4, 12), (0, 3, 0), padding, and (48, 64, 192)."""


def privately(
    group: list[Batch], elements: int = 2, noise: float = 0.0, **how: Any
) -> Batch:
    """The params after a step, where the gradient of a token is (x, c)."""
    params = {"w": torch.zeros(elements).double(), "b": torch.zeros(()).double()}
    new, _ = private_update_step(
        params, SGD.init(params), group, ps.random.key(0), clip=6.5, noise=noise, batch_size=4,
        loss_fn=lambda p, m: m["x"] @ p["w"] + m["c"] * p["b"], optimizer=SGD,
        weight_fn=lambda m: m["weight"], **how,
    )  # fmt: skip
    return new


def on_three_threads(run: Callable[..., Any], groups: list[Any]) -> Any:
    """What all ranks return alike."""
    axis = ps.testing.ThreadAxis(3)
    first, *others = axis.map(lambda group: run(group, axis=axis))(groups)
    assert all(str(other) == str(first) for other in others)
    return first


@pytest.mark.parametrize("how", ["one", "three", "one by one", "threads"])
def test_private_steps_clip_by_hand(how: str) -> None:
    """Each row's gradient over the whole tree, to the bit: all numbers are small and dyadic."""

    def stepped(noise: float) -> Batch:
        if how == "threads":
            groups = [cut(DATA, [[0, 3]]), [], cut(DATA, [[1], [2]])]
            return on_three_threads(partial(privately, noise=noise), groups)
        group = cut(DATA, [[2, 3], [0], [1]]) if how == "three" else [DATA]
        return privately(
            group, noise=noise, **({"chunk_size": 1} if how == "one by one" else {})
        )

    new, noisy = stepped(0.0), stepped(0.25)["w"]
    assert (-4 * new["w"]).tolist() == [1.5 + 0 + 1.5, 2 + 3 + 2]
    assert -4 * new["b"] == 6 + 0 + 6
    assert torch.equal(noisy, privately([DATA], noise=0.25)["w"]), (
        "it depends on the key alone"
    )
    assert not torch.equal(noisy, new["w"])


def test_private_noise_comes_once() -> None:
    """With the deviation noise · clip, to five standard errors."""
    n, deviation = 200_000, 0.25 * 6.5
    noise = 4 * privately([], n, noise=0.25)["w"]
    assert abs(noise.mean()) < 5 * deviation / math.sqrt(n)
    # The variance of n squares of deviation σ is 2 σ⁴ / n.
    assert abs(noise.square().mean() - deviation**2) < 5 * deviation**2 * math.sqrt(
        2 / n
    )


FEW, ONE, NONE = torch.tensor([2.0, 4.0]), torch.tensor([6.0]), torch.zeros(0)


def measured(
    group: list[Tensor], axis: Any = ps.LocalAxis()
) -> tuple[Tensor, Tensor, Tensor]:
    """Of tokens whose gradient is their number."""
    w = torch.tensor(1.0)
    w, _, found = measured_update_step(
        w, SGD.init(w), group, loss_fn=lambda w, x: w * x, optimizer=SGD,
        weight_fn=lambda x: x != 0, axis=axis,
    )  # fmt: skip
    assert axis.size > 1 or found.scale == found.trace / found.squared_norm
    return w, found.trace, found.squared_norm


def on_simulated_ranks() -> Any:
    axis = ps.VmapAxis(2)
    run: Any = axis.map(lambda x: measured([x], axis), in_dims=0, out_dims=None)
    return run(torch.stack([FEW, torch.tensor([6.0, 0.0])]))


HOW: dict[str, Any] = {
    "one by one": lambda: measured([FEW, ONE]),
    "with empty ones": lambda: measured([torch.zeros(3), ONE, NONE, FEW]),
    "threads": lambda: on_three_threads(measured, [[FEW], [], [ONE]]),
    "simulated ranks": on_simulated_ranks,
}


@pytest.mark.parametrize("how", HOW)
def test_the_noise_scale_by_hand(how: str) -> None:
    """Σ n g² = 2 · 3² + 1 · 6² = 54, N g² = 3 · 4² = 48, and K = 2; the update is by g = 4."""
    assert [*map(float, HOW[how]())] == [1 - 4, 6.0, 14.0]


@pytest.mark.parametrize("sizes", [(4, 4), (2, 5, 1)])
def test_the_estimates_of_the_noise_scale_are_those_of_all_examples(
    sizes: tuple[int, ...],
) -> None:
    """Of a network, the mean of many estimates is the direct one, to five standard errors."""
    generator = torch.Generator().manual_seed(0)
    params, data, steps = (
        tree.map(Tensor.double, init(generator)),
        people(200, seed=0),
        400,
    )
    data["x"] = data["x"].double()
    how: Any = {"loss_fn": loss_fn, "optimizer": SGD}
    found = []
    for _ in range(steps):
        rows = torch.randint(200, (sum(sizes),), generator=generator).split(sizes)
        group = [{name: leaf[each] for name, leaf in data.items()} for each in rows]
        *_, estimate = measured_update_step(params, SGD.init(params), group, **how)
        found.append(torch.stack(estimate))
    estimates, expected = torch.stack(found), torch.stack(direct(params, data))
    error = (estimates.mean(0) - expected).abs()
    assert (error < 5 * estimates.std(0) / steps**0.5).all()
    # A bias of the size that is taken away, tr Σ / N, would be seen.
    assert expected[0] / sum(sizes) > 10 * estimates[:, 1].std() / steps**0.5
