"""Derivatives through a step: by its arguments, and by nothing that a loss closes over."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import purestep as ps
from tests.square_loss import GRAD_BACKENDS, squares, weigh_by_one

SGD = ps.optim.sgd(0.5)
ONES = {"x": torch.ones(1)}


def two_ones(_: Any) -> Tensor:
    """Weighs two tokens, whatever the microbatch."""
    return torch.ones(2)


def products(w: Tensor, m: Any) -> Tensor:
    return w * m["x"]


# Derivatives by arguments


def test_an_outer_derivative_by_the_data() -> None:
    """A microbatch may require grad, the second one alone too: dataset distillation, say."""
    w = torch.tensor([3.0])
    x = torch.tensor([2.0], requires_grad=True)
    group = [{"x": torch.tensor([1.0])}, {"x": x.clone()}]

    grads, *_ = ps.accumulate(squares, w, group, weight_fn=weigh_by_one)
    grads.sum().backward()

    assert x.grad == 2 * 3 * 2 * 2


@pytest.mark.parametrize(
    "settings", [*GRAD_BACKENDS, {**GRAD_BACKENDS[1], "compile": True}]
)
def test_forward_mode_reaches_through(settings: dict[str, Any]) -> None:
    """Dual numbers without functorch: the parameters' tangents are not lost."""
    optimizer = ps.optim.master_weights(SGD)
    step = ps.make_update_step(squares, optimizer, weight_fn=weigh_by_one, **settings)
    group = [{"x": torch.tensor([2.0])}]

    with forward_ad.dual_level():
        w = forward_ad.make_dual(torch.tensor([3.0]), torch.tensor([1.0]))
        new, _, _ = step(w, optimizer.init(w), group)
        tangent = forward_ad.unpack_dual(new).tangent

    assert tangent == 1 - 0.5 * 2 * 4


def test_mappings_are_seen_into_by_derivatives() -> None:
    """Those that optree takes for leaves, too, as a tokenizer's BatchEncoding."""
    w = torch.ones(1)
    x = torch.tensor([2.0], requires_grad=True)

    def scaled_squares(w: Tensor, m: Any) -> Tensor:
        return w * m["x"].square()

    step = ps.make_update_step(scaled_squares, SGD, weight_fn=weigh_by_one)
    group = [UserDict(ONES), UserDict(x=x.clone())]
    new, *_ = step(w, SGD.init(w), group)
    new.backward()

    assert x.grad == -0.5 * 2 * 2 / 2


def test_mappings_are_seen_into_by_donation() -> None:
    w = torch.ones(1)
    step = ps.make_update_step(products, SGD, weight_fn=weigh_by_one, donate=True)
    group = [UserDict(ONES), UserDict(x=w)]
    message = r"but microbatches\[1\]\['x'\] shares its memory"
    with pytest.raises(ValueError, match=message):
        step(w, SGD.init(w), group)


def test_a_rate_that_requires_grad_is_refused_over_ranks() -> None:
    """Each rank would differentiate its own part alone."""
    axis = ps.testing.ThreadAxis(2)
    optimizer = ps.optim.sgd(torch.tensor(0.5, requires_grad=True))
    step = ps.make_update_step(products, optimizer, weight_fn=weigh_by_one, axis=axis)
    w = torch.ones(())
    state = optimizer.init(w)
    group = [{"x": torch.ones(2)}]

    message = r"differentiate through the step with ps\.VmapAxis"
    with pytest.raises(ValueError, match=message):
        axis.map(step)([w] * 2, [state] * 2, [group] * 2)


# Closures


@pytest.mark.parametrize("settings", GRAD_BACKENDS, ids=["own", "torch.func"])
def test_a_closure_is_a_constant(settings: dict[str, Any]) -> None:
    """On one rank and on several; its ``.grad`` is not written, and aux is detached."""
    teacher = torch.nn.Parameter(torch.tensor([3.0]))
    w = torch.ones(1)
    state = SGD.init(w)
    axis = ps.testing.ThreadAxis(2)

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> ps.LossOutput:
        losses = (w * m["x"] - teacher).square()
        return ps.LossOutput(losses, aux=losses.sum())

    def make_step(axis: Any) -> Any:
        return ps.make_update_step(
            loss_fn, SGD, weight_fn=weigh_by_one, axis=axis, **settings
        )

    step_alone = make_step(ps.LocalAxis())
    alone = step_alone(w, state, [ONES, ONES])
    step_on_ranks = axis.map(make_step(axis))
    on_ranks = step_on_ranks([w] * 2, [state] * 2, [[ONES]] * 2)

    for new, _, metrics in (alone, *on_ranks):
        assert new == 3
        assert not new.requires_grad
        assert not metrics.aux.requires_grad
    assert teacher.grad is None


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_closure_is_a_constant_under_vmap(requires_grad: bool) -> None:
    teacher = torch.nn.Parameter(torch.tensor(3.0))
    axis = ps.VmapAxis(2)
    w = torch.ones(()).requires_grad_(requires_grad)
    state = SGD.init(torch.ones(()))

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        return (w * x - teacher) ** 2

    step = ps.make_update_step(loss_fn, SGD, weight_fn=torch.ones_like, axis=axis)
    on_ranks = axis.map(step, in_dims=(None, None, 0), out_dims=None)
    new, *_ = on_ranks(w, state, [torch.ones(2, 1)])

    assert new == 3
    assert new.requires_grad is requires_grad


def test_a_closure_that_a_transform_differentiates_by_is_no_constant() -> None:
    w = torch.ones(())

    def step_towards(target: Tensor) -> Tensor:
        def loss_fn(w: Tensor, x: Tensor) -> Tensor:
            return (w * x - target) ** 2

        step = ps.make_update_step(loss_fn, SGD, weight_fn=torch.ones_like)
        new, *_ = step(w, SGD.init(w), [torch.ones(1)])
        return new

    slope = torch.func.grad(step_towards)(torch.tensor(3.0))
    assert slope == 1


# Data that requires grad


@dataclass
class Points:
    """Holds collocation points, in a class that optree takes for a leaf."""

    x: Tensor
    more: list[Tensor]


def derivative_squared(w: Tensor, m: Any) -> Tensor:
    """Differentiates by its points, as networks for physics do."""
    x = m.x if isinstance(m, Points) else m["x"]
    total = (w * x**2).sum()
    (slope,) = torch.autograd.grad(total, x, create_graph=True)
    return slope.square()


@pytest.mark.parametrize(
    "make_microbatch",
    [
        lambda x: {"x": x},
        lambda x: UserDict(x=x),
        lambda x: Points(x, [x]),
    ],
    ids=["dict", "UserDict", "dataclass"],
)
def test_points_that_require_grad_are_the_callers(make_microbatch: Any) -> None:
    """Made once before training, as every tutorial does. No graph grows, and ``.grad`` stays None."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    group = [make_microbatch(x)]
    step = ps.make_update_step(derivative_squared, SGD, weight_fn=two_ones)
    w = torch.tensor(0.01)
    state = SGD.init(w)

    for _ in range(3):
        before = w
        w, state, metrics = step(w, state, group)
        # L = mean (2 w x)², so its derivative is mean 8 w x².
        torch.testing.assert_close(w, before - 0.5 * 8 * before * 2.5)
        assert not w.requires_grad
        assert not metrics.loss.requires_grad
    assert x.grad is None
    assert x.requires_grad


def test_a_loss_that_marks_its_data_does_not_mark_the_callers_dataclass() -> None:
    points = Points(torch.ones(2), [torch.ones(1)])
    w = torch.tensor(0.1)

    def loss_fn(w: Tensor, m: Points) -> Tensor:
        m.x.requires_grad_()
        m.more[0].requires_grad_()
        return derivative_squared(w, m)

    step = ps.make_update_step(loss_fn, SGD, weight_fn=two_ones)
    step(w, SGD.init(w), [points])

    assert not points.x.requires_grad
    assert not points.more[0].requires_grad


def test_a_graph_inside_of_a_dataclass_is_recorded() -> None:
    x = torch.ones(2, requires_grad=True)
    w = torch.tensor(0.1)

    def loss_fn(w: Tensor, m: Points) -> Tensor:
        return w * m.x

    points = Points(2 * x, more=[])
    step = ps.make_update_step(loss_fn, SGD, weight_fn=two_ones)
    new, *_ = step(w, SGD.init(w), [points])
    new.backward()

    torch.testing.assert_close(x.grad, torch.full((2,), -0.5))


# Hypergradients


def cubes(w: Tensor, x: Tensor) -> Tensor:
    return (w * x) ** 3


def loss_after_a_step(rate: Tensor, read: str) -> Tensor:
    """Takes a step on 1 with this learning rate; returns the loss on 1 and 3."""
    w = torch.tensor(2.0)
    one = torch.tensor([1.0])
    three = torch.tensor([3.0])
    optimizer = ps.optim.sgd(rate)
    step = ps.make_update_step(cubes, optimizer, weight_fn=torch.ones_like)
    evaluate = ps.make_eval_step(cubes, weight_fn=torch.ones_like)

    new, state, _ = step(w, optimizer.init(w), [one])

    if read == "evaluation":
        return evaluate(new, [one, three]).loss
    _, _, metrics = step(new, state, [one, three])
    return metrics.loss


@pytest.mark.parametrize("read", ["evaluation", "metrics"])
def test_a_loss_keeps_its_derivative_under_a_transform(read: str) -> None:
    """A hypergradient was 0, without a word. Autograd alone says aloud that nothing is recorded."""

    def objective(rate: Tensor) -> Tensor:
        return loss_after_a_step(rate, read)

    rate = torch.tensor(0.1)
    slope = torch.func.grad(objective)(rate)

    # d/dr mean (θ x)³ = 3 θ² mean(x³) · dθ/dr, with dθ/dr = -12 and mean(x³) = 14.
    new = 2 - 0.1 * 12
    torch.testing.assert_close(slope, torch.tensor(3 * new**2 * 14 * -12))
    assert not objective(rate.clone().requires_grad_()).requires_grad
