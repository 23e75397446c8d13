"""The noise scale of gradients: by hand, whatever the ranks, and against a covariance that is known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps

SGD = ps.optim.sgd(0.5)
GROUP = [torch.tensor([2.0, 4.0]), torch.tensor([6.0])]


def loss_fn(w: Tensor, x: Tensor) -> ps.LossTerms:
    """A token's gradient is its number."""
    return ps.LossTerms(w * x, aux={"tokens": (x != 0).sum()})


def weights(x: Tensor) -> Tensor:
    return x != 0


def metrics_of(group: list[Tensor], axis: Any = ps.LocalAxis(), **how: Any) -> ps.StepMetrics:
    step = ps.make_update_step(
        loss_fn,
        SGD,
        weight_fn=weights,
        axis=axis,
        normalize="grads",
        grad_and_value=ps.with_squared_norms(),
        **how,
    )
    w = torch.tensor(1.0)
    return step(w, SGD.init(w), group)[2]


def assert_by_hand(metrics: ps.StepMetrics) -> None:
    """Σ n g² = 2 · 3² + 1 · 6² = 54, N g² = 3 · 4² = 48, and K = 2."""
    scale, trace, squared_norm = ps.noise_scale(metrics)
    assert (float(trace), float(squared_norm)) == (6.0, 14.0)
    assert scale == torch.tensor(6.0, dtype=torch.float64) / 14
    assert metrics.aux.squares == 54
    assert metrics.aux.aux["tokens"] == 3


def test_by_hand() -> None:
    assert_by_hand(metrics_of(GROUP))
    assert_by_hand(metrics_of(GROUP[::-1]))


def test_microbatches_without_tokens_do_not_count() -> None:
    assert_by_hand(metrics_of([torch.zeros(3), GROUP[0], torch.zeros(0), GROUP[1]]))


def test_over_ranks() -> None:
    threads = ps.testing.ThreadAxis(3)
    for metrics in threads.map(lambda group: metrics_of(group, threads))(
        [GROUP[:1], [], GROUP[1:]]
    ):
        assert_by_hand(metrics)
    vmap = ps.VmapAxis(2)
    on_ranks = vmap.map(lambda x: metrics_of([x], vmap), in_dims=0, out_dims=None)
    assert_by_hand(on_ranks(torch.tensor([[2.0, 4.0], [6.0, 0.0]])))


def test_compiled() -> None:
    assert_by_hand(metrics_of(GROUP, compile=True))


def test_the_update_is_the_same() -> None:
    """To the bit, whoever looks."""
    group = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (3, 1, 4)]
    w = torch.tensor(1.0)
    modes: list[Any] = [ps.grad_and_value, ps.with_squared_norms()]
    results = [
        ps.make_update_step(
            loss_fn, SGD, weight_fn=weights, normalize="grads", grad_and_value=mode
        )(w, SGD.init(w), group)
        for mode in modes
    ]
    assert torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("sizes", [(1, 1), (2, 5, 1), (4, 4, 4, 4)])
def test_a_known_covariance(sizes: tuple[int, ...]) -> None:
    """Of Gaussian gradients, the mean of the estimates is within five standard errors, which are known as well.

    With x ~ N(G, Σ) for each token, the K means differ by Σₖ nₖ ‖gₖ‖² − N ‖g‖², a sum of σⱼ² χ²(K − 1), whatever the sizes.
    """
    generator = torch.Generator().manual_seed(1)
    mean, deviation = torch.tensor([[2.0, -1.0, 0.5], [1.0, 3.0, 0.25]]).double()
    variance, tokens, steps = deviation.square(), sum(sizes), 1000
    w, sgd = torch.zeros(3, dtype=torch.float64), ps.optim.sgd(0.0)
    step = ps.make_update_step(
        lambda w, x: x @ w,
        sgd,
        weight_fn=lambda x: torch.ones(len(x)),
        normalize="grads",
        grad_and_value=ps.with_squared_norms(),
    )
    found = []
    for _ in range(steps):
        x = mean + deviation * torch.randn(tokens, 3, generator=generator, dtype=torch.float64)
        found.append(ps.noise_scale(step(w, sgd.init(w), [*x.split(sizes)])[2]))
    trace = torch.stack([each.trace for each in found]).mean()
    squared_norm = torch.stack([each.squared_norm for each in found]).mean()

    of_trace = 2 * float(variance.square().sum()) / (len(sizes) - 1)
    of_mean = (
        4 * float((mean.square() * variance).sum()) / tokens
        + 2 * float(variance.square().sum()) / tokens**2
    )
    assert abs(float(trace - variance.sum())) < 5 * math.sqrt(of_trace / steps)
    of_squared_norm = of_mean + of_trace / tokens**2
    error = abs(float(squared_norm - mean.square().sum()))
    assert error < 5 * math.sqrt(of_squared_norm / steps)


def test_refuses() -> None:
    with pytest.raises(ValueError, match=r'pass normalize="grads" to a step'):
        ps.make_update_step(loss_fn, SGD, grad_and_value=ps.with_squared_norms())
    step = ps.make_update_step(loss_fn, SGD, weight_fn=weights)
    w = torch.tensor(1.0)
    with pytest.raises(ValueError, match=r"grad_and_value=ps\.with_squared_norms\(\)"):
        ps.noise_scale(step(w, SGD.init(w), GROUP)[2])


def test_without_a_step() -> None:
    """A function that counts no tokens is differentiated as ever."""
    assert ps.with_squared_norms()(lambda w: w * w)(torch.tensor(3.0)) == (6, 9)
