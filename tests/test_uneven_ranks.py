"""Ranks that hold different amounts of data, in different dtypes: figures beside those of T2."""

from typing import Any

import pytest
import torch

import purestep as ps
from proofs.ranks import Run
from proofs.strategies import assert_same
from purestep import tree
from tests.uneven import BAD, batch, loss_fn, ones, params, sound, step

pytestmark = pytest.mark.timeout(120)


def step_of_other_dtypes(axis: ps.Axis, rank: int, normalize: Any) -> Any:
    """One rank has data; its loss and weights are of other dtypes than the params."""
    arguments = {
        **sound(rank),
        "loss_fn": lambda params, m: loss_fn(params, m).float(),
        "weight_fn": lambda m: m["y"].abs() + 0.5,
        "microbatches": [batch(3)] if rank in (-1, BAD) else [],
    }
    return step(axis, {**arguments, "normalize": normalize})


@pytest.mark.parametrize("normalize", ["loss", "grads"])
def test_an_empty_rank_reports_what_the_others_do(ranks: Run, normalize: str) -> None:
    expected = step_of_other_dtypes(ps.LocalAxis(), -1, normalize)
    assert expected[2].loss.dtype == torch.float32
    assert expected[2].num_tokens.dtype == torch.float64
    for result in ranks(step_of_other_dtypes, range(4), [normalize] * 4):
        assert_same(result, expected)


def metrics_of_two_dtypes(axis: ps.Axis, rank: int) -> Any:
    """Weights are integers or floats, too large to be added as integers; losses are of two dtypes."""
    weight, dtype = (2**52, torch.float64) if rank == 0 else (2, torch.float32)
    weights = torch.tensor([weight], dtype=torch.int64 if rank else torch.float64)
    how = {"loss_fn": lambda p, m: loss_fn(p, m).to(dtype), "weight_fn": lambda _: weights}
    return step(axis, {**sound(rank), **how, "microbatches": [batch(1)]})[2]


def test_counts_and_losses_of_two_dtypes(ranks: Run) -> None:
    """Floats and integers are added in float64, and so are losses."""
    for metrics in ranks(metrics_of_two_dtypes, range(4)):
        assert_same(metrics.num_tokens, torch.tensor(2**52 + 6).double())
        assert_same(metrics.loss, loss_fn(params(), batch(1))[0])


def metrics_in(axis: ps.Axis, rank: int, accum_dtype: torch.dtype) -> Any:
    """Counts and losses beyond the dtype in which gradients travel."""
    weight = {"weight_fn": lambda m: ones(m) * (10**12 + 7)}
    return step(axis, {**sound(rank), **weight, "normalize": "grads", "accum_dtype": accum_dtype})[
        2
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_counts_and_losses_are_exact_in_any_dtype_of_gradients(
    ranks: Run, dtype: torch.dtype
) -> None:
    total = 16 * (10**12 + 7)
    loss = loss_fn(params(), batch()).sum() * (10**12 + 7) / total
    for metrics in ranks(metrics_in, range(4), [dtype] * 4):
        assert_same(metrics.num_tokens, torch.tensor(total))
        assert metrics.loss == loss


def image_step(axis: ps.Axis, rank: int, name: str) -> tuple[Any, Any]:
    """Images lie with their channels last on some ranks, equal rows in one; and how copies of the state lie."""
    optimizer = {
        "sgd": ps.optim.sgd(0.5, momentum=0.5),
        "fused": ps.optim.from_torch(torch.optim.AdamW, lr=0.125, fused=True),
    }[name]
    order = torch.channels_last if rank % 2 else torch.contiguous_format
    numbers = torch.arange(48.0).remainder(7).view(2, 3, 4, 2)
    rows = torch.tensor([1.0, -2.0, 3.0]).expand(4, 3)
    rows = rows if rank % 2 else rows.contiguous()
    theta = {"image": numbers.contiguous(memory_format=order), "rows": rows}
    state = optimizer.init(theta)
    update_step = ps.make_update_step(
        lambda p, x: ((p["image"] * numbers).sum() + p["rows"].sum()) * x, optimizer,
        weight_fn=torch.ones_like, axis=axis,
    )  # fmt: skip
    new = update_step(theta, state, [torch.ones(1)])[:2]
    return new, [torch.empty_like(leaf).stride() for leaf in tree.leaves_of((theta, state))]


@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
@pytest.mark.parametrize("name", ["sgd", "fused"])
def test_leaves_keep_their_memory_order(ranks: Run, name: str, bucket_bytes: int) -> None:
    expected, _ = image_step(ps.LocalAxis(), 0, name)
    for state, strides in ranks(image_step, range(4), [name] * 4, bucket_bytes=bucket_bytes):
        assert_same(state, expected)
        assert [leaf.stride() for leaf in tree.leaves_of(state)] == strides
