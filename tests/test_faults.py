"""Ranks that go wrong, on threads and in processes alike: every rank hears what happened, and the next step is sound."""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.ranks import Run
from proofs.strategies import assert_same
from proofs.worlds import Ranks, on_threads
from purestep import tree
from tests.faults import COMPUTED, FAULTS, check_fault, faulty_step
from tests.uneven import (
    BAD,
    SGD,
    Batch,
    alone,
    batch,
    cut,
    loss_fn,
    loss_with_aux,
    ones,
    params,
    sound,
    step,
)

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_on_every_rank(ranks: Run, name: str, bucket_bytes: int) -> None:
    """And the same ranks go on. Nothing waits for a timeout, which is longer in a process group than in its world."""
    for donate in (False, True):
        how = {"donate": donate}
        check_fault(
            name, ranks(faulty_step, range(4), [name] * 4, [how] * 4, bucket_bytes=bucket_bytes)
        )


@pytest.mark.parametrize("gather", ["step", "microbatch"])
@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
@pytest.mark.parametrize("name", COMPUTED)
def test_a_fault_is_told_where_params_are_in_pieces(
    ranks: Run, name: str, bucket_bytes: int, gather: str
) -> None:
    """The others go on with their gathers, and the rank that failed joins them."""
    how = {"gather": gather, "donate": True}
    check_fault(
        name, ranks(faulty_step, range(4), [name] * 4, [how] * 4, bucket_bytes=bucket_bytes)
    )


def test_a_fault_is_told_in_any_default_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        results = on_threads(Ranks(4), faulty_step, range(4), ["first loss"] * 4, [{}] * 4)
    finally:
        torch.set_default_dtype(before)
    check_fault("first loss", results)


def faulty_derivative(axis: ps.Axis, rank: int, name: str) -> tuple[BaseException | None, Any]:
    """A step in which somebody differentiates and rank 2 goes wrong, and then a sound one."""
    groups = [list(group) for group in cut(batch(8), [[2, 1], [1], [2], [1, 1]])]
    theta = tree.map(lambda leaf: leaf.requires_grad_(), params())
    arguments = {**sound(rank), "params": theta, "microbatches": groups[rank]}
    error = None
    try:
        step(axis, arguments | (FAULTS[name].change(arguments) if rank == BAD else {}))
    except BaseException as caught:
        error = caught
    return error, tree.map(Tensor.detach, step(axis, arguments)[0])


@pytest.mark.parametrize("name", COMPUTED)
def test_a_fault_is_told_where_somebody_differentiates(ranks: Run, name: str) -> None:
    whole = {**sound(0), "microbatches": [batch(8)]}
    fault = FAULTS[name]
    for rank, (error, new_params) in enumerate(ranks(faulty_derivative, range(4), [name] * 4)):
        assert_same(new_params, step(ps.LocalAxis(), whole)[0])
        if fault.own[0] is ValueError:
            assert type(error) is ValueError
            assert "disagree on " in str(error)
            assert "ranks 0, 1, 3 with " in str(error)
            assert " against rank 2 with " in str(error)
        else:
            assert type(error) is (fault.own[0] if rank == BAD else ps.RankError)
            assert (fault.own if rank == BAD else fault.others)[1] in str(error)


def with_aux_of_its_own(axis: ps.Axis, group: list[Batch]) -> str:
    """A class that only this function knows cannot be told to a rank without microbatches."""

    class Local(NamedTuple):
        total: Tensor

    def loss(params: Any, microbatch: Batch) -> ps.LossTerms:
        losses = loss_fn(params, microbatch)
        return ps.LossTerms(losses, aux=Local(losses.sum()))

    with pytest.raises(ValueError, match="holds no microbatch") as info:
        step(axis, {**sound(0), "loss_fn": loss, "microbatches": group})
    return str(info.value)


def test_aux_that_an_empty_rank_cannot_be_told(ranks: Run) -> None:
    for text in ranks(with_aux_of_its_own, cut(batch())):
        assert "make it of containers that can be pickled" in text


register: Any = optree.dataclasses.dataclass


@register(namespace=tree.NAMESPACE)
class Positive:
    """A container that refuses zeros."""

    total: Any

    def __post_init__(self) -> None:
        if isinstance(self.total, Tensor) and not self.total.any():
            raise ArithmeticError("no zeros")


positive: Any = Positive


def aux_without_zeros(axis: ps.Axis, rank: int) -> tuple[str, Any]:
    """The rank without microbatches cannot make aux; what each hears, and a sound step."""

    def loss(params: Any, microbatch: Batch) -> ps.LossTerms:
        losses = loss_fn(params, microbatch)
        return ps.LossTerms(losses, aux=positive(losses.sum()))

    with pytest.raises((ArithmeticError, ps.RankError)) as info:
        step(axis, {**sound(rank), "loss_fn": loss})
    return f"{type(info.value).__name__}: {info.value}", step(axis, sound(rank))


def test_aux_that_an_empty_rank_cannot_make(ranks: Run) -> None:
    """Every rank hears of it, and the next step is sound."""
    for rank, (text, next_step) in enumerate(ranks(aux_without_zeros, range(4))):
        assert text.startswith("RankError: rank 1 of " if rank != 1 else "ArithmeticError: ")
        assert text.endswith("ArithmeticError: no zeros")
        assert_same(next_step, alone())


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
    """No rank's count is too large, and their sum is: an error on every rank, before anything is updated."""
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
    evaluate = ps.make_eval_step(loss_with_aux, weight_fn=ones, axis=axis)
    with pytest.raises(ValueError, match="disagree") as info:
        _ = evaluate(params(), []) if rank == 1 else step(axis, sound(rank))
    return str(info.value), step(axis, sound(rank))


def test_a_rank_that_evaluates_while_others_train(ranks: Run) -> None:
    for text, next_step in ranks(evaluates_while_others_train, range(4)):
        assert "ranks 0, 2, 3 with " in text
        assert "against rank 1 with " in text
        assert_same(next_step, alone())


def differs(axis: Any, rank: int, differing: str) -> None:
    """Rank 1 alone has small buckets, or is being differentiated."""
    w, optimizer = torch.tensor(1.0), ps.optim.sgd(0.5)
    if rank == 1 and differing == "bucket_bytes":
        axis = copy(axis)
        axis.bucket_bytes = 8
    elif rank == 1:
        w.requires_grad_()
    step_ = ps.make_update_step(lambda w, x: w * x, optimizer, weight_fn=torch.ones_like, axis=axis)
    with pytest.raises(ValueError, match="disagree on settings"):
        step_(w, optimizer.init(w), [torch.ones(3)])


@pytest.mark.parametrize("differing", ["bucket_bytes", "requires_grad"])
def test_what_decides_the_path_is_agreed_on(ranks: Run, differing: str) -> None:
    """It would take other collectives."""
    ranks(differs, range(4), [differing] * 4)
