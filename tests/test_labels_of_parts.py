"""Labels of ``partition``: written as a tree, a prefix or a function, asked once, and refused by name."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch

import purestep as ps
from proofs.strategies import assert_same, labels
from proofs.test_t08_optimizers import kinds
from purestep import tree
from tests.parts import NATIVE, SGD, drawn, muon_and_adamw

SAME_LABELS: dict[str, Any] = {
    "a tree": {
        "blocks": [{"w": "slow", "b": "slow"}, {"w": "fast", "b": "fast"}],
        "head": {"w": "slow", "scale": "slow"},
    },
    "a prefix": {"blocks": ["slow", "fast"], "head": "slow"},
    "a function to a tree": lambda params: {
        "blocks": [
            tree.map(lambda _: "slow", params["blocks"][0]),
            tree.map(lambda _: "fast", params["blocks"][1]),
        ],
        "head": tree.map(lambda _: "slow", params["head"]),
    },
    "a function to a prefix": lambda params: {"blocks": ["slow", "fast"], "head": "slow"},
}


@pytest.mark.parametrize("name", SAME_LABELS)
def test_labels_as_a_tree_or_a_prefix(name: str) -> None:
    """However the labels are written: the second block is fast, all else slow."""
    params, grads = drawn(0)
    optimizer = ps.optim.partition(SAME_LABELS[name], SGD)
    state = (params, optimizer.init(params))
    for one in grads:
        state = optimizer.update(one, state[1], state[0])
    for label, fast in {"slow": False, "fast": True}.items():

        def mine(whole: Any, fast: bool = fast) -> list[Any]:
            first, second = whole["blocks"]
            return [second] if fast else [first, whole["head"]]

        alone = (mine(params), SGD[label].init(mine(params)))
        for one in grads:
            alone = SGD[label].update(mine(one), alone[1], alone[0])
        assert_same(mine(state[0]), alone[0], label)
        assert_same(tree.leaves_of(state[1][label]), tree.leaves_of(alone[1]), label)


def test_one_label_for_everything() -> None:
    params, grads = drawn(0)
    optimizer = ps.optim.partition("fast", SGD)
    state = optimizer.init(params)
    assert set(state) == {"fast"}
    assert_same(
        optimizer.update(grads[0], state, params)[0],
        SGD["fast"].update(grads[0], SGD["fast"].init(params), params)[0],
    )


def test_none_stays_none() -> None:
    """An empty subtree has no label, and comes back."""
    params = {"w": torch.ones(2, 2), "nothing": None, "b": torch.ones(2)}
    optimizer = muon_and_adamw()
    new, _ = optimizer.update(params, optimizer.init(params), params)
    assert new["nothing"] is None
    assert kinds(new) == kinds(params)


@pytest.mark.parametrize("swapped", [False, True])
def test_ordered_dicts_are_labelled_by_key(swapped: bool) -> None:
    """As a module's state_dict is one, and labels are a dict; or the other way round."""
    kinds: list[Any] = [OrderedDict, dict]
    params_kind, labels_kind = reversed(kinds) if swapped else kinds
    params = params_kind(z=torch.ones(2, 2), a=torch.ones(2))
    optimizer = ps.optim.partition(
        labels_kind(z="slow", a="fast"), {"slow": ps.optim.sgd(0.25), "fast": ps.optim.sgd(1.0)}
    )
    mask = ps.optim.adamw(0.1, mask=lambda p: labels_kind(z=True, a=False)).init(params)
    new, _ = optimizer.update(params, optimizer.init(params), params)
    assert new["z"].unique() == 0.75
    assert new["a"].unique() == 0
    assert_same(mask["decay"].mu, params_kind(z=torch.zeros(2, 2), a=()))
    assert_same(mask["rest"].mu, params_kind(z=(), a=torch.zeros(2)))


def test_labels_are_asked_once_for_params_that_agree() -> None:
    """In structure, shapes and dtypes; and under a compiler or a transform each time."""
    asked = []

    def labels(params: Any) -> Any:
        asked.append(params["w"].shape)
        return tree.map(lambda leaf: "slow" if leaf.ndim == 2 else "fast", params)

    optimizer = ps.optim.partition(labels, SGD)
    for shape in [(2, 2), (4, 2), (2, 2), (4,), (2, 2)]:
        for dtype in (torch.float32, torch.float64):
            params = {"w": torch.ones(shape, dtype=dtype), "b": torch.ones(2, dtype=dtype)}
            state = optimizer.init(params)
            assert set(state) == ({"slow", "fast"} if len(shape) == 2 else {"fast"})
            for _ in range(2):
                moved, _ = optimizer.update(params, state, params)
            assert moved["b"].unique() == 0.5
    assert asked == [torch.Size(shape) for shape in ((2, 2), (2, 2), (4, 2), (4, 2), (4,), (4,))]
    torch.vmap(optimizer.update)(
        *(tree.map(lambda leaf: leaf[None], one) for one in (params, state, params))
    )
    assert len(asked) == 7


def test_what_is_remembered_keeps_no_tensor_alive() -> None:
    optimizer = ps.optim.partition(labels, NATIVE)
    params, _ = drawn(0)
    known = weakref.ref(tree.leaves_of(params)[0])
    optimizer.init(params)
    del params
    gc.collect()
    assert known() is None


def test_refusals() -> None:
    params, grads = drawn(0)
    unknown = ps.optim.partition(
        {"blocks": ["slow", {"w": "slow", "b": "fats"}], "head": "fast"}, SGD
    )
    message = r"labels params\['blocks'\]\[1\]\['b'\] 'fats', but its optimizers are 'slow', 'fast'"
    with pytest.raises(ValueError, match=message):
        unknown.init(params)
    no_state: Any = {}
    with pytest.raises(ValueError, match=message):
        unknown.update(grads[0], no_state, params)
    parts: list[Any] = [
        ps.optim.clip_by_global_norm(1.0),
        0.1,
        ps.optim.sgd,
        torch.optim.SGD([torch.ones(1)]),
    ]
    for part in parts:
        with pytest.raises(
            TypeError, match=rf"'fast' must be an Optimizer, got {type(part).__name__}: "
        ):
            ps.optim.partition("slow", {**SGD, "fast": part})
    with pytest.raises(ValueError, match="head"):
        ps.optim.partition({"blocks": "slow"}, SGD).init(params)
