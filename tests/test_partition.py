"""``partition``: each parameter to the optimizer of its label, as if the others were not there.

Labels are a tree, a prefix or a function, asked once, and refused by name.
"""

import gc
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import purestep as ps
from proofs.strategies import assert_same, labels
from proofs.test_t08_optimizers import Namesake, kinds, random_grads, random_params
from purestep import tree
from tests.optimizers import WAYS, states_of, updated

SHAPES = {
    "blocks": [{"w": (4, 16), "b": (16,)}, {"w": (16, 32), "b": (32,)}],
    "head": {"w": (32, 16), "scale": (16,)},
}
"""Whole vectors, in which ``adamw`` has the same bits in place and out of place."""
LEARNING_RATE = 0.05


def drawn(seed: int, dtype: torch.dtype = torch.float32, steps: int = 5) -> tuple[Any, list[Any]]:
    """Params, and the gradients of some steps."""
    generator = torch.Generator().manual_seed(seed)
    params = random_params(SHAPES, dtype, generator)
    return params, [random_grads(params, generator) for _ in range(steps)]


def split(whole: Any) -> dict[str, list[Tensor]]:
    """The leaves of each label, in order: by hand."""
    first, second = whole["blocks"]
    return {
        "matrix": [first["w"], second["w"], whole["head"]["w"]],
        "rest": [first["b"], second["b"], whole["head"]["scale"]],
    }


def muon() -> ps.optim.Optimizer:
    """For matrices only."""
    return ps.optim.from_torch(torch.optim.Muon, lr=LEARNING_RATE)


def muon_and_adamw() -> ps.optim.Optimizer:
    """What people train with."""
    return ps.optim.partition(labels, {"matrix": muon(), "rest": ps.optim.adamw(LEARNING_RATE)})


SGD = {"slow": ps.optim.sgd(0.125, 0.5), "fast": ps.optim.sgd(0.5)}


NATIVE = {
    "matrix": ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ps.optim.adamw(0.1)),
    "rest": ps.optim.sgd(0.1, 0.9, nesterov=True, weight_decay=0.1),
}
PLAIN = ps.optim.Optimizer(
    lambda params: (),
    lambda grads, state, params: (tree.map(lambda p, g: p - g / 8, params, grads), state),
)
"""One with three arguments, as others write it."""
PARTS: dict[str, dict[str, ps.optim.Optimizer]] = {
    "native": NATIVE,
    "without kernels": {"matrix": ps.optim.lion(0.1), "rest": PLAIN},
    "nested": {"matrix": ps.optim.partition("all of it", {"all of it": muon()}), "rest": PLAIN},
}


@settings(max_examples=10)
@given(seed=st.integers(0, 2**20), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_muon_for_matrices_and_adamw_for_the_rest(seed: int, dtype: torch.dtype) -> None:
    """Both by themselves on lists of leaves, and torch's Muon the usual way: the same bits."""
    params, grads = drawn(seed, dtype, steps=6)
    own = {"matrix": muon(), "rest": ps.optim.adamw(LEARNING_RATE)}
    alone = {label: (mine, own[label].init(mine)) for label, mine in split(params).items()}
    usual = Namesake(
        split(params)["matrix"], lambda leaves: torch.optim.Muon(leaves, lr=LEARNING_RATE)
    )
    for one, (moved, after) in zip(grads, states_of(muon_and_adamw(), params, grads), strict=True):
        usual.step(split(one)["matrix"])
        for label, (mine, state) in alone.items():
            alone[label] = mine, state = own[label].update(split(one)[label], state, mine)
            assert_same(split(moved)[label], mine, label)
            assert_same(tree.leaves_of(after[label]), tree.leaves_of(state), f"{label}'s state")
        assert_same(split(moved)["matrix"], [leaf.detach() for leaf in usual.leaves], "Muon")


@pytest.mark.parametrize("name", PARTS)
def test_in_place_as_out_of_place(name: str) -> None:
    params, grads = drawn(4)
    assert len([*states_of(ps.optim.partition(labels, PARTS[name]), params, grads)]) == len(grads)


class Node(NamedTuple):
    """A container of the user's."""

    w: Any
    b: Any


def test_the_state_of_a_part_has_nothing_for_the_others() -> None:
    """Each sees a tree like the params, with no leaves but those of its label."""
    seen = []

    def init(params: Any) -> Any:
        seen.append(params)
        return ()

    optimizer = ps.optim.Optimizer(init, lambda grads, state, params: (params, state))
    params = [Node(torch.ones(2, 2), torch.zeros(2)), {"b": torch.ones(1)}]
    ps.optim.partition(labels, {"matrix": optimizer, "rest": optimizer}).init(params)
    assert_same(seen[0], [Node(torch.ones(2, 2), ()), ()])
    assert_same(seen[1], [Node((), torch.zeros(2)), {"b": torch.ones(1)}])


def test_partition_of_transforms() -> None:
    """Each gradient to a Transform: one before an optimizer, in the order of the params."""
    params, grads = drawn(0)
    double = ps.optim.Transform(lambda _: (), lambda g, s, p: (tree.map(lambda x: 2 * x, g), s))
    parts = ps.optim.partition(labels, {"matrix": ps.optim.momentum(0.5), "rest": double})
    assert isinstance(parts, ps.optim.Transform)
    optimizer = ps.optim.chain(parts, ps.optim.descend(0.5))
    own = ps.optim.sgd(0.5, momentum=0.5)
    alone = (split(params)["matrix"], own.init(split(params)["matrix"]))
    for one, (moved, _) in zip(grads, states_of(optimizer, params, grads), strict=True):
        alone = own.update(split(one)["matrix"], alone[1], alone[0])
        assert_same(split(moved)["matrix"], alone[0])
    with pytest.raises(TypeError, match=r"'b' must be an Optimizer, got Transform"):
        ps.optim.partition("b", {"a": SGD["fast"], "b": double})  # type: ignore[type-var]


def test_a_label_that_no_leaf_has() -> None:
    """Its optimizer is never called, and has no state."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("no leaf has this label")

    unused = ps.optim.Optimizer(refuse, refuse, refuse)
    optimizer = ps.optim.partition(
        labels, {"unused": unused, "matrix": SGD["slow"], "rest": SGD["fast"]}
    )
    params, grads = drawn(0)
    state = optimizer.init(params)
    assert set(state) == {"matrix", "rest"}
    moved = optimizer.update(grads[0], state, params)
    given = tree.map(torch.clone, (grads[0], state, params))
    assert_same(updated(optimizer, "update_", *given), moved)


def by_size(params: Any) -> Any:
    return tree.map(lambda leaf: "rest" if leaf.numel() < 32 else "matrix", params)


@pytest.mark.parametrize("method", WAYS)
def test_a_state_of_others_is_refused(method: str) -> None:
    """It never trains on with half of a state."""
    params, grads = drawn(0)
    both = {"matrix": ps.optim.adamw(0.1), "rest": ps.optim.adamw(0.1)}
    optimizer, adamws = muon_and_adamw(), ps.optim.partition(labels, both)
    state = optimizer.init(params)
    foreign = r"opt_state was not made by .* is .*, and \{'matrix': .*'rest': .*was expected"
    swapped = {"matrix": state["rest"], "rest": state["matrix"]}
    of_others = ps.optim.partition(by_size, both).init(params)
    for one, other, message in (
        (optimizer, (), foreign),
        (optimizer, {"matrix": state["matrix"]}, foreign),
        (optimizer, {**state, "third": ()}, foreign),
        (optimizer, ps.optim.adamw(0.1).init(params), foreign),
        (optimizer, swapped, r"it is AdamWState.*, and TorchState.* was expected"),
        (adamws, of_others, r"opt_state was not made by optimizer\.init of these params"),
    ):
        with pytest.raises(ValueError, match=message):
            updated(one, method, grads[0], other, params)


@pytest.mark.parametrize("method", WAYS)
def test_each_part_clips_by_the_norm_of_its_leaves(method: str) -> None:
    """Clipping in front of the partition takes the norm of all."""
    params = {"w": torch.zeros(2, 2), "b": torch.zeros(2)}
    grads = {"w": torch.tensor([[3.0, 0.0], [0.0, 4.0]]), "b": torch.tensor([0.0, 12.0])}
    clip, descend = ps.optim.clip_by_global_norm, ps.optim.descend(1.0)
    inside = {"matrix": ps.optim.chain(clip(2.0), descend), "rest": descend}
    without = ps.optim.partition(labels, {"matrix": descend, "rest": descend})
    for optimizer, of_w, of_b in (
        (ps.optim.partition(labels, inside), 2 / 5, 1.0),
        (ps.optim.chain(clip(6.5), without), 6.5 / 13, 6.5 / 13),
    ):
        given = tree.map(torch.clone, (grads, optimizer.init(params), params))
        moved, _ = updated(optimizer, method, *given)
        assert_same(moved, {"w": -grads["w"] * torch.tensor(of_w), "b": -grads["b"] * of_b}, method)


# Labels

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

    def by_ndim(params: Any) -> Any:
        asked.append(params["w"].shape)
        return tree.map(lambda leaf: "slow" if leaf.ndim == 2 else "fast", params)

    optimizer = ps.optim.partition(by_ndim, SGD)
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


def test_labels_and_parts_that_are_none() -> None:
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
