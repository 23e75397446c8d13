"""Losses per token, row, pair and action: each by its formula, and lifted from half precision."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional

import purestep as ps
from purestep.testing.bounds import gamma
from tests.logits import problem

vjp: Callable[..., Any] = torch.func.vjp


@given(
    st.sampled_from([(), (3,), (2, 3), (2, 3, 1)]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([-100, 2]),
)
def test_equals_its_formula(
    shape: tuple[int, ...], smoothing: float, z_loss: float, ignore_index: int
) -> None:
    """(1 − s)(z − xᵧ) + s (z − mean x) + z_loss z², and 0 where ignored."""
    generator = torch.Generator().manual_seed(len(shape))
    logits = torch.randn(*shape, 5, generator=generator, dtype=torch.float64) * 3
    labels = torch.randint(0, 5, shape, generator=generator)
    if shape:
        labels.view(-1)[0] = ignore_index
    losses = ps.losses.cross_entropy(
        logits,
        labels,
        ignore_index=ignore_index,
        label_smoothing=smoothing,
        z_loss=z_loss,
    )
    z = logits.exp().sum(-1).log()
    picked = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    formula = (
        (1 - smoothing) * (z - picked)
        + smoothing * (z - logits.mean(-1))
        + z_loss * z**2
    )
    expected = torch.where(labels == ignore_index, 0, formula)
    # Each term rounds a handful of times, in sums of five.
    bound = (
        32
        * torch.finfo(torch.float64).eps
        * (z.abs() + logits.abs().amax(-1) + z_loss * z**2)
    )
    assert losses.shape == labels.shape
    assert ((losses - expected).abs() <= bound).all()
    assert (losses[labels == ignore_index] == 0).all()


@given(
    st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from([1, 3, 100]), st.integers(0, 3)
)
def test_kl_divergence(temperature: float, chunk: int, seed: int) -> None:
    """T² Σ q (log q − log p), whole and never whole; its gradient is T (p − q), and none reaches a detached teacher."""
    case, teacher = problem(4, 3, 7, seed=seed), problem(4, 5, 7, seed=seed + 10)
    logits, others = case.hidden @ case.weight.T, teacher.hidden @ teacher.weight.T
    p, q = (logits / temperature).softmax(-1), (others / temperature).softmax(-1)
    size = 1 + (case.hidden.abs() @ case.weight.abs().T).max()
    size = size + (teacher.hidden.abs() @ teacher.weight.abs().T).max()
    unit = gamma(500, torch.float64) * (size * (temperature + 1 / temperature)) ** 2
    found, pull = vjp(
        lambda x: ps.losses.kl_divergence(x, others, temperature=temperature), logits
    )
    assert ((found - temperature**2 * (q * (q / p).log()).sum(-1)).abs() <= unit).all()
    to_logits = temperature * case.cotangents[:, None] * (p - q)
    assert ((pull(case.cotangents)[0] - to_logits).abs() <= unit).all()

    def linear(hidden: Tensor, weight: Tensor) -> Tensor:
        given = hidden, weight, teacher.hidden, teacher.weight
        return ps.losses.linear_kl_divergence(
            *given, temperature=temperature, chunk=chunk
        )

    chunked, pull = vjp(linear, case.hidden, case.weight)
    assert ((chunked - found).abs() <= unit).all()
    to_hidden, to_weight = pull(case.cotangents)
    factor = 4 * (1 + case.hidden.abs().sum() + case.weight.abs().sum())
    assert ((to_hidden - to_logits @ case.weight).abs() <= factor * unit).all()
    assert ((to_weight - to_logits.T @ case.hidden).abs() <= factor * unit).all()


def test_kl_divergence_of_classes_that_are_ruled_out() -> None:
    """By the teacher they say nothing, even where the student rules them out too, and nothing that is no number flows back."""
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, -math.inf]], requires_grad=True)
    teacher = torch.tensor([[1.0, 2.0, -math.inf]] * 2, requires_grad=True)
    losses = ps.losses.kl_divergence(logits, teacher)
    grads = torch.autograd.grad(losses.sum(), (logits, teacher))
    assert losses[1] == 0
    assert losses[0] > 0
    assert all(each.isfinite().all() for each in grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_are_lifted(dtype: torch.dtype) -> None:
    """In half precision, each is that of what was lifted before, in float32."""
    generator = torch.Generator().manual_seed(0)
    x, y, z, u = (torch.randn(4, 4, generator=generator).to(dtype) for _ in range(4))
    losses: dict[Callable[..., Tensor], tuple[Tensor, ...]] = {
        ps.losses.cross_entropy: (x, torch.tensor([1, 3, 2, 0])),
        ps.losses.kl_divergence: (x, y),
        ps.losses.mse: (x, y),
        ps.losses.dpo: (x, y, z, u),
        ps.losses.policy_gradient: (x, y, z),
    }
    for loss, given_ in losses.items():
        wide = [each.float() if each.is_floating_point() else each for each in given_]
        found = loss(*given_)
        assert found.dtype == torch.float32
        assert torch.equal(found, loss(*wide))


def test_mse_is_torchs_over_all_rows() -> None:
    x, y = torch.arange(24.0).reshape(2, 3, 4), torch.ones(2, 3, 4)
    squares = (x - y).square()
    assert torch.equal(ps.losses.mse(x, y), squares.mean((1, 2)))
    assert torch.equal(ps.losses.mse(x, y, batch_dims=2), squares.mean(2))
    assert torch.equal(ps.losses.mse(x, y, batch_dims=3), squares)
    assert torch.equal(ps.losses.mse(x, y, batch_dims=0), functional.mse_loss(x, y))
    torch.testing.assert_close(ps.losses.mse(x, y).mean(), functional.mse_loss(x, y))


@given(st.sampled_from([0.1, 2.0]), st.sampled_from([0.0, 0.2]))
def test_dpo(beta: float, smoothing: float) -> None:
    """−(1 − s) log σ(β Δ) − s log σ(−β Δ), and its slopes ±β (σ(β Δ) − 1 + s); without overflow."""
    chosen, rejected, first, second = problem(4, 9, 1).hidden * 3

    def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        return ps.losses.dpo(
            chosen, rejected, first, second, beta=beta, label_smoothing=smoothing
        )

    found, pull = vjp(loss, chosen, rejected)
    gap = beta * ((chosen - first) - (rejected - second))
    p = 1 / (1 + (-gap).exp())
    expected = -(1 - smoothing) * p.log() - smoothing * (1 - p).log()
    bound = gamma(64, torch.float64) * (1 + gap.exp() + (-gap).exp())
    assert ((found - expected).abs() <= bound).all()
    slopes = pull(torch.ones_like(found))
    for slope, sign in zip(slopes, (beta, -beta), strict=True):
        assert ((slope - sign * (p - 1 + smoothing)).abs() <= bound).all()
    far = ps.losses.dpo(*(torch.tensor([x]) for x in (-1e6, 0.0, 0.0, 0.0)), beta=1.0)
    assert far == 1e6


def test_policy_gradient_ends_where_it_is_clipped() -> None:
    """Beyond the clip, a gain gives no gradient and a loss its whole one; at the policy that acted, both do."""
    ratio = torch.tensor(
        [0.5, 0.5, 1.0, 1.0, 1.25, 1.25, 1.5, 1.5], dtype=torch.float64
    )
    advantages = torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)
    how: Any = {"advantages": advantages, "clip": (0.25, 0.375)}
    losses, pull = vjp(
        lambda x: ps.losses.policy_gradient(x, 0 * x, **how), ratio.log()
    )
    expected = torch.tensor(
        [-0.5, 0.75, -1.0, 1.0, -1.25, 1.25, -1.375, 1.5], dtype=torch.float64
    )
    slopes = torch.tensor(
        [-0.5, 0.0, -1.0, 1.0, -1.25, 1.25, 0.0, 1.5], dtype=torch.float64
    )
    assert ((losses - expected).abs() <= gamma(8, torch.float64) * 2).all()
    assert (
        (pull(torch.ones_like(ratio))[0] - slopes).abs() <= gamma(8, torch.float64) * 2
    ).all()
    for edge in (0.0, (1.0, 0.0)):
        losses = ps.losses.policy_gradient(ratio, ratio, advantages, clip=edge)
        assert torch.equal(losses, -advantages)


REFUSED: list[tuple[Any, str]] = [
    (lambda a, b: ps.losses.cross_entropy(a, torch.ones(3).long()), r"logits of shape \(2, 2\) against labels of shape \(3,\)"),
    (lambda a, b: ps.losses.kl_divergence(a, b), r"teacher_logits of shape \(2, 1\) against logits"),
    (lambda a, b: ps.losses.kl_divergence(a, a, temperature=0.0), r"temperature=0.0"),
    (lambda a, b: ps.losses.linear_kl_divergence(a, a, a, a, temperature=0.0), r"temperature=0.0"),
    (lambda a, b: ps.losses.kl_divergence(a[0, 0], b[0, 0]), r"no classes"),
    (lambda a, b: ps.losses.linear_kl_divergence(a, a, b[:1], b), r"hidden of shape \(2, 2\) against teacher_hidden"),
    (lambda a, b: ps.losses.linear_kl_divergence(a, a, b, b[:1]), r"the same classes"),
    (lambda a, b: ps.losses.linear_kl_divergence(a, a, a, b), r"weight of shape \(2, 1\) against hidden"),
    (lambda a, b: ps.losses.mse(a, b), r"targets of shape \(2, 1\) against predictions of shape \(2, 2\)"),
    (lambda a, b: ps.losses.mse(a, a, batch_dims=3), r"batch_dims=3 .* from 0 to 2"),
    (lambda a, b: ps.losses.dpo(a, a, b, a), r"reference_chosen of shape \(2, 1\)"),
    (lambda a, b: ps.losses.policy_gradient(a, a, b), r"advantages of shape \(2, 1\)"),
    (lambda a, b: ps.losses.policy_gradient(a, a, a, clip=(2.0, 0.1)), r"clip=\(2.0, 0.1\)"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_losses_refuse(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 2), torch.ones(2, 1))


@pytest.mark.parametrize("how", [{}, {"z_loss": 0.1}, {"label_smoothing": 0.1}])
def test_labels_of_bytes(how: dict[str, Any]) -> None:
    """All 256 of them: -100 wraps around to 156 in uint8."""
    logits = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(256)
    wanted = ps.losses.cross_entropy(logits, labels, **how)
    assert torch.equal(
        ps.losses.cross_entropy(logits, labels.to(torch.uint8), **how), wanted
    )
