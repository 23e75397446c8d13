"""States and gradients of other params are refused by name."""

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
    "clipped adamw": ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ADAMW),
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


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_of_other_params_is_refused(name: str, other: str) -> None:
    """By the step and without it: both structures, the first difference by its path; and what was given is as it was."""
    optimizer = STATEFUL[name]
    state = state_like(optimizer, other)
    refusal = pytest.raises(ValueError, match=r"opt_state was not made by optimizer\.init of these")
    for donate in (False, True):
        step = ps.make_update_step(
            lambda p, m: (m @ p["w"] + p["b"]).sum(1),
            optimizer,
            weight_fn=lambda m: torch.ones(len(m)),
            donate=donate,
        )
        params = tree.map(torch.clone, PARAMS)
        with refusal as caught:
            step(params, tree.map(torch.clone, state), [torch.ones(3, 2)])
        message = str(caught.value)
        for each in (state, optimizer.init(PARAMS)):
            assert tree.describe(tree.flatten(each)[1]) in message
        where = {*tree.paths(state, "opt_state"), *tree.paths(optimizer.init(PARAMS), "opt_state")}
        assert message.split("very optimizer. ")[1].split(" ")[0] in where
        assert donate or all(map(torch.equal, tree.leaves_of(params), tree.leaves_of(PARAMS)))
    for method in WAYS if name != "of one's own" else ():
        with refusal:
            updated(optimizer, method, *tree.map(torch.clone, (GRADS, state, PARAMS)))


ONE = {"w": torch.ones(2)}
MANY, FEWER = ({f"layer{i}": torch.ones(2) for i in range(n)} for n in (300, 299))
DIFFERENCES: list[tuple[Any, Any, str]] = [
    (ONE, ADAMW.init({"v": torch.ones(2)}), r"opt_state\.mu\['w'\] is missing"),
    (ONE, ADAMW.init({"w": torch.ones(2, 1)}), r"opt_state\.mu\['w'\] is .*32 of shape \(2, 1\), and"),
    (ONE, ps.optim.sgd(0.1).init(ONE), r"it is \(DescentState.*, and AdamWState.* was expected"),
    (MANY, ADAMW.init(FEWER), r"take optimizer\.init\(params\).*\['layer299'\]"),
]  # fmt: skip


@pytest.mark.parametrize(("params", "state", "text"), DIFFERENCES)
def test_the_first_difference_is_told_in_few_words(params: Any, state: Any, text: str) -> None:
    """A name, a shape, or the optimizer's own kind."""
    with pytest.raises(ValueError, match=rf"by optimizer\.init of these.*{text}") as caught:
        ADAMW.update(params, state, params)
    assert len(str(caught.value)) < 1000


def test_gradients_of_other_params_are_refused() -> None:
    for name in ("momentum", "adamw", "lion", "adam", "master"):
        optimizer = RECIPES[name](0.1)
        for grads in ({"w": GRADS["w"]}, {**GRADS, "b": torch.ones(1)}):
            with pytest.raises(ValueError, match=r"grads are not like params: grads\['b'\] is"):
                optimizer.update(grads, optimizer.init(PARAMS), PARAMS)
