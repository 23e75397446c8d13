"""Steps on params in pieces that gather once, for each microbatch, or in the loss: beside T12.

Losses that gather differently, figures of memory, and what other people's losses and optimizers do.
"""

import gc
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.strategies import assert_same
from purestep import tree
from purestep.testing import ThreadAxis
from purestep.types import Gather
from tests.layers import ADAMW, GATHERS, network, of_pieces, of_whole, ones, rows
from tests.memory import LiveBytes

pytestmark = pytest.mark.timeout(60)

SGD = ps.optim.sgd(0.5)


def step_on(
    axis: ps.Axis,
    loss_fn: Any,
    params: Any,
    group: Sequence[Any],
    optimizer: Any = SGD,
    **how: Any,
) -> Any:
    """The whole params after a step, and its metrics."""
    how = {"weight_fn": ones, "axis": axis, **how}
    step: Any = ps.make_update_step(loss_fn, optimizer, **how)
    new, _, metrics = step(params, optimizer.init(params), group)
    return ps.unshard(new), metrics


# Who gathers what


def test_a_loss_that_gathers_wants_equally_many_microbatches() -> None:
    """Refused on all ranks before any of them gathers."""
    axis = ThreadAxis(2)

    message = r"disagree on the number of microbatches, each of which gathers params \(add some of "
    message += r"weight zero\).*rank 0 with .*'1'.* against rank 1 with .*'2'"

    def program(rank: int) -> None:
        params = ps.shard(network(2), axis)
        with pytest.raises(ValueError, match=message):
            step_on(axis, of_pieces, params, [rows(2)] * (1 + rank), gather="loss")

    axis.map(program)(range(2))


WAYS: dict[str, tuple[type[Exception], str]] = {
    "fails": (ArithmeticError, "rank 1 has returned"),
    "gathers less": (ps.RankError, "these ranks cannot meet"),
    "does not use it": (ps.RankError, "these ranks cannot meet"),
}


@pytest.mark.parametrize("what", WAYS)
def test_a_rank_that_gathers_less_than_the_others_is_an_error(what: str) -> None:
    """No rank updates anything: its next collective is not that of the others, or there is none."""
    axis, (own, text) = ThreadAxis(3), WAYS[what]

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        other, (first, second) = axis.rank == 1, params
        if other and what == "gathers less":
            return x.sum(-1) * ps.unshard(first).sum()
        x, w = x @ ps.unshard(first), ps.unshard(second)
        if other and what == "fails":
            raise ArithmeticError("rank 1 has returned")
        return x.sum(-1) + w.detach().sum() if other else (x @ w).sum(-1)

    def program(rank: int) -> None:
        params = ps.shard(network(2), axis)
        with pytest.raises(own if rank == 1 else ps.RankError, match=text):
            step_on(axis, loss_fn, params, [rows(2)], gather="loss")

    axis.map(program)(range(3))


def test_pieces_that_fit_on_one_rank_alone() -> None:
    """Those of ``tensor_split``: the others refuse theirs, and it does not wait."""
    axis = ThreadAxis(4)

    def unsharded(rank: int) -> None:
        piece = torch.tensor_split(torch.arange(9.0), 4)[rank].clone()
        kind, text = (
            (ValueError, "has shape") if rank else (ps.RankError, "cannot meet")
        )
        with pytest.raises(kind, match=text):
            ps.unshard(ps.Shard(piece, axis, (9,)))

    axis.map(unsharded)(range(4))


# Losses of other people


def experts(params: Any, batch: dict[str, Tensor]) -> Tensor:
    """Each row goes to one of three experts, all of which are gathered."""
    every, pairs = (
        ps.unshard(params),
        zip(batch["x"], batch["expert"].tolist(), strict=True),
    )
    return torch.stack([(x @ every[number]).square().sum() for x, number in pairs])


@pytest.mark.parametrize("gather", GATHERS)
def test_a_mixture_of_experts(gather: Gather) -> None:
    """Each rank's rows go to different experts; one rank has weights of zero."""
    axis, how = ThreadAxis(3), {"weight_fn": lambda m: m["w"], "gather": gather}
    groups = [
        [
            {
                "x": rows(2, seed),
                "expert": torch.tensor(places),
                "w": torch.full((2,), seed > 0),
            }
        ]
        for seed, places in enumerate([[1, 1], [0, 0], [2, 1]])
    ]

    def program(axis: ps.Axis, group: Any) -> Any:
        new, metrics = step_on(axis, experts, ps.shard(network(3), axis), group, **how)
        return new, metrics.loss

    expected = program(ps.LocalAxis(), [x for (x,) in groups])
    assert_same(axis.map(partial(program, axis))(groups), [expected] * 3)


@pytest.mark.parametrize("gather", GATHERS)
def test_sums_over_ranks_are_not_rounded_to_params(gather: Gather) -> None:
    """257 is none of bfloat16's numbers, nor 2^24 + 1 one of float32's."""
    axis = ThreadAxis(2)

    def norm(slope: float, dtype: torch.dtype, accum_dtype: Any) -> float:
        how: Any = {"normalize": "grads", "gather": gather, "accum_dtype": accum_dtype}
        params = ps.shard(torch.zeros(1, dtype=dtype), axis)
        group = [torch.tensor([slope])]
        metrics = step_on(axis, lambda p, x: ps.unshard(p) * x, params, group, **how)[1]
        return float(metrics.grad_norm * 2)

    assert axis.map(norm)([256.0, 1.0], [torch.bfloat16] * 2, [None] * 2) == [257.0] * 2
    args = [2.0**24, 1.0], [torch.float32] * 2, [torch.float64] * 2
    assert axis.map(norm)(*args) == [2.0**24 + 1] * 2


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("gather", GATHERS)
def test_sparse_gradients(gather: Gather, sharded: bool) -> None:
    axis, whole = ThreadAxis(2), torch.arange(12.0).view(6, 2)

    def loss_fn(w: Any, x: Tensor) -> Tensor:
        found = torch.nn.functional.embedding(x, ps.unshard(w), sparse=True)
        return found.square().sum(-1)

    def program(x: list[int]) -> Any:
        w = ps.shard(whole, axis) if sharded else whole
        return step_on(axis, loss_fn, w, [torch.tensor(x)], gather=gather)[0]

    expected = whole - 0.5 * 2 * whole * torch.tensor([2, 3, 1, 1, 0, 1.0])[:, None] / 8
    assert_same(axis.map(program)([[0, 1, 1, 5], [2, 1, 3, 0]]), [expected] * 2)


def test_the_state_of_others_in_pieces_and_whole_again() -> None:
    """What ``from_torch`` keeps for a param is a node with tensors of the piece's shape, and counts."""
    axis, whole = ThreadAxis(2), {"w": torch.arange(5.0), "b": torch.tensor(1.0)}
    optimizer = ps.optim.from_torch(torch.optim.RMSprop, lr=0.1)

    def update(params: Any) -> Any:
        return optimizer.update(
            tree.map(torch.ones_like, params), optimizer.init(params), params
        )

    def program(_: int) -> Any:
        params = ps.shard(whole, axis)
        assert params["b"] is not whole["b"]  # A donated step would write to it.
        return ps.unshard(update(params))

    assert_same(axis.map(program)(range(2)), [update(whole)] * 2)


# Memory


def test_one_layer_is_whole_at_a_time() -> None:
    """Sixteen layers more take the sums of their gradients and their inputs, and no whole layer.

    Measured on one rank, whose pieces are whole.
    """
    width, more = 128, 16
    of_layer = 8 * width * width

    def peak(layers: int) -> int:
        axis, x = ThreadAxis(1), torch.ones(1, width).double()
        how: Any = {"weight_fn": ones, "axis": axis, "gather": "loss", "donate": True}
        step = ps.make_update_step(of_pieces, SGD, **how)

        def program(_: int) -> int:
            params = ps.shard(network(layers, width), axis)
            state = SGD.init(params)
            with LiveBytes() as live:
                step(params, state, [x, x])
            return live.peak

        return int(axis.map(program)(range(1))[0])

    assert more * of_layer <= peak(4 + more) - peak(4) < 1.05 * more * of_layer


@pytest.mark.parametrize("gather", GATHERS)
def test_nothing_waits_for_the_garbage_collector(gather: Gather) -> None:
    """Whole tensors and sums are gone when the step has returned."""
    axis = ThreadAxis(2)
    wholes: list[list[Any]] = [[], []]

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        layers = ps.unshard(params)
        wholes[axis.rank] += map(weakref.ref, layers)
        return of_whole(layers, x)

    def program(rank: int) -> int:
        params = ps.shard(network(3), axis)
        step_on(axis, loss_fn, params, [rows(2)] * 2, ADAMW, gather=gather)
        return sum(each() is not None for each in wholes[rank])

    axis.map(program)(range(2))
    gc.disable()
    try:
        assert axis.map(program)(range(2)) == [0, 0]
    finally:
        gc.enable()
