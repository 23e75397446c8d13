"""States and gradients of other params are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import purestep as ps
from purestep import tree
from tests.optimizers import GRADS, PARAMS, RECIPES, WAYS, updated

OTHERS: dict[str, Any] = {
    "another name": {"w": torch.ones(2, 2), "c": torch.ones(2)},
    "one more": {**PARAMS, "z": torch.ones(3)},
    "one less": {"w": torch.ones(2, 2)},
    "what broadcasts": {"w": torch.ones(1, 2), "b": torch.ones(2)},
    "larger": {"w": torch.ones(50, 40), "b": torch.ones(40)},
    "integers": tree.map(lambda leaf: leaf.to(torch.int64), PARAMS),
    "float8": tree.map(lambda leaf: leaf.to(torch.float8_e4m3fn), PARAMS),
}
ADAMW = ps.optim.adamw(0.1)
STATEFUL: dict[str, ps.optim.Optimizer] = {
    **{name: RECIPES[name](0.1) for name in RECIPES if name not in ("descend", "clipped")},
    "clipped adamw": ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ps.optim.adamw(0.1)),
    "masters": ps.optim.master_weights(ps.optim.adamw(0.1)),
    "torch": ps.optim.from_torch(torch.optim.Adam),
    "torch, fused": ps.optim.from_torch(torch.optim.AdamW, fused=True),
    "torch, foreach": ps.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "of one's own": ps.optim.Optimizer(
        lambda params: {"sum": tree.zeros_like(params)},
        lambda grads, state, params: (
            tree.map(torch.sub, params, grads),
            {"sum": tree.map(torch.add, state["sum"], grads)},
        ),
    ),
}


def state_like(optimizer: ps.optim.Optimizer, other: str) -> Any:
    """The state of other params, after a step of theirs; or the right one in a dtype that is none for sums."""
    if other not in ("integers", "float8"):
        params = OTHERS[other]
        return optimizer.update(params, optimizer.init(params), params)[1]
    dtype = OTHERS[other]["w"].dtype
    return tree.map(
        lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, optimizer.init(PARAMS)
    )


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_of_other_params_is_refused(name: str, other: str, donate: bool) -> None:
    """Both structures, and the first difference by its path in the whole state; what was given is as it was."""
    optimizer = STATEFUL[name]
    step = ps.make_update_step(
        lambda p, m: (m @ p["w"] + p["b"]).sum(1),
        optimizer,
        weight_fn=lambda m: torch.ones(len(m)),
        donate=donate,
    )
    params, state = tree.map(torch.clone, PARAMS), state_like(optimizer, other)
    with pytest.raises(ValueError, match=r"opt_state was not made by optimizer\.init of") as caught:
        step(params, state, [torch.ones(3, 2)])
    message = str(caught.value)
    for structure in (tree.flatten(state)[1], tree.flatten(optimizer.init(PARAMS))[1]):
        assert tree.describe(structure) in message
    where = {*tree.paths(state, "opt_state"), *tree.paths(optimizer.init(PARAMS), "opt_state")}
    first = message.split("very optimizer. ")[1].split(" ")[0]
    assert first in where
    assert donate or all(map(torch.equal, tree.leaves_of(params), tree.leaves_of(PARAMS)))


def test_the_message_about_many_leaves_is_short() -> None:
    """The advice and the first difference, whatever the size of the model."""
    many, fewer = ({f"layer{i}": torch.ones(2) for i in range(n)} for n in (300, 299))
    optimizer = ps.optim.adamw(0.1)
    with pytest.raises(
        ValueError, match=r"take optimizer\.init\(params\).*\['layer299'\]"
    ) as caught:
        optimizer.update(many, optimizer.init(fewer), many)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", [name for name in STATEFUL if name != "of one's own"])
def test_a_state_of_other_params_is_refused_by_update(name: str, other: str, method: str) -> None:
    """Without the step, too."""
    optimizer = STATEFUL[name]
    given = tree.map(torch.clone, (GRADS, state_like(optimizer, other), PARAMS))
    with pytest.raises(ValueError, match=r"opt_state was not made by optimizer\.init of these"):
        updated(optimizer, method, *given)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            ADAMW.init({"v": torch.ones(2)}),
            r"opt_state\.mu\['w'\] is missing",
        ),
        (
            ADAMW.init({"w": torch.ones(2, 1)}),
            r"opt_state\.mu\['w'\] is .*32 of shape \(2, 1\), and",
        ),
        (
            ps.optim.sgd(0.1).init({"w": torch.ones(2)}),
            r"it is \(DescentState.*, and AdamWState.* was expected",
        ),
    ],
)
def test_the_first_difference_is_told(state: Any, text: str) -> None:
    """A name, a shape, or the optimizer's own kind."""
    step = ps.make_update_step(lambda p, m: p["w"] * m, ADAMW, weight_fn=torch.ones_like)
    with pytest.raises(ValueError, match=rf"by optimizer\.init of these.*{text}"):
        step({"w": torch.ones(2)}, state, [torch.ones(2)])


def test_gradients_of_other_params_are_refused() -> None:
    for name in ("momentum", "adamw", "lion", "adam", "master"):
        optimizer = RECIPES[name](0.1)
        for grads in ({"w": GRADS["w"]}, {**GRADS, "b": torch.ones(1)}):
            with pytest.raises(ValueError, match=r"grads are not like params: grads\['b'\] is"):
                optimizer.update(grads, optimizer.init(PARAMS), PARAMS)
