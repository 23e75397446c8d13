"""Losses per token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional

import purestep as ps


@given(
    st.sampled_from([(), (3,), (2, 3), (2, 3, 1)]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 1e-2]),
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
        logits, labels, ignore_index=ignore_index, label_smoothing=smoothing, z_loss=z_loss
    )
    z = logits.exp().sum(-1).log()
    picked = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    formula = (1 - smoothing) * (z - picked) + smoothing * (z - logits.mean(-1)) + z_loss * z**2
    expected = torch.where(labels == ignore_index, 0, formula)
    # Each term rounds a handful of times, in sums of five.
    bound = 32 * torch.finfo(torch.float64).eps * (z.abs() + logits.abs().amax(-1) + z_loss * z**2)
    assert losses.shape == labels.shape
    assert ((losses - expected).abs() <= bound).all()
    assert (losses[labels == ignore_index] == 0).all()


def test_equals_torch() -> None:
    logits, labels = torch.randn(4, 7), torch.tensor([1, 6, -100, 0])
    expected = functional.cross_entropy(logits, labels, reduction="none")
    assert torch.equal(ps.losses.cross_entropy(logits, labels), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_lifted(dtype: torch.dtype) -> None:
    logits, labels = torch.randn(4, 7).to(dtype), torch.tensor([1, 6, 2, 0])
    losses = ps.losses.cross_entropy(logits, labels)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, ps.losses.cross_entropy(logits.float(), labels))


def test_refuses_other_shapes() -> None:
    with pytest.raises(
        ValueError, match=r"logits of shape \(2, 5\) against labels of shape \(3,\)"
    ):
        ps.losses.cross_entropy(torch.ones(2, 5), torch.ones(3, dtype=torch.int64))
