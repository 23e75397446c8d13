"""``partition``: each parameter to the optimizer of its label, as if the others were not there.

Labels are a tree, a prefix or a function, asked once, and refused by name.
"""

import gc
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.strategies import assert_same, labels
from proofs.test_t08_optimizers import kinds, random_grads, random_params
from purestep import tree
from tests.optimizers import WAYS, states_of, updated

SHAPES = {
    "blocks": [{"w": (4, 16), "b": (16,)}, {"w": (16, 32), "b": (32,)}],
    "head": {"w": (32, 16), "scale": (16,)},
}
"""Whole vectors, in which ``adamw`` has the same bits in place and out of place."""
GENERATOR = torch.Generator().manual_seed(0)
PARAMS: Any = random_params(SHAPES, torch.float32, GENERATOR)
GRADS: Any = [random_grads(PARAMS, GENERATOR) for _ in range(5)]
MUON, ADAMW = ps.optim.from_torch(torch.optim.Muon, lr=0.05), ps.optim.adamw(0.05)
SGD = {"slow": ps.optim.sgd(0.125), "fast": ps.optim.sgd(0.5)}
PLAIN = ps.optim.Optimizer(
    lambda params: (),
    lambda grads, state, params: (
        tree.map(lambda p, g: p - g / 8, params, grads),
        state,
    ),
)
"""One with three arguments, as others write it."""


def split(whole: Any) -> dict[str, list[Tensor]]:
    """The leaves of each label, in order: by hand."""
    (first, second), head = whole["blocks"], whole["head"]
    matrices = [first["w"], second["w"], head["w"]]
    return {"matrix": matrices, "rest": [first["b"], second["b"], head["scale"]]}


@pytest.mark.parametrize(
    ("matrix", "rest"),
    [(MUON, ADAMW), (ps.optim.partition("all", {"all": MUON}), PLAIN)],
)
def test_each_part_is_its_optimizer_by_itself(matrix: Any, rest: Any) -> None:
    """On a list of its leaves, to the bit, with its state; nested, and without an ``update_``."""
    own = {"matrix": matrix, "rest": rest}
    alone = {
        label: (mine, own[label].init(mine)) for label, mine in split(PARAMS).items()
    }
    run = states_of(ps.optim.partition(labels, own), PARAMS, GRADS)
    for one, (moved, after) in zip(GRADS, run, strict=True):
        for label, (mine, state) in alone.items():
            alone[label] = mine, state = own[label].update(
                split(one)[label], state, mine
            )
            assert_same(split(moved)[label], mine, label)
            assert_same(
                tree.leaves(after[label]), tree.leaves(state), f"{label}'s state"
            )


class Node(NamedTuple):
    """A container of the user's."""

    w: Any
    b: Any


def test_a_part_sees_a_tree_with_no_leaves_but_its_own() -> None:
    """An optimizer whose label no leaf has is never called, and has no state. None stays None."""
    seen: list[Any] = []

    def refuse(*_: Any) -> Any:
        raise AssertionError("no leaf has this label")

    def init(params: Any) -> Any:
        seen.append(params)
        return ()

    own = ps.optim.Optimizer(init, lambda grads, state, params: (params, state))
    unused = ps.optim.Optimizer(refuse, refuse, refuse)
    optimizer = ps.optim.partition(
        labels, {"unused": unused, "matrix": own, "rest": own}
    )
    params = [
        Node(torch.ones(2, 2), torch.zeros(2)),
        {"b": torch.ones(1), "nothing": None},
    ]
    state = optimizer.init(params)
    assert_same(seen[0], [Node(torch.ones(2, 2), ()), ()])
    assert_same(
        seen[1], [Node((), torch.zeros(2)), {"b": torch.ones(1), "nothing": ()}]
    )
    for way in WAYS:
        assert kinds(updated(optimizer, way, params, state, params)) == kinds(
            (params, state)
        )
    assert [*state] == ["matrix", "rest"]


def test_partition_of_transforms() -> None:
    """Each gradient to a Transform: one before an optimizer, in the order of the params."""
    double = ps.optim.Transform(
        lambda _: (), lambda g, s, p: (tree.map(lambda x: 2 * x, g), s)
    )
    parts = ps.optim.partition(
        labels, {"matrix": ps.optim.momentum(0.5), "rest": double}
    )
    assert isinstance(parts, ps.optim.Transform)
    optimizer, own = (
        ps.optim.chain(parts, ps.optim.descend(0.5)),
        ps.optim.sgd(0.5, momentum=0.5),
    )
    alone = split(PARAMS)["matrix"], own.init(split(PARAMS)["matrix"])
    for one, (moved, _) in zip(GRADS, states_of(optimizer, PARAMS, GRADS), strict=True):
        alone = own.update(split(one)["matrix"], alone[1], alone[0])
        assert_same(split(moved)["matrix"], alone[0])
    with pytest.raises(TypeError, match=r"'b' must be an Optimizer, got Transform"):
        ps.optim.partition("b", {"a": SGD["fast"], "b": double})  # type: ignore[type-var]


@pytest.mark.parametrize("way", WAYS)
def test_a_state_of_others_is_refused(way: str) -> None:
    """It never trains on with half of a state."""
    both = {"matrix": ADAMW, "rest": ADAMW}
    optimizer = ps.optim.partition(labels, {"matrix": MUON, "rest": ADAMW})
    adamws, state = ps.optim.partition(labels, both), optimizer.init(PARAMS)
    foreign = (
        r"opt_state was not made by .* is .*, and \{'matrix': .*'rest': .*was expected"
    )
    swapped = {"matrix": state["rest"], "rest": state["matrix"]}
    by_size = tree.map(lambda leaf: "rest" if leaf.numel() < 32 else "matrix", PARAMS)
    of_others = ps.optim.partition(by_size, both).init(PARAMS)
    for one, other, message in (
        (optimizer, (), foreign),
        (optimizer, {"matrix": state["matrix"]}, foreign),
        (optimizer, {**state, "third": ()}, foreign),
        (optimizer, ADAMW.init(PARAMS), foreign),
        (optimizer, swapped, r"it is AdamWState.*, and TorchState.* was expected"),
        (
            adamws,
            of_others,
            r"opt_state was not made by optimizer\.init of these params",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            updated(one, way, GRADS[0], other, PARAMS)


@pytest.mark.parametrize("way", WAYS)
def test_each_part_clips_by_the_norm_of_its_leaves(way: str) -> None:
    """Clipping in front of the partition takes the norm of all."""
    params = {"w": torch.zeros(2, 2), "b": torch.zeros(2)}
    grads = {
        "w": torch.tensor([[3.0, 0.0], [0.0, 4.0]]),
        "b": torch.tensor([0.0, 12.0]),
    }
    clip, descend = ps.optim.clip_by_global_norm, ps.optim.descend(1.0)
    inside = {"matrix": ps.optim.chain(clip(2.0), descend), "rest": descend}
    without = ps.optim.partition(labels, {"matrix": descend, "rest": descend})
    for optimizer, of_w, of_b in (
        (ps.optim.partition(labels, inside), 2 / 5, 1.0),
        (ps.optim.chain(clip(6.5), without), 6.5 / 13, 6.5 / 13),
    ):
        given = tree.map(torch.clone, (grads, optimizer.init(params), params))
        moved, _ = updated(optimizer, way, *given)
        assert_same(
            moved, {"w": -grads["w"] * torch.tensor(of_w), "b": -grads["b"] * of_b}, way
        )


PREFIX = OrderedDict(head="slow", blocks=["slow", "fast"])
WHOLE = {
    "blocks": [{"w": "slow", "b": "slow"}, {"w": "fast", "b": "fast"}],
    "head": {"w": "slow", "scale": "slow"},
}


@pytest.mark.parametrize(
    "written", [WHOLE, PREFIX, lambda _: WHOLE, lambda _: PREFIX, "fast"]
)
def test_labels_as_a_tree_a_prefix_or_one_for_all(written: Any) -> None:
    """However the labels are written: the second block is fast, all else slow."""
    optimizer = ps.optim.partition(written, SGD)
    moved, _ = optimizer.update(GRADS[0], optimizer.init(PARAMS), PARAMS)
    rates = [0.5] * 6 if written == "fast" else [0.125, 0.125, 0.5, 0.5, 0.125, 0.125]
    leaves = zip(tree.leaves(PARAMS), tree.leaves(GRADS[0]), rates, strict=True)
    assert_same(tree.leaves(moved), [p - rate * g for p, g, rate in leaves])


def test_labels_are_asked_once_for_params_that_agree() -> None:
    """In structure, shapes and dtypes; and under a compiler or a transform each time. No tensor is kept."""
    asked = []

    def by_ndim(params: Any) -> Any:
        asked.append(params["w"].shape)
        return tree.map(lambda leaf: "slow" if leaf.ndim == 2 else "fast", params)

    optimizer = ps.optim.partition(by_ndim, SGD)
    for shape in [(2, 2), (4, 2), (2, 2), (4,), (2, 2)]:
        for dtype in (torch.float32, torch.float64):
            params = {
                "w": torch.ones(shape, dtype=dtype),
                "b": torch.ones(2, dtype=dtype),
            }
            state = optimizer.init(params)
            for _ in range(2):
                moved, _ = optimizer.update(params, state, params)
            assert moved["b"].unique() == 0.5
    assert asked == [
        torch.Size(shape) for shape in ((2, 2), (2, 2), (4, 2), (4, 2), (4,), (4,))
    ]
    torch.vmap(optimizer.update)(
        *tree.map(lambda leaf: leaf[None], (params, state, params))
    )
    assert len(asked) == 7
    known = weakref.ref(params["w"])
    del params, state, moved
    gc.collect()
    assert known() is None


def test_labels_and_parts_that_are_none() -> None:
    misspelt = {"blocks": ["slow", {"w": "slow", "b": "fats"}], "head": "fast"}
    unknown: Any = ps.optim.partition(misspelt, SGD)
    message = r"labels params\['blocks'\]\[1\]\['b'\] 'fats', but its optimizers are 'slow', 'fast'"
    for call in (
        lambda: unknown.init(PARAMS),
        lambda: unknown.update(GRADS[0], {}, PARAMS),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    parts: list[Any] = [SGD, 0.1, ps.optim.sgd, ps.optim.clip_by_global_norm(1.0)]
    for part in parts:
        message = rf"'fast' must be an Optimizer, got {type(part).__name__}: "
        with pytest.raises(TypeError, match=message):
            ps.optim.partition("slow", {**SGD, "fast": part})
    with pytest.raises(ValueError, match="head"):
        ps.optim.partition({"blocks": "slow"}, SGD).init(PARAMS)
