"""Tests losses per token, row, pair and action: each by its formula, in half precision too."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional

from purestep.losses import (
    cross_entropy,
    dpo,
    kl_divergence,
    linear_kl_divergence,
    mse,
    policy_gradient,
)
from purestep.testing.bounds import rounding_bound
from support.strategies import assert_same
from tests.drawn_logits import draw_problem

vjp: Callable[..., Any] = torch.func.vjp


def assert_within(actual: Tensor, expected: Any, bound: Any) -> None:
    """Compares element by element, up to this absolute error."""
    error = (actual - expected).abs()
    assert (error <= bound).all()


@given(
    st.sampled_from([(), (3,), (2, 3), (2, 3, 1)]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([-100, 2]),
)
def test_equals_its_formula(
    shape: tuple[int, ...],
    smoothing: float,
    z_loss: float,
    ignore_index: int,
) -> None:
    """(1 − s)(z − xᵧ) + s (z − mean x) + z_loss z², and 0 where ignored."""
    generator = torch.Generator().manual_seed(len(shape))
    logits = torch.randn(*shape, 5, generator=generator, dtype=torch.float64) * 3
    labels = torch.randint(0, 5, shape, generator=generator)
    if shape:
        labels.view(-1)[0] = ignore_index
    ignored = labels == ignore_index

    losses = cross_entropy(
        logits,
        labels,
        ignore_index=ignore_index,
        label_smoothing=smoothing,
        z_loss=z_loss,
    )

    z = logits.exp().sum(-1).log()
    index = labels.clamp(min=0).unsqueeze(-1)
    label_logits = logits.gather(-1, index).squeeze(-1)
    of_label = (1 - smoothing) * (z - label_logits)
    of_others = smoothing * (z - logits.mean(-1))
    of_normalizer = z_loss * z**2
    formula = of_label + of_others + of_normalizer
    expected = torch.where(ignored, 0, formula)
    # Each term rounds a handful of times, in sums of five.
    size = z.abs() + logits.abs().amax(-1) + of_normalizer
    bound = 32 * torch.finfo(torch.float64).eps * size
    assert losses.shape == labels.shape
    assert_within(losses, expected, bound)
    assert (losses[ignored] == 0).all()


def bound_logits(case: Any) -> Tensor:
    """Bounds the logits, and what their sums are made of."""
    magnitudes = case.hidden.abs() @ case.weight.abs().T
    return magnitudes.max()


@given(
    st.sampled_from([0.5, 1.0, 4.0]),
    st.sampled_from([1, 3, 100]),
    st.integers(0, 3),
)
def test_kl_divergence(temperature: float, chunk: int, seed: int) -> None:
    """T² Σ q (log q − log p), of whole logits and in chunks of them.

    Its gradient is T (p − q), and none reaches a detached teacher.
    """
    student = draw_problem(4, 3, 7, seed=seed)
    teacher = draw_problem(4, 5, 7, seed=seed + 10)
    student_logits = student.hidden @ student.weight.T
    teacher_logits = teacher.hidden @ teacher.weight.T
    p = (student_logits / temperature).softmax(-1)
    q = (teacher_logits / temperature).softmax(-1)
    per_class = q * (q / p).log()
    expected = temperature**2 * per_class.sum(-1)
    logits_grad = temperature * student.cotangents[:, None] * (p - q)
    size = 1 + bound_logits(student) + bound_logits(teacher)
    scaled_size = size * (temperature + 1 / temperature)
    unit = rounding_bound(500, torch.float64) * scaled_size**2

    def from_logits(logits: Tensor) -> Tensor:
        return kl_divergence(logits, teacher_logits, temperature=temperature)

    def from_hidden(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_kl_divergence(
            hidden,
            weight,
            teacher.hidden,
            teacher.weight,
            temperature=temperature,
            chunk_size=chunk,
        )

    losses, pull = vjp(from_logits, student_logits)
    assert_within(losses, expected, unit)
    (grad,) = pull(student.cotangents)
    assert_within(grad, logits_grad, unit)

    chunked, pull = vjp(from_hidden, student.hidden, student.weight)
    assert_within(chunked, losses, unit)
    hidden_grad, weight_grad = pull(student.cotangents)
    inputs_size = 1 + student.hidden.abs().sum() + student.weight.abs().sum()
    bound = 4 * inputs_size * unit
    assert_within(hidden_grad, logits_grad @ student.weight, bound)
    assert_within(weight_grad, logits_grad.T @ student.hidden, bound)


def test_kl_divergence_of_classes_that_are_ruled_out() -> None:
    """Classes that the teacher rules out add nothing, where the student does so too.

    No gradient is NaN or infinite.
    """
    all_classes = [1.0, 2.0, 3.0]
    two_classes = [1.0, 2.0, -math.inf]
    logits = torch.tensor([all_classes, two_classes], requires_grad=True)
    teacher = torch.tensor([two_classes, two_classes], requires_grad=True)

    losses = kl_divergence(logits, teacher)
    grads = torch.autograd.grad(losses.sum(), (logits, teacher))

    assert losses[1] == 0
    assert losses[0] > 0
    for grad in grads:
        assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    """Each loss equals that of inputs which were converted before."""
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(4, 4, 4, generator=generator).to(dtype)
    x, y, z, u = tensors
    labels = torch.tensor([1, 3, 2, 0])
    cases: dict[Callable[..., Tensor], list[Tensor]] = {
        kl_divergence: [x, y],
        mse: [x, y],
        dpo: [x, y, z, u],
        policy_gradient: [x, y, z],
    }
    for loss, inputs in cases.items():
        losses = loss(*inputs)
        converted = [value.float() for value in inputs]
        assert losses.dtype == torch.float32
        assert_same(losses, loss(*converted))
    losses = cross_entropy(x, labels)
    assert losses.dtype == torch.float32
    assert_same(losses, cross_entropy(x.float(), labels))


def test_mse_is_torchs_over_all_rows() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    y = torch.ones(2, 3, 4)
    squares = (x - y).square()
    mean = functional.mse_loss(x, y)

    by_row = mse(x, y)
    by_unit_dims = [mse(x, y, batch_dims=number) for number in range(4)]

    assert_same(by_row, squares.mean((1, 2)))
    assert_same(by_unit_dims[0], mean)
    assert_same(by_unit_dims[1], by_row)
    assert_same(by_unit_dims[2], squares.mean(2))
    assert_same(by_unit_dims[3], squares)
    assert_same(mse(x.long(), y.long()), by_row)
    large = torch.tensor([2**30 + 1])
    assert mse(large.double() - 1, large) == 1
    torch.testing.assert_close(by_row.mean(), mean)


@given(st.sampled_from([0.1, 2.0]), st.sampled_from([0.0, 0.2]))
def test_dpo(beta: float, smoothing: float) -> None:
    """−(1 − s) log σ(β Δ) − s log σ(−β Δ), with slopes ±β (σ(β Δ) − 1 + s).

    Nothing overflows.
    """
    values = draw_problem(4, 9, 1).hidden * 3
    chosen, rejected, reference_chosen, reference_rejected = values

    def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        return dpo(
            chosen,
            rejected,
            reference_chosen,
            reference_rejected,
            beta=beta,
            label_smoothing=smoothing,
        )

    losses, pull = vjp(loss, chosen, rejected)
    chosen_slope, rejected_slope = pull(torch.ones_like(losses))

    chosen_gain = chosen - reference_chosen
    rejected_gain = rejected - reference_rejected
    gap = beta * (chosen_gain - rejected_gain)
    p = 1 / (1 + (-gap).exp())
    of_preferred = -(1 - smoothing) * p.log()
    of_flipped = -smoothing * (1 - p).log()
    expected = of_preferred + of_flipped
    slope = beta * (p - 1 + smoothing)
    size = 1 + gap.exp() + (-gap).exp()
    bound = rounding_bound(64, torch.float64) * size
    assert_within(losses, expected, bound)
    assert_within(chosen_slope, slope, bound)
    assert_within(rejected_slope, -slope, bound)


def test_dpo_does_not_overflow() -> None:
    zero = torch.zeros(1)
    far = torch.tensor([-1e6])

    losses = dpo(far, zero, zero, zero, beta=1.0)

    assert losses == 1e6


# The ratio of the policies, the advantage, the loss, and its slope by the log of the ratio.
POLICY_GRADIENTS = [
    [0.5, 1.0, -0.5, -0.5],
    [0.5, -1.0, 0.75, 0.0],
    [1.0, 1.0, -1.0, -1.0],
    [1.0, -1.0, 1.0, 1.0],
    [1.25, 1.0, -1.25, -1.25],
    [1.25, -1.0, 1.25, 1.25],
    [1.5, 1.0, -1.375, 0.0],
    [1.5, -1.0, 1.5, 1.5],
]


def test_policy_gradient_ends_where_it_is_clipped() -> None:
    """Beyond the clip, a positive advantage has no gradient, a negative one its full gradient.

    At the policy that acted, both have theirs.
    """
    table = torch.tensor(POLICY_GRADIENTS, dtype=torch.float64)
    ratio, advantages, expected, slopes = table.unbind(dim=1)
    bound = rounding_bound(8, torch.float64) * 2

    def loss(log_ratio: Tensor) -> Tensor:
        acted = 0 * log_ratio
        return policy_gradient(
            log_ratio, acted, advantages=advantages, clip=(0.25, 0.375)
        )

    losses, pull = vjp(loss, ratio.log())
    (grad,) = pull(torch.ones_like(ratio))

    assert_within(losses, expected, bound)
    assert_within(grad, slopes, bound)
    for clip in (0.0, (1.0, 0.0)):
        losses = policy_gradient(ratio, ratio, advantages, clip=clip)
        assert_same(losses, -advantages)


@pytest.mark.parametrize("advantage", [0.0, 1.0])
def test_a_clipped_ratio_may_overflow(advantage: float) -> None:
    """In float32, exp(95) is infinite."""
    log_ratio = torch.tensor(95.0, requires_grad=True)
    acted = torch.tensor(0.0)
    loss = policy_gradient(
        log_ratio,
        acted,
        advantages=torch.tensor(advantage),
        clip=0.25,
    )
    loss.backward()
    assert loss == -1.25 * advantage
    assert log_ratio.grad == 0


def test_a_clip_that_varies_compiles_once() -> None:
    log_probs = torch.linspace(-1.0, 1.0, 5)
    acted = torch.zeros(5)
    ones = torch.ones(5)

    def loss(x: Tensor, clip: float) -> Tensor:
        return policy_gradient(x, acted, ones, clip=clip)

    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    for number in range(1, 12):
        clip = number / 20
        assert_same(compiled(log_probs, clip), loss(log_probs, clip))


Call = Callable[[], Tensor]
SQUARE = torch.ones(2, 2)
COLUMN = torch.ones(2, 1)
REFUSED: list[tuple[Call, str]] = [
    (
        lambda: cross_entropy(SQUARE, torch.ones(3).long()),
        r"logits of shape \(2, 2\) against labels of shape \(3,\)",
    ),
    (
        lambda: kl_divergence(SQUARE, COLUMN),
        r"teacher_logits of shape \(2, 1\) against logits",
    ),
    (
        lambda: kl_divergence(SQUARE, SQUARE, temperature=0.0),
        r"temperature=0.0",
    ),
    (
        lambda: linear_kl_divergence(SQUARE, SQUARE, SQUARE, SQUARE, temperature=0.0),
        r"temperature=0.0",
    ),
    (
        lambda: kl_divergence(SQUARE[0, 0], COLUMN[0, 0]),
        r"no classes",
    ),
    (
        lambda: linear_kl_divergence(SQUARE, SQUARE, COLUMN[:1], COLUMN),
        r"hidden of shape \(2, 2\) against teacher_hidden",
    ),
    (
        lambda: linear_kl_divergence(SQUARE, SQUARE, COLUMN, COLUMN[:1]),
        r"the same classes",
    ),
    (
        lambda: linear_kl_divergence(SQUARE, SQUARE, SQUARE, COLUMN),
        r"teacher_weight of shape \(2, 1\) against teacher_hidden",
    ),
    (
        lambda: linear_kl_divergence(SQUARE, SQUARE, COLUMN, SQUARE),
        r"teacher_weight of shape \(2, 2\) against teacher_hidden of shape \(2, 1\)",
    ),
    (
        lambda: mse(SQUARE, COLUMN),
        r"targets of shape \(2, 1\) against predictions of shape \(2, 2\)",
    ),
    (
        lambda: mse(SQUARE, SQUARE, batch_dims=3),
        r"batch_dims=3 .* from 0 to 2",
    ),
    (
        lambda: dpo(SQUARE, SQUARE, COLUMN, SQUARE),
        r"reference_chosen of shape \(2, 1\)",
    ),
    (
        lambda: dpo(SQUARE, SQUARE, SQUARE, SQUARE, label_smoothing=1.5),
        r"label_smoothing=1.5",
    ),
    (
        lambda: policy_gradient(SQUARE, SQUARE, COLUMN),
        r"advantages of shape \(2, 1\)",
    ),
    (
        lambda: policy_gradient(SQUARE, SQUARE, SQUARE, clip=(2.0, 0.1)),
        r"clip=\(2.0, 0.1\)",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_losses_refuse(call: Call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("settings", [{}, {"z_loss": 0.1}, {"label_smoothing": 0.1}])
def test_labels_of_bytes(settings: dict[str, Any]) -> None:
    """All 256 of them: -100 wraps around to 156 in uint8."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(256, 256, generator=generator)
    labels = torch.arange(256)

    losses = cross_entropy(logits, labels.to(torch.uint8), **settings)

    expected = cross_entropy(logits, labels, **settings)
    assert_same(losses, expected)
