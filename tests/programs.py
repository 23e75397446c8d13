"""What every rank runs, on threads and in processes alike, and what must come of it.

The sound step, and what can go wrong in it, are those of ``tests/faults.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from tests.faults import (
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
    same,
    sound,
    step,
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


def settings_step(axis: ps.Axis, rank: int, settings: dict[str, Any]) -> Any:
    """The sound step, with these settings."""
    return step(axis, {**sound(rank), **settings})
