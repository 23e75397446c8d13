"""``partition``: each parameter to the optimizer of its label, as if the others were not there."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st

import purestep as ps
from proofs.strategies import assert_same, labels
from proofs.test_t06_purity import storages
from proofs.test_t08_optimizers import buffers, kinds
from purestep import tree
from tests.optimizers import assert_in_place_where_it_applies, updated
from tests.parts import LEARNING_RATE, PARTS, SGD, drawn, muon, muon_and_adamw, split


@settings(max_examples=10)
@given(seed=st.integers(0, 2**20), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_muon_for_matrices_and_adamw_for_the_rest(seed: int, dtype: torch.dtype) -> None:
    """Both run by hand, on lists of their own, and torch's Muon the usual way: the same bits."""
    params, grads = drawn(seed, dtype, steps=20)
    optimizer = muon_and_adamw()
    pure = (params, optimizer.init(params))
    donated = tree.map(torch.clone, pure)
    full, places = kinds(pure), buffers(donated)
    own = {"matrix": muon(), "rest": ps.optim.adamw(LEARNING_RATE)}
    alone = {label: (mine, own[label].init(mine)) for label, mine in split(params).items()}
    leaves = [leaf.clone().requires_grad_() for leaf in split(params)["matrix"]]
    usual = torch.optim.Muon(leaves, lr=LEARNING_RATE)
    assert optimizer.update_ is not None
    for one in grads:
        given = (one, pure[1], pure[0])
        before = tree.map(torch.clone, given)
        pure = optimizer.update(*given)
        assert_same(given, before, "(grads, opt_state, params)")
        assert not storages(pure) & storages(given)
        donated = optimizer.update_(tree.map(torch.clone, one), donated[1], donated[0], None)
        assert buffers(donated) == places
        assert kinds(pure) == kinds(donated) == full
        for label, (mine, state) in alone.items():
            alone[label] = own[label].update(split(one)[label], state, mine)
        for leaf, grad in zip(leaves, split(one)["matrix"], strict=True):
            leaf.grad = grad.clone()
        usual.step()
        for params, states in (pure, donated):
            assert set(states) == {"matrix", "rest"}
            for label, (mine, state) in alone.items():
                assert_same(split(params)[label], mine, label)
                assert_same(
                    tree.leaves_of(states[label]), tree.leaves_of(state), f"{label}'s state"
                )
            assert_same(split(params)["matrix"], [leaf.detach() for leaf in leaves], "Muon")


class Node(NamedTuple):
    """A container of the user's."""

    w: Any
    b: Any


def test_the_state_of_a_part_has_nothing_for_the_others() -> None:
    """Each sees a tree like the params, of its own leaves alone, in containers that torch knows to be empty."""
    seen = []

    def init(params: Any) -> Any:
        seen.append(params)
        return ()

    optimizer = ps.optim.Optimizer(init, lambda grads, state, params: (params, state))
    params = [Node(torch.ones(2, 2), torch.zeros(2)), {"b": torch.ones(1)}]
    ps.optim.partition(labels, {"matrix": optimizer, "rest": optimizer}).init(params)
    assert_same(seen[0], [Node(torch.ones(2, 2), ()), ()])
    assert_same(seen[1], [Node((), torch.zeros(2)), {"b": torch.ones(1)}])


def test_of_transforms() -> None:
    """Each gradient to a Transform: one before an optimizer, in the order of the params."""
    params, grads = drawn(0)
    double = ps.optim.Transform(lambda _: (), lambda g, s, p: (tree.map(lambda x: 2 * x, g), s))
    apart = ps.optim.partition(labels, {"matrix": ps.optim.momentum(0.5), "rest": double})
    assert isinstance(apart, ps.optim.Transform)
    optimizer = ps.optim.chain(apart, ps.optim.descend(0.5))
    assert optimizer.update_ is not None
    pure = in_place = (params, optimizer.init(params))
    for one in grads:
        pure = optimizer.update(one, pure[1], pure[0])
        given = tree.map(torch.clone, (one, in_place[1], in_place[0]))
        in_place = updated(optimizer, "update_", *given)
        assert_same(in_place, pure)
    own = ps.optim.sgd(0.5, momentum=0.5)
    alone = (split(params)["matrix"], own.init(split(params)["matrix"]))
    for one in grads:
        alone = own.update(split(one)["matrix"], alone[1], alone[0])
    assert_same(split(pure[0])["matrix"], alone[0])
    with pytest.raises(TypeError, match=r"'b' must be an Optimizer, got Transform"):
        ps.optim.partition("b", {"a": SGD["fast"], "b": double})  # type: ignore[type-var]


def test_a_label_that_nobody_has() -> None:
    """Its optimizer is asked nothing, and has no state."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("nobody has this label")

    nobody = ps.optim.Optimizer(refuse, refuse, refuse)
    optimizer = ps.optim.partition(
        labels, {"nobody": nobody, "matrix": SGD["slow"], "rest": SGD["fast"]}
    )
    params, grads = drawn(0)
    state = optimizer.init(params)
    assert set(state) == {"matrix", "rest"}
    moved, after = optimizer.update(grads[0], state, params)
    assert kinds((moved, after)) == kinds((params, state))
    assert optimizer.update_ is not None
    given = tree.map(torch.clone, (grads[0], state, params))
    assert_same(updated(optimizer, "update_", *given), (moved, after))


@pytest.mark.parametrize("method", ["update", "update_"])
def test_a_state_of_others_is_refused(method: str) -> None:
    """It never trains on with half of a state."""
    params, grads = drawn(0)
    optimizer = muon_and_adamw()
    state, update = optimizer.init(params), partial(updated, optimizer, method)
    foreign: list[Any] = [
        (),
        {},
        {"matrix": state["matrix"]},
        {**state, "third": ()},
        {"matrix": state["matrix"], "others": state["rest"]},
        ps.optim.adamw(0.1).init(params),
    ]
    for other in foreign:
        with pytest.raises(
            ValueError,
            match=r"opt_state was not made by .* is .*, and \{'matrix': .*'rest': .*was expected",
        ):
            update(grads[0], other, params)
    swapped = {"matrix": state["rest"], "rest": state["matrix"]}
    with pytest.raises(ValueError, match=r"it is AdamWState.*, and TorchState.* was expected"):
        update(grads[0], swapped, params)
    relabelled = ps.optim.partition(
        lambda params: tree.map(lambda leaf: "rest" if leaf.numel() < 32 else "matrix", params),
        {"matrix": ps.optim.adamw(0.1), "rest": ps.optim.adamw(0.1)},
    ).init(params)
    both = ps.optim.partition(labels, {"matrix": ps.optim.adamw(0.1), "rest": ps.optim.adamw(0.1)})
    with pytest.raises(
        ValueError, match=r"opt_state was not made by optimizer\.init of these params"
    ):
        updated(both, method, grads[0], relabelled, params)


def test_each_part_sees_its_own_norm() -> None:
    """Clipping inside takes the norm of its own gradients; in front, that of all."""
    params = {"w": torch.zeros(2, 2), "b": torch.zeros(2)}
    grads = {"w": torch.tensor([[3.0, 0.0], [0.0, 4.0]]), "b": torch.tensor([0.0, 12.0])}
    clip, descend = ps.optim.clip_by_global_norm(2.0), ps.optim.descend(1.0)
    inside = ps.optim.partition(labels, {"matrix": ps.optim.chain(clip, descend), "rest": descend})
    before = ps.optim.chain(
        ps.optim.clip_by_global_norm(6.5),
        ps.optim.partition(labels, {"matrix": descend, "rest": descend}),
    )
    for method in ("update", "update_"):
        for optimizer, factors in ((inside, (2 / 5, 1.0)), (before, (6.5 / 13, 6.5 / 13))):
            given = tree.map(torch.clone, (grads, optimizer.init(params), params))
            moved, _ = updated(optimizer, method, *given)
            expected = {
                "w": -grads["w"] * torch.tensor(factors[0]),
                "b": -grads["b"] * torch.tensor(factors[1]),
            }
            assert_same(moved, expected, method)


@pytest.mark.parametrize("name", PARTS)
def test_in_place_where_it_applies(name: str) -> None:
    assert_in_place_where_it_applies(ps.optim.partition(labels, PARTS[name]), *drawn(4))
