"""T8, optimizers. Each equals its ``torch.optim`` namesake over many steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import purestep as ps
from proofs.strategies import gamma
from purestep import tree

STEPS = 30
DTYPES = [torch.float64, torch.float32]
Optimizers = tuple[ps.optim.Optimizer, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]]


def decays(params: Any) -> Any:
    """Matrices decay, vectors do not."""
    return tree.map(lambda leaf: leaf.ndim > 1, params)


@st.composite
def sgds(draw: st.DrawFn) -> Optimizers:
    """``sgd`` and its namesake."""
    lr = draw(st.sampled_from([0.1, 0.01]))
    momentum = draw(st.sampled_from([0.0, 0.9]))
    nesterov = momentum > 0 and draw(st.booleans())
    decay = draw(st.sampled_from([0.0, 0.1]))
    return (
        ps.optim.sgd(lr, momentum, nesterov=nesterov, weight_decay=decay, mask=decays),
        lambda groups: torch.optim.SGD(
            [{**group, "weight_decay": decay * group["decays"]} for group in groups],
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
        ),
    )


@st.composite
def adamws(draw: st.DrawFn) -> Optimizers:
    """``adamw`` and its namesake."""
    lr = draw(st.sampled_from([0.1, 0.001]))
    b1, b2 = draw(st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.95)]))
    eps = draw(st.sampled_from([1e-8, 1e-3]))
    decay = draw(st.sampled_from([0.0, 0.1]))
    return (
        ps.optim.adamw(lr, b1, b2, eps, weight_decay=decay, mask=decays),
        lambda groups: torch.optim.AdamW(
            [{**group, "weight_decay": decay * group["decays"]} for group in groups],
            lr=lr,
            betas=(b1, b2),
            eps=eps,
        ),
    )


@given(st.one_of(sgds(), adamws()), st.sampled_from(DTYPES), st.integers(0, 2**20))
def test_equals_namesake(optimizers: Optimizers, dtype: torch.dtype, seed: int) -> None:
    """The same gradients for thirty steps: the same parameters, but for the rounding of each step."""
    optimizer, make_torch = optimizers
    generator = torch.Generator().manual_seed(seed)
    params = {
        "matrix": torch.randn(3, 2, generator=generator, dtype=dtype),
        "vector": torch.randn(4, generator=generator, dtype=dtype),
    }
    theirs = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
    torch_optimizer = make_torch(
        [
            {"params": [theirs["matrix"]], "decays": True},
            {"params": [theirs["vector"]], "decays": False},
        ]
    )
    opt_state = optimizer.init(params)
    travelled = tree.map(lambda leaf: leaf.abs(), params)
    for _ in range(STEPS):
        grads = tree.map(
            lambda leaf: torch.randn(leaf.shape, generator=generator, dtype=dtype), params
        )
        before = params
        params, opt_state = optimizer.update(grads, opt_state, params)
        moved = tree.map(lambda new, old: (new - old).abs(), params, before)
        travelled = tree.map(torch.add, travelled, moved)
        for leaf, grad in zip(tree.leaves_of(theirs), tree.leaves_of(grads), strict=True):
            leaf.grad = grad
        torch_optimizer.step()
    # Both round a dozen times in each step, relative to how far the step goes; the decaying means keep
    # what they rounded before, so a step carries the roundings of all steps before it.
    roundings = gamma(2 * 12 * STEPS, dtype)
    for ours, their, distance in zip(
        *map(tree.leaves_of, (params, theirs, travelled)), strict=True
    ):
        assert ((ours - their).abs() <= roundings * distance.max()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [ps.optim.sgd, ps.optim.adamw])
def test_schedule_and_tensor(make: Callable[..., ps.optim.Optimizer], dtype: torch.dtype) -> None:
    """A learning rate that is a number, a tensor or a schedule of the same value: the same, to rounding."""
    params = {"w": torch.linspace(-1, 1, 5, dtype=dtype)}
    rate = 0.125
    results = []
    for learning_rate in (rate, torch.tensor(rate, dtype=dtype), lambda step: 0 * step + rate):
        optimizer = make(learning_rate)
        state = (params, optimizer.init(params))
        for _ in range(3):
            state = optimizer.update(tree.map(torch.cos, state[0]), state[1], state[0])
        results.append(state[0]["w"])
    for other in results[1:]:
        assert torch.equal(results[0], other)
        assert other.dtype == dtype


def test_schedule_is_followed() -> None:
    """Step t moves by the rate of step t, counted from 0."""
    schedule = ps.optim.linear_schedule(1.0, 0.0, 4)
    optimizer = ps.optim.sgd(schedule)
    params, opt_state = torch.tensor(0.0, dtype=torch.float64), optimizer.init(torch.tensor(0.0))
    places = []
    for _ in range(5):
        params, opt_state = optimizer.update(torch.ones((), dtype=torch.float64), opt_state, params)
        places.append(float(params))
    assert places == [-1.0, -1.75, -2.25, -2.5, -2.5]
