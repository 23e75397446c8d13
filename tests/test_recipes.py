"""Recipes of research whose gradient is written down by hand, and whatever the cut.

By hand it is a sum over few examples, from which rounding differs: ``gamma`` times what is added.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import purestep as ps
from proofs.strategies import cut
from purestep.testing.bounds import gamma

Batch = dict[str, Tensor]
ROWS = 5
CUTS = [[[*range(ROWS)]], [[0, 3], [4], [1, 2]], [[], [2, 1, 0], [4, 3]]]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_within(found: Tensor, terms: list[Tensor], sizes: list[Tensor], total: float) -> None:
    """The sum of the terms over the total, but for a hundred roundings of each term's size."""
    expected, size = torch.stack(terms).sum(0) / total, torch.stack(sizes).sum(0) / total
    assert ((found - expected).abs() <= gamma(100 + len(terms), torch.float64) * size).all()


def gradient(loss_fn: Any, params: Any, group: list[Batch], weight_fn: Any) -> Any:
    total = ps.count(group, weight_fn)
    return ps.accumulate(loss_fn, params, group, weight_fn=weight_fn, total=total).grads


def discriminator_loss(d: Tensor, g: Tensor, m: Batch) -> Tensor:
    """Two tokens for each row: a real one, and a generated one."""
    real, fake = m["x"] @ d, m["z"] @ g @ d
    return torch.stack([functional.softplus(-real), functional.softplus(fake)], -1)


def generator_loss(g: Tensor, d: Tensor, m: Batch) -> Tensor:
    return functional.softplus(-(m["z"] @ g @ d))


@pytest.mark.parametrize("rows", CUTS)
def test_gan(rows: list[list[int]]) -> None:
    """Each player's gradient, the generator's through the discriminator; the other is a constant.

    Discriminator: Σ −σ(−d·x) x + σ(d·y) y over 2 N, with y = z G. Generator: Σ −σ(−d·y) z ⊗ d
    over N.
    """
    g, d = normal(3, 2).requires_grad_(), normal(2, seed=1).requires_grad_()
    batch = {"x": normal(ROWS, 2, seed=2), "z": normal(ROWS, 3, seed=3)}
    group = cut(batch, rows)
    own_d, own_g = d.detach(), g.detach()
    of_d = gradient(
        lambda d, m: discriminator_loss(d, g, m), own_d, group, lambda m: torch.ones(len(m["x"]), 2)
    )
    of_g = gradient(
        lambda g, m: generator_loss(g, d, m), own_g, group, lambda m: torch.ones(len(m["z"]))
    )
    assert g.grad is d.grad is None
    assert not of_d.requires_grad
    assert not of_g.requires_grad

    hand_d, sizes_d, hand_g, sizes_g = [], [], [], []
    for x, z in zip(batch["x"], batch["z"], strict=True):
        y, size = z @ own_g, z.abs() @ own_g.abs()
        hand_d += [-torch.sigmoid(-(own_d @ x)) * x, torch.sigmoid(own_d @ y) * y]
        # A generated row is a sum of products itself, and so is what the sigmoid is of.
        sizes_d += [(1 + own_d.abs() @ x.abs()) * x.abs(), (1 + own_d.abs() @ size) * size]
        hand_g.append(-torch.sigmoid(-(own_d @ y)) * z.outer(own_d))
        sizes_g.append((1 + own_d.abs() @ size) * z.abs().outer(own_d.abs()))
    assert_within(of_d, hand_d, sizes_d, 2 * ROWS)
    assert_within(of_g, hand_g, sizes_g, ROWS)
