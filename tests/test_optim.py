"""Optimizers: how they compose, and what they refuse. T8 compares them with torch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

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
    with pytest.raises(TypeError, match="part 1 must be a Transform or an Optimizer, got float"):
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
    new, _ = optimizer.update_(tree.map(torch.clone, GRADS), optimizer.init(params), params)
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


def matrices(params: Any) -> Any:
    """A mask: matrices decay."""
    return tree.map(lambda leaf: leaf.ndim > 1, params)


RECIPES: dict[str, Any] = {
    "descend": ps.optim.descend,
    "momentum": lambda rate: ps.optim.sgd(
        rate, 0.9, nesterov=True, weight_decay=0.1, mask=matrices
    ),
    "clipped": lambda rate: ps.optim.chain(
        ps.optim.clip_by_global_norm(1.0), ps.optim.sgd(rate, 0.5)
    ),
    "adamw": ps.optim.adamw,
    "masked adamw": lambda rate: ps.optim.adamw(rate, 0.5, 0.9, weight_decay=0.1, mask=matrices),
    "lion": lambda rate: ps.optim.lion(rate, weight_decay=0.1, mask=matrices),
}
RATES = [1e-2, torch.tensor(1e-2), ps.optim.linear_schedule(3e-2, 1e-3, 3)]
SHAPES = [(), (7,), (64,), (33, 5), (128, 3), (1003,)]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_kernels_and_plain_arithmetic_agree(name: str, dtype: torch.dtype, rate: Any) -> None:
    """In place, out of place and under a transform: the same bits, at any length and whatever the rate is."""
    optimizer = RECIPES[name](rate)
    assert optimizer.update_ is not None
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    state = in_place = (params, optimizer.init(params))
    batched = tree.map(lambda leaf: torch.stack([leaf, leaf]), state)
    for step in range(4):
        grads = [torch.randn(shape, generator=generator) for shape in SHAPES]
        scale = torch.tensor(7.3, dtype=torch.float64) if step % 2 else None

        def under_vmap(
            grads: Any, state: Any, params: Any, scale: torch.Tensor | None = scale
        ) -> Any:
            return optimizer.update(grads, state, params, grad_scale=scale)

        both = [torch.stack([grad, -grad]) for grad in grads]
        batched = torch.vmap(under_vmap)(both, batched[1], batched[0])
        given = tree.map(torch.clone, grads)
        new = optimizer.update(grads, state[1], state[0], grad_scale=scale)
        assert all(map(torch.equal, grads, given))
        own_params, own_state = tree.map(torch.clone, in_place)
        in_place = optimizer.update_(given, own_state, own_params, grad_scale=scale)
        state = new
    for other in (in_place, tree.map(lambda leaf: leaf[0], batched)):
        assert all(map(torch.equal, tree.leaves_of(other), tree.leaves_of(state)))


def test_update_keeps_its_hands_off() -> None:
    """``update`` leaves all that it is given as it is, where kernels run too."""
    for make in RECIPES.values():
        optimizer = make(0.1)
        given = (GRADS, optimizer.init(PARAMS), PARAMS)
        before = tree.map(torch.clone, given)
        optimizer.update(*given, grad_scale=torch.tensor(3.0))
        assert all(map(torch.equal, tree.leaves_of(before), tree.leaves_of(given)))


class Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_one_kernel_for_all_leaves() -> None:
    """AdamW in float32 is one call of torch's fused kernel for all leaves that decay alike, and of little else."""
    params = [torch.ones(16) for _ in range(50)]
    optimizer = ps.optim.adamw(0.1)
    opt_state = optimizer.init(params)
    assert optimizer.update_ is not None
    with Calls() as calls:
        optimizer.update_(params, opt_state, tree.map(torch.clone, params))
    assert calls.counts.pop("_fused_adamw_") == 1
    calls.counts.pop("clone")
    views = {"view", "slice", "alias", "detach"}
    assert sum(count for name, count in calls.counts.items() if name not in views) < 10
