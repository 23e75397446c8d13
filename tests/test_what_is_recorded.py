"""Derivatives through a step: by its arguments, and by nothing that a loss closes over."""

from collections import UserDict
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
    ps.accumulate(squares, torch.tensor([3.0]), group, weight_fn=x_ones)[0].sum().backward()
    assert x.grad == 2 * 3 * 2 * 2


@pytest.mark.parametrize("how", [*WAYS, {**WAYS[1], "compile": True}])
def test_forward_mode_reaches_through(how: dict[str, Any]) -> None:
    """Dual numbers without functorch: the parameters' tangents are not lost."""
    optimizer = ps.optim.master_weights(SGD)
    step = ps.make_update_step(squares, optimizer, weight_fn=x_ones, **how)
    with torch.autograd.forward_ad.dual_level():
        w = torch.autograd.forward_ad.make_dual(torch.tensor([3.0]), torch.tensor([1.0]))
        new, _, _ = step(w, optimizer.init(w), [{"x": torch.tensor([2.0])}])
        assert torch.autograd.forward_ad.unpack_dual(new).tangent == 1 - 0.5 * 2 * 4


@pytest.mark.parametrize("how", WAYS, ids=["own", "torch.func"])
def test_a_closure_is_a_constant(how: dict[str, Any]) -> None:
    """On one rank and on several; its ``.grad`` is not written, and aux is detached."""
    teacher = torch.nn.Parameter(torch.tensor([3.0]))
    w, axis = torch.ones(1), ps.testing.ThreadAxis(2)

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> ps.LossTerms:
        losses = (w * m["x"] - teacher).square()
        return ps.LossTerms(losses, aux=losses.sum())

    alone = ps.make_update_step(loss_fn, SGD, weight_fn=x_ones, **how)
    ranks = axis.map(ps.make_update_step(loss_fn, SGD, weight_fn=x_ones, axis=axis, **how))
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
    step = ps.make_update_step(lambda w, x: (w * x - teacher) ** 2, SGD, axis=axis, **how)
    for recorded in (False, True):
        own = w.clone().requires_grad_(recorded)
        new, _, _ = axis.map(step, (None, None, 0), None)(own, SGD.init(w), [torch.ones(2, 1)])
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
    donating = ps.make_update_step(lambda w, m: w * m["x"], SGD, weight_fn=x_ones, donate=True)
    with pytest.raises(ValueError, match=r"but microbatches\[1\]\['x'\] shares its memory"):
        donating(w, SGD.init(w), [UserDict(ONES), UserDict(x=w)])


def test_a_rate_that_requires_grad_is_refused_over_ranks() -> None:
    """Each rank would differentiate its own part alone."""
    axis, optimizer = ps.testing.ThreadAxis(2), ps.optim.sgd(torch.tensor(0.5, requires_grad=True))
    step = ps.make_update_step(lambda w, x: w * x, optimizer, weight_fn=torch.ones_like, axis=axis)
    w = torch.ones(())
    with pytest.raises(ValueError, match=r"differentiate through the step with ps\.VmapAxis"):
        axis.map(step)([w] * 2, [optimizer.init(w)] * 2, [[torch.ones(2)]] * 2)
