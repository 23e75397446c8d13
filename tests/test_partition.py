"""Tests ``partition``: each parameter goes to the optimizer of its label, alone.

Labels are a tree, a prefix or a function that is called once; unknown ones are refused by name.
"""

import gc
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from purestep import optim, tree
from support.random_updates import random_grads, random_params, signature_of
from support.strategies import assert_same, label_leaves
from tests.optimizers import UPDATE_METHODS, call_update, iterate_states

SHAPES = {
    "blocks": [
        {"w": (4, 16), "b": (16,)},
        {"w": (16, 32), "b": (32,)},
    ],
    "head": {"w": (32, 16), "scale": (16,)},
}
"""Whole vectors, in which ``adamw`` has the same bits in place and out of place."""
GENERATOR = torch.Generator().manual_seed(0)
PARAMS: Any = random_params(SHAPES, torch.float32, GENERATOR)
GRADS: Any = [random_grads(PARAMS, GENERATOR) for _ in range(5)]
MUON = optim.from_torch(torch.optim.Muon, lr=0.05)
ADAMW = optim.adamw(0.05)
SGD = {"slow": optim.sgd(0.125), "fast": optim.sgd(0.5)}


def plain_update(grads: Any, state: Any, params: Any) -> Any:
    new_params = tree.map(lambda p, g: p - g / 8, params, grads)
    return new_params, state


PLAIN = optim.Optimizer(lambda params: (), plain_update)
"""One whose ``update`` has three arguments, as users write it."""


def split_by_hand(params: Any) -> dict[str, list[Tensor]]:
    """Lists the leaves of each label, in order."""
    first, second = params["blocks"]
    head = params["head"]
    return {
        "matrix": [first["w"], second["w"], head["w"]],
        "rest": [first["b"], second["b"], head["scale"]],
    }


@pytest.mark.parametrize(
    ("matrix", "rest"),
    [(MUON, ADAMW), (optim.partition({"all": MUON}, "all"), PLAIN)],
)
def test_each_part_is_its_optimizer_by_itself(matrix: Any, rest: Any) -> None:
    """To the bit, with its state; also nested, and without an ``update_``."""
    optimizers = {"matrix": matrix, "rest": rest}
    optimizer = optim.partition(optimizers, label_leaves)
    params = split_by_hand(PARAMS)
    states = {}
    for label, leaves in params.items():
        states[label] = optimizers[label].init(leaves)

    steps = iterate_states(optimizer, PARAMS, GRADS)

    for grads, (new_params, new_state) in zip(GRADS, steps, strict=True):
        leaf_grads = split_by_hand(grads)
        new_leaves = split_by_hand(new_params)
        for label, by_itself in optimizers.items():
            params[label], states[label] = by_itself.update(
                leaf_grads[label], states[label], params[label]
            )
            assert_same(new_leaves[label], params[label], label)
            actual = tree.leaves(new_state[label])
            expected = tree.leaves(states[label])
            assert_same(actual, expected, f"{label}'s state")


class Node(NamedTuple):
    """A container of the user's."""

    w: Any
    b: Any


def refuse_to_run(*_: Any) -> Any:
    raise AssertionError("no leaf has this label")


def test_a_part_sees_a_tree_with_no_leaves_but_its_own() -> None:
    """An optimizer whose label no leaf has is never called, and has no state.

    None stays None.
    """
    seen: list[Any] = []

    def init(params: Any) -> Any:
        seen.append(params)
        return ()

    keep = optim.Optimizer(init, lambda grads, state, params: (params, state))
    unused = optim.Optimizer(refuse_to_run, refuse_to_run, refuse_to_run)
    optimizers = {"unused": unused, "matrix": keep, "rest": keep}
    optimizer = optim.partition(optimizers, label_leaves)
    params = [
        Node(torch.ones(2, 2), torch.zeros(2)),
        {"b": torch.ones(1), "nothing": None},
    ]

    state = optimizer.init(params)

    matrices, rest = seen
    assert_same(matrices, [Node(torch.ones(2, 2), ()), ()])
    expected_rest = [
        Node((), torch.zeros(2)),
        {"b": torch.ones(1), "nothing": ()},
    ]
    assert_same(rest, expected_rest)
    assert list(state) == ["matrix", "rest"]
    for way in UPDATE_METHODS:
        result = call_update(optimizer, way, params, state, params)
        assert signature_of(result) == signature_of((params, state))


def double_update(grads: Any, state: Any, params: Any) -> Any:
    return tree.map(lambda g: 2 * g, grads), state


DOUBLE = optim.Transform(lambda params: (), double_update)


def test_partition_of_transforms() -> None:
    """A Transform before an optimizer, which gets each gradient in the params' order."""
    transforms = {"matrix": optim.momentum(0.5), "rest": DOUBLE}
    transform = optim.partition(transforms, label_leaves)
    optimizer = optim.chain(transform, optim.sgd(0.5))
    sgd = optim.sgd(0.5, momentum=0.5)
    params = split_by_hand(PARAMS)["matrix"]
    state = sgd.init(params)

    steps = iterate_states(optimizer, PARAMS, GRADS)

    assert isinstance(transform, optim.Transform)
    for grads, (new_params, _) in zip(GRADS, steps, strict=True):
        matrix_grads = split_by_hand(grads)["matrix"]
        params, state = sgd.update(matrix_grads, state, params)
        assert_same(split_by_hand(new_params)["matrix"], params)


def test_partition_refuses_to_mix_transforms_and_optimizers() -> None:
    mixed: Any = {"a": SGD["fast"], "b": DOUBLE}
    with pytest.raises(TypeError, match=r"'b' must be an Optimizer, got Transform"):
        optim.partition(mixed, "b")


FOREIGN = (
    r"opt_state was not made by .* is .*, and \{'matrix': .*'rest': .*was expected"
)


@pytest.mark.parametrize("way", UPDATE_METHODS)
def test_the_state_of_another_optimizer_is_refused(way: str) -> None:
    """Training never goes on with half of a state."""
    optimizer = optim.partition({"matrix": MUON, "rest": ADAMW}, label_leaves)
    state = optimizer.init(PARAMS)
    swapped = {"matrix": state["rest"], "rest": state["matrix"]}
    cases: list[tuple[Any, str]] = [
        ((), FOREIGN),
        ({"matrix": state["matrix"]}, FOREIGN),
        ({**state, "third": ()}, FOREIGN),
        (ADAMW.init(PARAMS), FOREIGN),
        (swapped, r"it is AdamWState.*, and TorchState.* was expected"),
    ]
    for other_state, message in cases:
        with pytest.raises(ValueError, match=message):
            call_update(optimizer, way, GRADS[0], other_state, PARAMS)


def label_by_size(leaf: Tensor) -> str:
    return "rest" if leaf.numel() < 32 else "matrix"


@pytest.mark.parametrize("way", UPDATE_METHODS)
def test_the_state_of_other_labels_is_refused(way: str) -> None:
    optimizers = {"matrix": ADAMW, "rest": ADAMW}
    by_size = tree.map(label_by_size, PARAMS)
    optimizer = optim.partition(optimizers, label_leaves)
    other_state = optim.partition(optimizers, by_size).init(PARAMS)

    message = r"opt_state was not made by optimizer\.init of these params"
    with pytest.raises(ValueError, match=message):
        call_update(optimizer, way, GRADS[0], other_state, PARAMS)


DESCEND = optim.sgd(1.0)
CLIPPING = {
    "inside": {
        "optimizer": optim.partition(
            {
                "matrix": optim.chain(optim.clip_by_global_norm(2.0), DESCEND),
                "rest": DESCEND,
            },
            label_leaves,
        ),
        "scale of w": 2 / 5,
        "scale of b": 1.0,
    },
    "in front": {
        "optimizer": optim.chain(
            optim.clip_by_global_norm(6.5),
            optim.partition({"matrix": DESCEND, "rest": DESCEND}, label_leaves),
        ),
        "scale of w": 6.5 / 13,
        "scale of b": 6.5 / 13,
    },
}


@pytest.mark.parametrize("clips", CLIPPING)
@pytest.mark.parametrize("way", UPDATE_METHODS)
def test_each_part_clips_by_the_norm_of_its_leaves(way: str, clips: str) -> None:
    """Clipping in front of the partition takes the norm of all."""
    case: Any = CLIPPING[clips]
    optimizer = case["optimizer"]
    params = {"w": torch.zeros(2, 2), "b": torch.zeros(2)}
    grads = {
        "w": torch.tensor([[3.0, 0.0], [0.0, 4.0]]),
        "b": torch.tensor([0.0, 12.0]),
    }
    expected = {
        "w": -grads["w"] * torch.tensor(case["scale of w"]),
        "b": -grads["b"] * case["scale of b"],
    }

    arguments = tree.map(torch.clone, (grads, optimizer.init(params), params))
    new_params, _ = call_update(optimizer, way, *arguments)

    assert_same(new_params, expected, way)


PREFIX = OrderedDict(head="slow", blocks=["slow", "fast"])
WHOLE = {
    "blocks": [
        {"w": "slow", "b": "slow"},
        {"w": "fast", "b": "fast"},
    ],
    "head": {"w": "slow", "scale": "slow"},
}
SECOND_BLOCK_IS_FAST = [0.125, 0.125, 0.5, 0.5, 0.125, 0.125]
LABELS: list[tuple[Any, list[float]]] = [
    (WHOLE, SECOND_BLOCK_IS_FAST),
    (PREFIX, SECOND_BLOCK_IS_FAST),
    (lambda _: WHOLE, SECOND_BLOCK_IS_FAST),
    (lambda _: PREFIX, SECOND_BLOCK_IS_FAST),
    ("fast", [0.5] * 6),
]


@pytest.mark.parametrize(("param_labels", "rates"), LABELS)
def test_labels_as_a_tree_a_prefix_or_one_for_all(
    param_labels: Any, rates: list[float]
) -> None:
    optimizer = optim.partition(SGD, param_labels)
    grads = GRADS[0]

    new_params, _ = optimizer.update(grads, optimizer.init(PARAMS), PARAMS)

    expected = []
    leaves = tree.leaves(PARAMS)
    for param, grad, rate in zip(leaves, tree.leaves(grads), rates, strict=True):
        expected.append(param - rate * grad)
    assert_same(tree.leaves(new_params), expected)


class LabelsByNdim:
    """Labels matrices as slow, and keeps the shape of ``w`` at each call."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, params: Any) -> Any:
        self.shapes.append(tuple(params["w"].shape))
        return tree.map(lambda leaf: "slow" if leaf.ndim == 2 else "fast", params)


def make_params(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "w": torch.ones(shape, dtype=dtype),
        "b": torch.ones(2, dtype=dtype),
    }


def test_labels_are_computed_once_for_params_of_one_structure() -> None:
    """With the same shapes and dtypes; under a compiler or a transform each time."""
    by_ndim = LabelsByNdim()
    optimizer = optim.partition(SGD, by_ndim)
    for shape in [(2, 2), (4, 2), (2, 2), (4,), (2, 2)]:
        for dtype in (torch.float32, torch.float64):
            params = make_params(shape, dtype)
            state = optimizer.init(params)
            for _ in range(2):
                new_params, _ = optimizer.update(params, state, params)
            assert new_params["b"].unique() == 0.5
    # Once for each dtype.
    assert by_ndim.shapes == [(2, 2), (2, 2), (4, 2), (4, 2), (4,), (4,)]

    batched = tree.map(lambda leaf: leaf[None], (params, state, params))
    torch.vmap(optimizer.update)(*batched)

    assert len(by_ndim.shapes) == 7


def test_labels_keep_no_tensor() -> None:
    optimizer = optim.partition(SGD, LabelsByNdim())
    params = make_params((2, 2), torch.float64)
    state = optimizer.init(params)
    new_params, _ = optimizer.update(params, state, params)
    batched = tree.map(lambda leaf: leaf[None], (params, state, params))
    torch.vmap(optimizer.update)(*batched)

    reference = weakref.ref(params["w"])
    del params, state, new_params, batched
    gc.collect()

    assert reference() is None


def test_unknown_labels_are_refused() -> None:
    misspelt = {
        "blocks": ["slow", {"w": "slow", "b": "fats"}],
        "head": "fast",
    }
    optimizer: Any = optim.partition(SGD, misspelt)
    leaf = r"params\['blocks'\]\[1\]\['b'\]"
    message = rf"labels {leaf} 'fats', but its optimizers are 'slow', 'fast'"
    with pytest.raises(ValueError, match=message):
        optimizer.init(PARAMS)
    with pytest.raises(ValueError, match=message):
        optimizer.update(GRADS[0], {}, PARAMS)

    with pytest.raises(ValueError, match="head"):
        optim.partition(SGD, {"blocks": "slow"}).init(PARAMS)


NO_OPTIMIZERS: list[Any] = [
    SGD,
    0.1,
    optim.sgd,
    optim.clip_by_global_norm(1.0),
]


@pytest.mark.parametrize("part", NO_OPTIMIZERS)
def test_parts_that_are_no_optimizers_are_refused(part: Any) -> None:
    message = rf"'fast' must be an Optimizer, got {type(part).__name__}: "
    with pytest.raises(TypeError, match=message):
        optim.partition({**SGD, "fast": part}, "slow")
