"""Derivatives through a step: by its arguments, and by nothing that a loss closes over."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from tests.squares import WAYS, squares, x_ones

SGD = ps.optim.sgd(0.5)
ONES = {"x": torch.ones(1)}


def test_an_outer_derivative_by_the_data() -> None:
    """A microbatch may require grad, the second one alone too: dataset distillation, say."""
    x = torch.tensor([2.0], requires_grad=True)
    group = [{"x": torch.tensor([1.0])}, {"x": x.clone()}]
    ps.accumulate(squares, torch.tensor([3.0]), group, weight_fn=x_ones)[
        0
    ].sum().backward()
    assert x.grad == 2 * 3 * 2 * 2


@pytest.mark.parametrize("how", [*WAYS, {**WAYS[1], "compile": True}])
def test_forward_mode_reaches_through(how: dict[str, Any]) -> None:
    """Dual numbers without functorch: the parameters' tangents are not lost."""
    optimizer = ps.optim.master_weights(SGD)
    step = ps.make_update_step(squares, optimizer, weight_fn=x_ones, **how)
    with torch.autograd.forward_ad.dual_level():
        w = torch.autograd.forward_ad.make_dual(
            torch.tensor([3.0]), torch.tensor([1.0])
        )
        new, _, _ = step(w, optimizer.init(w), [{"x": torch.tensor([2.0])}])
        assert torch.autograd.forward_ad.unpack_dual(new).tangent == 1 - 0.5 * 2 * 4


@pytest.mark.parametrize("how", WAYS, ids=["own", "torch.func"])
def test_a_closure_is_a_constant(how: dict[str, Any]) -> None:
    """On one rank and on several; its ``.grad`` is not written, and aux is detached."""
    teacher = torch.nn.Parameter(torch.tensor([3.0]))
    w, axis = torch.ones(1), ps.testing.ThreadAxis(2)

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> ps.LossOutput:
        losses = (w * m["x"] - teacher).square()
        return ps.LossOutput(losses, aux=losses.sum())

    alone = ps.make_update_step(loss_fn, SGD, weight_fn=x_ones, **how)
    ranks = axis.map(
        ps.make_update_step(loss_fn, SGD, weight_fn=x_ones, axis=axis, **how)
    )
    one = alone(w, SGD.init(w), [ONES] * 2)
    two = ranks([w] * 2, [SGD.init(w)] * 2, [[ONES], [ONES]])
    for new, _, metrics in (one, *two):
        assert new == 3
        assert not new.requires_grad
        assert not metrics.aux.requires_grad
    assert teacher.grad is None


def test_a_closure_is_a_constant_under_vmap() -> None:
    """Not so a tensor that a transform differentiates by."""
    teacher = torch.nn.Parameter(torch.tensor(3.0))
    w, axis = torch.ones(()), ps.VmapAxis(2)
    how: Any = {"weight_fn": torch.ones_like}
    step = ps.make_update_step(
        lambda w, x: (w * x - teacher) ** 2, SGD, axis=axis, **how
    )
    for recorded in (False, True):
        own = w.clone().requires_grad_(recorded)
        new, _, _ = axis.map(step, (None, None, 0), None)(
            own, SGD.init(w), [torch.ones(2, 1)]
        )
        assert new == 3
        assert new.requires_grad is recorded

    def moved(target: Tensor) -> Tensor:
        by = ps.make_update_step(lambda w, x: (w * x - target) ** 2, SGD, **how)
        return by(w, SGD.init(w), [torch.ones(1)])[0]

    assert torch.func.grad(moved)(torch.tensor(3.0)) == 1


def test_mappings_are_seen_into() -> None:
    """By derivatives, and by donation: those that optree takes for leaves, as a tokenizer's BatchEncoding."""
    w, x = torch.ones(1), torch.tensor([2.0], requires_grad=True)
    step = ps.make_update_step(lambda w, m: w * m["x"].square(), SGD, weight_fn=x_ones)
    step(w, SGD.init(w), [UserDict(ONES), UserDict(x=x.clone())])[0].backward()
    assert x.grad == -0.5 * 2 * 2 / 2
    donating = ps.make_update_step(
        lambda w, m: w * m["x"], SGD, weight_fn=x_ones, donate=True
    )
    with pytest.raises(
        ValueError, match=r"but microbatches\[1\]\['x'\] shares its memory"
    ):
        donating(w, SGD.init(w), [UserDict(ONES), UserDict(x=w)])


def test_a_rate_that_requires_grad_is_refused_over_ranks() -> None:
    """Each rank would differentiate its own part alone."""
    axis, optimizer = (
        ps.testing.ThreadAxis(2),
        ps.optim.sgd(torch.tensor(0.5, requires_grad=True)),
    )
    step = ps.make_update_step(
        lambda w, x: w * x, optimizer, weight_fn=torch.ones_like, axis=axis
    )
    w = torch.ones(())
    with pytest.raises(
        ValueError, match=r"differentiate through the step with ps\.VmapAxis"
    ):
        axis.map(step)([w] * 2, [optimizer.init(w)] * 2, [[torch.ones(2)]] * 2)


@dataclass
class Points:
    """Collocation points, in a class that optree takes for a leaf."""

    x: Tensor
    more: list[Tensor]


def derivative_squared(w: Tensor, m: Any) -> Tensor:
    """Differentiates by its points, as networks for physics do."""
    x = m.x if isinstance(m, Points) else m["x"]
    (slope,) = torch.autograd.grad((w * x**2).sum(), x, create_graph=True)
    return slope.square()


@pytest.mark.parametrize("holder", [dict, UserDict, lambda x: Points(x, [x])])
def test_points_that_require_grad_are_the_callers(holder: Any) -> None:
    """Made once before training, as every tutorial does. No graph grows, and ``.grad`` stays None."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    group = [Points(x, [x]) if holder not in (dict, UserDict) else holder(x=x)]
    step = ps.make_update_step(
        derivative_squared, SGD, weight_fn=lambda m: torch.ones(2)
    )
    w, state = torch.tensor(0.01), SGD.init(torch.tensor(0.01))
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
    data = Points(torch.ones(2), [torch.ones(1)])

    def loss_fn(w: Tensor, m: Points) -> Tensor:
        m.x.requires_grad_()
        m.more[0].requires_grad_()
        return derivative_squared(w, m)

    step = ps.make_update_step(loss_fn, SGD, weight_fn=lambda m: torch.ones(2))
    step(torch.tensor(0.1), SGD.init(torch.tensor(0.1)), [data])
    assert not data.x.requires_grad
    assert not data.more[0].requires_grad


def test_a_graph_inside_of_a_dataclass_is_recorded() -> None:
    x = torch.ones(2, requires_grad=True)
    step = ps.make_update_step(
        lambda w, m: w * m.x, SGD, weight_fn=lambda m: torch.ones(2)
    )
    w = torch.tensor(0.1)
    step(w, SGD.init(w), [Points(2 * x, [])])[0].backward()
    torch.testing.assert_close(x.grad, torch.full((2,), -0.5))


@pytest.mark.parametrize("read", ["evaluation", "metrics"])
def test_a_loss_keeps_its_derivative_under_a_transform(read: str) -> None:
    """A hypergradient was 0, without a word. Autograd alone says aloud that nothing is recorded."""

    def cubes(w: Tensor, x: Tensor) -> Tensor:
        return (w * x) ** 3

    evaluate = ps.make_eval_step(cubes, weight_fn=torch.ones_like)
    w, x = torch.tensor(2.0), torch.tensor([1.0, 3.0])

    def objective(rate: Tensor) -> Tensor:
        optimizer = ps.optim.sgd(rate)
        step = ps.make_update_step(cubes, optimizer, weight_fn=torch.ones_like)
        new, state, _ = step(w, optimizer.init(w), [x[:1]])
        if read == "evaluation":
            return evaluate(new, [x[:1], x[1:]]).loss
        return step(new, state, [x[:1], x[1:]])[2].loss

    rate = torch.tensor(0.1)
    new = 2 - 0.1 * 12
    # d/dr mean (θ x)³ = 3 θ² mean(x³) · dθ/dr, with dθ/dr = -12 and mean(x³) = 14.
    torch.testing.assert_close(
        torch.func.grad(objective)(rate), torch.tensor(3 * new**2 * 14 * -12)
    )
    assert not objective(rate.clone().requires_grad_()).requires_grad
