"""``partition``: each parameter to the optimizer of its label, as if the others were not there."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import purestep as ps
from proofs.strategies import assert_same
from proofs.test_t06_purity import storages
from proofs.test_t08_optimizers import buffers, kinds, random_grads, random_params
from purestep import tree

SHAPES = {
    "blocks": [{"w": (4, 6), "b": (6,)}, {"w": (6, 5), "b": (5,)}],
    "head": {"w": (5, 3), "scale": ()},
}
MATRICES = ["blocks[0].w", "blocks[1].w", "head.w"]
LEARNING_RATE = 0.05


def labels_of(params: Any) -> Any:
    """Matrices, and the rest."""
    return tree.map(lambda leaf: "matrix" if leaf.ndim == 2 else "rest", params)


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
    return ps.optim.partition(labels_of, {"matrix": muon(), "rest": ps.optim.adamw(LEARNING_RATE)})


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
        donated = optimizer.update_(tree.map(torch.clone, one), donated[1], donated[0])
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


SGD = {"slow": ps.optim.sgd(0.125, 0.5), "fast": ps.optim.sgd(0.5)}
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
    ps.optim.partition(labels_of, {"matrix": optimizer, "rest": optimizer}).init(params)
    assert_same(seen[0], [Node(torch.ones(2, 2), ()), ()])
    assert_same(seen[1], [Node((), torch.zeros(2)), {"b": torch.ones(1)}])


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
    optimizer = ps.optim.partition(labels_of, NATIVE)
    params, _ = drawn(0)
    known = weakref.ref(tree.leaves_of(params)[0])
    optimizer.init(params)
    del params
    gc.collect()
    assert known() is None


def test_of_transforms() -> None:
    """Each gradient to a Transform: one before an optimizer, in the order of the params."""
    params, grads = drawn(0)
    double = ps.optim.Transform(lambda _: (), lambda g, s, p: (tree.map(lambda x: 2 * x, g), s))
    apart = ps.optim.partition(labels_of, {"matrix": ps.optim.momentum(0.5), "rest": double})
    assert isinstance(apart, ps.optim.Transform)
    optimizer = ps.optim.chain(apart, ps.optim.descend(0.5))
    assert optimizer.update_ is not None
    pure = in_place = (params, optimizer.init(params))
    for one in grads:
        pure = optimizer.update(one, pure[1], pure[0])
        given = tree.map(torch.clone, (one, in_place[1], in_place[0]))
        in_place = optimizer.update_(*given)
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
        labels_of, {"nobody": nobody, "matrix": SGD["slow"], "rest": SGD["fast"]}
    )
    params, grads = drawn(0)
    state = optimizer.init(params)
    assert set(state) == {"matrix", "rest"}
    moved, after = optimizer.update(grads[0], state, params)
    assert kinds((moved, after)) == kinds((params, state))
    assert optimizer.update_ is not None
    given = tree.map(torch.clone, (grads[0], state, params))
    assert_same(optimizer.update_(*given), (moved, after))


def test_refusals() -> None:
    params, grads = drawn(0)
    unknown = ps.optim.partition(
        {"blocks": ["slow", {"w": "slow", "b": "fats"}], "head": "fast"}, SGD
    )
    message = r"labels params\['blocks'\]\[1\]\['b'\] 'fats', but its optimizers are 'slow', 'fast'"
    with pytest.raises(ValueError, match=message):
        unknown.init(params)
    with pytest.raises(ValueError, match=message):
        unknown.update(grads[0], {}, params)
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


@pytest.mark.parametrize("method", ["update", "update_"])
def test_a_state_of_others_is_refused(method: str) -> None:
    """It never trains on with half of a state."""
    params, grads = drawn(0)
    optimizer = muon_and_adamw()
    state, update = optimizer.init(params), getattr(optimizer, method)
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
        lambda params: tree.map(lambda leaf: "rest" if leaf.numel() < 6 else "matrix", params),
        {"matrix": ps.optim.adamw(0.1), "rest": ps.optim.adamw(0.1)},
    ).init(params)
    both = ps.optim.partition(
        labels_of, {"matrix": ps.optim.adamw(0.1), "rest": ps.optim.adamw(0.1)}
    )
    with pytest.raises(
        ValueError, match=r"opt_state was not made by optimizer\.init of these params"
    ):
        getattr(both, method)(grads[0], relabelled, params)


def test_each_part_sees_its_own_norm() -> None:
    """Clipping inside takes the norm of its own gradients; in front, that of all."""
    params = {"w": torch.zeros(2, 2), "b": torch.zeros(2)}
    grads = {"w": torch.tensor([[3.0, 0.0], [0.0, 4.0]]), "b": torch.tensor([0.0, 12.0])}
    clip, descend = ps.optim.clip_by_global_norm(2.0), ps.optim.descend(1.0)
    inside = ps.optim.partition(
        labels_of, {"matrix": ps.optim.chain(clip, descend), "rest": descend}
    )
    before = ps.optim.chain(
        ps.optim.clip_by_global_norm(6.5),
        ps.optim.partition(labels_of, {"matrix": descend, "rest": descend}),
    )
    for method in ("update", "update_"):
        for optimizer, factors in ((inside, (2 / 5, 1.0)), (before, (6.5 / 13, 6.5 / 13))):
            given = tree.map(torch.clone, (grads, optimizer.init(params), params))
            moved, _ = getattr(optimizer, method)(*given)
            expected = {
                "w": -grads["w"] * torch.tensor(factors[0]),
                "b": -grads["b"] * torch.tensor(factors[1]),
            }
            assert_same(moved, expected, method)


def plain_sgd() -> ps.optim.Optimizer:
    """One with three arguments, as others write it."""
    return ps.optim.Optimizer(
        lambda params: (),
        lambda grads, state, params: (tree.map(lambda p, g: p - g / 8, params, grads), state),
    )


NATIVE = {
    "matrix": ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ps.optim.adamw(0.1)),
    "rest": ps.optim.sgd(0.1, 0.9, nesterov=True, weight_decay=0.1),
}
PARTS: dict[str, dict[str, ps.optim.Optimizer]] = {
    "torch and native": {"matrix": muon(), "rest": ps.optim.adamw(0.1)},
    "native": NATIVE,
    "without kernels": {"matrix": ps.optim.lion(0.1), "rest": plain_sgd()},
    "nested": {
        "matrix": ps.optim.partition("all of it", {"all of it": muon()}),
        "rest": plain_sgd(),
    },
}


@pytest.mark.parametrize("method", ["update", "update_"])
@pytest.mark.parametrize("name", PARTS)
def test_grad_scale_reaches_each_part_once(name: str, method: str) -> None:
    """A power of two divides exactly, so nobody can tell; and a part without the keyword gets divided gradients."""
    params, grads = drawn(3)
    optimizer = ps.optim.partition(labels_of, PARTS[name])
    plain = scaled = (params, optimizer.init(params))
    divide: Any = ps.optim.chain(optimizer)  # gives the keyword to those who lack it
    for one in grads:
        plain = optimizer.update(one, plain[1], plain[0])
        larger = tree.map(lambda grad: grad * 4, one)
        given = tree.map(torch.clone, (larger, (scaled[1],), scaled[0]))
        moved, (state,) = getattr(divide, method)(*given, grad_scale=torch.tensor(4))
        scaled = (moved, state)
        assert_same(scaled, plain)


def loss_fn(params: Any, microbatch: Any) -> Tensor:
    """A squared loss, for each row."""
    hidden = microbatch["x"]
    for block in params["blocks"]:
        hidden = torch.tanh(hidden @ block["w"] + block["b"])
    return (hidden @ params["head"]["w"] * params["head"]["scale"]).square().sum(1)


def group(sizes: list[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Microbatches of these sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {"x": torch.randn(rows, 4, generator=generator, dtype=dtype), "w": torch.ones(rows)}
        for rows in sizes
    ]


def step_with(optimizer: ps.optim.Optimizer, **how: Any) -> Any:
    """The step."""
    return ps.make_update_step(loss_fn, optimizer, weight_fn=lambda m: m["w"], **how)


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("name", PARTS)
def test_in_the_step(name: str, normalize: str) -> None:
    """Donated or not, the same bits; a step that is not taken is the identity for every part."""
    optimizer = ps.optim.partition(labels_of, PARTS[name])
    params, _ = drawn(1)
    good = group([2, 1])
    groups = [
        good,
        [],
        [{**part, "w": torch.zeros_like(part["w"])} for part in good],
        [{**part, "x": part["x"] * float("inf")} for part in good],
        group([3, 2], seed=1),
    ]
    histories = []
    for donate in (False, True):
        step = step_with(optimizer, donate=donate, normalize=normalize, on_nonfinite="skip")
        given = ours, opt_state = tree.map(torch.clone, (params, optimizer.init(params)))
        history = [tree.map(torch.clone, (ours, opt_state))]
        for one in groups:
            ours, opt_state, metrics = step(ours, opt_state, one)
            assert bool(metrics.applied) is (one is groups[0] or one is groups[-1])
            history.append(tree.map(torch.clone, (ours, opt_state)))
        shared = storages((ours, opt_state)) & storages(given)
        assert shared == (storages(given) if donate else set())
        for number in (2, 3, 4):
            assert_same(history[number], history[1])
        assert not torch.equal(history[-1][0]["head"]["w"], history[1][0]["head"]["w"])
        assert not torch.equal(history[-1][0]["head"]["scale"], history[1][0]["head"]["scale"])
        histories.append(history)
    assert_same(histories[1], histories[0])


@pytest.mark.parametrize("scale", [None, 4.0])
@pytest.mark.parametrize("name", PARTS)
def test_in_place_where_it_applies(name: str, scale: float | None) -> None:
    """``applied=False`` leaves all parts as they are, to the bit; True is the update."""
    optimizer = ps.optim.partition(labels_of, PARTS[name])
    params, grads = drawn(4)
    how: Any = {} if scale is None else {"grad_scale": torch.tensor(scale)}
    state = (params, optimizer.init(params))
    assert optimizer.update_ is not None
    for one in grads:
        moved = optimizer.update(one, state[1], state[0], **how)
        for applied, expected in ((False, state), (True, moved)):
            own, ours, opt_state = tree.map(torch.clone, (one, *state))
            places = buffers((ours, opt_state))
            result = optimizer.update_(own, opt_state, ours, applied=torch.tensor(applied), **how)
            assert_same(result, expected, f"state where {applied=}")
            assert buffers(result) == places
        state = moved


@pytest.mark.parametrize("name", PARTS)
def test_the_step_is_its_parts_by_hand(name: str) -> None:
    """The gradients that the step sees, taken apart by hand, each to its optimizer."""
    optimizer = ps.optim.partition(labels_of, PARTS[name])
    params, _ = drawn(1)
    state = (params, optimizer.init(params))
    alone = {label: (mine, PARTS[name][label].init(mine)) for label, mine in split(params).items()}
    for seed in range(3):
        microbatches = group([2, 3], seed)
        grads, *_ = ps.accumulate(
            loss_fn,
            state[0],
            microbatches,
            weight_fn=lambda m: m["w"],
            total=ps.Count(torch.tensor(5), torch.tensor(1)),
        )
        new_params, new_state, _ = step_with(optimizer)(*state, microbatches)
        state = (new_params, new_state)
        for label, (mine, own) in alone.items():
            alone[label] = PARTS[name][label].update(split(grads)[label], own, mine)
            assert_same(split(state[0])[label], alone[label][0], label)


def batched(*states: Any) -> Any:
    """An ensemble."""
    return tree.map(lambda *leaves: torch.stack(leaves), *states)


def test_vmap_is_one_by_one() -> None:
    """An ensemble of native parts steps as its members do, to the bit."""
    optimizer = ps.optim.partition(
        labels_of, {"matrix": ps.optim.adamw(0.1, weight_decay=0.1), "rest": NATIVE["rest"]}
    )
    members = [drawn(seed, torch.float64) for seed in range(3)]
    states = [(params, optimizer.init(params)) for params, _ in members]
    ensemble = batched(*states)
    for number in range(3):
        grads = [history[number] for _, history in members]
        states = [
            optimizer.update(one, state, params)
            for one, (params, state) in zip(grads, states, strict=True)
        ]
        ensemble = torch.vmap(optimizer.update)(batched(*grads), ensemble[1], ensemble[0])
        assert_same(ensemble, batched(*states))


def test_vmap_of_the_step_is_one_by_one() -> None:
    """The whole step, on data without rounding: batched sums may round in another order."""
    optimizer = ps.optim.partition(labels_of, NATIVE)
    step = ps.make_update_step(exact_loss, optimizer, weight_fn=lambda m: m["w"])
    states, microbatches = [], exact_group()
    for seed in range(3):
        params = exact_params(seed)
        states.append((params, optimizer.init(params)))

    together = torch.vmap(step, in_dims=(0, 0, None))
    ensemble = batched(*states)
    for _ in range(2):
        states = [step(*state, microbatches)[:2] for state in states]
        ensemble = together(ensemble[0], ensemble[1], microbatches)[:2]
        assert_same(ensemble, batched(*states))


def exact_params(seed: int) -> Any:
    """Small integers."""
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(torch.float64)

    return {"w": integers(4, 3), "b": integers(3)}


def exact_loss(params: Any, microbatch: Any) -> Tensor:
    """Integers in float64: no rounding, in whatever order."""
    return (torch.relu(microbatch["x"] @ params["w"] + params["b"]).sum(1) - 1).square()


def exact_group(sizes: tuple[int, ...] = (3, 1, 4)) -> list[Any]:
    """Integers, and eight tokens in all."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(-2, 3, (sum(sizes), 4), generator=generator).to(torch.float64)
    return [{"x": part, "w": torch.ones(len(part))} for part in rows.split(list(sizes))]


Derivative = Callable[[Callable[[Any], Tensor]], Callable[[Any], Any]]
DERIVATIVES: dict[str, Derivative] = {
    "grad": torch.func.grad,
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (tree.map(torch.cos, x),))[1],
    "vmap of grad": lambda f: (
        lambda x: torch.vmap(torch.func.grad(f))(
            tree.map(lambda leaf: torch.stack([leaf, leaf / 2]), x)
        )
    ),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_are_those_of_the_parts(name: str) -> None:
    """Two steps, differentiated by the gradients of the first: each part's derivative is its own."""
    optimizer = ps.optim.partition(labels_of, NATIVE)
    params, grads = drawn(5, torch.float64)
    derivative = DERIVATIVES[name]

    def objective(params: list[Tensor]) -> Tensor:
        return torch.stack([leaf.sin().sum() for leaf in params]).sum()

    def through(first: Any) -> Tensor:
        state = optimizer.update(first, optimizer.init(params), params)
        moved, _ = optimizer.update(grads[1], state[1], state[0])
        parts = split(moved)
        return objective(parts["matrix"]) + objective(parts["rest"])

    def part(label: str) -> Callable[[Any], Tensor]:
        def through_part(first: Any) -> Tensor:
            mine = split(params)[label]
            state = NATIVE[label].update(split(first)[label], NATIVE[label].init(mine), mine)
            moved, _ = NATIVE[label].update(split(grads[1])[label], state[1], state[0])
            return objective(moved)

        return through_part

    whole = derivative(through)(grads[0])
    separate = [derivative(part(label))(grads[0]) for label in NATIVE]
    summed = tree.map(torch.add, *separate)
    assert_same(whole, summed)
    assert all(leaf.abs().max() > 0 for leaf in tree.leaves_of(whole))


def test_a_learned_rate_of_one_part() -> None:
    """A rate that requires grad differentiates its own part, and no other."""
    params, grads = drawn(5, torch.float64)

    def moved(rate: Tensor) -> Any:
        optimizer = ps.optim.partition(
            labels_of, {"matrix": ps.optim.sgd(rate), "rest": ps.optim.sgd(0.1)}
        )
        return split(optimizer.update(grads[0], optimizer.init(params), params)[0])

    rate = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)
    parts = moved(rate)
    assert not any(leaf.requires_grad for leaf in parts["rest"])
    for leaf, grad in zip(parts["matrix"], split(grads[0])["matrix"], strict=True):
        (slope,) = torch.autograd.grad(leaf[0, 0], rate, retain_graph=True)
        assert slope == -grad[0, 0]


def test_torch_under_a_transform_is_refused() -> None:
    """With the algorithm that cannot be transformed by name."""
    params, grads = drawn(0)
    optimizer = muon_and_adamw()
    state = optimizer.init(params)
    with pytest.raises(ValueError, match=r"torch\.optim\.Muon steps in place"):
        torch.func.grad(lambda g: optimizer.update(g, state, params)[0]["head"]["scale"])(grads[0])
    with pytest.raises(ValueError, match=r"torch\.optim\.Muon steps in place"):
        torch.vmap(optimizer.update)(*map(batched, (grads[0], state, params)))


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_ranks_agree(name: str, donate: bool) -> None:
    """Ranks with uneven data, one with none: the same bits on each, and those of one rank with all data."""
    optimizer = ps.optim.partition(labels_of, PARTS[name])
    axis = ps.testing.ThreadAxis(3)
    params = exact_params(0)
    whole = exact_group()

    def program(mine: list[Any]) -> Any:
        step = ps.make_update_step(
            exact_loss, optimizer, weight_fn=lambda m: m["w"], axis=axis, donate=donate
        )
        history = []
        ours, opt_state = tree.map(torch.clone, (params, optimizer.init(params)))
        for _ in range(3):
            ours, opt_state, metrics = step(ours, opt_state, mine)
            history.append(tree.map(torch.clone, (ours, opt_state, metrics)))
        return history

    alone = ps.make_update_step(exact_loss, optimizer, weight_fn=lambda m: m["w"])
    results = axis.map(program)([whole[:2], [], whole[2:]])
    for result in results:
        assert_same(result, results[0])
    assert_same(results[0][0], alone(params, optimizer.init(params), whole))
    assert not torch.equal(results[0][2][0]["w"], results[0][0][0]["w"])
