"""``from_torch``: what it refuses, what it leaves alone, what it casts. T8 compares its bits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import purestep as ps
from proofs.strategies import assert_same
from proofs.test_t06_purity import globals_of, storages
from proofs.test_t08_optimizers import (
    ALGORITHMS,
    Namesake,
    random_grads,
    random_params,
    shapes_for,
)
from purestep import tree
from tests.optimizers import WAYS, states_of, updated

PARAMS = {"w": torch.ones(2, 2), "b": torch.full((2, 2), -1.0)}
GRADS = {"w": torch.full((2, 2), 3.0), "b": torch.full((2, 2), -2.0)}
ANY = (
    r"sgd, adamw or lion, a chain of transforms, or an ps\.optim\.Optimizer of your own"
)
WAYS_OUT = {
    "SGD": r"Take ps\.optim\.sgd\(lr\), which is plain arithmetic",
    "Adam": r"Take ps\.optim\.adamw\(lr, weight_decay=0\), which is plain arithmetic",
    "AdamW": r"Take ps\.optim\.adamw\(lr\), which is plain arithmetic",
    "RMSprop": rf"Take ps\.optim\.{ANY}",
    "Muon": rf"Take ps\.optim\.{ANY}",
}
Update = Callable[..., Any]


def twice(value: Any) -> Any:
    """An ensemble of two."""
    return tree.map(lambda leaf: torch.stack([leaf, leaf]), value)


def recorded(value: Any) -> Any:
    """The same, of which gradients are recorded."""
    return tree.map(lambda x: x.clone().requires_grad_(x.is_floating_point()), value)


def dual(update: Update, grads: Any, opt_state: Any, params: Any) -> Any:
    """Forward mode without ``torch.func``."""
    with forward_ad.dual_level():
        tangents = tree.map(lambda leaf: forward_ad.make_dual(leaf, leaf), grads)
        return update(tangents, opt_state, params)


def new_w(result: Any) -> Tensor:
    """A scalar of the result, to differentiate."""
    total: Tensor = result[0]["w"].sum()
    return total


TRANSFORMS: dict[str, Callable[[Update, Any, Any, Any], Any]] = {
    "vmap": lambda update, g, s, p: torch.vmap(update)(twice(g), twice(s), twice(p)),
    "vmap of something else": lambda update, g, s, p: torch.vmap(lambda x: new_w(update(g, s, p)) + x)(torch.ones(2)),
    "grad over params": lambda update, g, s, p: torch.func.grad(lambda p: new_w(update(g, s, p)))(p),
    "jvp": lambda update, g, s, p: torch.func.jvp(lambda g: new_w(update(g, s, p)), (g,), (g,)),
    "dual numbers": dual,
    "params require grad": lambda update, g, s, p: update(g, s, recorded(p)),
    "grads require grad": lambda update, g, s, p: update(recorded(g), s, p),
    "state requires grad": lambda update, g, s, p: update(g, recorded(s), p),
    "torch.compile": lambda update, *given: torch.compile(update, fullgraph=True, backend="eager")(*given),
}  # fmt: skip
REFUSED = [("RMSprop", how) for how in TRANSFORMS]
REFUSED += [(name, "vmap") for name in WAYS_OUT if name != "RMSprop"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "how"), REFUSED)
def test_a_transform_or_a_compiler_is_refused(name: str, how: str, way: str) -> None:
    """By name and with the way out; the arguments stay as they are."""
    optimizer = ps.optim.from_torch(getattr(torch.optim, name), lr=0.1)
    given = (GRADS, optimizer.init(PARAMS), PARAMS)
    before = tree.map(torch.clone, given)
    message = rf"torch\.optim\.{name} steps in place, .*cannot follow.*{WAYS_OUT[name]}"
    with pytest.raises((ValueError, RuntimeError), match=message):
        TRANSFORMS[how](partial(updated, optimizer, way), *given)
    assert_same(given, before, "(grads, opt_state, params)")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fused", [False, True])
def test_a_rate_that_requires_grad_is_refused(fused: bool, way: str) -> None:
    rate = torch.tensor(0.1, requires_grad=True)
    optimizer = ps.optim.from_torch(torch.optim.Adam, lr=rate, fused=fused)
    state = ps.optim.from_torch(torch.optim.Adam).init(PARAMS)
    with pytest.raises(ValueError, match=r"torch\.optim\.Adam steps in place"):
        updated(optimizer, way, GRADS, state, PARAMS)


class Counting(torch.optim.Optimizer):
    """One that torch does not have, which counts its steps from here on, and takes longer ones."""

    def __init__(self, params: Any, lr: float = 0.1, start: Any = 0) -> None:
        super().__init__(params, {"lr": lr})
        self.start = start

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["steps"] = state.get("steps", self.start) + 1
            param.sub_(param.grad * self.param_groups[0]["lr"] * state["steps"])


def test_an_optimizer_that_torch_does_not_have() -> None:
    """One whose state is tensors is as good as torch's own: steps of g/4, 2 g/4 and 3 g/4."""
    optimizer = ps.optim.from_torch(Counting, lr=0.25, start=torch.tensor(0))
    *_, (params, state) = states_of(optimizer, PARAMS, [GRADS] * 3)
    assert_same(params, tree.map(lambda p, g: p - 1.5 * g, PARAMS, GRADS))
    assert state.leaves["w"]["steps"] == 3


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_gradient_may_be_one_number_for_many_elements(how: dict[str, bool]) -> None:
    """SGD looks ahead in its gradients: they are copied, however they lie in memory."""
    looking_ahead: Any = {"momentum": 0.9, "nesterov": True, "maximize": True, **how}
    optimizer = ps.optim.from_torch(torch.optim.SGD, lr=0.1, **looking_ahead)
    expanded = tree.map(lambda leaf: leaf[0, 0].expand(2, 2), GRADS)
    given = (optimizer.init(PARAMS), PARAMS)
    assert_same(optimizer.update(expanded, *given), optimizer.update(GRADS, *given))
    assert_same(expanded, GRADS)


def init(algorithm: Any, params: Any = PARAMS, **settings: Any) -> Any:
    return ps.optim.from_torch(algorithm, **settings).init(params)


CLASS = r"from_torch takes a class, such as torch\.optim\.AdamW"
VECTOR = {"w": torch.ones(2, 2), "b": torch.ones(2)}
NOT_TAKEN: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a name": (lambda: init("SGD"), TypeError, CLASS),
    "an object": (lambda: init(torch.optim.SGD([torch.ones(1)])), TypeError, CLASS),
    "a function": (lambda: init(ps.optim.sgd), TypeError, CLASS),
    "another class": (lambda: init(int), TypeError, CLASS),
    "a closure": (lambda: init(torch.optim.LBFGS), TypeError, "LBFGS.*closure"),
    "sparse gradients": (lambda: init(torch.optim.SparseAdam), TypeError, "SparseAdam takes sparse gradients alone"),
    "a vector for Muon": (lambda: init(torch.optim.Muon, VECTOR), ValueError, r"torch\.optim\.Muon: .*2D.*ps\.optim\.partition"),
    "a state of numbers": (lambda: init(Counting), TypeError, r"Counting keeps 'steps' as int, .* tensors alone: .*ps\.optim\.Optimizer"),
    "an unknown setting": (lambda: init(torch.optim.SGD, beta=0.9), TypeError, "SGD.*unexpected keyword .*'beta'"),
    "a negative rate": (lambda: init(torch.optim.SGD, lr=-1.0), ValueError, r"torch\.optim\.SGD: Invalid learning rate: -1\.0"),
    **{
        f"differentiable {name}": (partial(init, getattr(torch.optim, name), differentiable=True), ValueError, rf"differentiable=True.*{way_out}")
        for name, way_out in WAYS_OUT.items() if name != "Muon"
    },
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_TAKEN)
def test_what_from_torch_does_not_take(case: str) -> None:
    call, error, message = NOT_TAKEN[case]
    with pytest.raises(error, match=message):
        call()


def drawn(name: str, dtype: torch.dtype, steps: int) -> tuple[Any, Any, list[Any]]:
    """An algorithm with the richest of its settings, params for it, and gradients."""
    make, settings, _ = ALGORITHMS[name]
    generator = torch.Generator().manual_seed(1)
    params = random_params(shapes_for(name), dtype, generator)
    grads = [random_grads(params, generator) for _ in range(steps)]
    return partial(make, lr=0.05, **settings[-1]), params, grads


def from_torch(make: Any) -> ps.optim.Optimizer:
    return ps.optim.from_torch(make.func, **make.keywords)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_nothing_else_is_written(name: str, enabled: bool) -> None:
    """Neither global state, nor a ``.grad``; a new state is zeros in memory that nothing shares."""
    make, params, grads = drawn(name, torch.float32, 2)
    optimizer, params = from_torch(make), recorded(params) if enabled else params
    for leaf in tree.leaves(params):
        leaf.grad = torch.full_like(leaf, 7.0)
    before, detached = tree.map(Tensor.clone, params), tree.map(Tensor.detach, params)
    with torch.set_grad_enabled(enabled):
        rng, world = torch.get_rng_state(), globals_of()
        states = [optimizer.init(params) for _ in range(2)]
        results = [*states_of(optimizer, detached, grads)]
        assert torch.equal(torch.get_rng_state(), rng)
        assert globals_of() == world
    assert_same(*states)
    assert not storages(states[0]) & storages((states[1], params))
    assert not any(leaf.any() for leaf in tree.leaves(states))
    made = tree.leaves((states, results))
    assert not any(leaf.requires_grad or leaf.grad is not None for leaf in made)
    assert all((leaf.grad == 7).all() for leaf in tree.leaves(params))
    assert_same(params, before, "params")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adafactor", "Muon"])
def test_gradients_are_cast_to_the_dtype_of_the_params(
    name: str, dtype: torch.dtype
) -> None:
    """Sums in a wider dtype become what torch wants, and the params are torch's."""
    make, params, grads = drawn(name, dtype, 6)
    usual, optimizer = Namesake(params, make), from_torch(make)
    opt_state = optimizer.init(params)
    for one in grads:
        wide = tree.map(Tensor.double, one)
        params, opt_state = optimizer.update(wide, opt_state, params)
        usual.step(one)
    assert_same(params, tree.map(Tensor.detach, usual.params))
