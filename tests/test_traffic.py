"""Tests which collectives a step launches: when, how many, of how many bytes, in which dtype."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.testing import ThreadAxis
from purestep.types import Gather
from support.ranks import Run
from support.strategies import assert_same
from support.torch_private import TorchDispatchMode
from tests.layer_stack import loss_for, make_layers, make_rows, weigh_ones
from tests.uneven_ranks import (
    FAILING_RANK,
    SGD,
    Batch,
    loss_fn,
    make_arguments,
    make_batch,
    make_params,
    run_step,
    weigh_by_one as each_once,
)

pytestmark = pytest.mark.timeout(120)


class Collectives(TorchDispatchMode):
    """Lists the bytes that are handed to each collective, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_distributed = func.namespace in ("c10d", "_c10d_functional")
        if is_distributed and "wait" not in func.__name__:
            assert func.__name__.startswith("allreduce_")
            sizes = [
                leaf.numel() * leaf.element_size()
                for leaf in tree.leaves(args[0])
                if isinstance(leaf, Tensor)
            ]
            self.bytes.append(sum(sizes))
        return func(*args, **(kwargs or {}))


MIXED = {
    "a": torch.ones(30),
    "b": torch.ones(5).double(),
    "c": torch.ones(7, 3),
    "d": torch.ones(()),
}
"""One leaf in float64, three of 52 numbers in float32."""


def bytes_of_a_step(axis: ps.Axis, microbatches: int, aux: bool, normalize: Any) -> Any:
    """Returns the bytes of each collective of a step, sorted, and the new params."""

    def loss_fn(params: Any, microbatch: Tensor) -> ps.LossOutput:
        total = sum(leaf.double().sum() for leaf in params.values())
        losses = microbatch * total
        if not aux:
            return ps.LossOutput(losses)
        numbers = {
            "n": torch.tensor(1),
            "m": torch.tensor(2),
        }
        return ps.LossOutput(losses, aux=numbers)

    optimizer = ps.optim.sgd(0.5)
    update_step = ps.make_update_step(
        loss_fn,
        optimizer,
        weight_fn=torch.ones_like,
        axis=axis,
        normalize=normalize,
    )
    group = [torch.ones(2).double()] * microbatches
    with Collectives() as collectives:
        state = optimizer.init(MIXED)
        new, _, _ = update_step(MIXED, state, group)
    return sorted(collectives.bytes), new


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize(
    ("bucket_bytes", "buckets"),
    [
        (8, [4, 40, 84, 120]),
        (88, [40, 88, 120]),
        (1 << 20, [40, 208]),
    ],
)
def test_traffic_of_a_step(
    processes: Run, bucket_bytes: int, buckets: list[int], normalize: str
) -> None:
    """Sends two short messages and each gradient once, however many microbatches a rank has."""
    message = 13 * 8
    normalizes = [normalize] * 4
    without_aux = [False] * 4
    for counts in ([1] * 4, [16] * 4, [4, 0, 16, 1]):
        results = processes(
            bytes_of_a_step,
            counts,
            without_aux,
            normalizes,
            bucket_bytes=bucket_bytes,
        )
        _, new_of_first = results[0]
        for sizes, new in results:
            assert sizes == sorted([*buckets, message, message])
            assert_same(new, new_of_first)

    with_aux = [True] * 4
    for sizes, _ in processes(bytes_of_a_step, [1, 4, 16, 2], with_aux, normalizes):
        expected = sorted([40, 208, message, message, 2 * 8])
        assert sizes == expected, "aux is one collective more"


WEIGHT = 10**12 + 7


def metrics_of(axis: ps.Axis, rank: int, name: str) -> Any:
    """Takes a step whose losses or weights have other dtypes than the params.

    "one rank": one rank alone has tokens. "two": rank 0 counts a float, the others an integer,
    in losses of different dtypes. "half": the count is beyond the dtype of gradients.
    """

    def loss_in(dtype: torch.dtype) -> Callable[..., Tensor]:
        return lambda p, m: loss_fn(p, m).to(dtype)

    changes: dict[str, Any]
    if name == "one rank":
        changes = {
            "loss_fn": loss_in(torch.float32),
            "weight_fn": lambda m: m["y"].abs() + 0.5,
            "microbatches": [make_batch(3)] if rank == FAILING_RANK else [],
        }
    elif name == "two":
        integer = torch.tensor([2], dtype=torch.int64)
        large_float = torch.tensor([2.0**52]).double()
        changes = {
            "loss_fn": loss_in(torch.float32 if rank else torch.float64),
            "weight_fn": lambda m: integer if rank else large_float,
            "microbatches": [make_batch(1)],
        }
    else:
        changes = {
            "weight_fn": lambda m: each_once(m) * WEIGHT,
            "normalize": "grads",
            "accum_dtype": torch.float16,
        }
    _, _, metrics = run_step(axis, {**make_arguments(rank), **changes})
    return metrics


def test_counts_and_losses_of_other_dtypes_than_gradients(ranks: Run) -> None:
    """Adds in float64 what is too large for its own dtype, floats with integers, and losses."""
    alone = metrics_of(ps.LocalAxis(), FAILING_RANK, "one rank")
    assert alone.loss.dtype == torch.float32
    assert alone.num_tokens.dtype == torch.float64
    for metrics in ranks(metrics_of, range(4), ["one rank"] * 4):
        assert_same(metrics, alone)

    losses = loss_fn(make_params(), make_batch())
    for metrics in ranks(metrics_of, range(4), ["two"] * 4):
        assert_same(metrics.num_tokens, torch.tensor(2**52 + 6).double())
        assert_same(metrics.loss, losses[0])
    for metrics in ranks(metrics_of, range(4), ["half"] * 4):
        assert_same(metrics.num_tokens, torch.tensor(16 * WEIGHT))
        assert_same(metrics.loss, losses.sum() * WEIGHT / (16 * WEIGHT))


FUSED = ps.optim.from_torch(torch.optim.AdamW, lr=0.125, fused=True)


def image_step(axis: ps.Axis, rank: int) -> Any:
    """Takes a step on an image and rows, whose strides differ between ranks."""
    numbers = torch.arange(48.0).remainder(7).view(2, 3, 4, 2)
    expanded_rows = torch.ones(3).expand(4, 3)
    if rank % 2:
        image = numbers.contiguous(memory_format=torch.channels_last)
        theta = {"image": image, "rows": expanded_rows}
    else:
        image = numbers.contiguous()
        theta = {"image": image, "rows": expanded_rows.contiguous()}

    def linear_loss(p: Any, x: Tensor) -> Tensor:
        of_image = (p["image"] * numbers).sum()
        return (of_image + p["rows"].sum()) * x

    update_step = ps.make_update_step(
        linear_loss, FUSED, weight_fn=torch.ones_like, axis=axis
    )
    state = FUSED.init(theta)
    new, new_state, _ = update_step(theta, state, [torch.ones(1)])
    assert new["image"].stride() == image.stride()
    return new, new_state


@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
def test_kernels_read_gradients_in_the_order_of_their_leaves(
    ranks: Run, bucket_bytes: int
) -> None:
    expected = image_step(ps.LocalAxis(), 0)
    for state in ranks(image_step, range(4), bucket_bytes=bucket_bytes):
        assert_same(state, expected)


def step_that_meets(axis: ps.Axis, rank: int, everywhere: bool) -> Any:
    """Takes a step whose loss sums over the axis; some ranks may not use a leaf."""

    def loss(params: Any, microbatch: Batch) -> Tensor:
        local = microbatch["x"] @ params["w"]
        scores = ps.pvary(ps.psum(local, axis), axis)
        if rank == 0 or everywhere:
            scores = scores + params["z"] * (rank == 0)
        return scores.square()

    theta = {
        "w": make_params()["w"],
        "z": torch.tensor([2.0, 1.0, 1.0, 1.0]).double(),
    }
    arguments = {
        **make_arguments(rank),
        "loss_fn": loss,
        "params": theta,
        "opt_state": SGD.init(theta),
        "microbatches": [make_batch(4, rank)],
    }
    return run_step(axis, arguments)


@pytest.mark.parametrize("bucket_bytes", [8, 32, 1 << 20])
def test_a_loss_that_meets_over_the_same_axis(ranks: Run, bucket_bytes: int) -> None:
    """Its collectives are never taken for those of the gradients."""

    def run(everywhere: bool) -> Any:
        flags = [everywhere] * 4
        return ranks(step_that_meets, range(4), flags, bucket_bytes=bucket_bytes)

    expected = run(everywhere=True)[0]
    for result in run(everywhere=False):
        assert_same(result, expected)


class InBackward(torch.autograd.Function):
    """Returns its input, and calls a function in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[], Any]) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.act()
        return grad, None


in_backward: Callable[[Tensor, Callable[[], Any]], Tensor] = InBackward.apply


def step_that_meets_late(axis: ps.Axis, rank: int) -> str:
    """Sums in the backward pass, after a bucket has left on all ranks but the first.

    The first does not use the leaf of that bucket. Returns the text of the error.
    """

    def sum_over_ranks() -> None:
        ps.psum(torch.ones(3).double(), axis)

    def loss(params: Any, microbatch: Batch) -> Tensor:
        scores = microbatch["y"] * in_backward(params["b"], sum_over_ranks)
        if rank == 0:
            return scores
        return scores + microbatch["x"] @ params["w"]

    arguments = {
        **make_arguments(rank),
        "loss_fn": loss,
        "microbatches": [make_batch(4)],
    }
    with pytest.raises(
        ValueError, match="disagree on the buckets that have left"
    ) as info:
        run_step(axis, arguments)
    return str(info.value)


def test_buckets_that_crossed_a_collective_of_the_loss_are_refused(ranks: Run) -> None:
    """Refuses to sum a vector of one rank's loss with a bucket of the others."""
    expected = (
        "loss (add 0 * w.sum() to it): '0' against ranks 1, 2, 3 with the buckets"
    )
    for text in ranks(step_that_meets_late, range(4), bucket_bytes=1):
        assert expected in text


LEAVES = 6


def launched_by_then(axis: Any, meets: bool, gather: str) -> list[int]:
    """Counts, before each leaf's gradient, how many of six buckets have been launched.

    In the last of two microbatches; that of the last leaf comes first. The loss may meet, too.
    """
    theta = {
        f"w{index}": torch.full((4,), index + 1.0).double() for index in range(LEAVES)
    }
    launched: list[int] = []
    before = 0

    def record() -> None:
        launched.append(axis.num_collectives - before)

    def loss(params: Any, microbatch: Batch) -> Tensor:
        nonlocal before
        launched.clear()
        scores = microbatch["y"]
        for leaf in params.values():
            scores = scores * in_backward(leaf, record).sum()
        if meets:
            ps.psum(scores.detach(), axis)
        before = axis.num_collectives
        return scores

    arguments = {
        **make_arguments(0),
        "loss_fn": loss,
        "params": theta,
        "opt_state": SGD.init(theta),
        "microbatches": [make_batch(4)] * 2,
    }
    if gather:
        arguments["gather"] = gather
    # In the first update, ranks meet before each gather.
    run_step(axis, arguments, times=2)
    return launched


@pytest.mark.parametrize("gather", ["", "step", "microbatch"])
@pytest.mark.parametrize("meets", [False, True])
def test_buckets_leave_during_the_backward_pass(
    ranks: Run, meets: bool, gather: str
) -> None:
    """Launches each as soon as it is complete, unless the loss communicates over the same axis."""
    expected = [0] * LEAVES if meets else list(range(LEAVES))
    counts = ranks(
        launched_by_then,
        [meets] * 4,
        [gather] * 4,
        bucket_bytes=32,
    )
    assert counts == [expected] * 4


class LoggingAxis(ThreadAxis):
    """Logs the collectives of more than 1000 elements, on two ranks."""

    def __init__(self, bucket_bytes: int = 1 << 19) -> None:
        super().__init__(2, bucket_bytes=bucket_bytes)
        self.large: list[list[tuple[str, int]]] = [[], []]

    def note(self, op: str, x: Tensor) -> None:
        if x.numel() > 1000:
            self.large[self.rank].append((op, x.numel()))

    def run(self, op: str, x: Tensor) -> Tensor:
        self.note(op, x)
        return super().run(op, x)

    def launch(self, x: Tensor, op: str = "psum") -> Any:
        self.note(op, x)
        return super().launch(x, op)

    def count(self, op: str) -> int:
        """Counts the calls of a collective on this rank."""
        names = [name for name, _ in self.large[self.rank]]
        return names.count(op)


def test_the_first_bucket_is_small_and_the_last_leaf_leaves_first() -> None:
    """Puts a leaf into one bucket, however large."""
    axis = LoggingAxis(bucket_bytes=25 << 20)
    size = 1 << 18
    sizes = (2 * size, size, 2000, size - 2000)
    theta = [torch.zeros(numel) for numel in sizes]
    sgd = ps.optim.sgd(0.1)

    def linear_loss(p: Any, x: Tensor) -> Any:
        return sum(leaf.sum() for leaf in p) * x

    def program(rank: int) -> None:
        update_step = ps.make_update_step(
            linear_loss, sgd, weight_fn=torch.ones_like, axis=axis
        )
        update_step(theta, sgd.init(theta), [torch.ones(1)])

    axis.map(program)(range(2))
    assert axis.large == [[("psum", size), ("psum", 3 * size)]] * 2


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("gather", ["step", "microbatch", "loss"])
def test_sharded_params_are_gathered_and_scattered(
    gather: Gather, microbatches: int
) -> None:
    """Gathers each layer once a step or a microbatch; or in the loss, twice."""
    axis = LoggingAxis()
    sgd = ps.optim.sgd(0.1)
    network_loss = loss_for(gather)

    def loss_of_tiled(p: Any, x: Tensor) -> Tensor:
        return network_loss(p, x.repeat(1, 16))

    def program(rank: int) -> tuple[int, int]:
        params = ps.shard(make_layers(3, 256), axis)
        update_step = ps.make_update_step(
            loss_of_tiled, sgd, weight_fn=weigh_ones, axis=axis, gather=gather
        )
        update_step(params, sgd.init(params), [make_rows(2)] * microbatches)
        return axis.count("all_gather"), axis.count("psum_scatter")

    times = 1 if gather == "step" else microbatches
    gathers = 6 if gather == "loss" else 3
    counts = axis.map(program)(range(2))
    assert counts == [(gathers * times, 3 * times)] * 2
    assert axis.large[0] == axis.large[1]
