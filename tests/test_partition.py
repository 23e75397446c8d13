"""``partition``: each parameter to the optimizer of its label, as if the others were not there."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st

import purestep as ps
from proofs.strategies import assert_same, labels
from proofs.test_t06_purity import storages
from proofs.test_t08_optimizers import Namesake, buffers, kinds
from purestep import tree
from tests.optimizers import WAYS, assert_in_place_where_it_applies, updated
from tests.parts import LEARNING_RATE, PARTS, SGD, drawn, muon, muon_and_adamw, split


@settings(max_examples=10)
@given(seed=st.integers(0, 2**20), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_muon_for_matrices_and_adamw_for_the_rest(seed: int, dtype: torch.dtype) -> None:
    """Both by themselves on lists of leaves, and torch's Muon the usual way: the same bits."""
    params, grads = drawn(seed, dtype, steps=6)
    optimizer = muon_and_adamw()
    pure = (params, optimizer.init(params))
    donated = tree.map(torch.clone, pure)
    full, places = kinds(pure), buffers(donated)
    own = {"matrix": muon(), "rest": ps.optim.adamw(LEARNING_RATE)}
    alone = {label: (mine, own[label].init(mine)) for label, mine in split(params).items()}
    usual = Namesake(
        split(params)["matrix"], lambda leaves: torch.optim.Muon(leaves, lr=LEARNING_RATE)
    )
    for one in grads:
        given = (one, pure[1], pure[0])
        before = tree.map(torch.clone, given)
        pure = optimizer.update(*given)
        assert_same(given, before, "(grads, opt_state, params)")
        assert not storages(pure) & storages(given)
        donated = updated(optimizer, "update_", tree.map(torch.clone, one), donated[1], donated[0])
        assert buffers(donated) == places
        assert kinds(pure) == kinds(donated) == full
        assert_same(donated, pure)
        usual.step(split(one)["matrix"])
        for label, (mine, state) in alone.items():
            alone[label] = mine, state = own[label].update(split(one)[label], state, mine)
            assert_same(split(pure[0])[label], mine, label)
            assert_same(tree.leaves_of(pure[1][label]), tree.leaves_of(state), f"{label}'s state")
        assert_same(split(pure[0])["matrix"], [leaf.detach() for leaf in usual.leaves], "Muon")


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
    pure = in_place = (params, optimizer.init(params))
    own = ps.optim.sgd(0.5, momentum=0.5)
    alone = (split(params)["matrix"], own.init(split(params)["matrix"]))
    for one in grads:
        pure = optimizer.update(one, pure[1], pure[0])
        given = tree.map(torch.clone, (one, in_place[1], in_place[0]))
        in_place = updated(optimizer, "update_", *given)
        assert_same(in_place, pure)
        alone = own.update(split(one)["matrix"], alone[1], alone[0])
    assert_same(split(pure[0])["matrix"], alone[0])
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
    for one, other, message in (
        (optimizer, (), foreign),
        (optimizer, {}, foreign),
        (optimizer, {"matrix": state["matrix"]}, foreign),
        (optimizer, {**state, "third": ()}, foreign),
        (optimizer, {"matrix": state["matrix"], "others": state["rest"]}, foreign),
        (optimizer, ps.optim.adamw(0.1).init(params), foreign),
        (
            optimizer,
            {"matrix": state["rest"], "rest": state["matrix"]},
            r"it is AdamWState.*, and TorchState.* was expected",
        ),
        (
            adamws,
            ps.optim.partition(by_size, both).init(params),
            r"opt_state was not made by optimizer\.init of these params",
        ),
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


@pytest.mark.parametrize("name", PARTS)
def test_in_place_where_it_applies(name: str) -> None:
    assert_in_place_where_it_applies(ps.optim.partition(labels, PARTS[name]), *drawn(4))
