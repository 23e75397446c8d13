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
}
NO_SUMS = {"integers": torch.int64, "float8": torch.float8_e4m3fn}
"""Dtypes that a state's sums do not have."""
ADAMW = ps.optim.adamw(0.1)
STATEFUL: dict[str, ps.optim.Optimizer] = {
    **{name: RECIPES[name](0.1) for name in RECIPES if name not in ("descend", "clipped")},
    "clipped adamw": ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ADAMW),
    "torch": ps.optim.from_torch(torch.optim.Adam),
    "torch, fused": ps.optim.from_torch(torch.optim.AdamW, fused=True),
    "of one's own": ps.optim.Optimizer(
        tree.zeros_like,
        lambda grads, state, params: (tree.map(torch.sub, params, grads), tree.map(torch.add, state, grads)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("other", [*OTHERS, *NO_SUMS])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_of_other_params_is_refused(name: str, other: str) -> None:
    """By the step and without it: both structures, the first difference by its path; and what was given is as it was."""
    optimizer, right = STATEFUL[name], STATEFUL[name].init(PARAMS)
    if other in OTHERS:  # After a step of theirs.
        _, state = optimizer.update(
            OTHERS[other], optimizer.init(OTHERS[other]), OTHERS[other]
        )
    else:
        state = tree.map(
            lambda x: x.to(NO_SUMS[other]) if x.is_floating_point() else x, right
        )
    refusal = pytest.raises(
        ValueError, match=r"opt_state was not made by optimizer\.init of these"
    )
    for donate in (False, True):
        params = tree.map(torch.clone, PARAMS)
        step = ps.make_update_step(
            lambda p, m: (m @ p["w"] + p["b"]).sum(1), optimizer,
            weight_fn=lambda m: torch.ones(len(m)), donate=donate,
        )  # fmt: skip
        with refusal as caught:
            step(params, tree.map(torch.clone, state), [torch.ones(3, 2)])
        message = str(caught.value)
        for each in (state, right):
            assert tree.format_spec(tree.flatten(each)[1]) in message
        where = {*tree.paths(state, "opt_state"), *tree.paths(right, "opt_state")}
        assert message.split("very optimizer. ")[1].split(" ")[0] in where
        assert donate or all(map(torch.equal, tree.leaves(params), tree.leaves(PARAMS)))
    for way in WAYS if name != "of one's own" else ():
        with refusal:
            updated(optimizer, way, *tree.map(torch.clone, (GRADS, state, PARAMS)))


ONE, MASTERED = {"w": torch.ones(2)}, ps.optim.master_weights(ADAMW)
AVERAGED, TORCHS = ps.optim.ema(ADAMW, 0.9), ps.optim.from_torch(torch.optim.Adam)
MANY, FEWER = ({f"layer{i}": torch.ones(2) for i in range(n)} for n in (300, 299))
DIFFERENCES: list[tuple[ps.optim.Optimizer, Any, Any, str]] = [
    (ADAMW, ONE, ADAMW.init({"v": torch.ones(2)}), r"opt_state\.mu\['w'\] is missing"),
    (ADAMW, ONE, ADAMW.init({"w": torch.ones(2, 1)}), r"opt_state\.mu\['w'\] is .*32 of shape \(2, 1\), and"),
    (ADAMW, ONE, ps.optim.sgd(0.1).init(ONE), r"it is \(DescentState.*, and AdamWState.* was expected"),
    (ADAMW, MANY, ADAMW.init(FEWER), r"take optimizer\.init\(params\).*\['layer299'\]"),
    (MASTERED, ONE, ADAMW.init(ONE), r"it is AdamWState.*, and MasterState.* was expected"),
    (MASTERED, ONE, MASTERED.init({"w": torch.ones(3)}), r"\.master\['w'\] is .*\(3,\), and .*\(2,\) was expected"),
    (AVERAGED, ONE, ADAMW.init(ONE), r"it is AdamWState.*, and EmaState.* was expected"),
    (AVERAGED, ONE, AVERAGED.init({"w": torch.ones(3)}), r"\.average\['w'\] is .*\(3,\), and .*\(2,\) was expected"),
    (STATEFUL["clipped adamw"], ONE, ADAMW.init(ONE), r"it is AdamWState.*, and \(\(\), AdamWState.* was expected"),
    (TORCHS, ONE, (), r"it is \(\), and TorchState.* was expected"),
    (TORCHS, ONE, TORCHS.init({"w": torch.ones(3)}), r"opt_state\.leaves\['w'\]\['exp_avg'\] is .*\(3,\)"),
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("optimizer", "params", "state", "text"), DIFFERENCES)
def test_the_first_difference_is_told_in_few_words(
    optimizer: Any, params: Any, state: Any, text: str, way: str
) -> None:
    """A name, a shape, or the optimizer's own kind."""
    with pytest.raises(
        ValueError, match=rf"by optimizer\.init of these.*{text}"
    ) as caught:
        updated(optimizer, way, params, state, params)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["momentum", "adamw", "lion", "adam", "master"])
def test_gradients_of_other_params_are_refused(name: str) -> None:
    optimizer = RECIPES[name](0.1)
    for grads in ({"w": GRADS["w"]}, {**GRADS, "b": torch.ones(1)}):
        with pytest.raises(
            ValueError, match=r"grads are not like params: grads\['b'\] is"
        ):
            optimizer.update(grads, optimizer.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="trees differ in structure"):
        TORCHS.update({"w": GRADS["w"]}, TORCHS.init(PARAMS), PARAMS)
