"""Tests steps on sharded params that are gathered once, for each microbatch, or in the loss.

T12 compares their numbers. Here stand losses whose ranks gather differently, losses and optimizers
of other people, and how much memory is alive.
"""

import gc
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import purestep as ps
from purestep import tree
from purestep.sync.replicas import MAX_NUMEL
from purestep.testing import ThreadAxis
from purestep.types import Gather
from support.strategies import assert_same
from tests.layer_stack import (
    ADAMW,
    GATHERS,
    loss_of_full,
    loss_of_shards,
    make_layers,
    make_rows,
    weigh_ones,
)
from tests.memory import LiveBytes

pytestmark = pytest.mark.timeout(60)

SGD = ps.optim.sgd(0.5)


def step_on(
    axis: ps.Axis,
    loss_fn: Any,
    params: Any,
    group: Sequence[Any],
    optimizer: Any = SGD,
    **settings: Any,
) -> Any:
    """Takes a step, and returns the full params and the metrics."""
    settings = {"weight_fn": weigh_ones, "axis": axis, **settings}
    step: Any = ps.make_update_step(loss_fn, optimizer, **settings)
    state = optimizer.init(params)
    new, _, metrics = step(params, state, group)
    return ps.unshard(new), metrics


# Ranks that gather differently


def loss_with_weights(params: Any, x: Tensor) -> ps.LossOutput:
    """Returns the weights with the losses."""
    return ps.LossOutput(loss_of_shards(params, x), weights=weigh_ones(x))


UNEQUAL: dict[str, tuple[Any, dict[str, Any], list[int], str]] = {
    "weights of the loss": (
        loss_with_weights,
        {"weight_fn": None, "normalize": "grads"},
        [1, 2],
        "'1' against rank 1 with the number of microbatches: '2'",
    ),
    "none on a rank": (
        loss_of_shards,
        {},
        [0, 2],
        "'0' against rank 1 with the number of microbatches: 'one or more'",
    ),
}


@pytest.mark.parametrize("what", UNEQUAL)
def test_numbers_of_microbatches_that_a_loss_that_gathers_cannot_have(
    what: str,
) -> None:
    """Refuses them on all ranks before any of them gathers."""
    loss_fn, settings, numbers, difference = UNEQUAL[what]
    axis = ThreadAxis(2)
    message = (
        r"disagree on the number of microbatches, each of which gathers params "
        r"\(add some of weight zero\), and nothing was updated: "
        rf"rank 0 with the number of microbatches: {difference}"
    )

    def program(number: int) -> None:
        params = ps.shard(make_layers(2), axis)
        group = [make_rows(2)] * number
        with pytest.raises(ValueError, match=message):
            step_on(axis, loss_fn, params, group, gather="loss", **settings)

    axis.map(program)(numbers)


@pytest.mark.parametrize("normalize", ["loss", "grads"])
def test_a_loss_that_gathers_on_ranks_with_fewer_microbatches(normalize: str) -> None:
    """Takes the step of one rank: the others' last microbatch runs again, and counts once."""
    axis = ThreadAxis(3)
    group = [make_rows(size, seed) for seed, size in enumerate([1, 2, 1, 4])]
    groups = [group[:2], group[2:3], group[3:]]
    one_rank = step_on(ps.LocalAxis(), loss_of_full, make_layers(2), group)

    def program(group: list[Tensor]) -> Any:
        params = ps.shard(make_layers(2), axis)
        settings = {"gather": "loss", "normalize": normalize}
        return step_on(axis, loss_of_shards, params, group, **settings)

    for result in axis.map(program)(groups):
        assert_same(result, one_rank)


DIFFERS = "disagree on what their losses gather"
FAULTS: dict[str, tuple[type[Exception], type[Exception], str]] = {
    "fails": (ArithmeticError, ps.RankError, "rank 1 has returned"),
    "gathers less": (ValueError, ValueError, DIFFERS),
    "does not use it": (ValueError, ValueError, DIFFERS),
}
"""By what rank 1 does: its error, the error of the others, and words of both."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_gathers_less_than_the_others_is_an_error(fault: str) -> None:
    """No rank updates anything: its next collective is not that of the others, or there is none."""
    axis = ThreadAxis(3)
    error_of_rank_1, error_of_others, text = FAULTS[fault]

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        first, second = params
        faulty = axis.rank == 1
        if faulty and fault == "gathers less":
            w = ps.unshard(first)
            return x.sum(-1) * w.sum()
        x = x @ ps.unshard(first)
        w = ps.unshard(second)
        if faulty and fault == "fails":
            raise ArithmeticError("rank 1 has returned")
        if faulty:
            return x.sum(-1) + w.detach().sum()
        return (x @ w).sum(-1)

    def program(rank: int) -> None:
        params = ps.shard(make_layers(2), axis)
        error = error_of_rank_1 if rank == 1 else error_of_others
        with pytest.raises(error, match=text):
            step_on(axis, loss_fn, params, [make_rows(2)], gather="loss")

    axis.map(program)(range(3))


@pytest.mark.parametrize("num_earlier", [0, 1])
def test_a_loss_that_catches_all_errors_does_not_go_on_alone(num_earlier: int) -> None:
    """Raises on all ranks, where one skips its bad data and the others' losses catch what they hear."""
    axis = ThreadAxis(2)
    is_bad = [False, False]

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        first, second = params["layers"]
        try:
            y = x @ ps.unshard(first)
            if is_bad[axis.rank]:
                raise ArithmeticError("bad data")
            return (y @ ps.unshard(second)).sum(-1) + params["bias"]
        except Exception:
            return x.sum(-1) * params["bias"]

    def program(rank: int) -> None:
        layers = ps.shard(make_layers(2), axis)
        params = {"bias": torch.tensor(2.0).double(), "layers": layers}
        state = SGD.init(params)
        step = ps.make_update_step(
            loss_fn, SGD, weight_fn=weigh_ones, axis=axis, gather="loss"
        )
        for _ in range(num_earlier):
            step(params, state, [make_rows(2)])
        is_bad[rank] = rank == 1
        with pytest.raises((ValueError, ps.RankError)) as caught:
            step(params, state, [make_rows(2)])
        assert "cannot meet" not in str(caught.value)
        is_bad[rank] = False
        step(params, state, [make_rows(2)])

    axis.map(program)(range(2))


def test_an_evaluation_leaves_out_a_layer_that_an_earlier_one_had() -> None:
    """On all ranks: the layers that a loss gathers vary between evaluations."""
    axis = ThreadAxis(2)
    layers = make_layers(3)
    depth = [3, 3]

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return loss_of_shards(params[: depth[axis.rank]], x)

    def program(rank: int) -> list[Tensor]:
        params = ps.shard(layers, axis)
        evaluate = ps.make_eval_step(
            loss_fn, weight_fn=weigh_ones, axis=axis, gather="loss"
        )
        losses = []
        for depth[rank] in (3, 2, 3, 1):
            losses.append(evaluate(params, [make_rows(2)]).loss)
        return losses

    x = make_rows(2)
    expected = [loss_of_full(layers[:number], x).mean() for number in (3, 2, 3, 1)]
    assert_same(axis.map(program)(range(2)), [expected] * 2)


def test_pieces_that_fit_on_one_rank_alone() -> None:
    """Refuses shards cut by ``tensor_split`` on ranks 1 to 3, for which rank 0 does not wait."""
    axis = ThreadAxis(4)

    def program(rank: int) -> None:
        parts = torch.tensor_split(torch.arange(9.0), 4)
        local = parts[rank].clone()
        error: type[Exception] = ValueError
        message = "has shape"
        if rank == 0:
            error = ps.RankError
            message = "cannot meet"
        with pytest.raises(error, match=message):
            ps.unshard(ps.Shard(local, axis, (9,)))

    axis.map(program)(range(4))


# Losses of other people


def experts(params: Any, batch: dict[str, Tensor]) -> Tensor:
    """Sends each row to one of three experts, all of which are gathered."""
    matrices = ps.unshard(params)
    numbers = batch["expert"].tolist()
    losses = [
        (x @ matrices[number]).square().sum()
        for x, number in zip(batch["x"], numbers, strict=True)
    ]
    return torch.stack(losses)


@pytest.mark.parametrize("gather", GATHERS)
def test_a_mixture_of_experts(gather: Gather) -> None:
    """Sends each rank's rows to different experts; one rank has weights of zero."""
    axis = ThreadAxis(3)

    def microbatch(rank: int, numbers: list[int]) -> dict[str, Tensor]:
        return {
            "x": make_rows(2, seed=rank),
            "expert": torch.tensor(numbers),
            "w": torch.full((2,), rank > 0),
        }

    microbatches = [
        microbatch(0, [1, 1]),
        microbatch(1, [0, 0]),
        microbatch(2, [2, 1]),
    ]

    def program(axis: ps.Axis, group: Any) -> Any:
        params = ps.shard(make_layers(3), axis)
        new, metrics = step_on(
            axis,
            experts,
            params,
            group,
            weight_fn=lambda m: m["w"],
            gather=gather,
        )
        return new, metrics.loss

    expected = program(ps.LocalAxis(), microbatches)
    groups = [[microbatch] for microbatch in microbatches]
    actual = axis.map(partial(program, axis))(groups)
    assert_same(actual, [expected] * 3)


@pytest.mark.parametrize("gather", GATHERS)
def test_sums_over_ranks_are_not_rounded_to_params(gather: Gather) -> None:
    """257 is none of bfloat16's numbers, nor 2^24 + 1 one of float32's."""
    axis = ThreadAxis(2)

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return ps.unshard(p) * x

    def twice_the_norm(slope: float, dtype: torch.dtype, accum_dtype: Any) -> float:
        params = ps.shard(torch.zeros(1, dtype=dtype), axis)
        _, metrics = step_on(
            axis,
            loss_fn,
            params,
            [torch.tensor([slope])],
            normalize="grads",
            gather=gather,
            accum_dtype=accum_dtype,
        )
        return float(metrics.grad_norm * 2)

    def on_ranks(slopes: list[float], dtype: torch.dtype, accum_dtype: Any) -> Any:
        return axis.map(twice_the_norm)(slopes, [dtype] * 2, [accum_dtype] * 2)

    halves = on_ranks([256.0, 1.0], torch.bfloat16, None)
    assert halves == [257.0] * 2
    singles = on_ranks([2.0**24, 1.0], torch.float32, torch.float64)
    assert singles == [2.0**24 + 1] * 2


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("gather", GATHERS)
def test_sparse_gradients(gather: Gather, sharded: bool) -> None:
    axis = ThreadAxis(2)
    table = torch.arange(12.0).view(6, 2)

    def loss_fn(w: Any, x: Tensor) -> Tensor:
        vectors = functional.embedding(x, ps.unshard(w), sparse=True)
        return vectors.square().sum(-1)

    def program(x: list[int]) -> Any:
        w = ps.shard(table, axis) if sharded else table
        group = [torch.tensor(x)]
        new, _ = step_on(axis, loss_fn, w, group, gather=gather)
        return new

    # Eight tokens in all, of which so many have each row of the table.
    counts = torch.tensor([2, 3, 1, 1, 0, 1.0])[:, None]
    expected = table - 0.5 * 2 * table * counts / 8
    actual = axis.map(program)([[0, 1, 1, 5], [2, 1, 3, 0]])
    assert_same(actual, [expected] * 2)


def test_the_state_of_others_in_pieces_and_whole_again() -> None:
    """Shards the state of ``from_torch``, a node of tensors of the shard's shape and of counts."""
    axis = ThreadAxis(2)
    full = {"w": torch.arange(5.0), "b": torch.tensor(1.0)}
    optimizer = ps.optim.from_torch(torch.optim.RMSprop, lr=0.1)

    def update(params: Any) -> Any:
        grads = tree.map(torch.ones_like, params)
        state = optimizer.init(params)
        return optimizer.update(grads, state, params)

    def program(_: int) -> Any:
        params = ps.shard(full, axis)
        assert params["b"] is not full["b"]  # A donated step would write to it.
        return ps.unshard(update(params))

    actual = axis.map(program)(range(2))
    assert_same(actual, [update(full)] * 2)


# Memory


def test_one_layer_is_whole_at_a_time() -> None:
    """Sixteen layers more hold the sums of their gradients and their inputs, and no full layer.

    Measured on one rank, whose shards are full tensors.
    """
    width = 128
    more = 16
    layer_bytes = 8 * width * width

    def measure_peak(layers: int) -> int:
        axis = ThreadAxis(1)
        x = torch.ones(1, width).double()
        step = ps.make_update_step(
            loss_of_shards,
            SGD,
            weight_fn=weigh_ones,
            axis=axis,
            gather="loss",
            donate=True,
        )

        def program(_: int) -> int:
            params = ps.shard(make_layers(layers, width), axis)
            state = SGD.init(params)
            with LiveBytes() as live:
                step(params, state, [x, x])
            return live.peak

        (peak,) = axis.map(program)(range(1))
        return int(peak)

    difference = measure_peak(4 + more) - measure_peak(4)
    assert more * layer_bytes <= difference < 1.05 * more * layer_bytes


@pytest.mark.parametrize("gather", GATHERS)
def test_nothing_waits_for_the_garbage_collector(gather: Gather) -> None:
    """Frees full tensors and sums by the time the step returns."""
    axis = ThreadAxis(2)
    gathered: list[list[Any]] = [[], []]

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        layers = ps.unshard(params)
        gathered[axis.rank] += [weakref.ref(layer) for layer in layers]
        return loss_of_full(layers, x)

    def count_alive(rank: int) -> int:
        params = ps.shard(make_layers(3), axis)
        step_on(axis, loss_fn, params, [make_rows(2)] * 2, ADAMW, gather=gather)
        return sum(layer() is not None for layer in gathered[rank])

    axis.map(count_alive)(range(2))
    gc.disable()
    try:
        assert axis.map(count_alive)(range(2)) == [0, 0]
    finally:
        gc.enable()


def test_each_row_of_threads_compares_its_ranks() -> None:
    """Finds ranks of the second row that differ, although all threads share what the step has seen."""
    axis = ThreadAxis(4)
    _, columns = axis.split(2, 2)
    row_0_is_done = threading.Event()

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        scale = 1 + (axis.rank == 3)
        losses = x.square().sum(-1) * ps.unshard(params["w"]).sum() * params["b"]
        return losses * scale

    optimizer = ps.optim.sgd(0.5)
    step = ps.make_update_step(
        loss_fn,
        optimizer,
        weight_fn=lambda x: torch.ones(len(x), dtype=torch.int64),
    )

    def program(rank: int) -> None:
        w = ps.shard(torch.ones(2).double(), columns)
        params = {"b": torch.tensor(2.0).double(), "w": w}
        arguments = params, optimizer.init(params), [make_rows(2)]
        if rank < 2:
            step(*arguments)
            row_0_is_done.set()
            return
        row_0_is_done.wait(timeout=30)
        with pytest.raises(ValueError, match="have summed different losses"):
            step(*arguments)

    axis.map(program)(range(4))


def test_gradients_of_rows_that_are_far_apart_are_different() -> None:
    """A large gradient is measured in parts. Of a value in one part or another the norm is equal."""
    axis = ThreadAxis(2)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        scale = ps.unshard(params["w"]).sum() * params["b"][axis.rank * MAX_NUMEL]
        return x.square().sum(-1) * scale

    def program(rank: int) -> None:
        w = ps.shard(torch.ones(2).double(), axis)
        params = {"b": torch.ones(MAX_NUMEL + 1).double(), "w": w}
        step = ps.make_update_step(loss_fn, SGD, weight_fn=weigh_ones)
        with pytest.raises(ValueError, match=r"params\['b'\] is the same on all ranks"):
            step(params, SGD.init(params), [make_rows(2)])

    axis.map(program)(range(2))


def test_ranks_of_two_further_axes_raise_together() -> None:
    """Rank 3 shares no axis with rank 0, whose gradient is another, and waits for no other rank."""
    world = ThreadAxis(4)
    columns, rows = world.split(2, 2)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        scaled = params["b"] * (1 + (world.rank == 0))
        of_shards = ps.unshard(params["w"]).sum() * ps.unshard(params["v"]).sum()
        return x.square().sum(-1) * of_shards + scaled - scaled.detach()

    step = ps.make_update_step(loss_fn, SGD, weight_fn=weigh_ones)

    def program(rank: int) -> str:
        ones = torch.ones(2).double()
        params = {
            "b": torch.tensor(2.0).double(),
            "v": ps.shard(ones, columns),
            "w": ps.shard(ones, rows),
        }
        with pytest.raises(ValueError, match="grad") as info:
            step(params, SGD.init(params), [make_rows(2)])
        return str(info.value)

    *differing, of_rank_3 = world.map(program)(range(4))

    for message in differing:
        assert "params['b'] is the same on all ranks" in message
    assert "have summed different losses or gradients: see their errors" in of_rank_3
