"""Labels of ``partition``: written as a tree, a prefix or a function, asked once, and refused by name."""

import gc
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch

import purestep as ps
from proofs.strategies import assert_same
from proofs.test_t08_optimizers import kinds
from purestep import tree
from tests.parts import NATIVE, SGD, drawn, muon_and_adamw

PREFIX = {"blocks": ["slow", "fast"], "head": "slow"}
WHOLE = {
    "blocks": [{"w": "slow", "b": "slow"}, {"w": "fast", "b": "fast"}],
    "head": {"w": "slow", "scale": "slow"},
}


@pytest.mark.parametrize("written", [WHOLE, PREFIX, lambda _: WHOLE, lambda _: PREFIX, "fast"])
def test_labels_as_a_tree_a_prefix_or_one_for_all(written: Any) -> None:
    """However the labels are written: the second block is fast, all else slow."""
    params, grads = drawn(0)
    optimizer = ps.optim.partition(written, SGD)
    state = params, optimizer.init(params)
    for one in grads:
        state = optimizer.update(one, state[1], state[0])
    for label in state[1]:

        def mine(whole: Any, label: str = label) -> Any:
            first, second = whole["blocks"]
            parts = {"slow": [first, whole["head"]], "fast": [second]}
            return whole if written == "fast" else parts[label]

        alone = mine(params), SGD[label].init(mine(params))
        for one in grads:
            alone = SGD[label].update(mine(one), alone[1], alone[0])
        assert_same(mine(state[0]), alone[0], label)
        assert_same(tree.leaves_of(state[1][label]), tree.leaves_of(alone[1]), label)
    assert {*state[1]} == ({"fast"} if written == "fast" else {"slow", "fast"})


def test_none_stays_none() -> None:
    """An empty subtree has no label, and comes back."""
    params = {"w": torch.ones(2, 2), "nothing": None, "b": torch.ones(2)}
    optimizer = muon_and_adamw()
    assert kinds(optimizer.update(params, optimizer.init(params), params)[0]) == kinds(params)


@pytest.mark.parametrize(("of_params", "of_labels"), [(OrderedDict, dict), (dict, OrderedDict)])
def test_ordered_dicts_are_labelled_by_key(of_params: Any, of_labels: Any) -> None:
    """As a module's state_dict is one, and labels are a dict; or the other way round."""
    params = of_params(z=torch.ones(2, 2), a=torch.ones(2))
    parts = {"slow": ps.optim.sgd(0.25), "fast": ps.optim.sgd(1.0)}
    optimizer = ps.optim.partition(of_labels(z="slow", a="fast"), parts)
    new, _ = optimizer.update(params, optimizer.init(params), params)
    assert_same(new, of_params(z=torch.full((2, 2), 0.75), a=torch.zeros(2)))
    mask = ps.optim.adamw(0.1, mask=lambda p: of_labels(z=True, a=False)).init(params)
    assert_same(mask["decay"].mu, of_params(z=torch.zeros(2, 2), a=()))
    assert_same(mask["rest"].mu, of_params(z=(), a=torch.zeros(2)))


def test_labels_are_asked_once_for_params_that_agree() -> None:
    """In structure, shapes and dtypes; and under a compiler or a transform each time. No tensor is kept."""
    asked = []

    def labels(params: Any) -> Any:
        asked.append(params["w"].shape)
        return tree.map(lambda leaf: "slow" if leaf.ndim == 2 else "fast", params)

    optimizer = ps.optim.partition(labels, SGD)
    for shape in [(2, 2), (4, 2), (2, 2), (4,), (2, 2)]:
        for dtype in (torch.float32, torch.float64):
            params = {"w": torch.ones(shape, dtype=dtype), "b": torch.ones(2, dtype=dtype)}
            state = optimizer.init(params)
            for _ in range(2):
                moved, _ = optimizer.update(params, state, params)
            assert moved["b"].unique() == 0.5
    assert asked == [torch.Size(shape) for shape in ((2, 2), (2, 2), (4, 2), (4, 2), (4,), (4,))]
    torch.vmap(optimizer.update)(*tree.map(lambda leaf: leaf[None], (params, state, params)))
    assert len(asked) == 7
    known = weakref.ref(params["w"])
    del params, state, moved
    gc.collect()
    assert known() is None


def test_refusals() -> None:
    params, grads = drawn(0)
    misspelt = {"blocks": ["slow", {"w": "slow", "b": "fats"}], "head": "fast"}
    unknown: Any = ps.optim.partition(misspelt, SGD)
    message = r"labels params\['blocks'\]\[1\]\['b'\] 'fats', but its optimizers are 'slow', 'fast'"
    with pytest.raises(ValueError, match=message):
        unknown.init(params)
    with pytest.raises(ValueError, match=message):
        unknown.update(grads[0], {}, params)
    parts: list[Any] = [NATIVE, 0.1, ps.optim.sgd, ps.optim.clip_by_global_norm(1.0)]
    for part in parts:
        message = rf"'fast' must be an Optimizer, got {type(part).__name__}: "
        with pytest.raises(TypeError, match=message):
            ps.optim.partition("slow", {**SGD, "fast": part})
    with pytest.raises(ValueError, match="head"):
        ps.optim.partition({"blocks": "slow"}, SGD).init(params)
