"""Ranks that hold different amounts of data take the step of one rank that has it all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.ranks import Run
from proofs.strategies import assert_same
from purestep import tree
from purestep.types import EvalMetrics
from tests.uneven import (
    BAD,
    SGD,
    Batch,
    alone,
    batch,
    cut,
    loss_fn,
    ones,
    params,
    sound,
    step,
)

pytestmark = pytest.mark.timeout(120)


def settings_step(axis: ps.Axis, rank: int, settings: dict[str, Any]) -> Any:
    """The sound step, with these settings."""
    return step(axis, {**sound(rank), **settings})


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("bucket_bytes", [1, 8, 16, 1 << 20])
def test_uneven_ranks_take_the_step_of_one(ranks: Run, bucket_bytes: int, normalize: str) -> None:
    settings = [{"normalize": normalize}] * 4
    for result in ranks(settings_step, range(4), settings, bucket_bytes=bucket_bytes):
        assert_same(result, alone())


def on_few(axis: ps.Axis, rank: int, normalize: Any) -> Any:
    """One rank has data; its loss and weights are of other dtypes than the params."""
    arguments = {
        **sound(rank),
        "loss_fn": lambda params, m: loss_fn(params, m).float(),
        "weight_fn": lambda m: m["y"].abs() + 0.5,
        "normalize": normalize,
        "microbatches": [batch(3)] if rank in (-1, BAD) else [],
    }
    return step(axis, arguments)


@pytest.mark.parametrize("normalize", ["loss", "grads"])
def test_an_empty_rank_reports_what_the_others_do(ranks: Run, normalize: str) -> None:
    expected = on_few(ps.LocalAxis(), -1, normalize)
    assert expected[2].loss.dtype == torch.float32
    assert expected[2].num_tokens.dtype == torch.float64
    for result in ranks(on_few, range(4), [normalize] * 4):
        assert_same(result, expected)


def evaluated(axis: ps.Axis, rank: int) -> EvalMetrics:
    """An evaluation, for which one rank has data."""
    evaluate = ps.make_eval_step(loss_fn, weight_fn=ones, axis=axis)
    return evaluate(params(), [batch(4)] if rank in (-1, BAD) else [])


def test_evaluation_with_empty_ranks(ranks: Run) -> None:
    expected = evaluated(ps.LocalAxis(), -1)
    for result in ranks(evaluated, range(4)):
        assert_same(result, expected)


def test_no_data_anywhere_is_the_identity(ranks: Run) -> None:
    expected = settings_step(ps.LocalAxis(), 0, {"microbatches": []})
    assert_same(expected[:2], (params(), SGD.init(params())))
    assert not expected[2].applied
    for result in ranks(settings_step, range(4), [{"microbatches": []}] * 4):
        assert_same(result, expected)


LIFETIMES = [[2, 1, 1], [1], [1, 1], []]
"""The tokens of each rank's only microbatch in every step, until its data have run out."""


def until_the_end(axis: ps.Axis, groups: Sequence[Sequence[Batch]]) -> list[Any]:
    """States and metrics of all steps up to the first without tokens."""
    arguments, history = sound(0), []
    for number in itertools.count():
        arguments["microbatches"] = [group[number] for group in groups if number < len(group)]
        arguments["params"], arguments["opt_state"], metrics = step(axis, arguments)
        history.append((arguments["params"], arguments["opt_state"], metrics))
        if metrics.num_tokens == 0:
            break
    return history


def test_data_that_runs_out_at_different_steps(ranks: Run) -> None:
    """All ranks stop at the same step, with the states of one rank that has all their data."""
    expected = until_the_end(ps.LocalAxis(), cut(batch(7), LIFETIMES))
    assert [int(metrics.num_tokens) for *_, metrics in expected] == [4, 2, 1, 0]
    assert_same(expected[-1][:2], expected[-2][:2])
    for history in ranks(until_the_end, [[group] for group in cut(batch(7), LIFETIMES)]):
        assert_same(history, expected)


def counted_in(axis: ps.Axis, rank: int, accum_dtype: torch.dtype) -> Any:
    """Counts and losses beyond the dtype in which gradients travel."""
    arguments = {
        **sound(rank),
        "loss_fn": loss_fn,
        "weight_fn": lambda m: ones(m) * (10**12 + 7),
        "normalize": "grads",
        "accum_dtype": accum_dtype,
    }
    return step(axis, arguments)[2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_counts_and_losses_are_exact_in_any_dtype_of_gradients(
    ranks: Run, dtype: torch.dtype
) -> None:
    """Not a bit is lost, nor added."""
    total = 16 * (10**12 + 7)
    loss = loss_fn(params(), batch()).sum() * (10**12 + 7) / total
    for metrics in ranks(counted_in, range(4), [dtype] * 4):
        assert metrics.num_tokens.dtype == torch.int64
        assert metrics.num_tokens == total
        assert metrics.loss == loss


def layouts(leaf: Tensor) -> list[Tensor]:
    """The same values in different orders in memory."""
    room = leaf.new_zeros([2 * size for size in leaf.shape])[
        tuple(slice(1, None, 2) for _ in leaf.shape)
    ]
    back = leaf.permute(*range(leaf.ndim)[::-1]).contiguous().permute(*range(leaf.ndim)[::-1])
    last = leaf.contiguous(memory_format=torch.channels_last) if leaf.ndim == 4 else leaf
    return [leaf, back, room.copy_(leaf), last]


OPTIMIZERS = {
    "sgd": ps.optim.sgd(0.5, momentum=0.5),
    "adamw": ps.optim.adamw(0.125),
    "fused": ps.optim.from_torch(torch.optim.AdamW, lr=0.125, fused=True),
}


def laid_out_params() -> dict[str, Tensor]:
    """Integers in float32, for which kernels are fused; a row that is the same throughout."""
    count = torch.arange(48.0)
    numbers = (count * count * 3 + count) % 7 - 3
    row = torch.tensor([1.0, -2.0, 3.0]).expand(4, 3)
    return {"image": numbers.view(2, 3, 4, 2), "row": row, "w": numbers[:12].view(4, 3)}


def laid_out_step(axis: ps.Axis, rank: int, name: str) -> tuple[Any, list[tuple[int, ...]]]:
    """A step from values in a rank's own order in memory; and the strides of copies of them."""
    optimizer, theta = OPTIMIZERS[name], laid_out_params()
    if rank >= 0:
        theta |= {path: layouts(theta[path])[rank] for path in ("image", "w")}
        theta["row"] = theta["row"] if rank % 2 else theta["row"].contiguous()

    def loss(params: Any, microbatch: Batch) -> Tensor:
        image, w = params["image"], params["w"] * 2 + params["row"]
        scale = image.mul(laid_out_params()["image"]).sum() + (image[0] - image[1]).square().sum()
        return (microbatch["x"].float() @ w.t()).sum(1) * scale

    state = optimizer.init(theta)
    arguments = {**sound(0), "loss_fn": loss, "optimizer": optimizer, "params": theta}
    group = [batch()] if rank < 0 else cut(batch())[rank]
    new = step(axis, {**arguments, "opt_state": state, "microbatches": group})
    return new[:2], [torch.empty_like(leaf).stride() for leaf in tree.leaves_of((theta, state))]


@pytest.mark.parametrize("bucket_bytes", [8, 64, 1 << 20])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_memory_order(ranks: Run, name: str, bucket_bytes: int) -> None:
    """The same values lie otherwise on each rank: transposed, in steps, as images, or expanded.

    All ranks have the state of one, and it lies as copies of it would.
    """
    expected, _ = laid_out_step(ps.LocalAxis(), -1, name)
    results = ranks(laid_out_step, range(4), [name] * 4, bucket_bytes=bucket_bytes)
    for state, strides in results:
        assert_same(state, expected)
        for leaf, before in zip(tree.leaves_of(state), strides, strict=True):
            assert leaf.stride() == before
