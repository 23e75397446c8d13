"""Each optimizer by itself: its state, its defaults, what it clips and decays. T8: torch's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import purestep as ps
from proofs.strategies import assert_same, matrices
from proofs.test_t08_optimizers import Namesake
from purestep import tree
from purestep.testing.bounds import gamma
from tests.optimizers import GRADS, PARAMS, RECIPES, WAYS, updated


@given(st.floats(0.1, 10))
def test_clipping(max_norm: float) -> None:
    """To a norm of five; a shorter gradient stays, to the bit."""
    grads = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor(-4.0)}
    clipped, _ = ps.optim.clip_by_global_norm(max_norm).update(grads, (), PARAMS)
    if max_norm < 5:
        assert tree.global_norm(clipped) == pytest.approx(max_norm, rel=1e-6)
    else:
        assert_same(clipped, grads)


def test_a_mask_is_a_tree_or_a_function() -> None:
    masks: list[Any] = [matrices, matrices(PARAMS)]
    for mask in masks:
        optimizer = ps.optim.adamw(0.1, weight_decay=0.5, mask=mask)
        new, _ = optimizer.update(tree.zeros_like(PARAMS), optimizer.init(PARAMS), PARAMS)
        assert torch.equal(new["b"], PARAMS["b"])
        assert torch.allclose(new["w"], torch.full((2, 2), 0.95))
    assert set(ps.optim.adamw(0.1, mask=True).init(PARAMS)) == {"decay"}
    for mask in ({"w": True}, 1, tree.map(lambda leaf: torch.tensor(True), PARAMS)):
        with pytest.raises(ValueError, match="the weight-decay mask must be a tree of bools like"):
            ps.optim.sgd(0.1, weight_decay=0.1, mask=mask).init(PARAMS)


@pytest.mark.parametrize("transform", [lambda f: f, torch.vmap])
def test_what_does_not_decay_is_not_touched(transform: Any) -> None:
    """Not even multiplied by zero."""
    params = {"w": torch.ones(2, 2), "b": torch.full((2,), float("inf"))}
    decay = ps.optim.add_decayed_weights(0.5, matrices)
    given = (GRADS, decay.init(params), params)
    if transform is torch.vmap:
        given = tree.map(lambda leaf: leaf[None], given)
    updates, _ = transform(decay.update)(*given)
    assert torch.equal(updates["b"].squeeze(0), GRADS["b"])
    assert torch.equal(updates["w"].squeeze(0), GRADS["w"] + 0.5)


def test_sgd_refuses_nesterov_without_momentum() -> None:
    with pytest.raises(
        ValueError, match="nesterov=True looks ahead along the momentum, but momentum=0"
    ):
        ps.optim.sgd(0.1, nesterov=True)


STATES = {
    **RECIPES,
    "torch's Adagrad": lambda rate: ps.optim.from_torch(
        torch.optim.Adagrad, rate, initial_accumulator_value=0.5
    ),
    "torch's ASGD": lambda rate: ps.optim.from_torch(torch.optim.ASGD, rate),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_complete_and_detached_and_update_leaves_it_alone(name: str) -> None:
    """The structure never changes, and params that require grad do not reach into the state."""
    optimizer = STATES[name](0.1)
    state = optimizer.init(tree.map(lambda leaf: leaf.clone().requires_grad_(), PARAMS))
    given = (GRADS, state, PARAMS)
    before = tree.map(torch.clone, given)
    _, after = optimizer.update(*given)
    assert tree.flatten(state)[1] == tree.flatten(after)[1]
    assert not any(leaf.requires_grad for leaf in tree.leaves_of(state))
    assert_same(given, before)


PAPERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (ps.optim.adamw, {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 1e-2}),
    "scale_by_adam": (ps.optim.scale_by_adam, {"b1": 0.9, "b2": 0.999, "eps": 1e-8}),
    "sgd": (ps.optim.sgd, {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}),
    "lion": (ps.optim.lion, {"b1": 0.9, "b2": 0.99, "weight_decay": 0.0}),
    "momentum": (ps.optim.momentum, {"nesterov": False}),
}


@pytest.mark.parametrize("name", PAPERS)
def test_defaults_are_the_papers(name: str) -> None:
    """Adam's [Kingma and Ba, 2015], AdamW's as in torch, Lion's [Chen et al., 2023]."""
    make, wanted = PAPERS[name]
    own = inspect.signature(make).parameters
    defaults = {key: p.default for key, p in own.items() if p.default is not p.empty}
    defaults.pop("mask", None)
    assert defaults == wanted


NAMESAKES: dict[Any, ps.optim.Optimizer] = {
    torch.optim.AdamW: ps.optim.adamw(0.1),
    torch.optim.SGD: ps.optim.sgd(0.1),
    torch.optim.Adam: ps.optim.chain(ps.optim.scale_by_adam(), ps.optim.descend(0.1)),
}


@pytest.mark.parametrize("namesake", NAMESAKES)
def test_defaults_are_torchs_in_effect(namesake: Any) -> None:
    """On gradients of the size of eps and far from it: twelve roundings in each of five steps."""
    params = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    grad = torch.tensor([1e-8, -3e-9, 1.0, 0.0], dtype=torch.float64)
    usual = Namesake(params, lambda leaves: namesake(leaves, lr=0.1))
    state = NAMESAKES[namesake].init(params)
    for number in range(1, 6):
        usual.step(grad * number)
        params, state = NAMESAKES[namesake].update(grad * number, state, params)
    bound = gamma(2 * 5 * 12, torch.float64) * (params.abs().max() + 5 * 0.1)
    assert (params - usual.params).abs().max() <= bound


def test_lions_defaults_in_effect() -> None:
    """After a gradient of 1, μ is 0.01, and sign(0.9 μ + 0.1 g) turns at g = -0.09."""
    optimizer = ps.optim.lion(1.0)
    params = torch.zeros(2, dtype=torch.float64)
    params, state = optimizer.update(torch.ones_like(params), optimizer.init(params), params)
    params, _ = optimizer.update(torch.tensor([-0.089, -0.091]).double(), state, params)
    assert params.tolist() == [-2.0, 0.0]


def test_lion_passes_on_what_is_not_finite() -> None:
    """torch's sign of NaN is 0, which would hide it."""
    optimizer, params = ps.optim.lion(0.1), torch.ones(3)
    grad = torch.tensor([float("nan"), 0.0, float("inf")])
    moved, _ = optimizer.update(grad, optimizer.init(params), params)
    assert moved.isnan().tolist() == [True, False, True]


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_a_half_precision_gradient_is_what_it_is_in_float32(
    name: str, dtype: torch.dtype, half: torch.dtype, method: str
) -> None:
    """To the bit: 300² is no number of float16, and 257 none of bfloat16."""
    optimizer = RECIPES[name](0.1)
    params = [torch.ones(2, 2, dtype=dtype), torch.ones(3, dtype=dtype)]
    grads = [torch.tensor([[300.0, -3e4], [1e-4, 0.0]]), torch.tensor([1e-4, 257.0, -6e-8])]
    results = []
    for kind in (half, torch.float32):
        state = (params, optimizer.init(params))
        for _ in range(2):
            own = [grad.to(half).to(kind) for grad in grads]
            ours, opt_state = tree.map(torch.clone, state)
            state = updated(optimizer, method, own, opt_state, ours)
        results.append(state)
    assert_same(*results)
