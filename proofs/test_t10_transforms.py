"""T10, transforms. A step is an ordinary differentiable function of tensors.

``vmap(step)`` is the steps one by one; ``grad`` and ``jvp`` through steps match finite differences;
``compile(step)`` is the step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, strategies as st
from torch import Tensor

import purestep as ps
from proofs.strategies import (
    CAPTURE,
    EPS,
    RECIPES,
    Batch,
    Chooser,
    assert_same,
    cut,
    drawn,
    settings_of,
    stack,
    weights_of,
)
from proofs.theorem import PURESTEP, System, as_tests, theorem
from purestep import tree
from purestep.testing.bounds import gamma

OPTIMIZERS: dict[str, Callable[[Any], ps.optim.Optimizer]] = {
    **RECIPES,
    "scheduled": lambda rate: ps.optim.sgd(
        ps.optim.join_schedules(
            [lambda t: rate / (1 - t), lambda t: rate / (2 - t)], [1]
        )
    ),
}
Settings = dict[str, Any]
Point = tuple[Tensor, Any]


def affine(params: Any, m: Batch) -> Tensor:
    """(xᵀ w + b − y)², for each token: its second derivative holds no y."""
    return (m["x"] @ params["w"].flatten() + params["b"] - m["y"]).square()


def group_of(seed: int) -> list[Batch]:
    """Two microbatches of five tokens."""
    generator = torch.Generator().manual_seed(seed)
    how: Any = {"dtype": torch.float64, "generator": generator}
    x, y = torch.randn(5, 3, **how), torch.randn(5, **how)
    return cut({"x": x, "y": y, "w": torch.ones(5)}, [[0, 1], [2, 3, 4]])


def start(seed: int) -> Any:
    """A matrix, a number, and a leaf that the loss does not reach."""
    generator = torch.Generator().manual_seed(seed)
    w, b = (
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((3, 1), ())
    )
    return {"w": w, "b": b, "unused": torch.zeros(2, dtype=torch.float64)}


def trained(
    recipe: str,
    how: Settings,
    groups: list[list[Batch]],
    loss_fn: Any = affine,
    system: System = PURESTEP,
) -> Callable[[Point], Any]:
    """The params after a step on each group, as a function of the rate and of the first params."""

    def final(point: Point) -> Any:
        rate, params = point
        optimizer = OPTIMIZERS[recipe](rate)
        step = system.make_update_step(loss_fn, optimizer, weight_fn=weights_of, **how)
        params, opt_state = tree.map(torch.clone, (params, optimizer.init(params)))
        for group in groups:
            params, opt_state, _ = step(params, opt_state, group)
        return params

    return final


def summed(params: Any) -> Tensor:
    """Something of all of them."""
    return torch.stack([leaf.sin().sum() for leaf in tree.leaves(params)]).sum()


def derivatives(
    final: Callable[[Point], Any], point: Point, *, recorded: bool = True
) -> Any:
    """The same in reverse mode, in forward mode, and as autograd records it."""
    found: dict[str, Any] = {
        "reverse": torch.func.grad(lambda point: summed(final(point)))(point),
    }
    if has_forward_mode(point[0]):
        tangents = tree.map(torch.cos, point)
        found["forward"] = torch.func.jvp(final, (point,), (tangents,))[1]
    if recorded:
        own = tree.map(lambda leaf: leaf.clone().requires_grad_(), point)
        leaves = tree.leaves(own)
        found["recorded"] = torch.autograd.grad(
            summed(final(own)), leaves, allow_unused=True, materialize_grads=True
        )
    return found


def has_forward_mode(leaf: Tensor) -> bool:
    """Every device has it but the lazy one."""
    return leaf.device.type != "lazy"


def assert_slopes(
    f: Callable[[Tensor], Tensor], x: Tensor, which: tuple[str, ...] = ()
) -> Tensor:
    """f′(x) in reverse mode, in forward mode and recorded is its finite difference: how far off.

    That is extrapolated from two central differences, and as uncertain as they are apart.
    """
    h = 1e-4 * float(x)
    coarse, fine = ((f(x + k * h) - f(x - k * h)) / (2 * k * h) for k in (2, 1))
    uncertain = (fine - coarse).abs() + 64 * torch.finfo(x.dtype).eps * f(x).abs() / h
    expected = fine + (fine - coarse) / 3
    own = x.clone().requires_grad_()
    f(own).backward()
    slopes = {"reverse": torch.func.grad(f)(x), "recorded": own.grad}
    if has_forward_mode(x):
        slopes["forward"] = torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]
    for mode, slope in slopes.items():
        if mode not in which:
            assert slope is not None
            assert (slope - expected).abs() <= uncertain, mode
    return expected.abs() / uncertain


class Training(NamedTuple):
    """An optimizer and settings; three groups of data, three first params, and their rates."""

    recipe: str
    settings: Settings
    groups: list[list[Batch]]
    starts: list[Any]
    rates: list[Tensor]


def training(choose: Chooser, **fixed: Any) -> Training:
    """Any of them."""
    how = settings_of(choose, accum_dtype=None, **fixed)
    recipe, seed = choose.choice([*OPTIMIZERS]), choose.randrange(100)
    groups = [group_of(seed + number) for number in range(3)]
    starts = [start(seed + number) for number in range(3)]
    return Training(recipe, how, groups, starts, RATES)


RATES = [torch.tensor(rate, dtype=torch.float64) for rate in (0.0, 1e-3, 1e-2)]


@theorem("T10", st.tuples(drawn(training), st.booleans()))
def derivatives_by_the_rate(system: System, drawn: tuple[Training, bool]) -> None:
    """Through three steps, of a loss that may be computed again in the backward pass."""
    case, again = drawn
    # torch's checkpoints have no lazy tensors.
    loss_fn = ps.remat(affine) if again and has_forward_mode(case.rates[0]) else affine
    final = trained(case.recipe, case.settings, case.groups, loss_fn, system)

    def end(rate: Tensor) -> Tensor:
        return summed(final((rate, case.starts[0])))

    # What is left after cancellation may say nothing.
    assume(assert_slopes(end, case.rates[2]) > 10)


@theorem("T10", drawn(training))
def ensembles(system: System, case: Training) -> None:
    """An ensemble under vmap, each with its own learning rate, is its members one by one."""
    final = trained(case.recipe, case.settings, case.groups[:2], affine, system)
    together = torch.vmap(lambda *point: final(point))(
        stack(case.rates), stack(case.starts)
    )
    members = zip(case.rates, case.starts, strict=True)
    assert_nearly(together, stack([final(member) for member in members]))


def assert_nearly(actual: Any, expected: Any) -> None:
    """Batched or compiled products may be summed in another order; steps divide by EPS at least."""
    bound = gamma(2**10, torch.float64) / EPS**2
    for a, b in zip(tree.leaves(actual), tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        scale = b.double().abs().max().clamp(min=1)
        assert ((a.double() - b.double()).abs() <= bound * scale).all()


IDLE: dict[str, Callable[[list[Batch]], list[Batch]]] = {
    "no microbatches": lambda group: [],
    "no tokens": lambda group: [{**m, "w": torch.zeros_like(m["w"])} for m in group],
    "NaN": lambda group: [{**m, "y": m["y"] * float("nan")} for m in group],
    "infinite": lambda group: [{**m, "x": m["x"] * float("inf")} for m in group],
    "infinite on the way": lambda group: [
        {**m, "y": m["y"].sign() * 1e308} for m in group
    ],
}
"""Groups of which no step is taken."""
SKIPPING = drawn(training, on_nonfinite="skip")
POINT = torch.tensor(0.125, dtype=torch.float64)


SKIPS = st.lists(st.sampled_from([None, *IDLE]), min_size=1, max_size=3).filter(any)


@theorem("T10", st.tuples(SKIPPING, SKIPS))
def derivatives_through_steps_not_taken(
    system: System, drawn: tuple[Training, list[str | None]]
) -> None:
    """A step that is not taken is the identity, with its derivatives: as if it never was."""
    case, kinds = drawn
    # On a device, the host does not read that a step is not taken: there, 0 · ∞ is NaN.
    assume("infinite" not in kinds or case.rates[0].device.type == "cpu")
    pairs = [*zip(case.groups, kinds, strict=False)]
    taken = [group for group, kind in pairs if kind is None]
    given = [IDLE[kind](group) if kind else group for group, kind in pairs]
    point = (POINT.to(case.rates[0].device), case.starts[0])

    def slopes(groups: list[list[Batch]]) -> Any:
        return derivatives(
            trained(case.recipe, case.settings, groups, affine, system), point
        )

    actual = slopes(given)
    assert_same(actual, slopes(taken), "derivatives")
    assert all(bool(leaf.isfinite().all()) for leaf in tree.leaves(actual))


@theorem("T10", st.tuples(SKIPPING, st.sampled_from(["no tokens", "NaN"])))
def derivatives_in_an_ensemble_of_which_some_skip(
    system: System, drawn: tuple[Training, str]
) -> None:
    """Where no host can tell, since members differ, the derivative of each is right."""
    case, kind = drawn
    first, second, _ = case.groups
    groups = [second, IDLE[kind](second)]
    point = (POINT.to(case.rates[0].device), case.starts[0])

    def of(group: list[Batch]) -> Any:
        final = trained(case.recipe, case.settings, [first, group], affine, system)
        return derivatives(final, point, recorded=False)

    together = torch.vmap(of)([stack(pair) for pair in zip(*groups, strict=True)])
    assert_nearly(together, stack([*map(of, groups)]))


Move = Callable[[Any], Any]
"""Brings tensors to a device."""


def stay(values: Any) -> Any:
    """Leaves them on the host."""
    return values


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("recipe", OPTIMIZERS)
def test_derivatives_at_a_gradient_of_zero(recipe: str, normalize: str) -> None:
    """Exactly at the minimum, where norms and roots are 0."""
    check_derivatives_at_zero(recipe, normalize)


def check_derivatives_at_zero(recipe: str, normalize: str, move: Move = stay) -> None:
    """Compares derivatives at the minimum, on a device."""
    best = tree.map(lambda leaf: (4 * leaf).round(), start(0))
    x = torch.randint(
        -2, 3, (4, 3), generator=torch.Generator().manual_seed(0)
    ).double()
    group = [{"x": x, "y": x @ best["w"].flatten() + best["b"], "w": torch.ones(4)}]
    best, group, rate, here = move(
        (best, group, POINT, torch.ones((), dtype=torch.float64))
    )
    final = trained(
        recipe, {"normalize": normalize, "on_nonfinite": "skip"}, [group, group]
    )

    def end(distance: Tensor) -> Any:
        return final((rate, tree.map(lambda leaf: leaf + (distance - 1), best)))

    if recipe != "lion":
        # What ``init`` copies, as master weights, is not recorded.
        assert_slopes(
            lambda d: summed(end(d)), here, ("recorded",) if recipe == "master" else ()
        )
        return
    # A sign has the derivative 0, at 0 too, where its difference is none: decay is left, twice.
    slopes = torch.cat([leaf.flatten().cos() for leaf in tree.leaves(end(here))])
    expected = slopes.sum() * (1 - 0.125 * 0.1) ** 2
    slope = torch.func.grad(lambda d: summed(end(d)))(here)
    assert (slope - expected).abs() <= gamma(64, torch.float64) * slopes.abs().sum()


def compiled_same(function: Callable[..., Any], *given: Any) -> None:
    """As one graph it computes the same; tests/ runs what inductor makes of such graphs."""
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_nearly(compiled(*given), function(*given))


def test_compile_of_a_derivative() -> None:
    """The step is made in the graph; donation is ignored where it is recorded, and the loss is computed again."""
    check_compiled_derivative()


def check_compiled_derivative(move: Move = stay) -> None:
    """Compares the derivative of a step with that of its graph, on a device."""
    how: Settings = {"donate": True, "on_nonfinite": "skip", "normalize": "grads"}
    group, params, rate = move((group_of(0), start(0), POINT))
    final = trained("lion", how, [group], ps.remat(affine))

    def loss(rate: Tensor) -> Tensor:
        return summed(final((rate, params)))

    compiled_same(torch.func.grad_and_value(loss), rate)


def test_compile_on_ranks_and_in_ensembles() -> None:
    """The whole simulated group of ranks, in an ensemble, as one graph."""
    check_compiled_ranks()


def check_compiled_ranks(move: Move = stay) -> None:
    """Compares ranks in an ensemble with their graph, on a device."""
    axis = ps.VmapAxis(2)
    step = ps.make_update_step(affine, CAPTURE, weight_fn=weights_of, axis=axis)
    ensemble = torch.vmap(axis.map(step, (None, None, 0), None), in_dims=(0, 0, None))
    members = stack([start(0), start(1)])
    given = members, tree.zeros_like(members), [stack([group_of(0)[0], group_of(1)[0]])]
    compiled_same(ensemble, *move(given))


globals().update(as_tests(globals()))
