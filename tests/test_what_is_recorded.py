"""Derivatives through ``accumulate``: by all that is an argument, and by nothing that a loss closes over."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from tests.squares import WAYS, squares, x_ones


def test_what_the_loss_closes_over_is_a_constant() -> None:
    """Right values, nothing recorded, and no ``.grad`` written; an argument of the step is differentiated."""
    temperature = torch.tensor(3.0, requires_grad=True)
    w, group = torch.tensor([2.0]), [{"x": torch.tensor([1.0])}, {"x": torch.tensor([2.0])}]

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> ps.LossTerms:
        losses = temperature * squares(w, m)
        return ps.LossTerms(losses, aux=losses.sum())

    grads, loss, _, aux = ps.accumulate(loss_fn, w, group, weight_fn=x_ones)
    assert grads == 2 * 3 * 2 * (1 + 4)
    assert loss == aux == 3 * 4 * (1 + 4)
    assert not any(value.requires_grad for value in (grads, loss, aux))
    assert temperature.grad is None
    given = [{**m, "temperature": temperature} for m in group]
    grads, *_ = ps.accumulate(
        lambda w, m: m["temperature"] * squares(w, m), w, given, weight_fn=x_ones
    )
    grads.sum().backward()
    assert temperature.grad == 2 * 2 * (1 + 4)


def test_an_outer_derivative_by_the_data() -> None:
    """A microbatch may require grad, the second one alone too: dataset distillation, say."""
    x = torch.tensor([2.0], requires_grad=True)
    group = [{"x": torch.tensor([1.0])}, {"x": x}]
    ps.accumulate(squares, torch.tensor([3.0]), group, weight_fn=x_ones)[0].sum().backward()
    assert x.grad == 2 * 3 * 2 * 2


def test_forward_mode_reaches_through() -> None:
    """Dual numbers without functorch: the parameters' tangents are not lost."""
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        w = forward_ad.make_dual(torch.tensor([3.0]), torch.tensor([1.0]))
        grads, *_ = ps.accumulate(squares, w, [{"x": torch.tensor([2.0])}], weight_fn=x_ones)
        assert forward_ad.unpack_dual(grads).tangent == 2 * 4


def test_gradients_are_taken_without_grad_mode() -> None:
    """As ``torch.func.grad``: what the caller's mode says is about the caller's graph."""
    with torch.no_grad():
        w, group = torch.tensor([3.0]), [{"x": torch.tensor([2.0])}]
        assert ps.accumulate(squares, w, group, weight_fn=x_ones)[0] == 2 * 3 * 4


@pytest.mark.parametrize("how", WAYS, ids=["own", "torch.func"])
def test_nothing_of_a_closure_is_recorded_by_any_reverse_mode(how: dict[str, Any]) -> None:
    """On one rank and on several; the graph does not grow from step to step."""
    teacher = torch.nn.Parameter(torch.tensor([3.0]))
    sgd, w, group = ps.optim.sgd(0.5), torch.ones(1), [{"x": torch.ones(1)}, {"x": torch.ones(1)}]

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> ps.LossTerms:
        losses = (w * m["x"] - teacher).square()
        return ps.LossTerms(losses, aux=losses.sum())

    axis = ps.testing.ThreadAxis(2)
    alone = ps.make_update_step(loss_fn, sgd, weight_fn=x_ones, **how)
    ranks = axis.map(ps.make_update_step(loss_fn, sgd, weight_fn=x_ones, axis=axis, **how))
    one = alone(w, sgd.init(w), group)
    two = ranks([w] * 2, [sgd.init(w)] * 2, [group[:1], group[1:]])
    for new, _, metrics in (one, *two):
        assert new == 3
        assert not new.requires_grad
        assert not metrics.aux.requires_grad
    assert teacher.grad is None


class Encoding(UserDict[str, Tensor]):
    """A mapping that optree takes for a leaf, as a tokenizer's BatchEncoding is."""


def test_mappings_are_seen_into() -> None:
    """By derivatives, and by donation."""
    sgd, w, x = ps.optim.sgd(0.5), torch.ones(1), torch.tensor([2.0], requires_grad=True)
    step = ps.make_update_step(lambda w, m: w * m["x"].square(), sgd, weight_fn=x_ones)
    step(w, sgd.init(w), [Encoding(x=torch.ones(1)), Encoding(x=x)])[0].backward()
    assert x.grad == -0.5 * 2 * 2 / 2
    donating = ps.make_update_step(lambda w, m: w * m["x"], sgd, weight_fn=x_ones, donate=True)
    with pytest.raises(ValueError, match=r"but microbatches\[1\]\['x'\] shares its memory"):
        donating(w, sgd.init(w), [Encoding(x=torch.ones(1)), Encoding(x=w)])


def test_nothing_of_a_closure_is_recorded_under_vmap() -> None:
    teacher = torch.nn.Parameter(torch.tensor(3.0))
    sgd, w = ps.optim.sgd(0.5), torch.ones(())
    axis = ps.VmapAxis(2)
    step = ps.make_update_step(
        lambda w, x: (w * x - teacher) ** 2, sgd, weight_fn=torch.ones_like, axis=axis
    )
    new, _, _ = axis.map(step, (None, None, 0), None)(w, sgd.init(w), [torch.ones(2, 1)])
    assert new == 3
    assert not new.requires_grad
    recorded = w.clone().requires_grad_()
    new, _, _ = axis.map(step, (None, None, 0), None)(recorded, sgd.init(w), [torch.ones(2, 1)])
    assert new.requires_grad

    def moved(target: Tensor) -> Tensor:
        by = ps.make_update_step(lambda w, x: (w * x - target) ** 2, sgd, weight_fn=torch.ones_like)
        return by(w, sgd.init(w), [torch.ones(1)])[0]

    assert torch.func.grad(moved)(torch.tensor(3.0)) == 1


def test_a_rate_that_requires_grad_is_refused_over_ranks() -> None:
    """Each rank would differentiate its own part alone."""
    axis, optimizer = ps.testing.ThreadAxis(2), ps.optim.sgd(torch.tensor(0.5, requires_grad=True))
    step = ps.make_update_step(lambda w, x: w * x, optimizer, weight_fn=torch.ones_like, axis=axis)
    w = torch.ones(())
    with pytest.raises(ValueError, match=r"differentiate through the step with ps\.VmapAxis"):
        axis.map(step)([w] * 2, [optimizer.init(w)] * 2, [[torch.ones(2)]] * 2)
