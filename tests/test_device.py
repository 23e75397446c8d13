"""Steps on a device that is not the CPU: the CPU's answer with every optimizer and setting, and every wait is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs import models
from proofs.devices import Waits, lazy, moved, placed
from proofs.strategies import Batch, assert_same, cut, weights_of
from purestep import optim, tree
from tests.on_a_device import EXACT, OPTIMIZERS, assert_near, one_leaf, ones, problem, row

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "grads": {"normalize": "grads"},
    "skip": {"on_nonfinite": "skip"},
    "donate": {"donate": True},
    "all": {"normalize": "grads", "on_nonfinite": "skip", "donate": True},
    "accum_dtype": {"accum_dtype": torch.float64},
    "torch.func": {"grad_and_value": torch.func.grad_and_value},
}
GROUPS: dict[str, Callable[[Batch], list[Batch]]] = {
    "many": lambda batch: cut(batch, [[0, 1], [], [2], [3]]),
    "infinite": lambda batch: [{**batch, "y": batch["y"] * torch.inf}],
}


def started(optimizer: optim.Optimizer, params: Any) -> Any:
    """A state as if training had gone on for a while."""
    return tree.map(
        lambda leaf: torch.full_like(leaf, 2 if leaf.dtype == torch.int64 else 1),
        optimizer.init(params),
    )


def on_both(
    optimizer: optim.Optimizer, group: list[Batch], **settings: Any
) -> tuple[Any, Any, Any]:
    """Where a step begins, and what comes of it: on the host, and on the device without a wait."""
    make: Callable[..., Any] = ps.make_update_step
    step = make(models.integer_loss, optimizer, weight_fn=weights_of, **settings)
    params = problem()[0]
    state = (params, started(optimizer, params))
    there = moved(params)
    state_there = (there, placed(state[1], optimizer.init(there)))
    group_there = moved(group)
    expected = step(*tree.map(torch.clone, state), group)
    with Waits() as waits:
        actual = step(*state_there, group_there)
    assert waits.seen == []
    assert devices(actual[:2]) == devices(state_there), "state stays where it is"
    return state, expected, actual


@pytest.mark.parametrize("name", ["masked", "all of lion", "all of adamw"])
def test_state_loaded_to_the_device(name: str) -> None:
    """As ``torch.load(map_location=)`` brings it."""
    params, batch = problem()
    optimizer = OPTIMIZERS[name]
    state = (params, started(optimizer, params))
    step = ps.make_update_step(models.integer_loss, optimizer, weight_fn=weights_of)
    there, batch_there = moved((state, batch))
    with Waits() as waits:
        actual = step(there[0], there[1], [batch_there])
    assert waits.seen == []
    assert set(devices(actual)) == {lazy()}
    assert_near(actual[:2], step(*state, [batch])[:2], state)


def devices(state: Any) -> list[torch.device]:
    return [leaf.device for leaf in tree.leaves_of(state)]


def assert_as_on_the_host(name: str, group: list[Batch], **settings: Any) -> None:
    state, expected, actual = on_both(OPTIMIZERS[name], group, **settings)
    if name in EXACT or not expected[2].applied:
        assert_same(placed(actual[:2], state), expected[:2])
    else:
        assert_near(actual[:2], expected[:2], state)
    loss, *counts = placed(actual[2], expected[2])._replace(grad_norm=())
    assert_same((loss, counts), (expected[2].loss, [*expected[2]._replace(grad_norm=())[1:]]))


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_with_every_setting(name: str, settings: str) -> None:
    group = GROUPS["many"](problem()[1])
    assert_as_on_the_host(name, group, **SETTINGS[settings])


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipping(name: str, donate: bool) -> None:
    """Nobody reads whether the step is taken, and yet the state is as it was."""
    state, expected, actual = on_both(
        OPTIMIZERS[name], GROUPS["infinite"](problem()[1]), on_nonfinite="skip", donate=donate
    )
    assert_same(placed(actual[:2], state), state)
    assert_same(placed(actual[:2], state), expected[:2])
    assert not actual[2].applied


@pytest.mark.parametrize("fused", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_algorithms_of_torch_wait_once(fused: type[torch.optim.Optimizer]) -> None:
    """They cannot be told to stay where they are, so the host reads whether to call them."""
    optimizer = optim.from_torch(fused, lr=0.5)
    params, batch = problem()
    there = moved(params)
    step = ps.make_update_step(models.integer_loss, optimizer, weight_fn=weights_of)
    state, batch_there = optimizer.init(there), moved(batch)
    with Waits() as waits:
        actual = step(there, state, [batch_there])
    assert waits.seen == ["aten::_local_scalar_dense"]
    expected = step(params, optimizer.init(params), [batch])
    # One formula for each leaf, in the same kernels or in those that torch calls foreach.
    assert_near(actual[:2], expected[:2], (params, optimizer.init(params)))


WEIGHTS = [torch.bool, torch.uint8, torch.int64, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("name", ["default", "grads"])
def test_weights_of_every_dtype(name: str, dtype: torch.dtype) -> None:
    assert_as_on_the_host("momentum", [problem(dtype)[1]], **SETTINGS[name])


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: float(x.sum()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: torch.equal(x, x),
        lambda x: x.nonzero(),
        lambda x: torch.tensor([1.0], device=x.device),
        lambda x: torch.ones(2).to(x.device),
        lambda x: x.clone().copy_(torch.ones(3)),
    ],
)
def test_every_wait_is_seen(read: Callable[[Tensor], Any]) -> None:
    """In a loss; in the step itself it is no different."""

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        read(params["w"].detach() * 2)
        return one_leaf(params, batch)

    params = {"w": torch.ones(3, device=lazy())}
    optimizer = optim.sgd(0.5)
    step = ps.make_update_step(loss_fn, optimizer, weight_fn=ones)
    data = row()
    with Waits() as waits:
        step(params, optimizer.init(params), [data])
    assert len(waits.seen) == 1
