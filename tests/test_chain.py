"""``chain``: transforms and an optimizer are one optimizer, in place too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import purestep as ps
from purestep import tree
from purestep.step import transition
from tests.optimizers import GRADS, PARAMS, TRANSFORMS, updated


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


def test_chain_uses_the_last_optimizers_own_update_() -> None:
    """Clipping in front of it does not take a fast in-place step away."""
    calls = []

    def update_(grads: Any, state: Any, params: Any, applied: Any) -> Any:
        calls.append(grads["w"])
        tree.map(lambda p, g: p.sub_(g), params, grads)
        return params, state

    own = ps.optim.descend(1.0)._replace(update_=update_)
    optimizer = ps.optim.chain(TRANSFORMS["clip"], own)
    params = tree.map(torch.clone, PARAMS)
    assert optimizer.update_ is not None
    new, _ = optimizer.update_(tree.map(torch.clone, GRADS), optimizer.init(params), params, None)
    assert len(calls) == 1
    assert new["w"].data_ptr() == params["w"].data_ptr()
    assert torch.equal(new["w"], PARAMS["w"] - calls[0])


@pytest.mark.parametrize("behind", ["clip", "decay", "momentum"])
def test_what_comes_behind_momentum_leaves_its_trace_alone(behind: str) -> None:
    """It may write to the updates that it is given, and they are not the state's memory."""
    first = ps.optim.momentum(0.5)
    optimizer = ps.optim.chain(first, TRANSFORMS[behind], ps.optim.descend(1.0))
    pure = in_place = (PARAMS, optimizer.init(PARAMS))
    assert optimizer.update_ is not None
    for _ in range(2):
        pure = optimizer.update(GRADS, pure[1], pure[0])
        given = tree.map(torch.clone, (GRADS, in_place[1], in_place[0]))
        in_place = updated(optimizer, "update_", *given)
    assert all(map(torch.equal, tree.leaves_of(in_place), tree.leaves_of(pure)))
    assert torch.equal(pure[1][0].trace["w"], 1.5 * GRADS["w"])


def delayed(grads: Any, state: Any, params: Any) -> Any:
    """The gradients of the step before; the state keeps those of this one."""
    return state, grads


@pytest.mark.parametrize("behind", ["clip", "decay", "momentum"])
def test_a_part_that_hands_on_its_state(behind: str) -> None:
    """Without ``update_``, its new state is written over what it handed on: that is copied before."""
    first = ps.optim.Transform(tree.zeros_like, delayed)
    optimizer = ps.optim.chain(first, TRANSFORMS[behind], ps.optim.descend(1.0))
    pure = in_place = (PARAMS, optimizer.init(PARAMS))
    assert optimizer.update_ is not None
    for scale in (1.0, -2.0, 3.0):
        grads = tree.map(lambda leaf, scale=scale: leaf * scale, GRADS)
        pure = optimizer.update(grads, pure[1], pure[0])
        given = tree.map(torch.clone, (grads, in_place[1], in_place[0]))
        in_place = updated(optimizer, "update_", *given)
        assert all(map(torch.equal, tree.leaves_of(in_place), tree.leaves_of(pure)))


def test_an_optimizer_that_swaps_its_buffers() -> None:
    """The old params become state, and the state the params, donated too."""
    swap = ps.optim.Optimizer(tree.zeros_like, lambda grads, state, params: (state, params))
    yes = torch.tensor(True)
    for donate in (False, True):
        params, state = tree.map(torch.clone, (PARAMS, swap.init(PARAMS)))
        moved, after = transition(swap, GRADS, state, params, yes, donate=donate)
        assert not any(leaf.any() for leaf in tree.leaves_of(moved))
        assert all(map(torch.equal, tree.leaves_of(after), tree.leaves_of(PARAMS)))


def test_an_update_that_was_replaced_is_not_run() -> None:
    """Neither in place, nor of lists of leaves."""
    params = {"w": torch.ones(2)}

    def half(grads: Any, state: Any, params: Any) -> Any:
        return native.update(tree.map(lambda grad: grad / 2, grads), state, params)

    native = ps.optim.sgd(1.0)
    halved = native._replace(update=half, update_=None)
    group = [{"x": torch.ones(1)}]
    for donate in (False, True):
        step = ps.make_update_step(
            lambda p, m: p["w"].sum() * m["x"], halved, weight_fn=lambda m: m["x"], donate=donate
        )
        own = tree.map(torch.clone, params)
        assert step(own, halved.init(own), group)[0]["w"].tolist() == [0.5, 0.5]
