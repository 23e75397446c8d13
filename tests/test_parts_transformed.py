"""``partition`` under transforms: ensembles one by one, and derivatives of each part alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.strategies import assert_same, labels
from purestep import tree
from tests.parts import NATIVE, drawn, exact_group, exact_loss, exact_params, muon_and_adamw, split


def batched(*states: Any) -> Any:
    """An ensemble."""
    return tree.map(lambda *leaves: torch.stack(leaves), *states)


def test_vmap_is_one_by_one() -> None:
    """An ensemble of native parts steps as its members do, to the bit."""
    optimizer = ps.optim.partition(
        labels, {"matrix": ps.optim.adamw(0.1, weight_decay=0.1), "rest": NATIVE["rest"]}
    )
    members = [drawn(seed, torch.float64) for seed in range(3)]
    states = [(params, optimizer.init(params)) for params, _ in members]
    ensemble = batched(*states)
    for number in range(3):
        grads = [history[number] for _, history in members]
        states = [
            optimizer.update(one, state, params)
            for one, (params, state) in zip(grads, states, strict=True)
        ]
        ensemble = torch.vmap(optimizer.update)(batched(*grads), ensemble[1], ensemble[0])
        assert_same(ensemble, batched(*states))


def test_vmap_of_the_step_is_one_by_one() -> None:
    """The whole step, on data without rounding: batched sums may round in another order."""
    optimizer = ps.optim.partition(labels, NATIVE)
    step = ps.make_update_step(exact_loss, optimizer, weight_fn=lambda m: m["w"])
    states, microbatches = [], exact_group()
    for seed in range(3):
        params = exact_params(seed)
        states.append((params, optimizer.init(params)))

    together = torch.vmap(step, in_dims=(0, 0, None))
    ensemble = batched(*states)
    for _ in range(2):
        states = [step(*state, microbatches)[:2] for state in states]
        ensemble = together(ensemble[0], ensemble[1], microbatches)[:2]
        assert_same(ensemble, batched(*states))


Derivative = Callable[[Callable[[Any], Tensor]], Callable[[Any], Any]]
DERIVATIVES: dict[str, Derivative] = {
    "grad": torch.func.grad,
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (tree.map(torch.cos, x),))[1],
    "vmap of grad": lambda f: (
        lambda x: torch.vmap(torch.func.grad(f))(
            tree.map(lambda leaf: torch.stack([leaf, leaf / 2]), x)
        )
    ),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_are_those_of_the_parts(name: str) -> None:
    """Two steps, differentiated by the gradients of the first: each part's derivative is its own."""
    optimizer = ps.optim.partition(labels, NATIVE)
    params, grads = drawn(5, torch.float64)
    derivative = DERIVATIVES[name]

    def objective(params: list[Tensor]) -> Tensor:
        return torch.stack([leaf.sin().sum() for leaf in params]).sum()

    def through(first: Any) -> Tensor:
        state = optimizer.update(first, optimizer.init(params), params)
        moved, _ = optimizer.update(grads[1], state[1], state[0])
        parts = split(moved)
        return objective(parts["matrix"]) + objective(parts["rest"])

    def part(label: str) -> Callable[[Any], Tensor]:
        def through_part(first: Any) -> Tensor:
            mine = split(params)[label]
            state = NATIVE[label].update(split(first)[label], NATIVE[label].init(mine), mine)
            moved, _ = NATIVE[label].update(split(grads[1])[label], state[1], state[0])
            return objective(moved)

        return through_part

    whole = derivative(through)(grads[0])
    separate = [derivative(part(label))(grads[0]) for label in NATIVE]
    summed = tree.map(torch.add, *separate)
    assert_same(whole, summed)
    assert all(leaf.abs().max() > 0 for leaf in tree.leaves_of(whole))


def test_a_learned_rate_of_one_part() -> None:
    """A rate that requires grad differentiates its own part, and no other."""
    params, grads = drawn(5, torch.float64)

    def moved(rate: Tensor) -> Any:
        optimizer = ps.optim.partition(
            labels, {"matrix": ps.optim.sgd(rate), "rest": ps.optim.sgd(0.1)}
        )
        return split(optimizer.update(grads[0], optimizer.init(params), params)[0])

    rate = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)
    parts = moved(rate)
    assert not any(leaf.requires_grad for leaf in parts["rest"])
    for leaf, grad in zip(parts["matrix"], split(grads[0])["matrix"], strict=True):
        (slope,) = torch.autograd.grad(leaf[0, 0], rate, retain_graph=True)
        assert slope == -grad[0, 0]


def test_torch_under_a_transform_is_refused() -> None:
    """With the algorithm that cannot be transformed by name."""
    params, grads = drawn(0)
    optimizer = muon_and_adamw()
    state = optimizer.init(params)
    with pytest.raises(ValueError, match=r"torch\.optim\.Muon steps in place"):
        torch.func.grad(lambda g: optimizer.update(g, state, params)[0]["head"]["scale"])(grads[0])
    with pytest.raises(ValueError, match=r"torch\.optim\.Muon steps in place"):
        torch.vmap(optimizer.update)(*map(batched, (grads[0], state, params)))
