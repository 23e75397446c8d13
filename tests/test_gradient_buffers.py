"""Whose memory gradients are in: every sum has its own, or lies where ``ready`` has taken it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.tree import accumulation_dtype
from tests.squares import WAYS, squares, x_ones


class Taken:
    """Takes each sum to a place of its own, once."""

    def __init__(self, leaves: list[Tensor]) -> None:
        self.places = [torch.zeros(x.shape, dtype=accumulation_dtype(x.dtype)) for x in leaves]
        self.seen: dict[int, list[float]] = {}

    def ready(self, index: int, total: Tensor) -> Tensor:
        assert index not in self.seen
        self.seen[index] = total.tolist()
        assert total.dtype == self.places[index].dtype
        return self.places[index].copy_(total)


def test_a_gradient_shared_by_two_leaves_is_two_sums() -> None:
    """Autograd hands the same tensor to both; nobody adds to it in place."""
    params = [torch.zeros(2), torch.zeros(2)]
    group = [{"x": torch.ones(2)}] * 3
    grads, *_ = ps.accumulate(
        lambda p, m: p[0] + p[1] * 1 + 0 * m["x"], params, group, weight_fn=x_ones
    )
    assert torch.equal(torch.stack(grads), torch.full((2, 2), 3.0))
    assert grads[0].data_ptr() != grads[1].data_ptr()


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_gradient_whose_memory_two_leaves_share_is_two_sums(number: int, taken: bool) -> None:
    """Autograd hands views of one tensor to all that are stacked, and adds to them twice."""
    params = [torch.ones(1) for _ in range(3)]
    group = [{"x": torch.tensor([2.0**m]), "first": m > 0} for m in range(number)]
    ready = Taken(params).ready if taken else None

    def loss_fn(p: list[Tensor], m: Any) -> Tensor:
        return torch.stack(p[m["first"] :]).sum(0) * m["x"]

    grads, *_ = ps.accumulate(loss_fn, params, group, weight_fn=x_ones, ready=ready)
    assert [grad.item() for grad in grads] == [1, 2**number - 1, 2**number - 1]
    assert len({grad.data_ptr() for grad in grads}) == 3


def test_a_sum_that_is_not_taken_has_memory_of_its_own() -> None:
    """As that of a piece, which is in no bucket."""
    group = [{"x": torch.ones(1)}]
    grads, *_ = ps.accumulate(
        lambda p, m: torch.stack(p).sum(0) * m["x"],
        [torch.ones(1) for _ in range(3)],
        group,
        weight_fn=x_ones,
        ready=lambda index, total: total,
    )
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 3


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("normalize", ["loss", "grads"])
def test_a_shared_gradient_in_a_step(normalize: Any, donate: bool, recorded: bool) -> None:
    """Recorded by what its gradients do not depend on, a step works on them in place."""
    optimizer = ps.optim.sgd(1.0, 0.5)
    step = ps.make_update_step(
        lambda p, m: torch.stack([p["a"], p["b"]]).sum(0) * m["x"] + m["z"],
        optimizer,
        weight_fn=x_ones,
        normalize=normalize,
        donate=donate,
    )
    params = {"a": torch.zeros(1), "b": torch.zeros(1)}
    state, z = optimizer.init(params), torch.zeros(1, requires_grad=recorded)
    group = [{"x": torch.tensor([2.0**m]), "z": z} for m in range(4)]
    for expected in (-15 / 4, -15 / 4 * 2.5):
        params, state, _ = step(params, state, group)
        assert [leaf.item() for leaf in params.values()] == [expected] * 2


@pytest.mark.parametrize("how", WAYS, ids=["own", "torch.func"])
def test_sparse_gradients_arrive_dense(how: dict[str, Any]) -> None:
    table = torch.zeros(4, 2)
    group = [{"x": torch.tensor(rows)} for rows in ([1, 1], [3, 0], [1, 3])]

    def loss_fn(table: Tensor, m: dict[str, Tensor]) -> Tensor:
        return torch.nn.functional.embedding(m["x"], table, sparse=True).sum(-1)

    grads, *_ = ps.accumulate(loss_fn, table, group, weight_fn=x_ones, **how)
    assert grads.layout == torch.strided
    assert grads.sum(1).tolist() == [2, 6, 0, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_that_is_ready_is_taken(dtype: torch.dtype) -> None:
    """Once, when it is final; it lies where it was taken to."""
    params = {
        "a": torch.ones(2, dtype=dtype),
        "b": torch.ones(2, dtype=dtype),
        "unused": torch.ones(1),
    }
    taken = Taken(tree.leaves_of(params))

    def loss_fn(p: Any, m: dict[str, Tensor]) -> Tensor:
        return (p["a"] * m["x"] + (p["b"] if len(m) > 1 else 0)).float()

    group = [{"x": torch.ones(2), "y": torch.ones(2)}, {"x": 2 * torch.ones(2)}]
    grads, *_ = ps.accumulate(loss_fn, params, group, weight_fn=x_ones, ready=taken.ready)
    assert [leaf.tolist() for leaf in grads.values()] == [[3, 3], [1, 1], [0]]
    assert {leaf.dtype for leaf in grads.values()} == {torch.float32}
    assert grads["a"] is taken.places[0]
    assert taken.seen == {0: [3, 3]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leaves_that_some_microbatches_leave_out(dtype: torch.dtype) -> None:
    """Experts, say: where bit m of i is set, leaf i has a gradient of 2 ** m in microbatch m."""
    params = [torch.ones(1, dtype=dtype) for _ in range(8)]
    group = [{"x": torch.tensor([2.0**m]), "bit": m} for m in range(3)]
    taken = Taken(params)

    def loss_fn(p: list[Tensor], m: Any) -> Tensor:
        parts = [leaf for i, leaf in enumerate(p) if i >> m["bit"] & 1]
        return torch.stack(parts).sum(0).float() * m["x"]

    grads, *_ = ps.accumulate(loss_fn, params, group, weight_fn=x_ones, ready=taken.ready)
    assert torch.cat(grads).tolist() == list(range(8))
    assert taken.seen == {index: [index] for index in (4, 5, 6, 7)}


class First(torch.autograd.Function):
    """The first of two, and no gradient for the second."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("taken", [True, False])
def test_a_gradient_that_is_none_is_zero(dtype: torch.dtype, taken: bool) -> None:
    params = [torch.ones(1, dtype=dtype) for _ in range(2)]
    grads, *_ = ps.accumulate(
        lambda p, m: First.apply(*p).float() * m["x"],
        params,
        [{"x": torch.ones(1)}] * 2,
        weight_fn=x_ones,
        ready=Taken(params).ready if taken else None,
    )
    assert [grad.item() for grad in grads] == [2, 0]


def test_sums_in_another_dtype_are_taken() -> None:
    taken, dtype = Taken([torch.zeros(1).double()]), torch.float64
    group = [{"x": torch.ones(1)}] * 3
    grads, *_ = ps.accumulate(
        squares, torch.ones(1), group, weight_fn=x_ones, ready=taken.ready, accum_dtype=dtype
    )
    assert grads is taken.places[0]
    assert grads == 6


def test_a_hook_after_accumulation_sees_the_sum() -> None:
    seen: list[float] = []

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        w.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.item()))
        return w * m["x"]

    group = [{"x": torch.tensor([2.0**m])} for m in range(3)]
    grads, *_ = ps.accumulate(loss_fn, torch.ones(1), group, weight_fn=x_ones)
    assert grads == 7
    assert seen == [1, 3, 7]
