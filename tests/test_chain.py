"""``chain``: transforms and an optimizer are one optimizer, in place too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import purestep as ps
from purestep import tree
from tests.optimizers import GRADS, PARAMS, TRANSFORMS


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

    def update_(grads: Any, state: Any, params: Any) -> Any:
        calls.append(grads["w"])
        tree.map(lambda p, g: p.sub_(g), params, grads)
        return params, state

    own = ps.optim.descend(1.0)._replace(update_=update_, takes=())
    optimizer = ps.optim.chain(TRANSFORMS["clip"], own)
    params = tree.map(torch.clone, PARAMS)
    assert optimizer.update_ is not None
    new, _ = optimizer.update_(tree.map(torch.clone, GRADS), optimizer.init(params), params)
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
        in_place = optimizer.update_(*given)
    assert all(map(torch.equal, tree.leaves_of(in_place), tree.leaves_of(pure)))
    assert torch.equal(pure[1][0].trace["w"], 1.5 * GRADS["w"])


@pytest.mark.parametrize("takes", [(), ("grad_scale",), ("applied",), ("grad_scale", "applied")])
def test_only_keywords_that_are_declared_are_passed(takes: tuple[str, ...]) -> None:
    """Others are done before: gradients are divided, and the scalar is read on the host."""
    passed: list[set[str]] = []

    def update(grads: Any, state: Any, params: Any, **how: Any) -> Any:
        passed.append({*how})
        scale = how.get("grad_scale")
        scale = 1.0 if scale is None else scale
        applied = how.get("applied")
        if applied is None or applied:
            params = tree.map(lambda p, g: p.sub_(g / scale), params, grads)
        return params, state

    optimizer = ps.optim.Optimizer(lambda _: (), update, update, takes=takes)
    chained = ps.optim.chain(ps.optim.chain(optimizer))
    assert chained.update_ is not None
    scale = torch.tensor(2.0)
    for applied in (True, False):
        grads, params = tree.map(torch.clone, (GRADS, PARAMS))
        params, _ = chained.update_(
            grads, (((),),), params, grad_scale=scale, applied=torch.tensor(applied)
        )
        expected = PARAMS["w"] - GRADS["w"] / 2 if applied else PARAMS["w"]
        assert torch.equal(params["w"], expected)
    wanted = {"applied"} & {*takes} | {"grad_scale"} & {*takes}
    assert all(keywords <= wanted for keywords in passed)
    assert len(passed) == (2 if "applied" in takes else 1)
    pure, _ = chained.update(GRADS, (((),),), tree.map(torch.clone, PARAMS), grad_scale=scale)
    assert torch.equal(pure["w"], PARAMS["w"] - GRADS["w"] / 2)
    assert passed[-1] == {"grad_scale"} & {*takes}


def test_an_update_that_was_replaced_is_not_run() -> None:
    """Neither in place, nor of lists of leaves."""
    params = {"w": torch.ones(2)}

    def half(grads: Any, state: Any, params: Any) -> Any:
        return native.update(tree.map(lambda grad: grad / 2, grads), state, params)

    native = ps.optim.sgd(1.0)
    halved = native._replace(update=half, update_=None, takes=())
    group = [{"x": torch.ones(1)}]
    for donate in (False, True):
        step = ps.make_update_step(
            lambda p, m: p["w"].sum() * m["x"], halved, weight_fn=lambda m: m["x"], donate=donate
        )
        own = tree.map(torch.clone, params)
        assert step(own, halved.init(own), group)[0]["w"].tolist() == [0.5, 0.5]
