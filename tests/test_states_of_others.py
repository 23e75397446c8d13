"""Tests that states and gradients of other params are refused by name."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from support.strategies import assert_same
from tests.optimizers import GRADS, PARAMS, RECIPES, UPDATE_METHODS, call_update

OTHERS: dict[str, Any] = {
    "another name": {"w": torch.ones(2, 2), "c": torch.ones(2)},
    "one more": {**PARAMS, "z": torch.ones(3)},
    "one less": {"w": torch.ones(2, 2)},
    "what broadcasts": {"w": torch.ones(1, 2), "b": torch.ones(2)},
    "larger": {"w": torch.ones(50, 40), "b": torch.ones(40)},
}
NO_SUMS = {"integers": torch.int64, "float8": torch.float8_e4m3fn}
"""Dtypes that the sums in a state never have."""
ADAMW = ps.optim.adamw(0.1)
CLIPPED_ADAMW = ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ADAMW)


def sum_gradients(grads: Any, state: Any, params: Any) -> Any:
    """Updates by the gradients, and keeps their sum."""
    new = tree.map(torch.sub, params, grads)
    return new, tree.map(torch.add, state, grads)


STATELESS = ("sgd", "clipped")
STATEFUL: dict[str, ps.optim.Optimizer] = {
    name: RECIPES[name](0.1) for name in RECIPES if name not in STATELESS
}
STATEFUL |= {
    "clipped adamw": CLIPPED_ADAMW,
    "torch": ps.optim.from_torch(torch.optim.Adam),
    "torch, fused": ps.optim.from_torch(torch.optim.AdamW, fused=True),
    "of one's own": ps.optim.Optimizer(tree.zeros_like, sum_gradients),
}


def wrong_state(name: str, other: str) -> Any:
    """Makes a state of other params, after a step of theirs, or one with sums of other dtypes."""
    optimizer = STATEFUL[name]
    if other in OTHERS:
        params = OTHERS[other]
        _, state = optimizer.update(params, optimizer.init(params), params)
        return state
    dtype = NO_SUMS[other]

    def cast(leaf: Tensor) -> Tensor:
        return leaf.to(dtype) if leaf.is_floating_point() else leaf

    return tree.map(cast, optimizer.init(PARAMS))


def linear_loss(p: Any, m: Tensor) -> Tensor:
    return (m @ p["w"] + p["b"]).sum(1)


def refusal() -> Any:
    message = r"opt_state was not made by optimizer\.init of these"
    return pytest.raises(ValueError, match=message)


@pytest.mark.parametrize("other", [*OTHERS, *NO_SUMS])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_of_other_params_is_refused(name: str, other: str) -> None:
    """The step and the optimizer name both structures and the first difference by its path."""
    optimizer = STATEFUL[name]
    right = optimizer.init(PARAMS)
    wrong = wrong_state(name, other)
    paths = {*tree.paths(wrong, "opt_state"), *tree.paths(right, "opt_state")}
    for donate in (False, True):
        step = ps.make_update_step(
            linear_loss,
            optimizer,
            weight_fn=lambda m: torch.ones(len(m)),
            donate=donate,
        )
        params = tree.map(torch.clone, PARAMS)
        state = tree.map(torch.clone, wrong)
        with refusal() as caught:
            step(params, state, [torch.ones(3, 2)])
        message = str(caught.value)
        for expected in (wrong, right):
            assert tree.format_spec(tree.flatten(expected)[1]) in message
        path, *_ = message.split("very optimizer. ")[1].split(" ")
        assert path in paths
        if not donate:
            assert_same(params, PARAMS)
    if name == "of one's own":
        return
    for way in UPDATE_METHODS:
        inputs = tree.map(torch.clone, (GRADS, wrong, PARAMS))
        with refusal():
            call_update(optimizer, way, *inputs)


def test_a_compiled_step_says_the_same() -> None:
    """With ``fullgraph``, the error is the compiler's, with the text of the step's."""
    step = ps.make_update_step(
        linear_loss, ADAMW, weight_fn=lambda m: torch.ones(len(m))
    )
    arguments = (PARAMS, ADAMW.init(OTHERS["another name"]), [torch.ones(3, 2)])
    with refusal() as caught:
        step(*arguments)
    # torch 2.11 cannot trace what makes the text, and runs it in Python where it may.
    fullgraph = torch.__version__ >= "2.12"
    compiled = ps.compile(step, fullgraph=fullgraph, backend="eager")
    with pytest.raises(Exception, match=re.escape(str(caught.value))):
        compiled(*arguments)


def layers(number: int) -> dict[str, Tensor]:
    return {f"layer{i}": torch.ones(2) for i in range(number)}


ONE = {"w": torch.ones(2)}
ONE_OF_THREE = {"w": torch.ones(3)}
MASTER = ps.optim.master_weights(ADAMW)
EMA = ps.optim.ema(ADAMW, 0.9)
ADAM_OF_TORCH = ps.optim.from_torch(torch.optim.Adam)
DIFFERENCES: list[tuple[ps.optim.Optimizer, Any, Any, str]] = [
    (ADAMW, ONE, ADAMW.init({"v": torch.ones(2)}), r"opt_state\.mu\['w'\] is missing"),
    (
        ADAMW,
        ONE,
        ADAMW.init({"w": torch.ones(2, 1)}),
        r"opt_state\.mu\['w'\] is .*32 of shape \(2, 1\), and",
    ),
    (
        ADAMW,
        ONE,
        ps.optim.sgd(0.1).init(ONE),
        r"it is DescentState.*, and AdamWState.* was expected",
    ),
    (
        ADAMW,
        layers(300),
        ADAMW.init(layers(299)),
        r"take optimizer\.init\(params\).*\['layer299'\]",
    ),
    (
        MASTER,
        ONE,
        ADAMW.init(ONE),
        r"it is AdamWState.*, and MasterState.* was expected",
    ),
    (
        MASTER,
        ONE,
        MASTER.init(ONE_OF_THREE),
        r"\.master\['w'\] is .*\(3,\), and .*\(2,\) was expected",
    ),
    (
        EMA,
        ONE,
        ADAMW.init(ONE),
        r"it is AdamWState.*, and EmaState.* was expected",
    ),
    (
        EMA,
        ONE,
        EMA.init(ONE_OF_THREE),
        r"\.average\['w'\] is .*\(3,\), and .*\(2,\) was expected",
    ),
    (
        CLIPPED_ADAMW,
        ONE,
        ADAMW.init(ONE),
        r"it is AdamWState.*, and \(\(\), AdamWState.* was expected",
    ),
    (ADAM_OF_TORCH, ONE, (), r"it is \(\), and TorchState.* was expected"),
    (
        ADAM_OF_TORCH,
        ONE,
        ADAM_OF_TORCH.init(ONE_OF_THREE),
        r"opt_state\.leaves\['w'\]\['exp_avg'\] is .*\(3,\)",
    ),
]


@pytest.mark.parametrize("way", UPDATE_METHODS)
@pytest.mark.parametrize(("optimizer", "params", "state", "text"), DIFFERENCES)
def test_the_first_difference_is_told_in_few_words(
    optimizer: Any, params: Any, state: Any, text: str, way: str
) -> None:
    """A name, a shape, or the class of the state."""
    message = rf"by optimizer\.init of these.*{text}"
    with pytest.raises(ValueError, match=message) as caught:
        call_update(optimizer, way, params, state, params)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["momentum", "adamw", "lion", "adam", "master"])
def test_gradients_of_other_params_are_refused(name: str) -> None:
    optimizer = RECIPES[name](0.1)
    state = optimizer.init(PARAMS)
    missing = {"w": GRADS["w"]}
    broadcast = {**GRADS, "b": torch.ones(1)}
    for grads in (missing, broadcast):
        with pytest.raises(
            ValueError, match=r"grads are not like params: grads\['b'\] is"
        ):
            optimizer.update(grads, state, PARAMS)
    with pytest.raises(ValueError, match="trees differ in structure"):
        ADAM_OF_TORCH.update(missing, ADAM_OF_TORCH.init(PARAMS), PARAMS)


def test_a_dtype_that_no_optimizer_takes_is_named() -> None:
    optimizer = RECIPES["momentum"](0.1)
    params = {"w": torch.ones(2, dtype=torch.complex64)}
    state = optimizer.init(params)
    with pytest.raises(ValueError, match=r"not all of \['torch.complex64'"):
        optimizer.update(params, state, params)


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_a_tuple_of_the_same_fields_is_refused(name: str) -> None:
    """It is no state: where a field is added, say, old files must not fit by chance."""
    optimizer = STATEFUL[name]
    fields = tuple(optimizer.init(PARAMS))
    for way in UPDATE_METHODS:
        with refusal():
            call_update(optimizer, way, GRADS, fields, PARAMS)


def test_a_state_of_an_optimizer_without_one_is_refused() -> None:
    """Such a state is an empty tuple, and any tuple is an instance of its type."""
    with refusal():
        ps.optim.add_decayed_weights(0.1).update(GRADS, (torch.ones(2),), PARAMS)
