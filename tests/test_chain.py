"""``chain``: transforms and an optimizer are one optimizer, in place too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import purestep as ps
from proofs.strategies import assert_same
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
        return params, state

    own = ps.optim.descend(1.0)._replace(update_=update_)
    optimizer = ps.optim.chain(TRANSFORMS["clip"], own)
    updated(optimizer, "update_", tree.map(torch.clone, GRADS), optimizer.init(PARAMS), PARAMS)
    assert len(calls) == 1
    assert not torch.equal(calls[0], GRADS["w"])


def delayed(grads: Any, state: Any, params: Any) -> Any:
    """The gradients of the step before; the state keeps those of this one."""
    return state, grads


FIRST = {
    "keeps a trace": ps.optim.momentum(0.5),
    "hands on its state": ps.optim.Transform(tree.zeros_like, delayed),
}


@pytest.mark.parametrize("behind", ["clip", "decay", "momentum"])
@pytest.mark.parametrize("first", FIRST)
def test_what_comes_behind_a_part_leaves_its_state_alone(first: str, behind: str) -> None:
    """It may write to the updates that it gets, and they are not the state's memory."""
    optimizer = ps.optim.chain(FIRST[first], TRANSFORMS[behind], ps.optim.descend(1.0))
    pure = in_place = (PARAMS, optimizer.init(PARAMS))
    for scale in (1.0, -2.0, 3.0):
        grads = tree.map(lambda leaf, scale=scale: leaf * scale, GRADS)
        pure = optimizer.update(grads, pure[1], pure[0])
        given = tree.map(torch.clone, (grads, in_place[1], in_place[0]))
        in_place = updated(optimizer, "update_", *given)
        assert_same(in_place, pure)


@pytest.mark.parametrize("donate", [False, True])
def test_an_optimizer_that_swaps_its_buffers(donate: bool) -> None:
    """The old params become state, and the state the params."""
    swap = ps.optim.Optimizer(tree.zeros_like, lambda grads, state, params: (state, params))
    params, state = tree.map(torch.clone, (PARAMS, swap.init(PARAMS)))
    moved, after = transition(swap, GRADS, state, params, torch.tensor(True), donate=donate)
    assert_same((moved, after), (tree.zeros_like(PARAMS), PARAMS))
