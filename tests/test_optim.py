"""Optimizers: how they compose, and what they refuse. T8 compares them with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import purestep as ps
from purestep import tree

PARAMS = {"w": torch.ones(2, 2), "b": torch.ones(2)}
GRADS = {"w": torch.full((2, 2), 3.0), "b": torch.full((2,), -2.0)}
TRANSFORMS = {
    "clip": ps.optim.clip_by_global_norm(1.0),
    "momentum": ps.optim.momentum(0.5, nesterov=True),
    "adam": ps.optim.scale_by_adam(),
    "decay": ps.optim.add_decayed_weights(0.5),
}


def test_chain_of_transforms_is_a_transform() -> None:
    chained = ps.optim.chain(TRANSFORMS["clip"], TRANSFORMS["momentum"])
    assert isinstance(chained, ps.optim.Transform)
    nested = ps.optim.chain(chained, ps.optim.sgd(0.1))
    assert isinstance(nested, ps.optim.Optimizer)
    flat = ps.optim.chain(TRANSFORMS["clip"], TRANSFORMS["momentum"], ps.optim.sgd(0.1))
    results = [o.update(GRADS, o.init(PARAMS), PARAMS)[0] for o in (nested, flat)]
    assert torch.equal(results[0]["w"], results[1]["w"])


def test_chain_refuses() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ps.optim.chain()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"part 0 of 2 is an Optimizer.*put it last"):
        ps.optim.chain(ps.optim.sgd(0.1), ps.optim.sgd(0.1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="part 1 is a float, not a Transform"):
        ps.optim.chain(TRANSFORMS["clip"], 0.1)  # type: ignore[type-var]


@pytest.mark.parametrize("name", TRANSFORMS)
@given(scale=st.sampled_from([0.25, 1.0, 8.0]))
def test_grad_scale_divides(name: str, scale: float) -> None:
    """``grad_scale`` is a division of the gradients, exactly so for a power of two."""
    transform = TRANSFORMS[name]
    state = transform.init(PARAMS)
    scaled = tree.map(lambda g: g * scale, GRADS)
    folded = transform.update(scaled, state, PARAMS, grad_scale=torch.tensor(scale))
    plain = transform.update(GRADS, state, PARAMS)
    assert all(map(torch.equal, tree.leaves_of(folded), tree.leaves_of(plain)))


def test_grad_scale_for_whom_it_is_unknown() -> None:
    """A transform of one's own with three arguments gets gradients that are divided already."""
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


@given(st.floats(0.1, 10))
def test_clipping(max_norm: float) -> None:
    clip = ps.optim.clip_by_global_norm(max_norm)
    clipped, _ = clip.update(GRADS, (), PARAMS)
    norm = tree.global_norm(GRADS)
    assert tree.global_norm(clipped) <= min(max_norm, float(norm)) * (1 + 1e-6)
    if norm <= max_norm:
        assert torch.equal(clipped["w"], GRADS["w"])


def test_mask_as_a_tree_or_a_function() -> None:
    def matrices(params: Any) -> Any:
        return tree.map(lambda leaf: leaf.ndim > 1, params)

    masks: list[Any] = [matrices, matrices(PARAMS)]
    for mask in masks:
        optimizer = ps.optim.adamw(0.1, weight_decay=0.5, mask=mask)
        zero = tree.zeros_like(PARAMS)
        new, _ = optimizer.update(zero, optimizer.init(PARAMS), PARAMS)
        assert torch.equal(new["b"], PARAMS["b"])
        assert torch.allclose(new["w"], torch.full((2, 2), 0.95))
    for mask in ({"w": True}, True, tree.map(lambda leaf: torch.tensor(True), PARAMS)):
        with pytest.raises(
            ValueError, match="the weight-decay mask must be a tree of bools like the params"
        ):
            ps.optim.sgd(0.1, weight_decay=0.1, mask=mask).init(PARAMS)


def test_state_is_complete_and_detached() -> None:
    """The structure never changes, and params that require grad do not reach into the state."""
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), PARAMS)
    for optimizer in (ps.optim.sgd(0.1, 0.9), ps.optim.adamw(0.1)):
        state = optimizer.init(params)
        _, after = optimizer.update(GRADS, state, PARAMS)
        assert tree.flatten(state)[1] == tree.flatten(after)[1]
        assert not any(leaf.requires_grad for leaf in tree.leaves_of(state))


def test_chain_uses_the_last_optimizers_own_update_() -> None:
    """Clipping in front of it does not take a fast in-place step away."""
    calls = []

    def update_(grads: Any, state: Any, params: Any) -> Any:
        calls.append(grads["w"])
        tree.map(lambda p, g: p.sub_(g), params, grads)
        return params, state

    own = ps.optim.descend(1.0)._replace(update_=update_)
    optimizer = ps.optim.chain(TRANSFORMS["clip"], own)
    params = tree.map(torch.clone, PARAMS)
    assert optimizer.update_ is not None
    new, _ = optimizer.update_(GRADS, optimizer.init(params), params)
    assert len(calls) == 1
    assert new["w"].data_ptr() == params["w"].data_ptr()
    assert torch.equal(new["w"], PARAMS["w"] - calls[0])


def test_sgd_refuses_nesterov_without_momentum() -> None:
    with pytest.raises(
        ValueError, match="nesterov=True looks ahead along the momentum, but momentum=0"
    ):
        ps.optim.sgd(0.1, nesterov=True)


def test_schedules_refuse() -> None:
    with pytest.raises(ValueError, match="transition_steps=0 must be positive"):
        ps.optim.linear_schedule(0.0, 1.0, 0)
    with pytest.raises(ValueError, match="decay_steps=-1 must be positive"):
        ps.optim.cosine_decay_schedule(1.0, -1)
    with pytest.raises(ValueError, match=r"decay_steps=5 is the whole length .* warmup_steps=5"):
        ps.optim.warmup_cosine_decay_schedule(0.0, 1.0, 5, 5)
    with pytest.raises(
        ValueError, match="2 schedules have 1 boundaries between them, but 2 were given"
    ):
        ps.optim.join_schedules([lambda s: s, lambda s: s], [1, 2])


def test_schedules_keep_their_precision() -> None:
    schedule = ps.optim.warmup_cosine_decay_schedule(0.0, 0.3, 10, 100, 0.03)
    assert schedule(torch.tensor(5)) == pytest.approx(0.15, rel=1e-15)
    assert schedule(torch.tensor(10)) == pytest.approx(0.3, rel=1e-15)
    assert schedule(torch.tensor(1000)) == pytest.approx(0.03, rel=1e-15)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1), ps.optim.linear_schedule(0.3, 0.1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_descent_has_one_rounding(rate: Any, dtype: torch.dtype) -> None:
    """In place, out of place and under a transform: the same bits, at any length and whatever the rate is."""
    optimizer = ps.optim.descend(rate)
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(n, generator=generator).to(dtype) for n in (1, 7, 64, 1003)]
    grads = [torch.randn(len(p), generator=generator) for p in params]
    plain, state = optimizer.update(grads, optimizer.init(params), params)
    assert optimizer.update_ is not None
    own = [p.clone() for p in params]
    in_place, in_place_state = optimizer.update_(grads, optimizer.init(own), own)
    assert all(map(torch.equal, in_place, plain))
    assert torch.equal(in_place_state.step, state.step)
    together = torch.vmap(lambda g, p: optimizer.update(g, optimizer.init(params), p)[0])
    batched = together([torch.stack([g, -g]) for g in grads], [torch.stack([p, p]) for p in params])
    assert all(torch.equal(b[0], p) for b, p in zip(batched, plain, strict=True))
