"""What travels between ranks: when it leaves, and how many collectives and bytes it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.ranks import Run
from proofs.strategies import assert_same
from purestep import tree
from tests.torch_private import TorchDispatchMode
from tests.uneven import SGD, Batch, batch, params, sound, step

pytestmark = pytest.mark.timeout(120)


class Traffic(TorchDispatchMode):
    """The bytes that are handed to collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            sent = sum(
                leaf.numel() * leaf.element_size()
                for leaf in tree.leaves_of(args[0])
                if isinstance(leaf, Tensor)
            )
            name = func.__name__.split(".")[0]
            self.bytes[name] = self.bytes.get(name, 0) + sent
        return func(*args, **(kwargs or {}))


MIXED = {
    "a": torch.ones(30),
    "b": torch.ones(5).double(),
    "c": torch.ones(7, 3),
    "d": torch.ones(()),
}
"""One leaf in float64, three of 52 numbers in float32."""


def mixed_loss(params: Any, microbatch: Tensor) -> Tensor:
    """Every leaf takes part."""
    total = sum(leaf.double().sum() for leaf in params.values())
    return microbatch * torch.as_tensor(total)


def traffic(
    axis: ps.Axis, microbatches: int, aux: bool, settings: dict[str, Any]
) -> tuple[dict[str, int], dict[str, int], Any]:
    """How many collectives a step calls by name, the bytes they are handed, and the new params."""
    from torch.distributed.tensor.debug import CommDebugMode  # takes a second to import

    def loss(params: Any, microbatch: Tensor) -> ps.LossTerms:
        losses = mixed_loss(params, microbatch)
        return ps.LossTerms(losses, aux={"n": torch.tensor(1), "m": torch.tensor(2)} if aux else ())

    optimizer = ps.optim.sgd(0.5)
    run = ps.make_update_step(loss, optimizer, weight_fn=torch.ones_like, axis=axis, **settings)
    state = optimizer.init(MIXED)
    group = [torch.ones(2).double()] * microbatches
    with CommDebugMode() as calls:
        new_params, _, _ = run(MIXED, state, group)
    with Traffic() as sent:
        run(MIXED, state, group)
    counts = {str(op).split(".")[-1]: n for op, n in calls.get_comm_counts().items()}
    return counts, sent.bytes, new_params


SMALL, LARGE = 52 * 4, 5 * 8
"""Bytes of the gradients in each dtype."""

MESSAGES = 2 * 16 * 8
"""Bytes of the messages before the backward passes and after."""


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(8, 4), (88, 3), (1 << 20, 2)])
def test_traffic_of_a_step(processes: Run, bucket_bytes: int, buckets: int, normalize: str) -> None:
    """Two short messages and each gradient once, however many microbatches a rank has."""
    for numbers in ([1] * 4, [4] * 4, [16] * 4, [4, 0, 16, 1]):
        results = processes(
            traffic, numbers, [False] * 4, [{"normalize": normalize}] * 4,
            bucket_bytes=bucket_bytes,
        )  # fmt: skip
        for counts, sent, new_params in results:
            assert counts == {"allreduce_": 2 + buckets}
            assert sent == {"allreduce_": MESSAGES + SMALL + LARGE}
            assert_same(new_params, results[0][2])


def test_aux_travels_in_one_collective_more(processes: Run) -> None:
    """Two integers."""
    for counts, sent, _ in processes(traffic, [1, 4, 16, 2], [True] * 4, [{}] * 4):
        assert counts == {"allreduce_": 2 + 2 + 1}
        assert sent == {"allreduce_": MESSAGES + SMALL + LARGE + 2 * 8}


def meets_in_its_loss(axis: ps.Axis, rank: int, everywhere: bool) -> Any:
    """Ranks sum over the axis inside of the loss; on some of them a leaf is not used."""

    def loss(params: Any, microbatch: Batch) -> Tensor:
        scores = ps.pvary(ps.psum(microbatch["x"] @ params["w"], axis), axis)
        if rank == 0 or everywhere:
            scores = scores + params["z"] * (rank == 0)
        return scores.square()

    theta = {"w": params()["w"], "z": torch.tensor([2.0, 1.0, 1.0, 1.0]).double()}
    arguments = {**sound(rank), "loss_fn": loss, "params": theta, "opt_state": SGD.init(theta)}
    return step(axis, {**arguments, "microbatches": [batch(4, rank)]})


@pytest.mark.parametrize("bucket_bytes", [8, 32, 1 << 20])
def test_a_loss_that_meets_over_the_same_axis(ranks: Run, bucket_bytes: int) -> None:
    """Its collectives are never taken for those of the gradients."""
    used, unused = (
        ranks(meets_in_its_loss, range(4), [everywhere] * 4, bucket_bytes=bucket_bytes)
        for everywhere in (True, False)
    )
    for result in unused:
        assert_same(result, used[0])


class _Noticed(torch.autograd.Function):
    """The identity, which calls a function during the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, notice: Callable[[], None]) -> Tensor:
        ctx.notice = notice
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.notice()
        return grad, None


LEAVES = 6


def launched_by_then(axis: Any, meets: bool) -> list[int]:
    """How many of six buckets are on their way when the gradient of each leaf is about to be found.

    In the last of two microbatches; that of the last leaf comes first. The loss may meet, too.
    """
    theta = {f"w{place}": torch.full((3,), place + 1.0).double() for place in range(LEAVES)}
    launched: list[int] = []
    before = 0

    def loss(params: Any, microbatch: Batch) -> Tensor:
        nonlocal before
        launched.clear()
        scores = microbatch["y"]
        for leaf in params.values():
            noticed = _Noticed.apply(leaf, lambda: launched.append(axis.meetings - before))
            scores = scores * noticed.sum()
        if meets:
            ps.psum(scores.detach(), axis)
        before = axis.meetings
        return scores

    arguments = {**sound(0), "loss_fn": loss, "params": theta, "opt_state": SGD.init(theta)}
    step(axis, {**arguments, "microbatches": [batch(4)] * 2})
    return launched


@pytest.mark.parametrize("meets", [False, True])
def test_buckets_leave_during_the_backward_pass(ranks: Run, meets: bool) -> None:
    """Each leaves as soon as it is complete, unless the loss communicates over the same axis."""
    expected = [0] * LEAVES if meets else list(range(LEAVES))
    assert ranks(launched_by_then, [meets] * 4, bucket_bytes=24) == [expected] * 4
