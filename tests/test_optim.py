"""Each optimizer by itself: its state, its defaults, what it clips and decays. T8 compares them with torch."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import purestep as ps
from proofs.strategies import matrices
from purestep import tree
from purestep.testing.bounds import gamma
from tests.optimizers import GRADS, PARAMS, RECIPES, WAYS, updated


@given(st.floats(0.1, 10))
def test_clipping(max_norm: float) -> None:
    clip = ps.optim.clip_by_global_norm(max_norm)
    clipped, _ = clip.update(GRADS, (), PARAMS)
    norm = tree.global_norm(GRADS)
    assert tree.global_norm(clipped) <= min(max_norm, float(norm)) * (1 + 1e-6)
    if norm <= max_norm:
        assert torch.equal(clipped["w"], GRADS["w"])


def test_mask_as_a_tree_or_a_function() -> None:
    masks: list[Any] = [matrices, matrices(PARAMS)]
    for mask in masks:
        optimizer = ps.optim.adamw(0.1, weight_decay=0.5, mask=mask)
        zero = tree.zeros_like(PARAMS)
        new, _ = optimizer.update(zero, optimizer.init(PARAMS), PARAMS)
        assert torch.equal(new["b"], PARAMS["b"])
        assert torch.allclose(new["w"], torch.full((2, 2), 0.95))
    assert set(ps.optim.adamw(0.1, mask=True).init(PARAMS)) == {"decay"}
    for mask in ({"w": True}, 1, tree.map(lambda leaf: torch.tensor(True), PARAMS)):
        with pytest.raises(
            ValueError, match="the weight-decay mask must be a tree of bools like the params"
        ):
            ps.optim.sgd(0.1, weight_decay=0.1, mask=mask).init(PARAMS)


def test_state_is_complete_and_detached() -> None:
    """The structure never changes, and params that require grad do not reach into the state."""
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), PARAMS)
    algorithms = [
        ps.optim.from_torch(torch.optim.Adagrad, initial_accumulator_value=0.5),
        ps.optim.from_torch(torch.optim.ASGD),
    ]
    for optimizer in [*(make(0.1) for make in RECIPES.values()), *algorithms]:
        state = optimizer.init(params)
        _, after = optimizer.update(GRADS, state, PARAMS)
        assert tree.flatten(state)[1] == tree.flatten(after)[1]
        assert not any(leaf.requires_grad for leaf in tree.leaves_of(state))


def test_what_does_not_decay_is_not_touched() -> None:
    """Not even multiplied by zero."""
    params = {"w": torch.ones(2, 2), "b": torch.full((2,), float("inf"))}
    decay = ps.optim.add_decayed_weights(0.5, matrices)
    for update in (decay.update, torch.vmap(decay.update)):
        given = (GRADS, decay.init(params), params)
        given = given if update is decay.update else tree.map(lambda leaf: leaf[None], given)
        updates, _ = update(*given)
        assert torch.equal(updates["b"].squeeze(0), GRADS["b"])
        assert torch.equal(updates["w"].squeeze(0), GRADS["w"] + 0.5)


def test_sgd_refuses_nesterov_without_momentum() -> None:
    with pytest.raises(
        ValueError, match="nesterov=True looks ahead along the momentum, but momentum=0"
    ):
        ps.optim.sgd(0.1, nesterov=True)


def test_update_keeps_its_hands_off() -> None:
    """``update`` leaves all that it is given as it is, where kernels run too."""
    for make in RECIPES.values():
        optimizer = make(0.1)
        given = (GRADS, optimizer.init(PARAMS), PARAMS)
        before = tree.map(torch.clone, given)
        optimizer.update(*given)
        assert all(map(torch.equal, tree.leaves_of(before), tree.leaves_of(given)))


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


@pytest.mark.parametrize(
    ("optimizer", "namesake"),
    [
        (ps.optim.adamw(0.1), torch.optim.AdamW),
        (ps.optim.sgd(0.1), torch.optim.SGD),
        (ps.optim.chain(ps.optim.scale_by_adam(), ps.optim.descend(0.1)), torch.optim.Adam),
    ],
)
def test_defaults_are_torchs_in_effect(
    optimizer: ps.optim.Optimizer, namesake: type[torch.optim.Optimizer]
) -> None:
    """On gradients of the size of eps and far from it, in float64: twelve roundings in each of five steps."""
    params = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    grad = torch.tensor([1e-8, -3e-9, 1.0, 0.0], dtype=torch.float64)
    theirs = params.clone().requires_grad_()
    make: Any = namesake
    usual = make([theirs], lr=0.1)
    state = optimizer.init(params)
    for number in range(5):
        theirs.grad = grad * (1 + number)
        usual.step()
        params, state = optimizer.update(grad * (1 + number), state, params)
    bound = gamma(2 * 5 * 12, torch.float64) * (params.abs().max() + 5 * 0.1)
    assert (params - theirs.detach()).abs().max() <= bound


def test_lions_defaults_in_effect() -> None:
    """After a gradient of 1, μ is 0.01, and sign(0.9 μ + 0.1 g) turns at g = −0.09."""
    optimizer = ps.optim.lion(1.0)
    params = torch.zeros(2, dtype=torch.float64)
    ones = torch.ones(2, dtype=torch.float64)
    params, state = optimizer.update(ones, optimizer.init(params), params)
    params, _ = optimizer.update(torch.tensor([-0.089, -0.091]).double(), state, params)
    assert params.tolist() == [-2.0, 0.0]


def test_lion_passes_on_what_is_not_finite() -> None:
    """torch's sign of NaN is 0, which would be seen by nobody."""
    optimizer = ps.optim.lion(0.1)
    params = torch.ones(3)
    grad = torch.tensor([float("nan"), 0.0, float("inf")])
    moved, _ = optimizer.update(grad, optimizer.init(params), params)
    assert moved.isnan().tolist() == [True, False, True]


def test_sums_are_divided_before_the_optimizer() -> None:
    """With ``normalize="grads"`` too."""
    seen = []

    def update(grads: Any, state: Any, params: Any) -> Any:
        seen.append(grads)
        return grads, state

    optimizer = ps.optim.chain(ps.optim.Transform(lambda params: (), update), ps.optim.sgd(0.1))
    step = ps.make_update_step(
        lambda p, m: p["w"].sum() * m, optimizer, weight_fn=torch.ones_like, normalize="grads"
    )
    step(PARAMS, optimizer.init(PARAMS), [torch.ones(4)])
    assert torch.equal(seen[0]["w"], torch.ones(2, 2))


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
    assert all(map(torch.equal, *map(tree.leaves_of, results)))
