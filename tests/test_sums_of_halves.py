"""Gradients in half precision are summed in float32, over microbatches and over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import purestep as ps
from proofs.strategies import capture
from purestep.testing.bounds import gamma
from tests.halves import HALVES, linear_loss, tokens, weights_of

COUNT = 1000
WIDTH = 8
FEW = settings(max_examples=max(1, settings().max_examples // 30))


def many(seed: int, dtype: torch.dtype, count: int = COUNT) -> tuple[Any, list[Any]]:
    """Params, and microbatches of one to three rows, whose gradients all point the same way."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 4, (count,), generator=generator).tolist()
    group = [
        {
            "x": (0.5 + torch.rand(rows, WIDTH, generator=generator)).to(dtype),
            "w": torch.randint(1, 3, (rows,), generator=generator),
        }
        for rows in sizes
    ]
    return {"w": torch.randn(WIDTH, generator=generator).to(dtype)}, group


def gradients(params: Any, group: list[Any], loss_fn: Any = linear_loss) -> Tensor:
    """Each microbatch's gradient by autograd alone, in the dtype of the params."""
    total = tokens(group)
    found = []
    for batch in group:
        w = params["w"].clone().requires_grad_()
        losses = loss_fn({"w": w}, batch).float()
        seed = (batch["w"].to(torch.float64) / total).to(torch.float32)
        (losses * seed).sum().backward()
        found.append(w.grad)
    return torch.stack(found)


def errors_and_bounds(actual: Tensor, terms: Tensor) -> list[tuple[float, float]]:
    """|actual − Σ gₘ| and γₙ Σ |gₘ|, n additions in float32, for each element; the sum without any rounding."""
    bound = gamma(len(terms) - 1, torch.float32)
    return [
        (abs(found - math.fsum(column)), bound * math.fsum(map(abs, column)))
        for found, column in zip(actual.tolist(), terms.T.tolist(), strict=True)
    ]


@pytest.mark.parametrize("dtype", HALVES)
@FEW
@given(seed=st.integers(0, 2**20))
def test_a_thousand_microbatches_are_summed_in_float32(dtype: torch.dtype, seed: int) -> None:
    """Within the bound of float32 of the very gradients; in the params' own dtype, beyond it (BUGS.md, 29)."""
    params, group = many(seed, dtype)
    terms = gradients(params, group)
    assert terms.dtype == dtype

    def summed(accum_dtype: torch.dtype | None) -> list[Tensor]:
        total = tokens(group)
        grads, loss, *_ = ps.accumulate(
            linear_loss,
            params,
            group,
            weight_fn=weights_of,
            total=ps.count(group, weights_of),
            accum_dtype=accum_dtype,
        )
        assert grads["w"].dtype == (accum_dtype or torch.float32)
        assert loss.dtype == torch.float32
        step = ps.make_update_step(
            linear_loss, capture(), weight_fn=weights_of, accum_dtype=accum_dtype
        )
        _, captured, metrics = step(params, capture().init(params), group)
        assert metrics.num_tokens == total
        return [grads["w"], captured["w"]]

    for actual in summed(None):
        assert all(error <= bound for error, bound in errors_and_bounds(actual, terms))
    for actual in summed(dtype):
        assert any(error > bound for error, bound in errors_and_bounds(actual, terms))


def test_a_thousand_times_a_thousandth() -> None:
    """The bug as it happened: it gave 0.5."""
    params = {"w": torch.ones(1, dtype=torch.bfloat16)}
    group = [{"x": torch.ones(1, 1, dtype=torch.bfloat16), "w": torch.ones(1)}] * COUNT
    (thousandth,) = set(gradients(params, group).flatten().tolist())

    def total(accum_dtype: torch.dtype | None) -> float:
        grads, *_ = ps.accumulate(
            linear_loss,
            params,
            group,
            weight_fn=weights_of,
            total=ps.Count(torch.tensor(COUNT), torch.tensor(1)),
            accum_dtype=accum_dtype,
        )
        return float(grads["w"])

    assert total(torch.bfloat16) == 0.5
    error = abs(total(None) - COUNT * thousandth)
    assert error <= gamma(COUNT - 1, torch.float32) * COUNT * thousandth


@pytest.mark.parametrize("bucket_bytes", [4, 1 << 20])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_thousand_microbatches_over_ranks(dtype: torch.dtype, bucket_bytes: int) -> None:
    """Uneven ranks, one without data: however the sum is cut, no more than a thousand additions."""
    params, group = many(0, dtype)
    terms = gradients(params, group)
    shares = [group[:600], [], group[600:610], group[610:]]
    axis = ps.testing.ThreadAxis(4, bucket_bytes=bucket_bytes)

    def program(accum_dtype: torch.dtype | None) -> Callable[[list[Any]], Tensor]:
        step = ps.make_update_step(
            linear_loss, capture(), weight_fn=weights_of, axis=axis, accum_dtype=accum_dtype
        )

        def run(mine: list[Any]) -> Tensor:
            found: Tensor = step(params, capture().init(params), mine)[1]["w"]
            return found

        return run

    for actual in axis.map(program(None))(shares):
        assert all(error <= bound for error, bound in errors_and_bounds(actual, terms))
    for actual in axis.map(program(dtype))(shares):
        assert any(error > bound for error, bound in errors_and_bounds(actual, terms))


@pytest.mark.parametrize("dtype", HALVES)
def test_ranks_are_summed_in_float32(dtype: torch.dtype) -> None:
    """One microbatch for each rank: the sum over ranks is the only sum."""
    size = 8
    params, group = many(1, dtype, size)
    terms = gradients(params, group)
    axis = ps.testing.ThreadAxis(size)

    def program(accum_dtype: torch.dtype | None) -> Callable[[Any], Tensor]:
        step = ps.make_update_step(
            linear_loss, capture(), weight_fn=weights_of, axis=axis, accum_dtype=accum_dtype
        )

        def run(batch: Any) -> Tensor:
            found: Tensor = step(params, capture().init(params), [batch])[1]["w"]
            return found

        return run

    for actual in axis.map(program(None))(group):
        assert all(error <= bound for error, bound in errors_and_bounds(actual, terms))
    for actual in axis.map(program(dtype))(group):
        assert any(error > bound for error, bound in errors_and_bounds(actual, terms))


def test_sums_beyond_the_range_of_float16() -> None:
    """Gradients that are numbers of float16, whose sum is none."""
    params = {"w": torch.ones(1, dtype=torch.float16)}
    rows = torch.full((1, 1), 30000.0, dtype=torch.float16)
    group = [{"x": rows, "w": torch.ones(1)}] * 4

    def summed(accum_dtype: torch.dtype | None) -> Tensor:
        found: Tensor = ps.accumulate(
            linear_loss, params, group, weight_fn=weights_of, accum_dtype=accum_dtype
        )[0]["w"]
        return found

    assert summed(None) == 120000.0
    assert summed(torch.float16).isinf()
    step = ps.make_update_step(
        linear_loss,
        ps.optim.sgd(2.0**-14),
        weight_fn=weights_of,
        normalize="grads",
        on_nonfinite="skip",
    )
    new, _, metrics = step(params, ps.optim.sgd(1.0).init(params), group)
    assert metrics.applied
    assert new["w"].dtype == torch.float16
    assert new["w"] == torch.tensor(1 - 30000.0 * 2.0**-14).to(torch.float16)
