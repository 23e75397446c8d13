"""Tests trainers in JAX: few shapes, the same verdicts as in torch, and refusals."""

import itertools
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import torch
from jax import numpy as jnp
from torch import Tensor, nn

import purestep as ps
from purestep.testing import Capabilities, Linear, Problem
from purestep.testing.draws import Draw
from purestep.testing.jax_loops import LENGTHS, ROWS

PLAIN = Capabilities(dtype=torch.float32, momentum=False)
TRACED: Counter[tuple[Any, ...]] = Counter()
"""How often JAX compiled for a shape and dtype of weights."""


def grad_of_sum(params: Any, batch: Any) -> Any:
    """Returns the gradient of the sum of weighted losses. JAX runs this once for each shape."""
    TRACED[batch["w"].shape, batch["w"].dtype.name] += 1

    def sum_losses(params: Any) -> Any:
        errors = batch["x"] @ params["weight"] + params["bias"] - batch["y"]
        return (batch["w"] * errors**2).sum()

    return jax.grad(sum_losses)(params)


compute_grads: Any = jax.jit(grad_of_sum)


def divide_once(params: Any, state: Any, microbatches: Any, problem: Problem) -> Any:
    count = sum(batch["w"].sum() for batch in microbatches)
    if count == 0:
        return params, state, {"num_tokens": 0}
    grads = [compute_grads(params, batch) for batch in microbatches]
    mean = jax.tree.map(lambda *g: sum(g) / count, *grads)
    state = jax.tree.map(lambda m, g: problem.momentum * m + g, state, mean)
    params = jax.tree.map(lambda p, m: p - problem.learning_rate * m, params, state)
    return params, state, {"num_tokens": count}


def take_mean_of_means(
    params: Any, state: Any, microbatches: Any, problem: Problem
) -> Any:
    grads = jax.tree.map(jnp.zeros_like, params)
    for batch in microbatches:
        scale = len(microbatches) * jnp.where(batch["w"].any(), batch["w"].sum(), 1)
        more = compute_grads(params, batch)
        grads = jax.tree.map(lambda g, m, s=scale: g + m / s, grads, more)
    rate = problem.learning_rate
    params = jax.tree.map(lambda p, g: p - rate * g, params, grads)
    return params, state


def make_zeros(params: Any, problem: Problem) -> Any:
    return jax.tree.map(jnp.zeros_like, params)


def test_a_right_update_holds_in_few_shapes() -> None:
    """It is compiled once for each shape, and its state is saved and loaded."""
    TRACED.clear()
    trainer = ps.testing.jax_loop(divide_once, make_zeros, PLAIN)
    verdicts = ps.testing.run_laws(trainer, cases=40)
    failed = [str(verdict) for verdict in verdicts if verdict.case is not None]
    assert not failed
    (resume,) = [verdict for verdict in verdicts if verdict.law.name == "T16"]
    assert resume.status == "holds"
    assert {*TRACED.values()} == {1}
    shapes = {shape for shape, _ in TRACED}
    assert shapes <= {*itertools.product(ROWS, LENGTHS)}


@pytest.mark.parametrize("weights", ["mask", "whole", "any"])
def test_the_largest_sizes_hold_what_is_drawn(weights: Any) -> None:
    capabilities = Capabilities(weights=weights, dropout=True, skips_nonfinite=True)
    trainer = SimpleNamespace(capabilities=capabilities, settings=["a", "b"])
    sizes: set[Any] = set()
    for name, seed in itertools.product(["T0", "T1", "T4", "T5", "T14"], range(150)):
        law = ps.testing.LAWS[name]
        draw = Draw({(0,): seed}, random.Random(seed))
        part = law.parts[seed % len(law.parts)]
        case = law.draw_case(draw, trainer, part)
        for run in (case.first or case.second, case.second):
            for group in run.groups:
                sizes |= {batch["y"].shape for share in group for batch in share}
    num_rows, lengths = zip(*sizes, strict=True)
    assert max(num_rows) <= ROWS[-1]
    assert max(lengths) <= LENGTHS[-1]


def test_a_mean_of_means_is_wrong() -> None:
    trainer = ps.testing.jax_loop(take_mean_of_means, capabilities=PLAIN)
    (verdict,) = ps.testing.run_laws(trainer, ["T1"], cases=40, shrink=0)
    assert verdict.parts["equal tokens"].status == "holds"
    assert verdict.parts["unequal tokens"].status == "wrong"


def make_batch(num_rows: int, length: int) -> dict[str, Tensor]:
    """Makes a microbatch of ones, with a number for each row."""
    return {
        "x": torch.ones(num_rows, length, 2),
        "y": torch.ones(num_rows, length),
        "w": torch.ones(num_rows, length, dtype=torch.bool),
        "key": torch.arange(num_rows),
    }


PROBLEM = Problem(ps.testing.REGRESSION, Linear([1.0, 2.0], 3.0, torch.float32), 0.5)


def test_microbatches_of_an_update_have_the_same_sizes() -> None:
    """Each is as it was, and what is added counts for nothing."""
    seen: list[Any] = []

    def record(params: Any, state: Any, microbatches: Any, problem: Problem) -> Any:
        seen.extend(microbatches)
        return params, state

    sizes: Any = {"rows": (1, 2, 5), "lengths": (3, 4)}
    trainer = ps.testing.jax_loop(record, capabilities=PLAIN, **sizes)
    trainer.start(PROBLEM, 1)
    small = make_batch(1, 4)
    large = make_batch(3, 2)
    trainer.update([[small, large]])
    trainer.update([[]])
    for padded, batch in zip(seen, [small, large], strict=True):
        assert padded["w"].shape == (5, 4)
        assert padded["key"].shape == (5,)
        assert padded["w"].dtype == bool
        num_rows, length = batch["w"].shape
        assert padded["x"][:num_rows, :length].tolist() == batch["x"].tolist()
        assert float(padded["w"].sum()) == float(batch["w"].sum())
        # Not 0: padding that counts for something has to show.
        num_added = 20 - batch["y"].numel()
        assert float(padded["y"].sum()) == float(batch["y"].sum()) + 3 * num_added
    with pytest.raises(ValueError, match=r"has 6 rows: jax_loop.rows=\(1, 2, 5\)"):
        trainer.update([[make_batch(6, 1)]])


def test_a_saved_state_outlives_donation() -> None:
    """A jitted function that takes over the buffers of params deletes the arrays."""

    @partial(jax.jit, donate_argnums=0)
    def add_one(params: Any) -> Any:
        return jax.tree.map(lambda p: p + 1, params)

    def update(params: Any, state: Any, microbatches: Any, problem: Problem) -> Any:
        return add_one(params), state

    trainer = ps.testing.jax_loop(update, capabilities=PLAIN)
    trainer.start(PROBLEM, 1)
    saved = trainer.save()
    for _ in range(2):
        trainer.load(saved)
        trainer.update([[]])
        (seen,) = trainer.observe()
        assert seen.params["weight"].tolist() == [2, 3]
    assert PROBLEM.params()["weight"].tolist() == [1, 2]


def test_a_report_may_be_missing() -> None:
    def update(params: Any, state: Any, microbatches: Any, problem: Problem) -> Any:
        return params, state, {"loss": None, "num_tokens": 3}

    trainer = ps.testing.jax_loop(update, capabilities=PLAIN)
    trainer.start(PROBLEM, 1)
    trainer.update([[]])
    (seen,) = trainer.observe()
    assert seen.loss is None
    assert seen.num_tokens == 3


def test_params_in_bfloat16_are_the_same_numbers() -> None:
    model = Linear([1.0, 1 / 3], 2.0, torch.bfloat16)
    problem = Problem(ps.testing.REGRESSION, model, 0.5)
    capabilities = PLAIN._replace(dtype=torch.bfloat16)
    trainer = ps.testing.jax_loop(lambda *_: None, capabilities=capabilities)
    trainer.start(problem, 1)
    (seen,) = trainer.observe()
    for name, p in problem.params().items():
        assert seen.params[name].dtype == torch.bfloat16
        assert torch.equal(seen.params[name], p)


@pytest.mark.parametrize(
    ("capabilities", "message"),
    [
        (PLAIN._replace(ranks=2), "runs a single rank, but capabilities.ranks=2"),
        (Capabilities(), "JAX computes in float32: declare .*jax_enable_x64"),
        (
            PLAIN._replace(task=replace(ps.testing.REGRESSION, model=nn.Linear(1, 1))),
            "model of the task 'regression', which is torch's",
        ),
    ],
)
def test_what_jax_cannot_do_is_refused(
    capabilities: Capabilities, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ps.testing.jax_loop(divide_once, capabilities=capabilities)
