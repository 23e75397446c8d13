"""T10, transforms. A step is an ordinary differentiable function of tensors.

``vmap(step)`` is the steps one by one; ``grad`` and ``jvp`` through steps match finite differences;
``compile(step)`` is the step.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import purestep as ps
from proofs import models
from proofs.strategies import Batch, assert_same, capture, cut
from purestep import tree
from purestep.testing.bounds import gamma

Recipes = dict[str, Callable[[Tensor], ps.optim.Optimizer]]


def matrices(params: Any) -> Any:
    """A mask: matrices decay."""
    return tree.map(lambda leaf: leaf.ndim > 1, params)


def by_shape(params: Any) -> Any:
    """Labels: matrices, and the rest."""
    return tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "rest", params)


RECIPES: Recipes = {
    "sgd": lambda rate: ps.optim.sgd(rate),
    "momentum": lambda rate: ps.optim.sgd(rate, 0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda rate: ps.optim.adamw(rate),
    "masked": lambda rate: ps.optim.adamw(rate, weight_decay=0.1, mask=matrices),
    "clipped": lambda rate: ps.optim.chain(
        ps.optim.clip_by_global_norm(0.5), ps.optim.adamw(rate, weight_decay=0.1)
    ),
}
EPS = 0.125
"""So large that a step is smooth where gradients are small."""
NATIVE: Recipes = {
    "sgd": ps.optim.sgd,
    "momentum": lambda rate: ps.optim.sgd(rate, 0.5),
    "nesterov": lambda rate: ps.optim.sgd(rate, 0.5, nesterov=True, weight_decay=0.25),
    "decayed": lambda rate: ps.optim.chain(
        ps.optim.add_decayed_weights(0.25, matrices), ps.optim.descend(rate)
    ),
    "scheduled": lambda rate: ps.optim.sgd(
        ps.optim.join_schedules([lambda t: rate / (1 - t), lambda t: rate / (2 - t)], [1])
    ),
    "clipped": lambda rate: ps.optim.chain(ps.optim.clip_by_global_norm(0.5), ps.optim.sgd(rate)),
    "clipped adamw": lambda rate: ps.optim.chain(
        ps.optim.clip_by_global_norm(0.5), ps.optim.adamw(rate, eps=EPS)
    ),
    "adamw": lambda rate: ps.optim.adamw(rate, eps=EPS, weight_decay=0.25),
    "masked": lambda rate: ps.optim.adamw(rate, eps=EPS, weight_decay=0.25, mask=matrices),
    "adam": lambda rate: ps.optim.chain(ps.optim.scale_by_adam(eps=EPS), ps.optim.descend(rate)),
    "lion": lambda rate: ps.optim.lion(rate, 0.5, 0.75, weight_decay=0.25),
    "partition": lambda rate: ps.optim.partition(
        by_shape,
        {
            "matrix": ps.optim.chain(
                ps.optim.clip_by_global_norm(0.5), ps.optim.sgd(rate, momentum=0.5)
            ),
            "rest": ps.optim.adamw(rate, eps=EPS),
        },
    ),
    "master": lambda rate: ps.optim.master_weights(ps.optim.adamw(rate, eps=EPS)),
    "ema": lambda rate: ps.optim.ema(ps.optim.sgd(rate, 0.5), 0.75),
}
"""All that is ours."""
SETTINGS: list[dict[str, Any]] = [
    {},
    {"normalize": "grads"},
    {"on_nonfinite": "skip"},
    {"donate": True},
]
REMAT = {"loss_fn": ps.remat(models.transformer_loss)}
"""All that the loss computes is computed again."""
# An inductor needs a C++ compiler; where there is none, the same graphs run uncompiled.
COMPILER = "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"


def text(seed: int, rows: int = 4) -> Batch:
    """Random tokens, the last ones of each row ignored."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, models.CONTEXT)
    labels = torch.randint(0, models.VOCABULARY, shape, generator=generator)
    lengths = torch.randint(1, models.CONTEXT, (rows, 1), generator=generator)
    return {
        "tokens": torch.randint(0, models.VOCABULARY, shape, generator=generator),
        "labels": labels.masked_fill(torch.arange(models.CONTEXT) >= lengths, -100),
    }


def start(seed: int) -> Any:
    """A transformer."""
    return models.transformer_params(torch.Generator().manual_seed(seed))


def train(
    rate: Tensor,
    recipe: str,
    params: Any,
    group: list[Batch],
    steps: int,
    loss_fn: Any = models.transformer_loss,
    **how: Any,
) -> tuple[Any, Any]:
    """A few steps at this learning rate: the parameters, and the losses on the way."""
    optimizer = RECIPES[recipe](rate)
    step = ps.make_update_step(loss_fn, optimizer, **how)
    opt_state, losses = optimizer.init(params), []
    for _ in range(steps):
        params, opt_state, metrics = step(params, opt_state, group)
        losses.append(metrics.loss)
    return params, torch.stack(losses)


@settings(max_examples=10)
@given(st.sampled_from(list(RECIPES)), st.sampled_from([*SETTINGS, REMAT]), st.integers(0, 99))
def test_ensemble(recipe: str, how: dict[str, Any], seed: int) -> None:
    """An ensemble under vmap, each with its own learning rate, is its members one by one."""
    group = cut(text(seed), [[0], [1, 2, 3]])
    rates = torch.tensor([0.0, 1e-3, 1e-2], dtype=torch.float64)
    members = [start(seed + i) for i in range(len(rates))]
    stacked = tree.map(lambda *leaves: torch.stack(leaves), *members)

    def member(rate: Tensor, params: Any) -> Any:
        return train(rate, recipe, params, group, 2, **how)

    together = torch.vmap(member)(rates, stacked)
    for i, params in enumerate(members):
        params = tree.map(torch.clone, params)
        for a, b in zip(
            tree.leaves_of(together), tree.leaves_of(member(rates[i], params)), strict=True
        ):
            n = 4 * models.transformer_roundings(torch.float64)
            # Adam divides gradients by their own size: elements that are nothing but rounding move by
            # up to the learning rate, so the bound is that of a step's length.
            bound = gamma(n, torch.float64) * b.abs().max() + sensitivity(recipe, float(rates[i]))
            assert (a[i] - b).abs().max() <= bound


def sensitivity(recipe: str, rate: float) -> float:
    """How far rounding noise in the gradient can move an Adam step: noise / ε, of a step of length lr."""
    noise = gamma(models.transformer_roundings(torch.float64), torch.float64)
    return 0.0 if recipe in ("sgd", "momentum") else 2 * rate * noise / 1e-8


def finite_difference(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """f′(x) extrapolated from two central differences, and how far they are from agreeing."""
    h = 1e-4 * float(x)
    coarse, fine = ((f(x + k * h) - f(x - k * h)) / (2 * k * h) for k in (2, 1))
    rounding = 64 * torch.finfo(x.dtype).eps * f(x).abs() / h
    return fine + (fine - coarse) / 3, (fine - coarse).abs() + rounding


@settings(max_examples=10)
@given(st.sampled_from(list(RECIPES)), st.sampled_from([*SETTINGS, REMAT]), st.integers(0, 99))
def test_hypergradient(recipe: str, how: dict[str, Any], seed: int) -> None:
    """d(loss after three steps) / d(learning rate), backward and forward, is the finite difference."""
    group, held_out = cut(text(seed), [[0], [1, 2]]), text(seed + 1)

    def final_loss(rate: Tensor) -> Tensor:
        params, _ = train(rate, recipe, tree.map(torch.clone, start(seed)), group, 3, **how)
        return models.transformer_loss(params, held_out).sum()

    rate = torch.tensor(1e-2, dtype=torch.float64)
    expected, uncertainty = finite_difference(final_loss, rate)
    backward = torch.func.grad(final_loss)(rate)
    forward = torch.func.jvp(final_loss, (rate,), (torch.ones_like(rate),))[1]
    assert (backward - expected).abs() <= uncertainty
    assert (forward - expected).abs() <= uncertainty
    assert backward.abs() > 10 * uncertainty, "the case says nothing"
    recorded = rate.clone().requires_grad_()
    final_loss(recorded).backward()
    assert recorded.grad is not None
    assert (recorded.grad - expected).abs() <= uncertainty


@pytest.mark.parametrize("how", SETTINGS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_lion(how: dict[str, Any], seed: int) -> None:
    """The sign's own derivative is 0; the rest of the recipe has one. Few parameters, none of them near a change of sign."""
    generator = torch.Generator().manual_seed(seed)
    x, y, start = (torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in (5, 5, 3))
    group = [{"x": x[:2], "y": y[:2]}, {"x": x[2:], "y": y[2:]}]

    def final(rate: Tensor, params: Tensor = start) -> Tensor:
        optimizer = ps.optim.lion(rate, 0.5, 0.75, weight_decay=0.25)
        step = ps.make_update_step(
            lambda w, m: (m["x"] @ w - m["y"]).square(),
            optimizer,
            weight_fn=lambda m: torch.ones_like(m["y"]),
            **how,
        )
        params, opt_state = tree.map(torch.clone, (params, optimizer.init(params)))
        for _ in range(3):
            params, opt_state, _ = step(params, opt_state, group)
        return params

    rates = torch.tensor([1e-2, 3e-2], dtype=torch.float64)
    members = torch.stack([start, -start])
    for together, rate, member in zip(
        torch.vmap(final)(rates, members), rates, members, strict=True
    ):
        # A product and a sum for each of the steps; signs are the same, however gradients are rounded.
        assert (together - final(rate, member)).abs().max() <= gamma(
            6, rates.dtype
        ) * member.abs().max()

    def summed(rate: Tensor) -> Tensor:
        return (final(rate) * y[:3]).sum()

    expected, uncertainty = finite_difference(summed, rates[0])
    backward = torch.func.grad(summed)(rates[0])
    forward = torch.func.jvp(summed, (rates[0],), (torch.ones_like(rates[0]),))[1]
    assert (backward - expected).abs() <= uncertainty
    assert (forward - expected).abs() <= uncertainty
    assert backward.abs() > 10 * uncertainty, "the case says nothing"


def affine(params: Any, m: Batch) -> Tensor:
    """(xᵀ w + b − y)², for each token: its second derivative holds no y."""
    return (m["x"] @ params["w"].flatten() + params["b"] - m["y"]).square()


def affine_group(seed: int) -> list[Batch]:
    """Two microbatches of five tokens."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (
        torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((5, 3), (5,))
    )
    whole = {"x": x, "y": y, "w": torch.ones(5)}
    return cut(whole, [[0, 1], [2, 3, 4]])


def affine_start(seed: int) -> Any:
    """A matrix and a number."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(3, 1, dtype=torch.float64, generator=generator)
    return {"w": w, "b": torch.randn((), dtype=torch.float64, generator=generator)}


IDLE: dict[str, Callable[[list[Batch]], list[Batch]]] = {
    "no microbatches": lambda group: [],
    "no tokens": lambda group: [{**m, "w": torch.zeros_like(m["w"])} for m in group],
    "NaN": lambda group: [{**m, "y": m["y"] * float("nan")} for m in group],
    "infinite": lambda group: [{**m, "x": m["x"] * float("inf")} for m in group],
    "infinite on the way": lambda group: [{**m, "y": m["y"].sign() * 1e308} for m in group],
}
"""Groups of which no step is taken."""
SKIPPING: list[dict[str, Any]] = [
    {"on_nonfinite": "skip", "normalize": normalize, "donate": donate}
    for normalize in ("loss", "grads")
    for donate in (False, True)
]
Point = tuple[Tensor, Any]


def trained(recipe: str, how: dict[str, Any], groups: list[list[Batch]]) -> Callable[[Point], Any]:
    """The parameters after a step on each of the groups, as a function of the rate and of those at the start."""

    def final(point: Point) -> Any:
        rate, params = point
        optimizer = NATIVE[recipe](rate)
        step = ps.make_update_step(affine, optimizer, weight_fn=lambda m: m["w"], **how)
        params, opt_state = tree.map(torch.clone, (params, optimizer.init(params)))
        for group in groups:
            params, opt_state, _ = step(params, opt_state, group)
        return params

    return final


def summed(params: Any) -> Tensor:
    """Something of all of them."""
    return torch.stack([leaf.sin().sum() for leaf in tree.leaves_of(params)]).sum()


def derivatives(final: Callable[[Point], Any], point: Point) -> dict[str, Any]:
    """The same in reverse mode, in forward mode, and as autograd records it."""
    own = tree.map(lambda leaf: leaf.clone().requires_grad_(), point)
    leaves = tree.leaves_of(own)
    recorded = torch.autograd.grad(summed(final(own)), leaves, allow_unused=True)
    return {
        "reverse": torch.func.grad(lambda point: summed(final(point)))(point),
        "forward": torch.func.jvp(final, (point,), (tree.map(torch.cos, point),))[1],
        "recorded": [grad for grad in recorded if grad is not None],
    }


@given(
    st.sampled_from(list(NATIVE)),
    st.sampled_from(SKIPPING),
    st.lists(st.sampled_from([None, *IDLE]), min_size=1, max_size=3),
    st.integers(0, 99),
)
def test_derivatives_through_steps_not_taken(
    recipe: str, how: dict[str, Any], kinds: list[str | None], seed: int
) -> None:
    """A step that is not taken is the identity, and so are its derivatives: as if it never was, to the bit."""
    groups = [affine_group(seed + i) for i in range(len(kinds))]
    taken = [group for group, kind in zip(groups, kinds, strict=True) if kind is None]
    given = [
        group if kind is None else IDLE[kind](group)
        for group, kind in zip(groups, kinds, strict=True)
    ]
    point = (torch.tensor(0.125, dtype=torch.float64), affine_start(seed))
    actual = derivatives(trained(recipe, how, given), point)
    expected = derivatives(trained(recipe, how, taken), point)
    assert_same(actual, expected, "derivatives")
    assert all(bool(leaf.isfinite().all()) for leaf in tree.leaves_of(actual))


@settings(max_examples=20)
@given(
    st.sampled_from(list(NATIVE)),
    st.sampled_from(SKIPPING),
    st.sampled_from(["no tokens", "NaN"]),
    st.integers(0, 99),
)
def test_derivatives_in_an_ensemble_of_which_some_skip(
    recipe: str, how: dict[str, Any], kind: str, seed: int
) -> None:
    """Where no host can tell, since members differ, the derivative of each is its own."""
    first, second = affine_group(seed), affine_group(seed + 1)
    both = [
        tree.map(lambda a, b: torch.stack([a, b]), *pair)
        for pair in zip(second, IDLE[kind](second), strict=True)
    ]
    point = (torch.tensor(0.125, dtype=torch.float64), affine_start(seed))

    def of(group: list[Batch]) -> Any:
        actual = derivatives(trained(recipe, how, [first, group]), point)
        return {mode: actual[mode] for mode in ("reverse", "forward")}

    def transformed(group: list[Batch]) -> Any:
        final = trained(recipe, how, [first, group])
        return {
            "reverse": torch.func.grad(lambda point: summed(final(point)))(point),
            "forward": torch.func.jvp(final, (point,), (tree.map(torch.cos, point),))[1],
        }

    together = torch.vmap(transformed)(both)
    for index, group in enumerate((second, IDLE[kind](second))):
        for a, b in zip(tree.leaves_of(together), tree.leaves_of(of(group)), strict=True):
            # Batched products may sum in another order, and each step divides by EPS at the least.
            bound = gamma(2**10, torch.float64) / EPS**2 * max(1, b.abs().max())
            assert (a[index] - b).abs().max() <= bound


@pytest.mark.parametrize("how", SKIPPING, ids=str)
@pytest.mark.parametrize("recipe", NATIVE)
def test_derivatives_at_a_gradient_of_zero(recipe: str, how: dict[str, Any]) -> None:
    """Exactly at the minimum, where norms and roots are 0: the finite differences, in both modes."""
    generator = torch.Generator().manual_seed(0)
    best = affine_start(0)
    x = torch.randint(-2, 3, (4, 3), generator=generator).to(torch.float64)
    best = tree.map(lambda leaf: (4 * leaf).round(), best)
    y = x @ best["w"].flatten() + best["b"]
    group = [{"x": x, "y": y, "w": torch.ones(4)}]

    def end(distance: Tensor) -> Any:
        moved = tree.map(lambda leaf: leaf + (distance - 1), best)
        rate = torch.tensor(0.125, dtype=torch.float64)
        return trained(recipe, how, [group, group])((rate, moved))

    def along(distance: Tensor) -> Tensor:
        return summed(end(distance))

    here = torch.ones((), dtype=torch.float64)
    backward = torch.func.grad(along)(here)
    forward = torch.func.jvp(along, (here,), (torch.ones_like(here),))[1]
    recorded = here.clone().requires_grad_()
    along(recorded).backward()
    assert recorded.grad is not None
    expected, uncertainty = finite_difference(along, here)
    if recipe == "lion":
        # A sign has the derivative 0, at 0 too, where its finite difference is none: decay is left, twice.
        slopes = torch.cat([leaf.flatten().cos() for leaf in tree.leaves_of(end(here))])
        expected = slopes.sum() * (1 - 0.125 * 0.25) ** 2
        uncertainty = gamma(64, torch.float64) * slopes.abs().sum()
    for slope in (backward, forward, recorded.grad):
        if recipe != "master" or slope is not recorded.grad:  # cut off by ``init``, as it says
            assert (slope - expected).abs() <= uncertainty


def test_derivatives_at_rest() -> None:
    """Where no gradient ever came, second moments are 0 and derivatives are 0, not NaN."""

    def final(rate: Tensor) -> Tensor:
        optimizer = ps.optim.adamw(rate, weight_decay=0.0)
        step = ps.make_update_step(
            lambda p, m: p["used"] * m["x"], optimizer, weight_fn=lambda m: m["w"]
        )
        params = {"used": torch.ones(()), "unused": torch.ones(2)}
        group = [{"x": torch.ones(2), "w": torch.ones(2)}]
        params, state, _ = step(params, optimizer.init(params), group)
        params, *_ = step(params, state, [{"x": torch.ones(2), "w": torch.zeros(2)}])
        return params["used"] + params["unused"].sum()

    rate = torch.tensor(0.5)
    slopes = torch.func.grad(final)(rate), torch.func.jvp(final, (rate,), (torch.ones(()),))[1]
    # A dozen roundings in the one step that is taken.
    assert all((slope + 1).abs() <= gamma(12, torch.float32) for slope in slopes)


@pytest.mark.parametrize(
    ("how", "backend"),
    [*((how, "aot_eager") for how in [*SETTINGS, REMAT]), (SETTINGS[1], COMPILER)],
    ids=lambda value: "remat" if value is REMAT else str(value),
)
def test_compile(how: dict[str, Any], backend: str) -> None:
    """``torch.compile(fullgraph=True)``: one graph, the same step."""
    torch.compiler.reset()
    optimizer = ps.optim.chain(
        ps.optim.clip_by_global_norm(0.5),
        ps.optim.sgd(
            ps.optim.cosine_decay_schedule(0.1, 9),
            momentum=0.9,
            weight_decay=0.1,
            mask=lambda params: tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )
    step = ps.make_update_step(**{"loss_fn": models.transformer_loss, **how}, optimizer=optimizer)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    params, group = start(0), cut(text(0), [[0, 1], [2, 3]])
    expected = step(tree.map(torch.clone, params), optimizer.init(params), group)
    actual = compiled(tree.map(torch.clone, params), optimizer.init(params), group)
    assert_compiled_same(actual, expected)


def assert_compiled_same(actual: Any, expected: Any) -> None:
    """A compiler may round elsewhere, but no more often."""
    bound = gamma(2 * models.transformer_roundings(torch.float64), torch.float64)
    for a, b in zip(tree.leaves_of(actual), tree.leaves_of(expected), strict=True):
        assert a.dtype == b.dtype
        assert ((a.double() - b.double()).abs() <= bound * b.double().abs().max()).all()


@pytest.mark.parametrize("recipe", ["momentum", "lion"])
def test_compile_of_a_whole_training(recipe: str) -> None:
    """The step may be built inside of what is compiled, and differentiated there."""
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    x, y, start = (torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in (5, 5, 3))
    group = [{"x": x[:2], "y": y[:2]}, {"x": x[2:], "y": y[2:]}]

    def final(rate: Tensor) -> Tensor:
        optimizer = NATIVE[recipe](rate)
        step = ps.make_update_step(
            lambda w, m: (m["x"] @ w - m["y"]).square(),
            optimizer,
            weight_fn=lambda m: torch.ones_like(m["y"]),
        )
        params, opt_state = start, optimizer.init(start)
        for _ in range(2):
            params, opt_state, _ = step(params, opt_state, group)
        return (params * y[:3]).sum()

    rate = torch.tensor(0.01, dtype=torch.float64)
    for function in (final, torch.func.grad(final)):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert_compiled_same(compiled(rate), function(rate))


def test_compile_on_ranks_and_in_ensembles() -> None:
    """The whole simulated group of ranks, in an ensemble, as one graph."""
    torch.compiler.reset()
    axis = ps.VmapAxis(2)
    step = ps.make_update_step(models.transformer_loss, capture(), axis=axis)
    ranks = axis.map(step, in_dims=(None, None, 0), out_dims=None)
    members = tree.map(lambda a, b: torch.stack([a, b]), start(0), start(1))
    group = [tree.map(lambda a, b: torch.stack([a, b]), text(0), text(1))]
    ensemble = torch.vmap(ranks, in_dims=(0, 0, None))
    compiled = torch.compile(ensemble, fullgraph=True, backend="aot_eager")
    expected = ensemble(members, tree.zeros_like(members), group)
    actual = compiled(members, tree.zeros_like(members), group)
    assert_compiled_same(actual, expected)
