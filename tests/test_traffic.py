"""What travels between ranks: when it leaves, how many collectives and bytes it is, and in which dtype."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.ranks import Run
from proofs.strategies import assert_same
from purestep import tree
from purestep.testing import ThreadAxis
from purestep.types import Gather
from tests.layers import loss_of, network, ones, rows
from tests.torch_private import TorchDispatchMode
from tests.uneven import (
    BAD,
    SGD,
    Batch,
    batch,
    loss_fn,
    ones as each_once,
    params,
    sound,
    step,
)

pytestmark = pytest.mark.timeout(120)


class Collectives(TorchDispatchMode):
    """The bytes that are handed to each collective, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (
            func.namespace in ("c10d", "_c10d_functional")
            and "wait" not in func.__name__
        ):
            assert func.__name__.startswith("allreduce_")
            tensors = [
                leaf for leaf in tree.leaves(args[0]) if isinstance(leaf, Tensor)
            ]
            self.bytes.append(
                sum(leaf.numel() * leaf.element_size() for leaf in tensors)
            )
        return func(*args, **(kwargs or {}))


MIXED = {
    "a": torch.ones(30), "b": torch.ones(5).double(), "c": torch.ones(7, 3), "d": torch.ones(()),
}  # fmt: skip
"""One leaf in float64, three of 52 numbers in float32."""


def bytes_of_a_step(axis: ps.Axis, microbatches: int, aux: bool, normalize: Any) -> Any:
    """The bytes of each collective of a step, and the new params."""

    def loss(params: Any, microbatch: Tensor) -> ps.LossOutput:
        total = sum(leaf.double().sum() for leaf in params.values())
        numbers = {"n": torch.tensor(1), "m": torch.tensor(2)} if aux else ()
        return ps.LossOutput(microbatch * total, aux=numbers)

    how: Any = {"weight_fn": torch.ones_like, "axis": axis, "normalize": normalize}
    optimizer = ps.optim.sgd(0.5)
    with Collectives() as sent:
        new, _, _ = ps.make_update_step(loss, optimizer, **how)(
            MIXED, optimizer.init(MIXED), [torch.ones(2).double()] * microbatches
        )
    return sorted(sent.bytes), new


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize(
    ("bucket_bytes", "buckets"),
    [(8, [4, 40, 84, 120]), (88, [40, 88, 120]), (1 << 20, [40, 208])],
)
def test_traffic_of_a_step(
    processes: Run, bucket_bytes: int, buckets: list[int], normalize: str
) -> None:
    """Two short messages and each gradient once, however many microbatches a rank has."""
    message, how = 10 * 8, [normalize] * 4
    for numbers in ([1] * 4, [16] * 4, [4, 0, 16, 1]):
        results = processes(
            bytes_of_a_step, numbers, [False] * 4, how, bucket_bytes=bucket_bytes
        )
        for sent, new in results:
            assert sent == sorted([*buckets, message, message])
            assert_same(new, results[0][1])
    for sent, _ in processes(bytes_of_a_step, [1, 4, 16, 2], [True] * 4, how):
        assert sent == sorted([40, 208, message, message, 2 * 8]), (
            "aux is one collective more"
        )


EACH = 10**12 + 7


def metrics_of(axis: ps.Axis, rank: int, name: str) -> Any:
    """Losses and weights of other dtypes than the params, on one rank alone or of two; or beyond that of gradients."""
    dtype = torch.float32 if rank or name == "one rank" else torch.float64
    weights = (
        torch.tensor([2], dtype=torch.int64)
        if rank
        else torch.tensor([2.0**52]).double()
    )
    how: dict[str, dict[str, Any]] = {
        "one rank": {
            "weight_fn": lambda m: m["y"].abs() + 0.5,
            "microbatches": [batch(3)] * (rank == BAD),
        },
        "two": {"weight_fn": lambda m: weights, "microbatches": [batch(1)]},
        "half": {
            "weight_fn": lambda m: each_once(m) * EACH,
            "normalize": "grads",
            "accum_dtype": torch.float16,
        },
    }
    loss = {} if name == "half" else {"loss_fn": lambda p, m: loss_fn(p, m).to(dtype)}
    return step(axis, {**sound(rank), **loss, **how[name]})[2]


def test_counts_and_losses_of_other_dtypes_than_gradients(ranks: Run) -> None:
    """Floats and integers, too large to be added as such, are added in float64, and so are losses; an empty rank agrees."""
    alone = metrics_of(ps.LocalAxis(), BAD, "one rank")
    assert (alone.loss.dtype, alone.num_tokens.dtype) == (torch.float32, torch.float64)
    losses = loss_fn(params(), batch())
    for metrics in ranks(metrics_of, range(4), ["one rank"] * 4):
        assert_same(metrics, alone)
    for metrics in ranks(metrics_of, range(4), ["two"] * 4):
        assert_same(metrics.num_tokens, torch.tensor(2**52 + 6).double())
        assert_same(metrics.loss, losses[0])
    for metrics in ranks(metrics_of, range(4), ["half"] * 4):
        assert_same(metrics.num_tokens, torch.tensor(16 * EACH))
        assert_same(metrics.loss, losses.sum() * EACH / (16 * EACH))


FUSED = ps.optim.from_torch(torch.optim.AdamW, lr=0.125, fused=True)


def image_step(axis: ps.Axis, rank: int) -> Any:
    """Images lie with their channels last on some ranks, equal rows in one."""
    numbers, rows = (
        torch.arange(48.0).remainder(7).view(2, 3, 4, 2),
        torch.ones(3).expand(4, 3),
    )
    order = torch.channels_last if rank % 2 else torch.contiguous_format
    image = numbers.contiguous(memory_format=order)
    theta = {"image": image, "rows": rows if rank % 2 else rows.contiguous()}
    how: Any = {"weight_fn": torch.ones_like, "axis": axis}
    update_step = ps.make_update_step(
        lambda p, x: ((p["image"] * numbers).sum() + p["rows"].sum()) * x, FUSED, **how
    )
    new = update_step(theta, FUSED.init(theta), [torch.ones(1)])[:2]
    assert new[0]["image"].stride() == image.stride()
    return new


@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
def test_kernels_read_gradients_in_the_order_of_their_leaves(
    ranks: Run, bucket_bytes: int
) -> None:
    expected = image_step(ps.LocalAxis(), 0)
    for state in ranks(image_step, range(4), bucket_bytes=bucket_bytes):
        assert_same(state, expected)


def step_that_meets(axis: ps.Axis, rank: int, everywhere: bool) -> Any:
    """Ranks sum over the axis inside of the loss; on some of them a leaf is not used."""

    def loss(params: Any, microbatch: Batch) -> Tensor:
        scores = ps.pvary(ps.psum(microbatch["x"] @ params["w"], axis), axis)
        if rank == 0 or everywhere:
            scores = scores + params["z"] * (rank == 0)
        return scores.square()

    theta = {"w": params()["w"], "z": torch.tensor([2.0, 1.0, 1.0, 1.0]).double()}
    arguments = {
        **sound(rank),
        "loss_fn": loss,
        "params": theta,
        "opt_state": SGD.init(theta),
    }
    return step(axis, {**arguments, "microbatches": [batch(4, rank)]})


@pytest.mark.parametrize("bucket_bytes", [8, 32, 1 << 20])
def test_a_loss_that_meets_over_the_same_axis(ranks: Run, bucket_bytes: int) -> None:
    """Its collectives are never taken for those of the gradients."""
    used, unused = (
        ranks(step_that_meets, range(4), [everywhere] * 4, bucket_bytes=bucket_bytes)
        for everywhere in (True, False)
    )
    for result in unused:
        assert_same(result, used[0])


class InBackward(torch.autograd.Function):
    """The identity, whose backward pass calls a function."""

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
    """The loss meets when a bucket has left on all ranks but the first, which does not use its leaf."""

    def loss(params: Any, microbatch: Batch) -> Tensor:
        meet = in_backward(params["b"], lambda: ps.psum(torch.ones(3).double(), axis))
        late = microbatch["x"] @ params["w"] if rank else 0
        return microbatch["y"] * meet + late

    with pytest.raises(
        ValueError, match="disagree on the buckets that have left"
    ) as info:
        step(axis, {**sound(rank), "loss_fn": loss, "microbatches": [batch(4)]})
    return str(info.value)


def test_buckets_that_crossed_a_collective_of_the_loss_are_refused(ranks: Run) -> None:
    """One rank sums a vector of the loss's, where the others sum a bucket of its shape."""
    for text in ranks(step_that_meets_late, range(4), bucket_bytes=1):
        assert (
            "loss (add 0 * w.sum() to it): '0' against ranks 1, 2, 3 with the buckets"
            in text
        )


LEAVES = 6


def launched_by_then(axis: Any, meets: bool, gather: str) -> list[int]:
    """How many of six buckets are on their way when the gradient of each leaf is about to be found.

    In the last of two microbatches; that of the last leaf comes first. The loss may meet, too.
    """
    theta = {
        f"w{place}": torch.full((4,), place + 1.0).double() for place in range(LEAVES)
    }
    launched: list[int] = []
    before = 0

    def loss(params: Any, microbatch: Batch) -> Tensor:
        nonlocal before
        launched.clear()
        scores = microbatch["y"]
        for leaf in params.values():
            noticed = in_backward(leaf, lambda: launched.append(axis.meetings - before))
            scores = scores * noticed.sum()
        if meets:
            ps.psum(scores.detach(), axis)
        before = axis.meetings
        return scores

    arguments = {
        **sound(0),
        "loss_fn": loss,
        "params": theta,
        "opt_state": SGD.init(theta),
    }
    arguments |= {"gather": gather} if gather else {}
    step(axis, {**arguments, "microbatches": [batch(4)] * 2})
    return launched


@pytest.mark.parametrize("gather", ["", "step", "microbatch"])
@pytest.mark.parametrize("meets", [False, True])
def test_buckets_leave_during_the_backward_pass(
    ranks: Run, meets: bool, gather: str
) -> None:
    """Each leaves as soon as it is complete, unless the loss communicates over the same axis."""
    expected = [0] * LEAVES if meets else list(range(LEAVES))
    found = ranks(launched_by_then, [meets] * 4, [gather] * 4, bucket_bytes=32)
    assert found == [expected] * 4


class Log(ThreadAxis):
    """Two ranks that write down their collectives of more than 1000 elements."""

    def __init__(self, bucket_bytes: int = 1 << 19) -> None:
        super().__init__(2, bucket_bytes=bucket_bytes)
        self.large: list[list[tuple[str, int]]] = [[], []]

    def note(self, law: str, x: Tensor) -> None:
        if x.numel() > 1000:
            self.large[self.rank].append((law, x.numel()))

    def meet(self, law: str, x: Tensor) -> Tensor:
        self.note(law, x)
        return super().meet(law, x)

    def launch(self, x: Tensor, law: str = "psum") -> Any:
        self.note(law, x)
        return super().launch(x, law)

    def count(self, law: str) -> int:
        """How often this rank has called a law."""
        return [name for name, _ in self.large[self.rank]].count(law)


def test_the_first_bucket_is_small_and_the_last_leaf_leaves_first() -> None:
    """A leaf is in one bucket, however large."""
    axis, size = Log(bucket_bytes=25 << 20), 1 << 18
    theta = [torch.zeros(n) for n in (2 * size, size, 2000, size - 2000)]
    sgd = ps.optim.sgd(0.1)

    def program(rank: int) -> None:
        how: Any = {"weight_fn": torch.ones_like, "axis": axis}
        step = ps.make_update_step(
            lambda p, x: sum(leaf.sum() for leaf in p) * x, sgd, **how
        )
        step(theta, sgd.init(theta), [torch.ones(1)])

    axis.map(program)(range(2))
    assert axis.large == [[("psum", size), ("psum", 3 * size)]] * 2


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("gather", ["step", "microbatch", "loss"])
def test_sharded_params_are_gathered_and_scattered(
    gather: Gather, microbatches: int
) -> None:
    """Each layer once a step, or a microbatch; or by the loss, which gathers it twice."""
    axis, sgd = Log(), ps.optim.sgd(0.1)

    def program(rank: int) -> tuple[int, int]:
        params = ps.shard(network(3, 256), axis)
        loss_fn = loss_of(gather)
        step = ps.make_update_step(
            lambda p, x: loss_fn(p, x.repeat(1, 16)),
            sgd,
            weight_fn=ones,
            axis=axis,
            gather=gather,
        )
        step(params, sgd.init(params), [rows(2)] * microbatches)
        return axis.count("all_gather"), axis.count("psum_scatter")

    times = 1 if gather == "step" else microbatches
    gathers = 6 if gather == "loss" else 3
    assert axis.map(program)(range(2)) == [(gathers * times, 3 * times)] * 2
    assert axis.large[0] == axis.large[1]
