"""Ranks that go wrong, on threads and in processes: all hear of it, and the next step is sound."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.ranks import Run
from proofs.strategies import assert_same
from proofs.worlds import Ranks, on_threads
from tests.faults import COMPUTED, FAULTS, check_fault, faulty_step
from tests.uneven import SGD, alone, batch, loss_fn, ones, params, sound, step

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_on_every_rank(ranks: Run, name: str, bucket_bytes: int) -> None:
    """And the same ranks go on. Nothing waits for a timeout."""
    for donate in (False, True):
        how = {"donate": donate}
        check_fault(
            name, ranks(faulty_step, range(4), [name] * 4, [how] * 4, bucket_bytes=bucket_bytes)
        )


@pytest.mark.parametrize("name", COMPUTED)
def test_a_fault_is_told_where_params_are_in_pieces(ranks: Run, name: str) -> None:
    """The rank that failed joins the others' scatter."""
    how = {"gather": "step", "donate": True}
    check_fault(name, ranks(faulty_step, range(4), [name] * 4, [how] * 4, bucket_bytes=8))


def test_a_fault_is_told_in_any_default_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        results = on_threads(Ranks(4), faulty_step, range(4), ["first loss"] * 4, [{}] * 4)
    finally:
        torch.set_default_dtype(before)
    check_fault("first loss", results)


OVERFLOWS = {
    "integers to a negative number": [(2**53, 512), (2**53, 512), (0, 1), (0, 1)],
    "integers to zero": [(2**53, 512)] * 4,
    "integers to a positive number": [(2**53, 512), (2**53, 512), (2**53, 512), (2**53, 768)],
    "floats to infinity": [(1e308, 1)] * 4,
}
"""The weight of each microbatch's only token, and how many there are, on each rank."""


def weights_of(weight: float) -> Tensor:
    """The weight of one token, in the widest dtype of its kind."""
    return torch.tensor([weight], dtype=torch.float64 if isinstance(weight, float) else torch.int64)


def overflowing(axis: ps.Axis, held: tuple[float, int], normalize: Any) -> Any:
    """A step and an evaluation on ranks whose counts overflow together, and then a sound step."""
    weight, number = held
    weights = weights_of(weight)
    group = [batch(1)] * number
    state = params(), SGD.init(params())
    arguments = {**sound(0), "params": state[0], "opt_state": state[1], "microbatches": group}
    how = {"weight_fn": lambda _: weights, "normalize": normalize, "donate": True}
    with pytest.raises(ValueError, match="num_tokens, the sum of all weights, overflows"):
        step(axis, {**arguments, **how})
    evaluate = ps.make_eval_step(loss_fn, weight_fn=lambda _: weights, axis=axis)
    with pytest.raises(ValueError, match="overflows"):
        evaluate(params(), group)
    assert_same(state, (params(), SGD.init(params())))
    return step(axis, {**sound(0), "microbatches": group[:1]})[2].num_tokens


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("held", OVERFLOWS.values(), ids=list(OVERFLOWS))
def test_counts_that_overflow_together(
    ranks: Run, held: list[tuple[float, int]], normalize: str
) -> None:
    """No rank's count is too large, and their sum is: an error on every rank."""
    for count in ranks(overflowing, held, [normalize] * 4):
        assert count == 4


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("held", [(2**53, 1024), (1e308, 2)])
def test_a_count_that_overflows_on_one_rank(held: tuple[float, int], normalize: Any) -> None:
    weight, number = held
    step_ = ps.make_update_step(
        loss_fn, SGD, weight_fn=lambda _: weights_of(weight), normalize=normalize
    )
    with pytest.raises(ValueError, match="overflows"):
        step_(params(), SGD.init(params()), [batch(1)] * number)


def evaluates_while_others_train(axis: ps.Axis, rank: int) -> tuple[str, Any]:
    """Another function altogether on rank 1, with the same params."""
    evaluate = ps.make_eval_step(loss_fn, weight_fn=ones, axis=axis)
    with pytest.raises(ValueError, match="disagree") as info:
        _ = evaluate(params(), []) if rank == 1 else step(axis, sound(rank))
    return str(info.value), step(axis, sound(rank))


def test_a_rank_that_evaluates_while_others_train(ranks: Run) -> None:
    for text, next_step in ranks(evaluates_while_others_train, range(4)):
        assert "ranks 0, 2, 3 with " in text
        assert "against rank 1 with " in text
        assert_same(next_step, alone())


def differs(axis: Any, rank: int) -> None:
    """Rank 1 alone has small buckets."""
    if rank == 1:
        axis = copy(axis)
        axis.bucket_bytes = 8
    with pytest.raises(ValueError, match="disagree on settings"):
        step(axis, sound(rank))


def test_the_size_of_buckets_is_agreed_on(ranks: Run) -> None:
    """Other buckets are other collectives."""
    ranks(differs, range(4))
