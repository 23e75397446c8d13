"""Ranks that hold different amounts of data, and ranks that go wrong: on threads.

``tests/test_mesh.py`` says the same of processes, with the programs of this file and of ``tests/faults.py``.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import purestep as ps
from purestep import tree
from purestep.conversation import WIDTH
from tests.faults import (
    BAD,
    COMPUTED,
    FAULTS,
    SGD,
    Batch,
    Unruly,
    alone,
    batch,
    check_fault,
    check_faulty_derivative,
    cut,
    faulty_derivative,
    faulty_step,
    loss_fn,
    loss_with_aux,
    ones,
    params,
    same,
    sound,
    step,
)

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_on_every_rank(name: str, bucket_bytes: int, donate: bool) -> None:
    axis = ps.testing.ThreadAxis(4, bucket_bytes=bucket_bytes)
    results = axis.map(lambda rank: faulty_step(axis, rank, name, donate))(range(4))
    check_fault(name, results, repr(axis))


@pytest.mark.parametrize("gather", ["step", "microbatch"])
@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
@pytest.mark.parametrize("name", COMPUTED)
def test_a_fault_is_told_where_params_are_in_pieces(
    name: str, bucket_bytes: int, gather: str
) -> None:
    """The others go on with their gathers, and the rank that failed joins them."""
    axis = ps.testing.ThreadAxis(4, bucket_bytes=bucket_bytes)
    results = axis.map(lambda rank: faulty_step(axis, rank, name, True, gather=gather))(range(4))
    check_fault(name, results, repr(axis))


def test_a_fault_is_told_in_any_default_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        axis = ps.testing.ThreadAxis(4)
        results = axis.map(lambda rank: faulty_step(axis, rank, "first loss", False))(range(4))
    finally:
        torch.set_default_dtype(before)
    check_fault("first loss", results, repr(axis))


@pytest.mark.parametrize("name", COMPUTED)
def test_a_fault_is_told_where_somebody_differentiates(name: str) -> None:
    axis = ps.testing.ThreadAxis(4)
    check_faulty_derivative(
        name, axis.map(lambda rank: faulty_derivative(axis, rank, name))(range(4))
    )


def meets_in_its_loss(axis: ps.Axis, rank: int, everywhere: bool) -> Any:
    """Ranks sum over the axis inside of the loss; a leaf is used on rank 0, and elsewhere times zero or not at all."""

    def loss(params: Any, microbatch: Batch) -> Tensor:
        scores = ps.pvary(ps.psum(microbatch["x"] @ params["w"], axis), axis)
        if rank == 0 or everywhere:
            scores = scores + params["z"] * (rank == 0)
        return scores.square()

    theta = {"w": params()["w"], "z": torch.tensor([2.0, 1.0, 1.0, 1.0]).double()}
    arguments = {**sound(rank), "loss_fn": loss, "params": theta, "opt_state": SGD.init(theta)}
    return step(axis, {**arguments, "microbatches": [batch(4, rank)]})


@pytest.mark.parametrize("bucket_bytes", [8, 32, 1 << 20])
def test_a_loss_that_meets_over_the_same_axis(bucket_bytes: int) -> None:
    """Its collectives are never taken for those of the gradients."""
    axis = ps.testing.ThreadAxis(4, bucket_bytes=bucket_bytes)

    def steps(everywhere: bool) -> list[Any]:
        return axis.map(lambda rank: meets_in_its_loss(axis, rank, everywhere))(range(4))

    expected = steps(True)[0]
    for result in steps(False):
        assert same(result, expected)


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
    """How many buckets of six are on their way when the gradient of each leaf is about to be found.

    In the last of two microbatches, which finds that of the last leaf first. The loss may meet, too.
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


def check_launched(results: Sequence[list[int]], meets: bool) -> None:
    """Each leaves as soon as it is complete, unless the loss communicates over the same axis."""
    expected = [0] * LEAVES if meets else list(range(LEAVES))
    assert list(results) == [expected] * len(results)


@pytest.mark.parametrize("meets", [False, True])
def test_buckets_leave_during_the_backward_pass(meets: bool) -> None:
    check_launched(threads(4, launched_by_then, [meets] * 4, bucket_bytes=24), meets)


def test_what_is_launched_is_handed_over_at_once() -> None:
    """What is written to the buffer later is lost, as it may be between processes; ranks need not wait in step."""

    def program(axis: Any, rank: int) -> tuple[list[int], list[Any]]:
        flats = [torch.full((2,), 10.0**place * (rank + 1)) for place in range(3)]
        waits = [axis.launch("psum", flat, flat) for flat in flats]
        begun = axis.meetings
        for flat in flats:
            flat.fill_(-1.0)
        for wait in waits[::-1] if rank else waits:
            wait()
        return [begun, axis.meetings], [flat.tolist() for flat in flats]

    for begun, sums in threads(3, program, range(3)):
        assert begun == [3, 3]
        assert sums == [[6.0] * 2, [60.0] * 2, [600.0] * 2]


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
    """A step from the same values, in a rank's own order in memory; and the strides that copies of them have."""
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


def check_laid_out(name: str, results: Sequence[tuple[Any, list[tuple[int, ...]]]]) -> None:
    """All ranks have the state of one, and it lies as copies of it would."""
    expected, _ = laid_out_step(ps.LocalAxis(), -1, name)
    for state, strides in results:
        assert same(state, expected)
        for leaf, before in zip(tree.leaves_of(state), strides, strict=True):
            assert leaf.stride() == before


@pytest.mark.parametrize("bucket_bytes", [8, 64, 1 << 20])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_memory_order_is_nobodys_business(name: str, bucket_bytes: int) -> None:
    """The same values lie otherwise on each rank: transposed, in steps, as images, or on themselves."""
    check_laid_out(name, threads(4, laid_out_step, range(4), [name] * 4, bucket_bytes=bucket_bytes))


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


def test_aux_that_an_empty_rank_cannot_be_told() -> None:
    for text in threads(4, with_aux_of_its_own, cut(batch())):
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


def check_aux_without_zeros(results: Sequence[tuple[str, Any]]) -> None:
    """Every rank heard of it, and the next step is sound."""
    for rank, (text, next_step) in enumerate(results):
        assert text.startswith("RankError: rank 1 of " if rank != 1 else "ArithmeticError: ")
        assert text.endswith("ArithmeticError: no zeros")
        assert same(next_step, alone())


def test_aux_that_an_empty_rank_cannot_make() -> None:
    check_aux_without_zeros(threads(4, aux_without_zeros, range(4)))


class Named(NamedTuple):
    """A part of aux."""

    total: Tensor
    rest: list[Any]


def on_few(axis: ps.Axis, rank: int, normalize: Any) -> Any:
    """One rank has data; its loss and weights are of other dtypes than the params, and its aux is a tree."""

    def loss(params: Any, microbatch: Batch) -> ps.LossTerms:
        losses = loss_fn(params, microbatch).float()
        flags = losses > 4
        aux = {"b": Named(flags.sum(), [None, losses.bfloat16().sum()]), "a": flags}
        return ps.LossTerms(losses, aux=aux)

    arguments = {
        **sound(rank),
        "loss_fn": loss,
        "weight_fn": lambda m: m["y"].abs() + 0.5,
        "normalize": normalize,
        "microbatches": [batch(3)] if rank in (-1, BAD) else [],
    }
    return step(axis, arguments)


def evaluated(axis: ps.Axis, rank: int) -> ps.EvalMetrics:
    """The same of ``make_eval_step``."""
    evaluate = ps.make_eval_step(loss_with_aux, weight_fn=ones, axis=axis)
    return evaluate(params(), [batch(4)] if rank in (-1, BAD) else [])


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


def check_history(histories: Sequence[list[Any]]) -> None:
    """All ranks stop at the same step, with the states of one rank that has all their data."""
    expected = until_the_end(ps.LocalAxis(), cut(batch(7), LIFETIMES))
    assert [int(metrics.num_tokens) for *_, metrics in expected] == [4, 2, 1, 0]
    assert same(expected[-1][:2], expected[-2][:2])
    for history in histories:
        assert same(history, expected)


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


ACCUM_DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def check_counted(metrics: Sequence[Any]) -> None:
    """Not a bit is lost, nor added."""
    total = 16 * (10**12 + 7)
    loss = loss_fn(params(), batch()).sum() * (10**12 + 7) / total
    for one in metrics:
        assert one.num_tokens.dtype == torch.int64
        assert one.num_tokens == total
        assert one.loss == loss


def threads(size: int, program: Callable[..., Any], *args: Sequence[Any], **how: Any) -> list[Any]:
    """What ``program(axis, *args of its rank)`` returns on every thread."""
    axis = ps.testing.ThreadAxis(size, **how)
    return axis.map(lambda *args: program(axis, *args))(*args)


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("bucket_bytes", [1, 8, 16, 1 << 20])
def test_uneven_ranks_take_the_step_of_one(bucket_bytes: int, normalize: str) -> None:
    def program(axis: ps.Axis, rank: int) -> Any:
        return step(axis, {**sound(rank), "normalize": normalize})

    for result in threads(4, program, range(4), bucket_bytes=bucket_bytes):
        assert same(result, alone())


@pytest.mark.parametrize("normalize", ["loss", "grads"])
def test_an_empty_rank_reports_what_the_others_do(normalize: str) -> None:
    expected = on_few(ps.LocalAxis(), -1, normalize)
    assert expected[2].loss.dtype == torch.float32
    assert expected[2].num_tokens.dtype == torch.float64
    for result in threads(4, on_few, range(4), [normalize] * 4):
        assert same(result, expected)


def test_evaluation_with_empty_ranks() -> None:
    expected = evaluated(ps.LocalAxis(), -1)
    for result in threads(4, evaluated, range(4)):
        assert same(result, expected)


def test_no_data_anywhere_is_the_identity() -> None:
    def program(axis: ps.Axis) -> Any:
        return step(axis, {**sound(0), "microbatches": []})

    expected = program(ps.LocalAxis())
    assert same(expected[:2], (params(), SGD.init(params())))
    for result in threads(2, program):
        assert same(result, expected)


def test_data_that_runs_out_at_different_steps() -> None:
    groups = [[group] for group in cut(batch(7), LIFETIMES)]
    check_history(threads(4, until_the_end, groups))


@pytest.mark.parametrize("dtype", ACCUM_DTYPES)
def test_counts_and_losses_are_exact_in_any_dtype_of_gradients(dtype: torch.dtype) -> None:
    check_counted(threads(4, counted_in, range(4), [dtype] * 4))


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


def overflowing(axis: ps.Axis, held: tuple[float, int], normalize: Any) -> tuple[bool, Any]:
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
    untouched = same(state, (params(), SGD.init(params())))
    return untouched, step(axis, {**sound(0), "microbatches": group[:1]})[2].num_tokens


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("held", OVERFLOWS.values(), ids=list(OVERFLOWS))
def test_counts_that_overflow_together(held: list[tuple[float, int]], normalize: str) -> None:
    """No rank's count is too large, and their sum is: an error on every rank, before anything is updated."""
    for untouched, count in threads(4, overflowing, held, [normalize] * 4):
        assert untouched
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


def test_replicas_along_another_axis_are_not_counted() -> None:
    world = ps.testing.ThreadAxis(4)
    dp, tp = world.split(2, 2)
    places = world.map(lambda: (dp.rank, tp.rank, int(dp.index), int(tp.index)))()
    assert places == [(0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 1, 0), (1, 1, 1, 1)]
    assert (dp.size, tp.size) == (2, 2)
    groups = cut(batch(), [[3, 2], [8, 1, 1, 1]])
    results = world.map(lambda: step(dp, {**sound(0), "microbatches": groups[dp.rank]}))()
    for result in results:
        assert same(result, alone())


def test_thirty_runs_are_one() -> None:
    """With numbers that round: in which order threads arrive does not matter."""
    numbers = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    groups = cut({"x": numbers[:, :3], "y": numbers[:, 3]})

    def program(axis: ps.Axis, group: list[Batch]) -> Any:
        state = {"b": torch.tensor(0.1), "w": torch.tensor([0.2, 0.3, 0.4])}
        return step(
            axis,
            {**sound(0), "params": state, "opt_state": SGD.init(state), "microbatches": group},
        )

    first, *runs = (threads(4, program, groups, bucket_bytes=8) for _ in range(30))
    assert all(same(rank, first[0]) for run in [first, *runs] for rank in run)


def errors_of(axis: ps.testing.ThreadAxis, *programs: Callable[[], Any]) -> list[str]:
    """What ranks hear that run these programs and cannot meet."""

    def caught(program: Callable[[], Any]) -> str:
        try:
            program()
        except ps.RankError as error:
            return str(error)
        return "nothing"

    return axis.map(caught)(programs)


def test_a_skipped_collective_is_an_error() -> None:
    axis = ps.testing.ThreadAxis(3)
    x = torch.ones(2)
    heard = errors_of(axis, lambda: ps.psum(x, axis), lambda: None, lambda: ps.psum(x, axis))
    assert heard[1] == "nothing"
    for rank in (0, 2):
        assert heard[rank].startswith("these ranks cannot meet: ")
        assert f"rank {rank} calls psum of torch.float32 (2,) over ThreadAxis(3)" in heard[rank]
        assert "rank 1 has returned" in heard[rank]


def test_an_error_does_not_wait_for_those_who_still_compute() -> None:
    axis, told = ps.testing.ThreadAxis(3), threading.Event()

    def program(rank: int) -> bool:
        if rank == 0:
            with pytest.raises(ps.RankError, match="rank 1 has returned; rank 2 still computes"):
                ps.psum(torch.ones(2), axis)
            told.set()
        return rank == 1 or told.wait(timeout=10)

    assert all(axis.map(program)(range(3)))


def test_what_comes_out_is_each_ranks_own() -> None:
    """To write into, say."""
    axis = ps.testing.ThreadAxis(3)
    for law, total in ((ps.psum, 3), (ps.all_gather, 1)):
        results = axis.map(lambda rank, law=law: law(torch.ones(2), axis).add_(rank))(range(3))
        assert [float(result.flatten()[0]) for result in results] == [total, total + 1, total + 2]


def test_a_skipped_step_is_an_error() -> None:
    axis = ps.testing.ThreadAxis(2)
    heard = errors_of(axis, lambda: step(axis, sound(0)), lambda: None)
    assert f"rank 0 calls psum of torch.float64 ({WIDTH},) over ThreadAxis(2)" in heard[0]
    assert "rank 1 has returned" in heard[0]


@pytest.mark.parametrize(
    ("calls", "named"),
    [
        ([(ps.psum, torch.ones(2)), (ps.all_gather, torch.ones(2))], ["psum of", "all_gather of"]),
        ([(ps.psum, torch.ones(2)), (ps.psum, torch.ones(3))], ["(2,)", "(3,)"]),
        (
            [(ps.psum, torch.ones(2)), (ps.psum, torch.ones(2).double())],
            ["torch.float32", "torch.float64"],
        ),
    ],
    ids=["law", "shape", "dtype"],
)
def test_collectives_that_do_not_match(calls: Any, named: list[str]) -> None:
    axis = ps.testing.ThreadAxis(2)
    heard = errors_of(axis, *(lambda law=law, x=x: law(x, axis) for law, x in calls))
    assert heard[0] == heard[1]
    first, second = heard[0].removeprefix("these ranks cannot meet: ").split("; ")
    assert first.startswith("rank 0 calls")
    assert second.startswith("rank 1 calls")
    assert named[0] in first
    assert named[1] in second


def test_a_ring_of_waiting_ranks_is_an_error() -> None:
    """Along two axes: each waits for the next, and no two of them are in the same group."""
    world = ps.testing.ThreadAxis(4)
    first, second = world.split(2, 2)
    axes = [first, second, second, first]
    heard = errors_of(world, *(lambda axis=axis: ps.psum(torch.ones(1), axis) for axis in axes))
    assert len(set(heard)) == 1
    for rank, axis in enumerate(axes):
        assert f"rank {rank} calls psum of torch.float32 (1,) over {axis!r}" in heard[0]


def test_an_exception_comes_out_as_it_is_with_its_rank() -> None:
    axis, mine, heard = ps.testing.ThreadAxis(3), KeyError("mine"), []

    def program(rank: int) -> None:
        if rank == 1:
            raise mine
        try:
            ps.psum(torch.ones(2), axis)
        except ps.RankError as error:
            heard.append(str(error))
            raise

    with pytest.raises(KeyError) as info:
        axis.map(program)(range(3))
    assert info.value is mine
    assert mine.__notes__ == ["raised by rank 1 of 3"]
    assert len(heard) == 2
    assert all("rank 1 has raised KeyError: 'mine'" in text for text in heard)


def test_ranks_that_only_miss_each_other_raise_rank_error() -> None:
    axis = ps.testing.ThreadAxis(2)
    with pytest.raises(ps.RankError, match="rank 0 has returned") as info:
        axis.map(lambda rank: rank and ps.psum(torch.ones(2), axis))(range(2))
    assert info.value.__notes__ == ["raised by rank 1 of 2"]


def test_usable_again_after_an_error() -> None:
    axis = ps.testing.ThreadAxis(2)
    for _ in range(3):
        with pytest.raises(ps.RankError):
            axis.map(lambda rank: rank and ps.psum(torch.ones(2), axis))(range(2))
        assert axis.map(lambda x: ps.psum(x, axis))([torch.tensor(1), torch.tensor(2)]) == [3, 3]


def test_outside_of_map() -> None:
    axis = ps.testing.ThreadAxis(2)
    way_out = r"ThreadAxis\(2\) has ranks only while it maps: axis\.map\(fn\)"
    with pytest.raises(RuntimeError, match=way_out):
        ps.psum(torch.ones(2), axis)
    with pytest.raises(RuntimeError, match=way_out):
        _ = axis.index
    with pytest.raises(RuntimeError, match=way_out):
        step(axis, sound(0))


@pytest.mark.parametrize("size", [0, -1, 2.0, "2"])
def test_size(size: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"ThreadAxis\(size={size!r}\): an axis has a whole number"
    ):
        ps.testing.ThreadAxis(size)


@pytest.mark.parametrize("bucket_bytes", [0, -8, 8.0, None])
def test_bucket_bytes(bucket_bytes: Any) -> None:
    with pytest.raises(ValueError, match=rf"bucket_bytes={bucket_bytes} must be a whole number"):
        ps.testing.ThreadAxis(2, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("sizes", [(), (3,), (2, 3), (4, 0)])
def test_split_must_multiply_to_the_size(sizes: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"ThreadAxis\(4\)\.split\(.*: the sizes must multiply to 4"
    ):
        ps.testing.ThreadAxis(4).split(*sizes)


def test_map_takes_an_entry_for_each_rank() -> None:
    axis = ps.testing.ThreadAxis(2)
    with pytest.raises(
        ValueError, match=r"argument 1 has 3 entries, but ThreadAxis\(2\) takes one for each rank"
    ):
        axis.map(lambda a, b: a)([1, 2], [1, 2, 3])


LAWS: dict[
    str, tuple[Callable[..., Any], Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
] = {
    "psum": (ps.psum, lambda x: x.sum(0).expand_as(x), lambda y: y),
    "pvary": (ps.pvary, lambda x: x, lambda y: y.sum(0).expand_as(y)),
    "pmean": (ps.pmean, lambda x: x.mean(0).expand_as(x), lambda y: y / len(y)),
    "all_gather": (ps.all_gather, lambda x: x.expand(len(x), *x.shape), lambda y: y.sum(0)),
    "psum_scatter": (ps.psum_scatter, lambda x: x.sum(0), lambda y: y.expand(len(y), *y.shape)),
}
"""Each collective; what ranks that hold x₀, x₁, ... get; and its transpose."""


def blocks(law: str, size: int) -> tuple[Tensor, Tensor]:
    """What every rank puts in, ``(ranks, ranks, 3)``, and the cotangent of what comes out."""
    x = torch.arange(size * size * 3).view(size, size, 3).double()
    _, forward, _ = LAWS[law]
    return x, forward(x).flip(0) + torch.arange(size).view(size, *[1] * (forward(x).ndim - 1))


def forward_and_pulled(axis: ps.Axis, law: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """f(x), and the gradient of ⟨y, f(x)⟩ in what this rank put in."""
    collective, *_ = LAWS[law]
    pulled: Tensor = torch.func.grad(lambda x: (collective(x, axis) * y).sum())(x)
    return collective(x, axis), pulled


def check_law(law: str, results: Sequence[tuple[Tensor, Tensor]]) -> None:
    """The law and its transpose on every rank."""
    _, forward, transpose = LAWS[law]
    x, y = blocks(law, len(results))
    outputs, pulled = map(torch.stack, zip(*results, strict=True))
    assert torch.equal(outputs, forward(x))
    assert torch.equal(pulled, transpose(y))


@pytest.mark.parametrize("law", LAWS)
def test_transpose(law: str) -> None:
    x, y = blocks(law, 4)
    check_law(law, threads(4, forward_and_pulled, [law] * 4, list(x), list(y)))


def backward_through_two_steps(axis: ps.Axis, groups: Sequence[list[Batch]]) -> Any:
    """θ.grad, where the loss is that of the parameters after two steps from θ."""
    theta = tree.map(lambda leaf: leaf.requires_grad_(), params())
    arguments = {**sound(0), "params": theta, "opt_state": SGD.init(params())}
    for group in groups:
        arguments["microbatches"] = group
        arguments["params"], arguments["opt_state"], _ = step(axis, arguments)
    end = arguments["params"]
    ((end["w"] ** 2).sum() * 3 + end["b"]).backward()
    return tree.map(lambda leaf: leaf.grad, theta)


def groups_of_two_steps() -> list[list[list[Batch]]]:
    """The microbatches of each of four ranks, in each of two steps: uneven."""
    share = [[2, 1], [1], [2], [1, 1]]
    return [list(rank) for rank in zip(cut(batch(8), share), cut(batch(8, 1), share), strict=True)]


def test_backward_through_steps() -> None:
    """Where parameters require grad, every rank gets the whole derivative."""
    expected = backward_through_two_steps(ps.LocalAxis(), [[batch(8)], [batch(8, 1)]])
    assert expected["w"].all()
    for result in threads(4, backward_through_two_steps, groups_of_two_steps()):
        assert same(result, expected)


def differentiated_by_data(axis: ps.Axis, group: list[Batch]) -> list[Tensor]:
    """The derivative of the parameters after a step by each microbatch: dataset distillation, say."""
    data = [{**m, "x": m["x"].clone().requires_grad_()} for m in group]
    end, _, _ = step(axis, {**sound(0), "microbatches": data})
    ((end["w"] ** 2).sum() * 3 + end["b"]).backward()
    grads = [m["x"].grad for m in data]
    return [grad for grad in grads if grad is not None]


def check_differentiated_by_data(results: Sequence[list[Tensor]]) -> None:
    """Each rank has the derivative by its own data, of the step of one rank that holds them all."""
    (expected,) = differentiated_by_data(ps.LocalAxis(), [batch(8)])
    assert expected.any()
    assert torch.equal(torch.cat([grad for grads in results for grad in grads]), expected)


def test_derivatives_by_the_data() -> None:
    groups = cut(batch(8), [[2, 1], [1], [2], [1, 1]])
    check_differentiated_by_data(threads(4, differentiated_by_data, groups))


@pytest.mark.parametrize("differing", ["bucket_bytes", "requires_grad"])
def test_what_decides_the_path_is_agreed_on(differing: str) -> None:
    """Another size of buckets, or one rank that is being differentiated, would take other collectives."""
    axis = ps.testing.ThreadAxis(2)
    optimizer = ps.optim.sgd(0.5)

    def on_rank(w: Tensor) -> Any:
        if axis.rank == 1 and differing == "bucket_bytes":
            axis_of_mine = copy(axis)
            axis_of_mine.bucket_bytes = 8
        else:
            axis_of_mine = axis
        if axis.rank == 1 and differing == "requires_grad":
            w = w.clone().requires_grad_()
        step = ps.make_update_step(
            lambda w, x: w * x, optimizer, weight_fn=torch.ones_like, axis=axis_of_mine
        )
        return step(w, optimizer.init(w), [torch.ones(3)])

    with pytest.raises(ValueError, match="disagree on settings"):
        axis.map(on_rank)([torch.tensor(1.0)] * 2)


def test_map_where_no_thread_can_follow() -> None:
    axis = ps.testing.ThreadAxis(2)
    first, _ = ps.testing.ThreadAxis(4).split(2, 2)
    with pytest.raises(RuntimeError, match="transform inside fn"):
        torch.func.grad(lambda w: sum(axis.map(lambda x: w * x)([1.0, 2.0])))(torch.tensor(3.0))
    with pytest.raises(RuntimeError, match="no other map"):
        axis.map(lambda x: axis.map(lambda y: y)([x, x]))([1, 2])
    with pytest.raises(ValueError, match="map over the axis that was split"):
        first.map(lambda x: x)([1, 2])


def test_one_axis_in_many_threads() -> None:
    """Each ``map`` is a world of its own; so are the parts of an axis that was split."""
    axis = ps.testing.ThreadAxis(4)
    rows, columns = axis.split(2, 2)
    begin = threading.Barrier(3)

    def program(x: Tensor) -> list[Tensor]:
        return [ps.psum(x, part) for _ in range(20) for part in (rows, columns, axis)]

    def mapped(number: int) -> None:
        begin.wait(timeout=30)
        results[number] = axis.map(program)([torch.tensor(number * 10**rank) for rank in range(4)])

    results: dict[int, Any] = {}
    callers = [threading.Thread(target=mapped, args=(number,), daemon=True) for number in (1, 2, 3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    for number in (1, 2, 3):
        for rank, sums in enumerate(results[number]):
            row, column = divmod(rank, 2)
            expected = [101 * 10**column, 11 * 100**row, 1111]
            assert sums == [number * total for total in expected] * 20


def test_a_world_inside_of_a_rank() -> None:
    outer, inner = ps.testing.ThreadAxis(2), ps.testing.ThreadAxis(2)

    def program(x: Tensor) -> Tensor:
        parts: list[Tensor] = inner.map(lambda y: ps.psum(y, inner))([x, x + 1])
        total: Tensor = ps.psum(parts[0], outer)
        return total

    assert outer.map(program)([torch.tensor(1), torch.tensor(10)]) == [24, 24]


def in_this_process(program: Callable[[ps.Axis], None], kind: str) -> None:
    """The program on one rank, on two threads, or on a process group of one."""
    if kind == "local":
        program(ps.LocalAxis())
    elif kind == "threads":
        axis = ps.testing.ThreadAxis(2)
        axis.map(lambda: program(axis))()
    else:
        with tempfile.TemporaryDirectory() as folder:
            store = f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
            try:
                program(ps.MeshAxis(DeviceMesh("cpu", [0], mesh_dim_names=("dp",)), "dp"))
            finally:
                dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["local", "threads", "mesh"])
@pytest.mark.parametrize("where", ["weights", "loss", "backward", "aux", "evaluation"])
@pytest.mark.parametrize("fails", [KeyboardInterrupt, ArithmeticError])
def test_a_failed_step_keeps_nothing(fails: type[BaseException], where: str, kind: str) -> None:
    """What it has computed is gone when its exception is, and no garbage collector has to look for it."""
    alive: list[weakref.ref[Tensor]] = []

    def activation(x: Tensor) -> Tensor:
        h = x.exp()
        alive.append(weakref.ref(h))
        return h

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise fails

    def weight_fn(microbatch: Batch) -> Tensor:
        weights = activation(torch.zeros(len(microbatch["y"])))
        if where == "weights" and len(weights) == 2:
            raise fails
        return weights

    def loss(params: Any, microbatch: Batch) -> ps.LossTerms:
        h = activation(params["w"] * params["b"])
        losses = loss_fn({**params, "w": h}, microbatch)
        if where in ("loss", "evaluation") and len(losses) == 2:
            raise fails
        if where == "backward":
            losses = Broken.apply(losses)
        aux = activation(losses.detach())
        return ps.LossTerms(losses, aux=aux.as_subclass(Unruly) if where == "aux" else aux.sum())

    def program(axis: ps.Axis) -> None:
        optimizer = ps.optim.sgd(0.5)
        if where == "evaluation":
            evaluate = ps.make_eval_step(loss, weight_fn=weight_fn, axis=axis)
            evaluate(params(), [batch(1), batch(2)])
        else:
            update = ps.make_update_step(loss, optimizer, weight_fn=weight_fn, axis=axis)
            update(params(), optimizer.init(params()), [batch(1), batch(2)])
        raise fails

    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            with contextlib.suppress(fails, ValueError):
                in_this_process(program, kind)
        assert alive
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()
