"""``from_torch``: what it refuses, what it leaves alone, and that it keeps nothing. T8 compares its bits."""

from __future__ import annotations

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
from proofs.test_t08_optimizers import ALGORITHMS, random_grads, random_params, shapes_for
from purestep import tree
from tests.optimizers import updated

PARAMS = {"w": torch.ones(2, 2), "b": torch.full((2, 2), -1.0)}
GRADS = {"w": torch.full((2, 2), 3.0), "b": torch.full((2, 2), -2.0)}
WAYS_OUT = {
    "SGD": r"Take ps\.optim\.sgd\(lr\), which is plain arithmetic",
    "Adam": r"Take ps\.optim\.adamw\(lr, weight_decay=0\), which is plain arithmetic",
    "AdamW": r"Take ps\.optim\.adamw\(lr\), which is plain arithmetic",
    "RMSprop": r"Take ps\.optim\.sgd, adamw or lion, a chain of transforms, or an ps\.optim\.Optimizer of your own",
    "Muon": r"Take ps\.optim\.sgd, adamw or lion, a chain of transforms, or an ps\.optim\.Optimizer of your own",
}
UPDATES = ["update", "update_"]
Update = Callable[..., Any]


def twice(value: Any) -> Any:
    """An ensemble of two."""
    return tree.map(lambda leaf: torch.stack([leaf, leaf]), value)


def recording(value: Any) -> Any:
    """The same, with gradients recorded."""

    def record(leaf: Tensor) -> Tensor:
        copied = leaf.clone()
        return copied.requires_grad_() if copied.is_floating_point() else copied

    return tree.map(record, value)


def dual(update: Update, grads: Any, opt_state: Any, params: Any) -> Any:
    """Forward mode without ``torch.func``."""
    with forward_ad.dual_level():
        tangents = tree.map(lambda leaf: forward_ad.make_dual(leaf, leaf), grads)
        return update(tangents, opt_state, params)


def moved_sum(result: Any) -> Tensor:
    """What somebody differentiates."""
    return result[0]["w"].sum()


def over_grads(update: Update, g: Any, s: Any, p: Any) -> Any:
    """A derivative by the gradients."""
    return torch.func.grad(lambda g: moved_sum(update(g, s, p)))(g)


def over_params(update: Update, g: Any, s: Any, p: Any) -> Any:
    """A derivative by the params."""
    return torch.func.grad(lambda p: moved_sum(update(g, s, p)))(p)


def forward_mode(update: Update, g: Any, s: Any, p: Any) -> Any:
    """A derivative along the gradients."""
    return torch.func.jvp(lambda g: moved_sum(update(g, s, p)), (g,), (g,))


def beside(update: Update, g: Any, s: Any, p: Any) -> Any:
    """A transform of something else: what is batched is none of the arguments."""
    return torch.vmap(lambda x: moved_sum(update(g, s, p)) + x)(torch.ones(2))


TRANSFORMS: dict[str, Callable[[Update, Any, Any, Any], Any]] = {
    "vmap": lambda update, g, s, p: torch.vmap(update)(twice(g), twice(s), twice(p)),
    "vmap over grads": lambda update, g, s, p: torch.vmap(update, (0, None, None))(twice(g), s, p),
    "vmap beside": beside,
    "grad over grads": over_grads,
    "grad over params": over_params,
    "jvp": forward_mode,
    "dual numbers": dual,
    "params require grad": lambda update, g, s, p: update(g, s, recording(p)),
    "grads require grad": lambda update, g, s, p: update(recording(g), s, p),
    "state requires grad": lambda update, g, s, p: update(g, recording(s), p),
}


def refusal(name: str) -> str:
    """The algorithm, and where to go instead."""
    return (
        rf"torch\.optim\.{name} steps in place, which a transform .*cannot follow.*{WAYS_OUT[name]}"
    )


@pytest.mark.parametrize("method", UPDATES)
@pytest.mark.parametrize("how", TRANSFORMS)
@pytest.mark.parametrize("name", WAYS_OUT)
def test_a_transform_is_refused(name: str, how: str, method: str) -> None:
    """Never silently wrong; and what was given is as it was."""
    settings = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = ps.optim.from_torch(getattr(torch.optim, name), lr=0.1, **settings)
    given = (GRADS, optimizer.init(PARAMS), PARAMS)
    before = tree.map(torch.clone, given)
    with pytest.raises(ValueError, match=refusal(name)):
        TRANSFORMS[how](partial(updated, optimizer, method), *given)
    assert_same(given, before, "(grads, opt_state, params)")


@pytest.mark.parametrize("method", UPDATES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_a_rate_that_requires_grad_is_refused(name: str, fused: bool, method: str) -> None:
    rate = torch.tensor(0.1, requires_grad=True)
    algorithm = getattr(torch.optim, name)
    state = ps.optim.from_torch(algorithm, lr=0.1).init(PARAMS)
    optimizer = ps.optim.from_torch(algorithm, lr=rate, fused=fused)
    with pytest.raises(ValueError, match=refusal(name)):
        updated(optimizer, method, GRADS, state, PARAMS)
    assert rate.grad is None


@pytest.mark.parametrize("method", UPDATES)
@pytest.mark.parametrize("name", ["Adam", "RMSprop"])
def test_a_compiler_is_refused(name: str, method: str) -> None:
    torch.compiler.reset()
    optimizer = ps.optim.from_torch(getattr(torch.optim, name), lr=0.1)
    compiled = torch.compile(partial(updated, optimizer, method), fullgraph=True, backend="eager")
    given = (GRADS, optimizer.init(PARAMS), PARAMS)
    before = tree.map(torch.clone, given)
    with pytest.raises(RuntimeError, match=refusal(name)):
        compiled(*given)
    assert_same(given, before, "(grads, opt_state, params)")


def loss_fn(params: Any, microbatch: Tensor) -> Tensor:
    """Something of both parameters, for each row."""
    return (microbatch @ params["w"]).square().sum(1) + (microbatch @ params["b"]).sum(1)


def ones(microbatch: Tensor) -> Tensor:
    """Each row counts once."""
    return torch.ones(len(microbatch))


GROUP = [torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, -1.0], [3.0, 0.25]])]


@pytest.mark.parametrize("donate", [False, True])
def test_a_transform_of_the_step_is_refused(donate: bool) -> None:
    optimizer = ps.optim.from_torch(torch.optim.NAdam)
    opt_state = optimizer.init(PARAMS)
    step = ps.make_update_step(loss_fn, optimizer, weight_fn=ones, donate=donate)
    message = r"torch\.optim\.NAdam steps in place.*a chain of transforms"
    before = tree.map(torch.clone, (opt_state, PARAMS))
    with pytest.raises(ValueError, match=message):
        torch.vmap(step, (0, 0, None))(twice(PARAMS), twice(opt_state), GROUP)
    with pytest.raises(ValueError, match=message):
        torch.func.grad(lambda p: moved_sum(step(p, opt_state, GROUP)))(PARAMS)
    with pytest.raises(ValueError, match=message):
        torch.func.jvp(lambda p: moved_sum(step(p, opt_state, GROUP)), (PARAMS,), (PARAMS,))
    with pytest.raises(ValueError, match=message):
        step(recording(PARAMS), opt_state, GROUP)
    assert_same((opt_state, PARAMS), before, "(opt_state, params)")


class Counting(torch.optim.Optimizer):
    """Somebody's, with a python int in its state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Steps that become longer."""
        for group in self.param_groups:
            for param in group["params"]:
                steps = self.count(self.state[param])
                param.sub_(param.grad * group["lr"] * steps)

    def count(self, state: dict[str, Any]) -> Any:
        """The steps so far."""
        state["steps"] = state.get("steps", 0) + 1
        return state["steps"]


class CountingTensors(Counting):
    """The same with a tensor."""

    def count(self, state: dict[str, Any]) -> Any:
        """The steps so far."""
        return state.setdefault("steps", torch.zeros((), dtype=torch.int32)).add_(1)


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    "how", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str
)
def test_gradients_stay_the_callers(how: dict[str, bool], maximize: bool, expanded: bool) -> None:
    """``update`` leaves them alone, and takes them however they lie in memory; only ``update_`` may write to them."""
    settings = {"momentum": 0.9, "nesterov": True, "maximize": maximize, **how}
    optimizer = ps.optim.from_torch(torch.optim.SGD, lr=0.1, **settings)
    grads = tree.map(torch.clone, GRADS)
    if expanded:
        grads = tree.map(lambda leaf: leaf[0, 0].expand(2, 2), grads)
    before = tree.map(torch.clone, grads)
    state = (PARAMS, optimizer.init(PARAMS))
    for _ in range(3):
        state = optimizer.update(grads, state[1], state[0])
        assert_same(grads, before, "grads")


def test_state_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"Counting keeps 'steps' as int, .* tensors alone: .*ps\.optim\.Optimizer"
    ):
        ps.optim.from_torch(Counting).init(PARAMS)


def test_an_optimizer_of_somebody_elses() -> None:
    """One whose state is tensors is as good as torch's own."""
    leaves = tree.leaves_of(recording(PARAMS))
    usual = CountingTensors(leaves, lr=0.25)
    optimizer = ps.optim.from_torch(CountingTensors, lr=0.25)
    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(3):
        params, state = optimizer.update(GRADS, state, params)
        for leaf, grad in zip(leaves, tree.leaves_of(GRADS), strict=True):
            leaf.grad = grad
        usual.step()
    assert_same(tree.leaves_of(params), [leaf.detach() for leaf in leaves])
    assert state.leaves["w"]["steps"] == 3


@pytest.mark.parametrize("algorithm", ["SGD", torch.optim.SGD([torch.ones(1)]), ps.optim.sgd, int])
def test_what_is_no_class_of_optimizers(algorithm: Any) -> None:
    with pytest.raises(TypeError, match=r"from_torch takes a class, such as torch\.optim\.AdamW"):
        ps.optim.from_torch(algorithm)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_differentiable_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"differentiable=True.*{WAYS_OUT[name]}"):
        ps.optim.from_torch(getattr(torch.optim, name), differentiable=True)


def test_lbfgs_wants_a_closure() -> None:
    with pytest.raises(TypeError, match=r"LBFGS.*closure"):
        ps.optim.from_torch(torch.optim.LBFGS).init(PARAMS)


def test_sparse_adam_wants_sparse_gradients() -> None:
    with pytest.raises(RuntimeError, match="SparseAdam does not support dense gradients"):
        ps.optim.from_torch(torch.optim.SparseAdam).init(PARAMS)


def test_muon_of_a_vector_points_to_partition() -> None:
    with pytest.raises(ValueError, match=r"torch\.optim\.Muon: .*2D.*ps\.optim\.partition"):
        ps.optim.from_torch(torch.optim.Muon).init({"w": torch.ones(2, 2), "b": torch.ones(2)})


def test_settings_that_torch_does_not_have() -> None:
    with pytest.raises(TypeError, match=r"SGD.*unexpected keyword argument 'beta'"):
        ps.optim.from_torch(torch.optim.SGD, beta=0.9).init(PARAMS)
    with pytest.raises(ValueError, match=r"torch\.optim\.SGD: Invalid learning rate: -1\.0"):
        ps.optim.from_torch(torch.optim.SGD, lr=-1.0).init(PARAMS)


@pytest.mark.parametrize("method", UPDATES)
def test_what_does_not_belong_together(method: str) -> None:
    optimizer = ps.optim.from_torch(torch.optim.Adam)
    state, update = optimizer.init(PARAMS), partial(updated, optimizer, method)
    with pytest.raises(
        ValueError, match=r"opt_state was not made by .* is \(\), and TorchState.* was expected"
    ):
        update(GRADS, (), PARAMS)
    with pytest.raises(ValueError, match="trees differ in structure"):
        update({"w": GRADS["w"]}, state, PARAMS)
    with pytest.raises(ValueError, match="'w'"):
        update(GRADS, optimizer.init({"b": PARAMS["b"]}), PARAMS)
    others = optimizer.init(tree.map(lambda leaf: leaf[0], PARAMS))
    with pytest.raises(ValueError, match=r"opt_state\.leaves\['b'\]\['exp_avg'\] is .*\(2,\)"):
        update(GRADS, others, PARAMS)


def run(optimizer: ps.optim.Optimizer, state: Any, grads: list[Any], method: str = "update") -> Any:
    """The states after each of these gradients."""
    history = []
    for one in grads:
        given = tree.map(torch.clone, (one, state[1], state[0])) if method == "update_" else None
        state = updated(optimizer, method, *(given or (one, state[1], state[0])))
        history.append(state)
    return history


def case(name: str, dtype: torch.dtype = torch.float32) -> tuple[ps.optim.Optimizer, Any, Any]:
    """An optimizer with the richest of the settings, params for it, and gradients of six steps."""
    make, settings, _ = ALGORITHMS[name]
    generator = torch.Generator().manual_seed(1)
    params = random_params(shapes_for(name), dtype, generator)
    grads = [random_grads(params, generator) for _ in range(6)]
    algorithm: Any = make
    return ps.optim.from_torch(algorithm, lr=0.05, **settings[-1]), params, grads


@pytest.mark.parametrize("name", ALGORITHMS)
def test_init_is_pure(name: str) -> None:
    """The same twice, in memory of its own, in zeros, from params that it does not touch."""
    optimizer, params, _ = case(name)
    params = recording(params)
    before = tree.map(lambda leaf: leaf.detach().clone(), params)
    rng, world = torch.get_rng_state(), globals_of()
    states = [optimizer.init(params) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), rng)
    assert globals_of() == world
    assert_same(states[0], states[1])
    assert not storages(states[0]) & storages(states[1])
    assert not storages(states) & storages(params)
    assert not any(leaf.requires_grad or leaf.any() for leaf in tree.leaves_of(states))
    assert all(leaf.requires_grad and leaf.grad is None for leaf in tree.leaves_of(params))
    assert_same(tree.map(Tensor.detach, params), before, "params")


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("method", UPDATES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_nothing_else_moves(name: str, method: str, enabled: bool) -> None:
    """No ``.grad`` on anything, the grad mode and the random numbers as they were; a ``.grad`` of the user's stays."""
    optimizer, params, grads = case(name)
    marks = [torch.full_like(leaf, 7.0) for leaf in tree.leaves_of(params)]
    with torch.set_grad_enabled(enabled):
        given = (grads[0], optimizer.init(params), params)
        for leaf, mark in zip(tree.leaves_of(params), marks, strict=True):
            leaf.grad = mark
        rng, world = torch.get_rng_state(), globals_of()
        result = updated(optimizer, method, *given)
        assert torch.equal(torch.get_rng_state(), rng)
        assert globals_of() == world
    assert all(
        leaf.grad is mark and bool((mark == 7).all())
        for leaf, mark in zip(tree.leaves_of(params), marks, strict=True)
    )
    mine = {id(leaf) for leaf in tree.leaves_of(params)}
    others = [leaf for leaf in tree.leaves_of((given, result)) if id(leaf) not in mine]
    assert all(leaf.grad is None for leaf in others)
    assert not any(leaf.requires_grad for leaf in tree.leaves_of((given, result)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "Adafactor", "Muon"])
def test_gradients_come_in_the_dtype_of_the_params(name: str, dtype: torch.dtype) -> None:
    """Sums in a wider dtype are cast, as torch wants them, and the state is what torch's would be."""
    optimizer, params, grads = case(name, dtype)
    wide = [tree.map(lambda leaf: leaf.to(torch.float64), one) for one in grads]
    given = (params, optimizer.init(params))
    narrow = run(optimizer, given, grads)
    assert_same(run(optimizer, given, wide), narrow)
    assert all(leaf.dtype == dtype for leaf in tree.leaves_of(narrow[-1][0]))

    make: Any = ALGORITHMS[name].make
    leaves = tree.leaves_of(recording(params))
    usual = make(leaves, lr=0.05, **ALGORITHMS[name].settings[-1])
    for one in grads:
        for leaf, grad in zip(leaves, tree.leaves_of(one), strict=True):
            leaf.grad = grad.clone()
        usual.step()
    assert_same(tree.leaves_of(narrow[-1][0]), [leaf.detach() for leaf in leaves])


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_not_taken_leaves_no_trace(name: str, donate: bool) -> None:
    """Before the first step and after it: no tokens, no microbatches, or a skipped infinity."""
    make, settings, _ = ALGORITHMS[name]
    algorithm: Any = make
    schedule = ps.optim.linear_schedule(0.1, 0.01, 3)
    optimizer = ps.optim.from_torch(algorithm, lr=schedule, **settings[-1])

    def step_with(**how: Any) -> Any:
        return ps.make_update_step(
            lambda p, m: loss_fn(p, m["x"]), optimizer, weight_fn=lambda m: m["w"], **how
        )

    step, plain = step_with(donate=donate, on_nonfinite="skip"), step_with()
    good = [{"x": part, "w": ones(part)} for part in GROUP]
    idle: list[Any] = [
        [],
        [{**part, "w": torch.zeros_like(part["w"])} for part in good],
        [{**part, "x": part["x"] * float("inf")} for part in good],
        [{**part, "x": part["x"] * float("nan")} for part in good],
    ]
    params, state = tree.map(torch.clone, (PARAMS, optimizer.init(PARAMS)))
    expected = tree.map(torch.clone, (params, state))
    for _ in range(2):
        for group in idle:
            params, state, metrics = step(params, state, group)
            assert not metrics.applied
            assert_same((params, state), expected)
        params, state, metrics = step(params, state, good)
        assert metrics.applied
        expected = plain(*expected, good)[:2]
        assert_same((params, state), expected)
