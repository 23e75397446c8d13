"""T10, transforms. A step is an ordinary differentiable function of tensors.

    vmap(step)(x₁, ..., xₙ) = (step(x₁), ..., step(xₙ))      compile(step) = step

``grad`` and ``jvp`` through steps match finite differences.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, strategies as st
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.testing.bounds import rounding_bound
from support.optimizers import CAPTURE, EPS, RECIPES
from support.strategies import (
    Batch,
    Chooser,
    assert_same,
    builds,
    choose_settings,
    cut_batch,
    get_weights,
    stack_trees,
)
from support.theorem import PURESTEP, System, as_tests, theorem


def make_scheduled(rate: Any) -> ps.optim.Optimizer:
    """Makes SGD with two schedules, of which the first divides by zero where the second begins."""
    first = lambda t: rate / (1 - t)  # noqa: E731
    second = lambda t: rate / (2 - t)  # noqa: E731
    return ps.optim.sgd(ps.optim.join_schedules([first, second], [1]))


OPTIMIZERS: dict[str, Callable[[Any], ps.optim.Optimizer]] = {
    **RECIPES,
    "scheduled": make_scheduled,
}
Settings = dict[str, Any]
Group = list[Batch]
Point = tuple[Tensor, Any]
"""A learning rate, and the first params."""


def affine(params: Any, batch: Batch) -> Tensor:
    """Computes (xᵀ w + b − y)², for each token: its second derivative holds no y."""
    output = batch["x"] @ params["w"].flatten() + params["b"]
    return (output - batch["y"]).square()


def make_group(seed: int) -> Group:
    """Makes two microbatches, of two and of three tokens."""
    generator = torch.Generator().manual_seed(seed)
    batch = {
        "x": torch.randn(5, 3, dtype=torch.float64, generator=generator),
        "y": torch.randn(5, dtype=torch.float64, generator=generator),
        "w": torch.ones(5),
    }
    return cut_batch(batch, [[0, 1], [2, 3, 4]])


def make_params(seed: int) -> Any:
    """Makes a matrix, a number, and a leaf that the loss does not reach."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(3, 1, dtype=torch.float64, generator=generator),
        "b": torch.randn((), dtype=torch.float64, generator=generator),
        "unused": torch.zeros(2, dtype=torch.float64),
    }


def make_train_fn(
    recipe: str,
    settings: Settings,
    groups: list[Group],
    loss_fn: Any = affine,
    system: System = PURESTEP,
) -> Callable[[Point], Any]:
    """Returns the params after a step on each group, as a function of the rate and of the first params."""

    def train(point: Point) -> Any:
        rate, params = point
        optimizer = OPTIMIZERS[recipe](rate)
        step = system.make_update_step(
            loss_fn, optimizer, weight_fn=get_weights, **settings
        )
        params, opt_state = tree.map(torch.clone, (params, optimizer.init(params)))
        for group in groups:
            params, opt_state, _ = step(params, opt_state, group)
        return params

    return train


def sum_of_sines(params: Any) -> Tensor:
    """Computes a scalar of all elements."""
    return torch.stack([leaf.sin().sum() for leaf in tree.leaves(params)]).sum()


def derivatives(
    train: Callable[[Point], Any], point: Point, *, recorded: bool = True
) -> Any:
    """Returns, by mode, derivatives of the training: reverse, forward, and recorded by autograd.

    Forward mode, which lazy tensors lack, differentiates the final params. The other modes
    differentiate the sum of their sines.
    """

    def scalar(point: Point) -> Tensor:
        return sum_of_sines(train(point))

    results: dict[str, Any] = {"reverse": torch.func.grad(scalar)(point)}
    rate, _ = point
    if has_forward_mode(rate):
        tangents = tree.map(torch.cos, point)
        results["forward"] = torch.func.jvp(train, (point,), (tangents,))[1]
    if recorded:
        leaf_point = tree.map(lambda leaf: leaf.clone().requires_grad_(), point)
        results["recorded"] = torch.autograd.grad(
            scalar(leaf_point),
            tree.leaves(leaf_point),
            allow_unused=True,
            materialize_grads=True,
        )
    return results


def has_forward_mode(leaf: Tensor) -> bool:
    """Returns whether a tensor's device has forward mode: every device but the lazy one."""
    return leaf.device.type != "lazy"


def assert_slopes(
    f: Callable[[Tensor], Tensor], x: Tensor, excluded: tuple[str, ...] = ()
) -> Tensor:
    """Asserts that f′(x) in reverse mode, in forward mode and recorded is its finite difference.

    That is extrapolated from two central differences. Its uncertainty is how far they differ, plus
    their cancellation. Modes in ``excluded`` are not compared. Returns the size of the finite
    difference, divided by its uncertainty.
    """
    h = 1e-4 * float(x)
    coarse = (f(x + 2 * h) - f(x - 2 * h)) / (4 * h)
    fine = (f(x + h) - f(x - h)) / (2 * h)
    cancellation = 64 * torch.finfo(x.dtype).eps * f(x).abs() / h
    uncertainty = (fine - coarse).abs() + cancellation
    expected = fine + (fine - coarse) / 3

    leaf = x.clone().requires_grad_()
    f(leaf).backward()
    slopes = {"reverse": torch.func.grad(f)(x), "recorded": leaf.grad}
    if has_forward_mode(x):
        slopes["forward"] = torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]
    for mode, slope in slopes.items():
        if mode not in excluded:
            assert slope is not None
            assert (slope - expected).abs() <= uncertainty, mode
    return expected.abs() / uncertainty


class TrainCase(NamedTuple):
    """An optimizer and settings; three groups of data, three first params, and their rates."""

    recipe: str
    settings: Settings
    groups: list[Group]
    starts: list[Any]
    rates: list[Tensor]

    def make_train_fn(
        self, system: System, groups: list[Group], loss_fn: Any = affine
    ) -> Callable[[Point], Any]:
        """Returns the params after a step on each of these groups, as a function of rate and first params."""
        return make_train_fn(self.recipe, self.settings, groups, loss_fn, system)


RATES = [torch.tensor(rate, dtype=torch.float64) for rate in (0.0, 1e-3, 1e-2)]


def make_train_case(choose: Chooser, **fixed: Any) -> TrainCase:
    """Makes a case of any optimizer and settings, of which some may be fixed."""
    settings = choose_settings(choose, accum_dtype=None, **fixed)
    recipe = choose.choice([*OPTIMIZERS])
    seed = choose.randrange(100)
    groups = [make_group(seed + number) for number in range(3)]
    starts = [make_params(seed + number) for number in range(3)]
    return TrainCase(recipe, settings, groups, starts, RATES)


@theorem("T10", st.tuples(builds(make_train_case), st.booleans()))
def derivatives_by_the_rate(system: System, drawn: tuple[TrainCase, bool]) -> None:
    """Through three steps, of a loss that may be computed again in the backward pass."""
    case, recomputed = drawn
    *_, rate = case.rates
    # torch's checkpoints have no lazy tensors.
    if recomputed and has_forward_mode(rate):
        train = case.make_train_fn(system, case.groups, ps.remat(affine))
    else:
        train = case.make_train_fn(system, case.groups)

    def scalar(rate: Tensor) -> Tensor:
        return sum_of_sines(train((rate, case.starts[0])))

    # What is left after cancellation may say nothing.
    assume(assert_slopes(scalar, rate) > 10)


@theorem("T10", builds(make_train_case))
def ensembles(system: System, case: TrainCase) -> None:
    """An ensemble under vmap, each with its own learning rate, is its members one by one."""
    train = case.make_train_fn(system, case.groups[:2])
    points = [*zip(case.rates, case.starts, strict=True)]
    ensemble = torch.vmap(lambda *point: train(point))
    actual = ensemble(stack_trees(case.rates), stack_trees(case.starts))
    assert_nearly(actual, stack_trees([train(point) for point in points]))


def assert_nearly(actual: Any, expected: Any) -> None:
    """Asserts equality but for rounding.

    Batched or compiled products may be summed in another order; steps divide by EPS at least.
    """
    bound = rounding_bound(2**10, torch.float64) / EPS**2
    leaves = zip(tree.leaves(actual), tree.leaves(expected), strict=True)
    for a, b in leaves:
        assert a.dtype == b.dtype
        scale = b.double().abs().max().clamp(min=1)
        assert ((a.double() - b.double()).abs() <= bound * scale).all()


def scale_targets(batch: Batch, factor: float) -> Batch:
    """Multiplies the targets."""
    return {**batch, "y": batch["y"] * factor}


SKIPPED: dict[str, Callable[[Batch], Batch]] = {
    "no tokens": lambda batch: {**batch, "w": torch.zeros_like(batch["w"])},
    "NaN": lambda batch: scale_targets(batch, float("nan")),
    "infinite": lambda batch: {**batch, "x": batch["x"] * float("inf")},
    "infinite on the way": lambda batch: {**batch, "y": batch["y"].sign() * 1e308},
}
"""Changes to microbatches after which no step is taken."""
REASONS = ["no microbatches", *SKIPPED]


def make_skipped(group: Group, reason: str) -> Group:
    """Changes a group so that no step is taken."""
    if reason == "no microbatches":
        return []
    return [SKIPPED[reason](batch) for batch in group]


SKIPPING = builds(make_train_case, on_nonfinite="skip")
MAYBE_SKIPPED = st.lists(st.sampled_from([None, *REASONS]), min_size=1, max_size=3)
RATE = torch.tensor(0.125, dtype=torch.float64)


@theorem("T10", st.tuples(SKIPPING, MAYBE_SKIPPED.filter(any)))
def derivatives_through_steps_not_taken(
    system: System, drawn: tuple[TrainCase, list[str | None]]
) -> None:
    """A step that is not taken is the identity, with its derivatives: as if it never was."""
    case, reasons = drawn
    device = case.rates[0].device
    # On a device, the host does not read that a step is not taken: there, 0 · ∞ is NaN.
    assume("infinite" not in reasons or device.type == "cpu")
    point = (RATE.to(device), case.starts[0])
    groups, taken_groups = [], []
    for group, reason in zip(case.groups, reasons, strict=False):
        if reason is None:
            groups.append(group)
            taken_groups.append(group)
        else:
            groups.append(make_skipped(group, reason))

    actual = derivatives(case.make_train_fn(system, groups), point)
    expected = derivatives(case.make_train_fn(system, taken_groups), point)

    assert_same(actual, expected, "derivatives")
    assert all(bool(leaf.isfinite().all()) for leaf in tree.leaves(actual))


@theorem("T10", st.tuples(SKIPPING, st.sampled_from(["no tokens", "NaN"])))
def derivatives_in_an_ensemble_of_which_some_skip(
    system: System, drawn: tuple[TrainCase, str]
) -> None:
    """Where no host can tell, since members differ, the derivative of each is right."""
    case, reason = drawn
    first, second, _ = case.groups
    groups = [second, make_skipped(second, reason)]
    point = (RATE.to(case.rates[0].device), case.starts[0])

    def differentiate(group: Group) -> Any:
        train = case.make_train_fn(system, [first, group])
        return derivatives(train, point, recorded=False)

    stacked = [stack_trees(batches) for batches in zip(*groups, strict=True)]
    ensemble = torch.vmap(differentiate)(stacked)
    assert_nearly(ensemble, stack_trees([differentiate(group) for group in groups]))


Move = Callable[[Any], Any]
"""Moves tensors to a device."""


def stay(values: Any) -> Any:
    """Leaves tensors on the host."""
    return values


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("recipe", OPTIMIZERS)
def test_derivatives_at_a_gradient_of_zero(recipe: str, normalize: str) -> None:
    """Exactly at the minimum, where norms and roots are 0."""
    check_derivatives_at_zero(recipe, normalize)


def check_derivatives_at_zero(recipe: str, normalize: str, move: Move = stay) -> None:
    """Compares derivatives at the minimum with finite differences, where ``move`` puts the tensors.

    Lion's are compared with a formula.
    """
    best = tree.map(lambda leaf: (4 * leaf).round(), make_params(0))
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (4, 3), generator=generator).double()
    y = x @ best["w"].flatten() + best["b"]
    group = [{"x": x, "y": y, "w": torch.ones(4)}]
    one = torch.ones((), dtype=torch.float64)
    best, group, rate, one = move((best, group, RATE, one))
    settings = {"normalize": normalize, "on_nonfinite": "skip"}
    train = make_train_fn(recipe, settings, [group, group])

    def end(distance: Tensor) -> Any:
        """Trains from a point that lies at ``distance − 1`` from the minimum."""
        start = tree.map(lambda leaf: leaf + (distance - 1), best)
        return train((rate, start))

    def scalar(distance: Tensor) -> Tensor:
        return sum_of_sines(end(distance))

    if recipe == "lion":
        # A sign has the derivative 0, at 0 too, where its difference is none: decay is left, twice.
        cosines = [leaf.flatten().cos() for leaf in tree.leaves(end(one))]
        slopes = torch.cat(cosines)
        expected = slopes.sum() * (1 - 0.125 * 0.1) ** 2
        error = (torch.func.grad(scalar)(one) - expected).abs()
        assert error <= rounding_bound(64, torch.float64) * slopes.abs().sum()
    elif recipe == "master":
        # What ``init`` copies, as master weights, is not recorded.
        assert_slopes(scalar, one, excluded=("recorded",))
    else:
        assert_slopes(scalar, one)


def assert_compiled_same(function: Callable[..., Any], *inputs: Any) -> None:
    """Asserts that one graph computes the same; tests/ runs what inductor makes of such graphs."""
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_nearly(compiled(*inputs), function(*inputs))


def test_compile_of_a_derivative() -> None:
    """The step is made in the graph; donation is ignored where it is recorded, and the loss is computed again."""
    check_compiled_derivative()


def check_compiled_derivative(move: Move = stay) -> None:
    """Compares the derivative of a step with that of its graph, on a device."""
    settings: Settings = {
        "donate": True,
        "on_nonfinite": "skip",
        "normalize": "grads",
    }
    group, params, rate = move((make_group(0), make_params(0), RATE))
    train = make_train_fn("lion", settings, [group], ps.remat(affine))

    def scalar(rate: Tensor) -> Tensor:
        return sum_of_sines(train((rate, params)))

    assert_compiled_same(torch.func.grad_and_value(scalar), rate)


def test_compile_on_ranks_and_in_ensembles() -> None:
    """The whole simulated group of ranks, in an ensemble, as one graph."""
    check_compiled_ranks()


def check_compiled_ranks(move: Move = stay) -> None:
    """Compares ranks in an ensemble with their graph, on a device."""
    axis = ps.VmapAxis(2)
    step = ps.make_update_step(affine, CAPTURE, weight_fn=get_weights, axis=axis)
    on_ranks = axis.map(step, (None, None, 0), None)
    ensemble = torch.vmap(on_ranks, in_dims=(0, 0, None))
    params = stack_trees([make_params(0), make_params(1)])
    group = [stack_trees([make_group(0)[0], make_group(1)[0]])]
    inputs = params, tree.zeros_like(params), group
    assert_compiled_same(ensemble, *move(inputs))


def test_compile_of_a_stacked_group() -> None:
    """One graph serves every number of microbatches from two on."""
    num_graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        nonlocal num_graphs
        num_graphs += 1
        return graph.forward

    step = ps.make_update_step(affine, CAPTURE, weight_fn=get_weights)
    compiled = ps.compile(step, fullgraph=True, backend=count)
    params = make_params(0)
    state = params, CAPTURE.init(params)
    for length in (2, 3, 5):
        group = [make_group(seed)[0] for seed in range(length)]
        assert_nearly(compiled(*state, ps.stack(group)), step(*state, group))
    assert num_graphs == 1


globals().update(as_tests(globals()))
