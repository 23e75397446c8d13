"""Tests what ``from_torch`` refuses, leaves alone and casts. T8 compares its bits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import purestep as ps
from purestep import tree
from support.purity import global_state, storages_in
from support.random_updates import random_grads, random_params
from support.strategies import assert_same
from support.torch_algorithms import ALGORITHMS, Namesake, shapes_of
from tests.optimizers import UPDATE_METHODS, call_update, iterate_states

PARAMS = {
    "w": torch.ones(2, 2),
    "b": torch.full((2, 2), -1.0),
}
GRADS = {
    "w": torch.full((2, 2), 3.0),
    "b": torch.full((2, 2), -2.0),
}
ANY = (
    r"sgd, adamw or lion, a chain of transforms, or a ps\.optim\.Optimizer of your own"
)
WAYS_OUT = {
    "SGD": r"Take ps\.optim\.sgd\(lr\), which is plain arithmetic",
    "Adam": r"Take ps\.optim\.adamw\(lr, weight_decay=0\), which is plain arithmetic",
    "AdamW": r"Take ps\.optim\.adamw\(lr\), which is plain arithmetic",
    "RMSprop": rf"Take ps\.optim\.{ANY}",
    "Muon": rf"Take ps\.optim\.{ANY}",
}
Update = Callable[..., Any]
"""What the transforms below are applied to: ``update(grads, opt_state, params)``."""


def twice(value: Any) -> Any:
    """Stacks each leaf with itself, as an ensemble of two."""
    return tree.map(lambda leaf: torch.stack([leaf, leaf]), value)


def recorded(value: Any) -> Any:
    """Copies a tree, with leaves that require grad."""
    return tree.map(lambda x: x.clone().requires_grad_(x.is_floating_point()), value)


def new_w(result: Any) -> Tensor:
    """Reduces an update's result to a scalar, which can be differentiated."""
    params, _ = result
    total: Tensor = params["w"].sum()
    return total


def under_vmap(update: Update, grads: Any, state: Any, params: Any) -> Any:
    return torch.vmap(update)(twice(grads), twice(state), twice(params))


def under_vmap_of_something_else(
    update: Update, grads: Any, state: Any, params: Any
) -> Any:
    def add(x: Tensor) -> Tensor:
        return new_w(update(grads, state, params)) + x

    return torch.vmap(add)(torch.ones(2))


def under_grad(update: Update, grads: Any, state: Any, params: Any) -> Any:
    def of_params(p: Any) -> Tensor:
        return new_w(update(grads, state, p))

    return torch.func.grad(of_params)(params)


def under_jvp(update: Update, grads: Any, state: Any, params: Any) -> Any:
    def of_grads(g: Any) -> Tensor:
        return new_w(update(g, state, params))

    return torch.func.jvp(of_grads, (grads,), (grads,))


def with_dual_numbers(update: Update, grads: Any, state: Any, params: Any) -> Any:
    """Differentiates in forward mode without ``torch.func``."""
    with forward_ad.dual_level():
        tangents = tree.map(lambda leaf: forward_ad.make_dual(leaf, leaf), grads)
        return update(tangents, state, params)


def with_recorded_params(update: Update, grads: Any, state: Any, params: Any) -> Any:
    return update(grads, state, recorded(params))


def with_recorded_grads(update: Update, grads: Any, state: Any, params: Any) -> Any:
    return update(recorded(grads), state, params)


def with_recorded_state(update: Update, grads: Any, state: Any, params: Any) -> Any:
    return update(grads, recorded(state), params)


def compiled(update: Update, grads: Any, state: Any, params: Any) -> Any:
    traced = torch.compile(update, fullgraph=True, backend="eager")
    return traced(grads, state, params)


TRANSFORMS: dict[str, Callable[[Update, Any, Any, Any], Any]] = {
    "vmap": under_vmap,
    "vmap of something else": under_vmap_of_something_else,
    "grad over params": under_grad,
    "jvp": under_jvp,
    "dual numbers": with_dual_numbers,
    "params require grad": with_recorded_params,
    "grads require grad": with_recorded_grads,
    "state requires grad": with_recorded_state,
    "torch.compile": compiled,
}
REFUSED = [("RMSprop", transform) for transform in TRANSFORMS]
REFUSED += [(name, "vmap") for name in WAYS_OUT if name != "RMSprop"]


@pytest.mark.parametrize("way", UPDATE_METHODS)
@pytest.mark.parametrize(("name", "transform"), REFUSED)
def test_a_transform_or_a_compiler_is_refused(
    name: str, transform: str, way: str
) -> None:
    """Names the algorithm and the way out; the arguments stay as they are."""
    optimizer = ps.optim.from_torch(getattr(torch.optim, name), lr=0.1)
    update = partial(call_update, optimizer, way)
    inputs = (GRADS, optimizer.init(PARAMS), PARAMS)
    before = tree.map(torch.clone, inputs)
    message = rf"torch\.optim\.{name} steps in place, .*cannot follow.*{WAYS_OUT[name]}"
    with pytest.raises((ValueError, RuntimeError), match=message):
        TRANSFORMS[transform](update, *inputs)
    assert_same(inputs, before, "(grads, opt_state, params)")


@pytest.mark.parametrize("way", UPDATE_METHODS)
@pytest.mark.parametrize("fused", [False, True])
def test_a_rate_that_requires_grad_is_refused(fused: bool, way: str) -> None:
    """A schedule may return one."""
    rate = torch.tensor(0.1, requires_grad=True)
    state = ps.optim.from_torch(torch.optim.Adam).init(PARAMS)
    lrs: list[Any] = [rate, lambda step: 2 * rate]
    for lr in lrs:
        optimizer = ps.optim.from_torch(torch.optim.Adam, lr=lr, fused=fused)
        with pytest.raises(ValueError, match=r"torch\.optim\.Adam steps in place"):
            call_update(optimizer, way, GRADS, state, PARAMS)


class Counting(torch.optim.Optimizer):
    """Counts its steps, and takes longer ones: an optimizer that torch does not have."""

    def __init__(self, params: Any, lr: float = 0.1, start: Any = 0) -> None:
        super().__init__(params, {"lr": lr})
        self.start = start

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for param in group["params"]:
            state = self.state[param]
            state["steps"] = state.get("steps", self.start) + 1
            param.sub_(param.grad * group["lr"] * state["steps"])


def test_an_optimizer_that_torch_does_not_have() -> None:
    """One whose state is tensors is as good as torch's own: steps of g/4, 2 g/4 and 3 g/4."""
    optimizer = ps.optim.from_torch(Counting, lr=0.25, start=torch.tensor(0))
    *_, (params, state) = iterate_states(optimizer, PARAMS, [GRADS] * 3)
    expected = tree.map(lambda p, g: p - 1.5 * g, PARAMS, GRADS)
    assert_same(params, expected)
    assert state.leaves["w"]["steps"] == 3


@pytest.mark.parametrize(
    "implementation", [{}, {"foreach": True}, {"fused": True}], ids=str
)
def test_a_gradient_may_be_one_number_for_many_elements(
    implementation: dict[str, bool],
) -> None:
    """SGD writes its look-ahead into gradients: they are copied, whatever their strides."""
    settings: Any = {
        "lr": 0.1,
        "momentum": 0.9,
        "nesterov": True,
        "maximize": True,
        **implementation,
    }
    optimizer = ps.optim.from_torch(torch.optim.SGD, **settings)
    expanded = tree.map(lambda leaf: leaf[0, 0].expand(2, 2), GRADS)
    state = optimizer.init(PARAMS)
    of_expanded = optimizer.update(expanded, state, PARAMS)
    of_contiguous = optimizer.update(GRADS, state, PARAMS)
    assert_same(of_expanded, of_contiguous)
    assert_same(expanded, GRADS)


def init(algorithm: Any, params: Any = PARAMS, **settings: Any) -> Any:
    optimizer = ps.optim.from_torch(algorithm, **settings)
    return optimizer.init(params)


CLASS = r"from_torch takes a class, such as torch\.optim\.AdamW"
VECTOR = {"w": torch.ones(2, 2), "b": torch.ones(2)}
NOT_TAKEN: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a name": (
        lambda: init("SGD"),
        TypeError,
        CLASS,
    ),
    "an object": (
        lambda: init(torch.optim.SGD([torch.ones(1)])),
        TypeError,
        CLASS,
    ),
    "a function": (
        lambda: init(ps.optim.sgd),
        TypeError,
        CLASS,
    ),
    "another class": (
        lambda: init(int),
        TypeError,
        CLASS,
    ),
    "a closure": (
        lambda: init(torch.optim.LBFGS),
        TypeError,
        "LBFGS.*closure",
    ),
    "sparse gradients": (
        lambda: init(torch.optim.SparseAdam),
        TypeError,
        "SparseAdam takes sparse gradients alone",
    ),
    "a vector for Muon": (
        lambda: init(torch.optim.Muon, VECTOR),
        ValueError,
        r"torch\.optim\.Muon: .*2D.*ps\.optim\.partition",
    ),
    "a state of numbers": (
        lambda: init(Counting),
        TypeError,
        r"Counting keeps 'steps' as int, .* tensors alone: .*ps\.optim\.Optimizer",
    ),
    "an unknown setting": (
        lambda: init(torch.optim.SGD, beta=0.9),
        TypeError,
        "SGD.*unexpected keyword .*'beta'",
    ),
    "a negative rate": (
        lambda: init(torch.optim.SGD, lr=-1.0),
        ValueError,
        r"torch\.optim\.SGD: Invalid learning rate: -1\.0",
    ),
}
# Muon has no such setting.
NOT_TAKEN |= {
    f"differentiable {name}": (
        partial(init, getattr(torch.optim, name), differentiable=True),
        ValueError,
        rf"differentiable=True.*{way_out}",
    )
    for name, way_out in WAYS_OUT.items()
    if name != "Muon"
}


@pytest.mark.parametrize("case", NOT_TAKEN)
def test_what_from_torch_does_not_take(case: str) -> None:
    call, error, message = NOT_TAKEN[case]
    with pytest.raises(error, match=message):
        call()


def draw(name: str, dtype: torch.dtype, steps: int) -> tuple[Any, Any, list[Any]]:
    """Draws params and gradients for an algorithm with the richest of its settings."""
    make, settings, _ = ALGORITHMS[name]
    generator = torch.Generator().manual_seed(1)
    params = random_params(shapes_of(name), dtype, generator)
    grads = [random_grads(params, generator) for _ in range(steps)]
    return partial(make, lr=0.05, **settings[-1]), params, grads


def from_torch(make: Any) -> ps.optim.Optimizer:
    return ps.optim.from_torch(make.func, **make.keywords)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_nothing_else_is_written(name: str, enabled: bool) -> None:
    """Writes neither global state nor a ``.grad``; a new state is unaliased zeros."""
    make, params, grads = draw(name, torch.float32, 2)
    if enabled:
        params = recorded(params)
    optimizer = from_torch(make)
    for leaf in tree.leaves(params):
        leaf.grad = torch.full_like(leaf, 7.0)
    before = tree.map(Tensor.clone, params)
    detached = tree.map(Tensor.detach, params)

    with torch.set_grad_enabled(enabled):
        rng_before = torch.get_rng_state()
        globals_before = global_state()
        states = [optimizer.init(params) for _ in range(2)]
        results = [*iterate_states(optimizer, detached, grads)]
        assert torch.equal(torch.get_rng_state(), rng_before)
        assert global_state() == globals_before

    assert_same(*states)
    assert not storages_in(states[0]) & storages_in((states[1], params))
    assert not any(leaf.any() for leaf in tree.leaves(states))
    outputs = tree.leaves((states, results))
    assert not any(leaf.requires_grad for leaf in outputs)
    assert not any(leaf.grad is not None for leaf in outputs)
    assert all((leaf.grad == 7).all() for leaf in tree.leaves(params))
    assert_same(params, before, "params")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adafactor", "Muon"])
def test_gradients_are_cast_to_the_dtype_of_the_params(
    name: str, dtype: torch.dtype
) -> None:
    """Sums in a wider dtype become what torch wants, and the params are torch's."""
    make, params, all_grads = draw(name, dtype, 6)
    namesake = Namesake(params, make)
    optimizer = from_torch(make)
    opt_state = optimizer.init(params)
    for grads in all_grads:
        wide = tree.map(Tensor.double, grads)
        params, opt_state = optimizer.update(wide, opt_state, params)
        namesake.step(grads)
    expected = tree.map(Tensor.detach, namesake.params)
    assert_same(params, expected)
