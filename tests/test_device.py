"""Steps on a device that is not the CPU: the CPU's answer without a wait, and waits are seen."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import purestep as ps
from proofs import models
from proofs.devices import DEVICE_TYPE, SEES_WAITS, Waits, device, moved, placed
from proofs.strategies import (
    Batch,
    assert_near,
    assert_same,
    cut,
    integer_batch,
    matrices,
    weights_of,
)
from purestep import optim, tree

line = optim.linear_schedule(0.5, 0.25, 4)
joined = optim.join_schedules([line, optim.cosine_decay_schedule(0.5, 8)], [2])
half = torch.tensor(0.5)


OPTIMIZERS = {
    "by tensors": optim.sgd(half, weight_decay=half, mask=matrices),
    "all of sgd": optim.sgd(line, 0.5, nesterov=True, weight_decay=0.5, mask=matrices),
    "all of lion": optim.lion(line, 0.5, 0.5, weight_decay=0.5, mask=matrices),
    "no update_": optim.sgd(0.5, 0.5, weight_decay=0.5, mask=matrices)._replace(
        update_=None
    ),
    "all of adamw": optim.adamw(
        joined, 0.8, 0.99, 1e-3, weight_decay=half, mask=matrices
    ),
    "clipped by a tensor": optim.chain(
        optim.clip_by_global_norm(half), optim.adamw(0.125)
    ),
}
"""What the recipes of the proofs have not: they take steps on a device, too."""


def problem() -> tuple[Any, Batch]:
    """Parameters, and a batch of 8 tokens whose weights sum to 8."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.tensor([[1, 2], [0, 1], [1, 1], [2, 0]])
    return models.integer_params(generator), integer_batch(weights, generator)


def on_both(run: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """What a program gives on the device, without a wait, and what it gives on the host."""
    expected = run(*tree.map(torch.clone, arguments))
    there = moved(arguments)
    with Waits() as waits:
        actual = run(*there)
    assert waits.seen == []
    assert {leaf.device for leaf in tree.leaves(actual)} == {device()}
    return placed(actual, expected), expected


def one_leaf(params: Any, batch: Batch) -> Tensor:
    return batch["x"] @ params["w"] - batch["y"]


def row(**more: Any) -> Batch:
    """A microbatch for it, on the device."""
    data = {"x": torch.tensor([[1.0, 2.0, 3.0]]), "y": torch.tensor([1.0]), **more}
    return {key: value.to(device()) for key, value in data.items()}


SGD, ONES = optim.sgd(0.5), lambda m: torch.ones_like(m["y"], dtype=torch.bool)


def step_with(
    params: Any, group: list[Batch], loss_fn: Any = one_leaf, **how: Any
) -> Any:
    step = ps.make_update_step(loss_fn, SGD, **{"weight_fn": ONES, **how})
    return step(params, SGD.init(params), group)


def started(optimizer: optim.Optimizer, params: Any) -> Any:
    """A state as if training had gone on for a while."""
    return tree.map(
        lambda leaf: torch.full_like(leaf, 2 if leaf.dtype == torch.int64 else 1),
        optimizer.init(params),
    )


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_of_the_host(name: str, taken: bool) -> None:
    """Whether it is taken or skipped is not read. Theorems have the settings."""
    optimizer, (params, batch) = OPTIMIZERS[name], problem()
    infinite = {**batch, "y": batch["y"] * torch.inf}
    group = cut(batch, [[0, 1], [], [2], [3]]) if taken else [infinite]
    state = [params, started(optimizer, params)]
    how: Any = {"weight_fn": weights_of, "on_nonfinite": "skip"}
    step = ps.make_update_step(models.integer_loss, optimizer, **how)
    (*actual, metrics), (*expected, told) = on_both(step, *state, group)
    assert told.applied == taken
    assert_near(actual, expected if taken else state, state)
    assert_same(metrics._replace(grad_norm=()), told._replace(grad_norm=()))


@pytest.mark.parametrize("algorithm", [torch.optim.AdamW, torch.optim.RMSprop])
def test_an_algorithm_of_torch_waits_once(
    algorithm: type[torch.optim.Optimizer],
) -> None:
    """It cannot leave values as they are, so the host reads whether to call it."""
    optimizer, (params, batch) = optim.from_torch(algorithm, lr=0.5), problem()
    there, batch_there = moved((params, batch))
    step: Any = ps.make_update_step(
        models.integer_loss, optimizer, weight_fn=weights_of
    )
    state, before = (there, optimizer.init(there)), (params, optimizer.init(params))
    with Waits() as waits:
        actual = step(*state, [batch_there])[:2]
    assert len(waits.seen) == SEES_WAITS
    # One formula for each leaf, in the same kernels or in those that torch calls foreach.
    assert_near(placed(actual, before), step(*before, [batch])[:2], before)


WAITING: list[Callable[[Tensor], Any]] = [
    lambda x: x.sum().item(), lambda x: bool((x > 0).all()), lambda x: float(x.sum()),
    lambda x: x.tolist(), lambda x: x.cpu(),
    lambda x: torch.equal(x, x), lambda x: x.nonzero(),
    lambda x: torch.tensor([1.0], device=x.device), lambda x: torch.ones(2).to(x.device),
    lambda x: x.clone().copy_(torch.ones(3)),
]  # fmt: skip


if DEVICE_TYPE == "lazy":
    # CUDA does not wait for this copy: its values come later.
    WAITING.append(lambda x: x.to("cpu", non_blocking=True))

another_device = pytest.mark.skipif(
    DEVICE_TYPE == "cpu", reason="the CPU is the only device"
)


def reading(read: Callable[[Tensor], Any], params: Any, batch: Batch) -> Tensor:
    read(params["w"].detach() * 2)
    return one_leaf(params, batch)


@another_device
def test_every_wait_is_seen() -> None:
    """In a loss, as in the step itself."""
    for read in WAITING:
        params, data = {"w": torch.ones(3, device=device())}, row()
        with Waits() as waits:
            step_with(params, [data], partial(reading, read))
        # CUDA waits more than once for the size of some results.
        assert len(waits.seen) == 1 or (DEVICE_TYPE == "cuda" and waits.seen)


def test_groups_that_are_prefetched_from_the_host() -> None:
    """Empty ones included: nothing is waited for, and the weights come with them."""
    params, batch = problem()
    groups = [cut(batch, [[0, 1], [2], [3]]), [], [batch]]
    optimizer = optim.sgd(0.5, 0.5)
    step: Any = ps.make_update_step(
        models.integer_loss, optimizer, weight_fn=weights_of
    )
    ours: Any = moved(params), optimizer.init(moved(params))
    theirs: Any = params, optimizer.init(params)
    stream = ps.prefetch(groups, device(), weight_fn=weights_of)
    for group in groups:
        arriving = next(stream)
        with Waits() as waits:
            *ours, metrics = step(*ours, arriving)
        assert waits.seen == []
        *theirs, expected = step(*theirs, group)
        assert_same(
            placed(metrics.num_tokens, expected.num_tokens), expected.num_tokens
        )
        assert_same(placed(ours, theirs), theirs)


def test_steps_that_are_recorded() -> None:
    """A step under ``torch.func.grad``, and one of parameters that require grad."""
    optimizer = OPTIMIZERS["by tensors"]
    step = ps.make_update_step(models.integer_loss, optimizer, weight_fn=weights_of)

    def after(params: Any, state: Any, batch: Batch) -> Tensor:
        new = step(params, state, [batch])[0]
        return torch.stack([leaf.sum() for leaf in tree.leaves(new)]).sum()

    def recorded(params: Any, batch: Batch) -> Any:
        state = optimizer.init(params)
        own = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
        copies = tree.map(torch.clone, own)
        grads = torch.autograd.grad(after(copies, state, batch), tree.leaves(own))
        return torch.func.grad(after)(params, state, batch), [*grads]

    assert_same(*on_both(recorded, *problem()))


@another_device
def test_two_devices_are_refused() -> None:
    params = {"v": torch.ones(3), "w": torch.ones(3, device=device())}
    message = rf"params\['v'\] is on cpu, but params\['w'\] is on {DEVICE_TYPE}"
    with pytest.raises(ValueError, match=message):
        step_with(params, [row()])


@another_device
def test_data_on_the_host_is_refused_but_not_its_weights() -> None:
    """As on CUDA, the loss meets tensors of two devices."""
    params, data = {"w": torch.ones(3, device=device())}, row()
    with pytest.raises(
        RuntimeError, match=r"not a lazy tensor|tensors to be on the same device"
    ):
        step_with(params, [{"x": torch.ones(1, 3), "y": torch.ones(1)}])
    with Waits() as waits:
        new = step_with(params, [data], weight_fn=lambda m: torch.ones(1))[0]
    assert waits.seen == []
    assert new["w"].tolist() == [0.5, 0, -0.5]


class Again(Function):
    """Computes with a parameter in the backward pass again, as checkpoints do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, again: Tensor) -> Tensor:
        ctx.again = again
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            return grad * ctx.again.sum(), None


@pytest.mark.parametrize("shared", [True, False])
def test_recomputation_with_a_modules_own_parameter_is_refused(shared: bool) -> None:
    """But for one that is a leaf's own memory."""
    parameter = torch.nn.Parameter(torch.ones(3, device=device()))
    params = {"w": parameter.detach() if shared else torch.ones(3, device=device())}
    refused = pytest.raises(ValueError, match="a module's own parameter")
    with nullcontext() if shared else refused:
        new = step_with(
            params, [row()], lambda p, m: Again.apply(one_leaf(p, m), parameter)
        )[0]
        assert new["w"].tolist() == [-0.5, -2, -3.5]
