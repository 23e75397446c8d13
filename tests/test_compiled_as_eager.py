"""Tests that a compiled step does what the eager one does: in its first update, with any data."""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.torch_private import TRACES_AUTOGRAD
from support.strategies import assert_same

# Dynamo looks at ``.grad`` of data that were computed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)

SGD = ps.optim.sgd(0.1)
EAGER: Any = partial(torch.compile, backend="eager")
PARAMS = {"a": torch.tensor([1.0, 2.0, 3.0])}


def weigh_rows(m: Any) -> Tensor:
    return torch.ones(2)


def make_step(loss_fn: Any, **settings: Any) -> Any:
    return ps.make_update_step(loss_fn, SGD, weight_fn=weigh_rows, **settings)


def compile_step(step: Any, **settings: Any) -> Any:
    return ps.compile(step, backend="eager", **settings)


def squares(params: Any, m: Any) -> Tensor:
    return (m["x"] @ params["a"] - 1).square()


def make_group(num_microbatches: int = 2, **more: Any) -> list[dict[str, Any]]:
    rows = torch.arange(6.0).reshape(2, 3)
    return [{"x": rows + i, **more} for i in range(num_microbatches)]


# Losses that write to their microbatch


def halve_in_place(params: Any, m: Any) -> Tensor:
    m["x"].mul_(0.5)
    return squares(params, m)


def rebind(params: Any, m: Any) -> Tensor:
    m["x"] = m["x"] / 2
    return squares(params, m)


def pop(params: Any, m: Any) -> Tensor:
    return squares(params, {"x": m.pop("x")})


def pop_from_list(params: Any, m: Any) -> Tensor:
    return squares(params, {"x": m["more"].pop()})


@pytest.mark.parametrize("loss_fn", [halve_in_place, rebind, pop, pop_from_list])
@pytest.mark.parametrize("make", [partial(make_step, compile=EAGER), compile_step])
def test_a_loss_writes_to_its_microbatch_once(loss_fn: Any, make: Any) -> None:
    """The first update of ``compile=True`` also runs the loss eagerly, on a copy."""
    eager = make_step(loss_fn)
    compiled = make(loss_fn if make is not compile_step else eager)
    if loss_fn is halve_in_place and make is compile_step and not TRACES_AUTOGRAD:
        with pytest.raises(RuntimeError, match="mutat"):
            compiled(PARAMS, SGD.init(PARAMS), make_group())
        return

    for _ in range(2):
        groups = [make_group(more=[torch.ones(2, 3)]) for _ in range(2)]
        expected = eager(PARAMS, SGD.init(PARAMS), groups[0])
        actual = compiled(PARAMS, SGD.init(PARAMS), groups[1])
        assert_same(actual, expected)
        assert_same(groups[1], groups[0])


# Derivatives


@pytest.mark.parametrize("stack", [list, ps.stack])
def test_a_derivative_by_data_through_a_whole_compiled_step(
    stack: Callable[..., Any],
) -> None:
    """Params require no grad; the data are computed from what is learned."""

    def loss_after(step: Any, x: Tensor) -> Tensor:
        group = stack([{"x": x.tanh()}, {"x": x.sin()}])
        params, *_ = step(PARAMS, SGD.init(PARAMS), group)
        return squares(params, {"x": torch.ones(2, 3)}).sum() + x.square().sum()

    eager = make_step(squares)
    for step in (eager, compile_step(eager, fullgraph=True)):
        x = make_group()[0]["x"].requires_grad_()
        (actual,) = torch.autograd.grad(loss_after(step, x), x)
        if step is eager:
            expected = actual
    torch.testing.assert_close(actual, expected)


def vmap_twice(function: Any) -> Any:
    """Makes an ensemble of two: ``vmap(function)`` of values and their doubles."""

    def run(a: Tensor) -> Any:
        return torch.vmap(function)(torch.stack([a, 2 * a]))

    return run


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.hessian, vmap_twice])
def test_a_transform_around_a_compiled_step_is_that_of_the_eager_one(
    transform: Any,
) -> None:
    def norm_after(step: Any, a: Tensor) -> Tensor:
        params = {"a": a}
        params, *_ = step(params, SGD.init(params), make_group())
        return params["a"].square().sum()

    eager = make_step(squares)
    compiled = ps.compile(eager, backend="aot_eager", fullgraph=True)
    expected = transform(partial(norm_after, eager))(PARAMS["a"])
    assert_same(transform(partial(norm_after, compiled))(PARAMS["a"]), expected)


# Graph breaks


def branch_on_value(params: Any, m: Any) -> Tensor:
    factor = 2.0 if m["x"].sum().item() > 1 else 1.0
    return factor * squares(params, m)


def print_shape(params: Any, m: Any) -> Tensor:
    losses = squares(params, m)
    print(losses.shape)
    return 2 * losses


@pytest.mark.parametrize("loss_fn", [branch_on_value, print_shape])
@pytest.mark.parametrize("compile_", [compile_step, EAGER])
def test_a_graph_break_in_a_loss_is_an_error(loss_fn: Any, compile_: Any) -> None:
    """Graphs of its pieces would lose the gradient, silently (torch 2.15)."""
    torch.compiler.reset()  # torch runs a function eagerly that has failed too often.
    step = compile_(make_step(loss_fn))
    with pytest.raises(RuntimeError, match=r"Unsupported|Failed to trace|print|item"):
        step(PARAMS, SGD.init(PARAMS), make_group())


# Kinds of arguments


NUMBERS: list[Any] = [int, float]
if TRACES_AUTOGRAD:  # torch 2.11 takes no number of NumPy's within a function mode.
    NUMBERS += [np.float32]


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_number_in_a_microbatch_may_vary(kind: Any) -> None:
    def scaled(params: Any, m: Any) -> Tensor:
        return m["scale"] * squares(params, m)

    eager = make_step(scaled)
    compiled = compile_step(eager, fullgraph=True)
    for scale in range(3):
        group = make_group(scale=kind(scale))
        arguments = PARAMS, SGD.init(PARAMS), group
        assert_same(compiled(*arguments), eager(*arguments))


@dataclass
class Rows:
    """Is no container that optree knows."""

    x: Tensor

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class Batch(dict[str, Any]):
    """Stands for the dict of a library."""


@pytest.mark.parametrize("kind", [Rows, UserDict, Batch])
def test_microbatches_of_any_class_are_compiled(kind: Any) -> None:
    eager = make_step(squares)
    compiled = compile_step(eager, fullgraph=True)
    group = [kind(**microbatch) for microbatch in make_group()]
    arguments = PARAMS, SGD.init(PARAMS), group
    assert_same(compiled(*arguments), eager(*arguments))


def test_a_prefetched_group_is_compiled_as_a_list() -> None:
    eager = make_step(squares)
    compiled = compile_step(eager, fullgraph=True)
    source = [make_group(), make_group(3)]
    groups = ps.prefetch(source, "cpu", weight_fn=weigh_rows)
    for group, expected_group in zip(groups, source, strict=True):
        actual = compiled(PARAMS, SGD.init(PARAMS), group)
        assert_same(actual, eager(PARAMS, SGD.init(PARAMS), expected_group))


def test_parameters_are_refused_in_words_of_the_step() -> None:
    params = tree.map(torch.nn.Parameter, PARAMS)
    step = compile_step(make_step(squares))
    with pytest.raises(TypeError, match=r"leaf 0 of params requires grad"):
        step(params, SGD.init(params), make_group())
