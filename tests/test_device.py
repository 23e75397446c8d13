"""Tests steps on a device that is not the CPU: the CPU's answer, and no wait of the host."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import purestep as ps
from purestep import optim, tree
from support import models
from support.devices import (
    DEVICE_TYPE,
    SEES_WAITS,
    Waits,
    get_device,
    move_case,
    place_like,
)
from support.strategies import (
    Batch,
    assert_near,
    assert_same,
    cut_batch,
    get_weights,
    make_integer_batch,
    mask_matrices,
)

linear = optim.linear_schedule(0.5, 0.25, 4)
cosine = optim.cosine_decay_schedule(0.5, 8)
joined = optim.join_schedules([linear, cosine], [2])
half = torch.tensor(0.5)
decayed = optim.sgd(0.5, 0.5, weight_decay=0.5, mask=mask_matrices)


OPTIMIZERS = {
    "by tensors": optim.sgd(half, weight_decay=half, mask=mask_matrices),
    "all of sgd": optim.sgd(
        linear, 0.5, nesterov=True, weight_decay=0.5, mask=mask_matrices
    ),
    "all of lion": optim.lion(linear, 0.5, 0.5, weight_decay=0.5, mask=mask_matrices),
    "no update_": decayed._replace(update_=None),
    "all of adamw": optim.adamw(
        joined, 0.8, 0.99, 1e-3, weight_decay=half, mask=mask_matrices
    ),
    "clipped by a tensor": optim.chain(
        optim.clip_by_global_norm(half), optim.adamw(0.125)
    ),
}
"""Settings that the recipes of the proofs lack, which take steps on a device, too."""


def make_problem() -> tuple[Any, Batch]:
    """Makes parameters, and a batch of 8 tokens whose weights sum to 8."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.tensor(
        [
            [1, 2],
            [0, 1],
            [1, 1],
            [2, 0],
        ]
    )
    params = models.integer_params(generator)
    return params, make_integer_batch(weights, generator)


def run_on_both(run: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """Runs a program on the device, without a wait, and on the host."""
    expected = run(*tree.map(torch.clone, arguments))
    on_device = move_case(arguments)
    with Waits() as waits:
        actual = run(*on_device)
    assert waits.seen == []
    devices = {leaf.device for leaf in tree.leaves(actual)}
    assert devices == {get_device()}
    return place_like(actual, expected), expected


def linear_loss(params: Any, batch: Batch) -> Tensor:
    return batch["x"] @ params["w"] - batch["y"]


X = torch.tensor([[1.0, 2.0, 3.0]])
Y = torch.tensor([1.0])


def make_row() -> Batch:
    """Makes a microbatch of one token for it, on the device."""
    return {
        "x": X.to(get_device()),
        "y": Y.to(get_device()),
    }


def make_params() -> dict[str, Tensor]:
    """Makes params for it, on the device."""
    return {"w": torch.ones(3, device=get_device())}


SGD = optim.sgd(0.5)


def weigh_as_one(microbatch: Batch) -> Tensor:
    return torch.ones_like(microbatch["y"], dtype=torch.bool)


def run_step(
    params: Any,
    group: list[Batch],
    loss_fn: Any = linear_loss,
    weight_fn: Any = weigh_as_one,
) -> Any:
    """Runs one step, and returns the new params."""
    step: Any = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn)
    new_params, _, _ = step(params, SGD.init(params), group)
    return new_params


def start_training(optimizer: optim.Optimizer, params: Any) -> Any:
    """Makes a state as if training had gone on for a while."""

    def fill(leaf: Tensor) -> Tensor:
        value = 2 if leaf.dtype == torch.int64 else 1
        return torch.full_like(leaf, value)

    return tree.map(fill, optimizer.init(params))


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_of_the_host(name: str, applied: bool) -> None:
    """The host does not read whether the step is applied or skipped.

    Theorems have the other settings.
    """
    optimizer = OPTIMIZERS[name]
    params, batch = make_problem()
    group = cut_batch(batch, [[0, 1], [], [2], [3]])
    if not applied:
        infinite = batch["y"] * torch.inf
        group = [{**batch, "y": infinite}]
    state = [params, start_training(optimizer, params)]
    step = ps.make_update_step(
        models.integer_loss, optimizer, weight_fn=get_weights, on_nonfinite="skip"
    )

    actual, expected = run_on_both(step, *state, group)

    *actual_state, metrics = actual
    *expected_state, expected_metrics = expected
    assert expected_metrics.applied == applied
    if not applied:
        expected_state = state
    assert_near(actual_state, expected_state, state)
    # Norms are summed in another order.
    metrics = metrics._replace(grad_norm=())
    assert_same(metrics, expected_metrics._replace(grad_norm=()))


@pytest.mark.parametrize("algorithm", [torch.optim.AdamW, torch.optim.RMSprop])
def test_an_algorithm_of_torch_waits_once(
    algorithm: type[torch.optim.Optimizer],
) -> None:
    """It cannot leave values as they are, so the host reads whether to call it."""
    optimizer = optim.from_torch(algorithm, lr=0.5)
    params, batch = make_problem()
    state = (params, optimizer.init(params))
    device_params, device_batch = move_case((params, batch))
    device_state = (device_params, optimizer.init(device_params))
    step: Any = ps.make_update_step(
        models.integer_loss, optimizer, weight_fn=get_weights
    )

    with Waits() as waits:
        *actual, _ = step(*device_state, [device_batch])

    assert len(waits.seen) == SEES_WAITS
    *expected, _ = step(*state, [batch])
    # One formula for each leaf, in the same kernels or in those that torch calls foreach.
    actual_state = place_like(tuple(actual), state)
    assert_near(actual_state, tuple(expected), state)


WAITING: list[Callable[[Tensor], Any]] = [
    lambda x: x.sum().item(),
    lambda x: bool((x > 0).all()),
    lambda x: float(x.sum()),
    lambda x: x.tolist(),
    lambda x: x.cpu(),
    lambda x: torch.equal(x, x.clone()),
    lambda x: x.nonzero(),
    lambda x: torch.tensor([1.0], device=x.device),
    lambda x: torch.ones(2).to(x.device),
    lambda x: x.clone().copy_(torch.ones(3)),
]


if DEVICE_TYPE == "lazy":
    # CUDA does not wait for this copy: its values come later.
    WAITING.append(lambda x: x.to("cpu", non_blocking=True))

another_device = pytest.mark.skipif(
    DEVICE_TYPE == "cpu", reason="the CPU is the only device"
)


@another_device
@pytest.mark.parametrize("wait", WAITING)
def test_every_wait_is_seen(wait: Callable[[Tensor], Any]) -> None:
    """In a loss, as in the step itself."""

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        wait(params["w"].detach() * 2)
        return linear_loss(params, batch)

    params = make_params()
    row = make_row()
    with Waits() as waits:
        run_step(params, [row], loss_fn)
    if DEVICE_TYPE == "cuda":
        # CUDA waits more than once for the size of some results.
        assert waits.seen
    else:
        assert len(waits.seen) == 1


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_all_finite_of_leaves_of_several_dtypes(bad: int) -> None:
    leaves = []
    for index, dtype in enumerate([torch.float32, torch.float64, torch.bfloat16]):
        value = torch.inf if index == bad else 1.0
        leaves.append(torch.tensor([1.0, value], dtype=dtype).to(get_device()))
        assert bool(tree.all_finite(leaves)) == (index < bad)


def test_groups_that_are_prefetched_from_the_host() -> None:
    """Also empty groups: the host waits for nothing, and their weights are moved too."""
    params, batch = make_problem()
    in_parts = cut_batch(batch, [[0, 1], [2], [3]])
    groups = [in_parts, [], [batch]]
    optimizer = optim.sgd(0.5, 0.5)
    step: Any = ps.make_update_step(
        models.integer_loss, optimizer, weight_fn=get_weights
    )
    device_params = move_case(params)
    device_state: Any = [device_params, optimizer.init(device_params)]
    state: Any = [params, optimizer.init(params)]
    stream = ps.prefetch(groups, get_device(), weight_fn=get_weights)

    for group in groups:
        device_group = next(stream)
        with Waits() as waits:
            *device_state, metrics = step(*device_state, device_group)
        assert waits.seen == []
        *state, expected_metrics = step(*state, group)
        count = expected_metrics.num_tokens
        assert_same(place_like(metrics.num_tokens, count), count)
        assert_same(place_like(device_state, state), state)


def test_steps_that_are_recorded() -> None:
    """A step under ``torch.func.grad``, and one of parameters that require grad."""
    optimizer = OPTIMIZERS["by tensors"]
    step = ps.make_update_step(models.integer_loss, optimizer, weight_fn=get_weights)

    def sum_after_step(params: Any, state: Any, batch: Batch) -> Tensor:
        new_params, _, _ = step(params, state, [batch])
        leaves = tree.leaves(new_params)
        sums = [leaf.sum() for leaf in leaves]
        return torch.stack(sums).sum()

    def differentiate(params: Any, batch: Batch) -> Any:
        state = optimizer.init(params)
        copies = tree.map(torch.clone, params)
        leaves = tree.map(Tensor.requires_grad_, copies)
        # Params that are computed from these leaves: a step refuses leaves that require grad.
        computed = tree.map(torch.clone, leaves)
        total = sum_after_step(computed, state, batch)
        by_autograd = torch.autograd.grad(total, tree.leaves(leaves))
        by_func = torch.func.grad(sum_after_step)(params, state, batch)
        return by_func, list(by_autograd)

    actual, expected = run_on_both(differentiate, *make_problem())

    assert_same(actual, expected)


@another_device
def test_two_devices_are_refused() -> None:
    params = {"v": torch.ones(3), **make_params()}
    message = rf"params\['v'\] is on cpu, but params\['w'\] is on {DEVICE_TYPE}"
    with pytest.raises(ValueError, match=message):
        run_step(params, [make_row()])


@another_device
def test_data_on_the_host_is_refused() -> None:
    """As on CUDA, the loss meets tensors of two devices."""
    on_host = {"x": X, "y": Y}
    message = r"not a lazy tensor|tensors to be on the same device"
    with pytest.raises(RuntimeError, match=message):
        run_step(make_params(), [on_host])


@another_device
def test_weights_on_the_host() -> None:
    params = make_params()
    row = make_row()

    with Waits() as waits:
        new_params = run_step(params, [row], weight_fn=lambda m: torch.ones(1))

    assert waits.seen == []
    assert new_params["w"].tolist() == [0.5, 0, -0.5]


class Recompute(Function):
    """Computes with a parameter in the backward pass again, as checkpoints do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor) -> Tensor:
        ctx.parameter = parameter
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            return grad * ctx.parameter.sum(), None


def recomputing_loss(parameter: Tensor) -> Callable[..., Any]:
    """Makes a loss that computes with this parameter in its backward pass."""

    def loss_fn(params: Any, batch: Batch) -> Any:
        return Recompute.apply(linear_loss(params, batch), parameter)

    return loss_fn


def test_recomputation_with_a_modules_own_parameter_is_refused() -> None:
    ones = torch.ones(3, device=get_device())
    parameter = torch.nn.Parameter(ones)
    params = make_params()
    loss = recomputing_loss(parameter)
    with pytest.raises(ValueError, match="a module's own parameter"):
        run_step(params, [make_row()], loss)


def test_recomputation_with_a_parameter_that_shares_memory_with_params() -> None:
    ones = torch.ones(3, device=get_device())
    parameter = torch.nn.Parameter(ones)
    params = {"w": parameter.detach()}

    new_params = run_step(params, [make_row()], recomputing_loss(parameter))

    assert new_params["w"].tolist() == [-0.5, -2, -3.5]
