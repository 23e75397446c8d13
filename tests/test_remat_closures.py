"""``remat`` of functions that close over what is differentiated, write to arguments or return views of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

import purestep as ps
from proofs.strategies import assert_same
from purestep import tree
from tests.blocks import Function, W, X, both, pulled


def closing(remat: Any, w: Tensor) -> Tensor:
    """Closes over a parameter, as users write it."""
    total: Tensor = remat(lambda x: x * w)(X[:, 0]).sum()
    return total


def closing_beside(remat: Any, w: Tensor) -> Tensor:
    """What it is given is differentiated, too."""
    total: Tensor = remat(lambda x: x * w)(2 * w).sum()
    return total


class Holding(torch.nn.Module):
    """Computes a part of it again."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor, remat: Any) -> Any:
        return remat(self.part)(x)


_, HOLDING = ps.from_module(Holding())


def closing_in_module(remat: Any, w: Tensor) -> Tensor:
    """A module holds it."""
    params = {"part.weight": torch.ones(4, 4).double(), "part.bias": w}
    total: Tensor = HOLDING(params, X[:, 0], remat).sum()
    return total


def returning(remat: Any, w: Tensor) -> Tensor:
    """It is returned as it is."""
    total: Tensor = remat(lambda x: (x, w))(X[:, 0])[1].sum()
    return total


LOSSES = pytest.mark.parametrize("loss", [closing, closing_beside, closing_in_module, returning])


@LOSSES
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: grad(f)(W),
        lambda f: pulled(f, W),
        lambda f: vmap(grad(f))(torch.stack([W, W])),
        lambda f: grad(lambda w: vmap(f)(w).sum())(torch.stack([W, W])),
        lambda f: vmap(lambda x, w: f(w) + x, (0, None))(W, W.clone().requires_grad_()),
    ],
)
def test_what_is_closed_over_is_no_constant_unseen(transform: Any, loss: Function) -> None:
    """Its gradient would be zero without a word: it is refused before anything is differentiated."""
    with pytest.raises(ValueError, match=r"closes over.*ps\.remat\(block\)\(params, x\)"):
        transform(lambda w: loss(ps.remat, w))


@LOSSES
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: ps.grad_and_value(f)(W),
        lambda f: jvp(f, (W,), (W,)),
        lambda f: torch.autograd.grad(f(own := W.clone().requires_grad_()), own),
    ],
)
def test_outside_of_transforms_it_is_differentiated(transform: Any, loss: Function) -> None:
    """And for derivatives in forward mode."""
    expected = transform(lambda w: loss(lambda fn: fn, w))
    assert_same(transform(lambda w: loss(ps.remat, w)), expected)


def test_what_only_a_derivative_within_sees_is_closed_over_too() -> None:
    with pytest.raises(ValueError, match="closes over"):
        grad(lambda w: ps.remat(lambda x: grad(lambda y: (y * y * w).sum())(x))(2 * w).sum())(W)


def test_what_the_function_itself_differentiates() -> None:
    """It may make what requires grad, and close over constants."""

    def by_engine(x: Tensor) -> Tensor:
        y = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad((y**3).sum(), y, create_graph=True)
        return slope * x * W

    def by_transform(x: Tensor) -> Tensor:
        return grad(lambda y: (y**3).sum())(x) * x * W

    both(lambda f: ps.grad_and_value(lambda w: f(w).sum())(W), by_engine)
    with pytest.raises(ValueError, match=r"by_transform, under ps\.remat, calls torch\.func\.grad"):
        ps.grad_and_value(lambda w: ps.remat(by_transform)(w).sum())(W)
    both(lambda f: grad(lambda w: f(w).sum())(W), by_transform)
    both(lambda f: vmap(grad(lambda w: f(w).sum()))(torch.stack([W, -W])), by_transform)


def doubling(p: dict[str, Tensor]) -> Tensor:
    """Writes to its argument."""
    return p["x"].mul_(2) ** 3


def cubed(p: dict[str, Tensor]) -> Tensor:
    """Needs its argument in the backward pass."""
    return p["x"] ** 3


def written(w: Tensor) -> Tensor:
    """The argument is written to before the backward pass."""
    x = 2 * w
    y = ps.remat(cubed)({"x": x})
    x.mul_(3)
    return y.sum()


@pytest.mark.parametrize("transform", [grad, ps.grad_and_value])
def test_arguments_that_are_written_to_are_refused(transform: Any) -> None:
    """In a tree, too."""
    message = r"doubling.* writes to one of its arguments|an inplace operation"
    with pytest.raises((ValueError, RuntimeError), match=message):
        transform(lambda w: ps.remat(doubling)({"x": w * 1}).sum())(W)
    with pytest.raises(RuntimeError, match="an inplace operation"):
        transform(written)(W)


VIEWS: dict[str, Function] = {
    "view": lambda h: h.view(-1),
    "transposed": lambda h: h.mT,
    "detached": lambda h: h.detach(),
    "part": lambda h: h[0],
    "another result": lambda h: (y := 2 * h, y[0]),
}


def use(of: Function, w: Tensor) -> Tensor:
    """What a function returns is written to, and so is its argument, if it is a view of it."""
    h = torch.stack([w, w + 1]) * 2
    y, *others = tree.leaves_of(of(h))
    y.mul_(3)
    return torch.stack([(each * each).sum() for each in (y, h, *others)]).sum()


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_a_view_or_refused(name: str) -> None:
    """Under a transform, a write to one would not reach the other."""
    both(lambda f: ps.grad_and_value(lambda w: use(f, w))(W), VIEWS[name])
    for transform in (grad(use, argnums=1), vmap(use, (None, 0))):
        with pytest.raises(ValueError, match="returns a view"):
            transform(ps.remat(VIEWS[name]), torch.stack([W, W]))


@pytest.mark.parametrize("transform", [ps.grad_and_value, grad, lambda f: vmap(grad(f))])
def test_an_argument_that_is_returned_is_the_argument(transform: Any) -> None:
    """Whether it is written to, and whether autograd has saved it."""

    def same(h: Tensor) -> Tensor:
        return h

    given = torch.stack([W, -W])
    both(lambda f: transform(lambda w: use(f, w))(given), same)
    both(lambda f: transform(lambda w: vmap(lambda w: use(f, w))(w).sum())(given), same)

    def saved(w: Tensor) -> Tensor:
        return ps.remat(same)(torch.tanh(w)).mul_(3).sum()

    with pytest.raises(RuntimeError, match="an inplace operation"):
        transform(saved)(given)
