"""``remat`` refuses a function that closes over what is differentiated, or that writes to its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

import purestep as ps
from tests.blocks import Function, W, X, both, pulled


def closing(w: Tensor) -> Tensor:
    """Closes over a parameter, as users write it."""
    return ps.remat(lambda x: x * w)(X[:, 0]).sum()


def closing_beside(w: Tensor) -> Tensor:
    """What it is given is differentiated, too."""
    return ps.remat(lambda x: x * w)(2 * w).sum()


class Holding(torch.nn.Module):
    """Computes a part of it again."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        return ps.remat(self.part)(x)


_, HOLDING = ps.from_module(Holding())


def closing_in_module(w: Tensor) -> Tensor:
    """A module holds it."""
    params = {"part.weight": torch.ones(4, 4).double(), "part.bias": w}
    total: Tensor = HOLDING(params, X[:, 0]).sum()
    return total


def returning(w: Tensor) -> Tensor:
    """It is returned as it is."""
    return ps.remat(lambda x: (x, w))(X[:, 0])[1].sum()


@pytest.mark.parametrize("loss", [closing, closing_beside, closing_in_module, returning])
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: ps.grad_and_value(f)(W),
        lambda f: grad(f)(W),
        lambda f: pulled(f, W),
        lambda f: jvp(f, (W,), (W,)),
        lambda f: vmap(grad(f))(torch.stack([W, W])),
        lambda f: grad(lambda w: vmap(f)(w).sum())(torch.stack([W, W])),
        lambda f: f(W.clone().requires_grad_()).backward(),
    ],
)
def test_what_is_closed_over_is_no_constant_unseen(transform: Any, loss: Function) -> None:
    """Its gradient would be zero without a word: it is refused before anything is differentiated."""
    with pytest.raises(ValueError, match=r"closes over.*ps\.remat\(block\)\(params, x\)"):
        transform(loss)


def test_what_only_a_derivative_within_sees_is_closed_over_too() -> None:
    with pytest.raises(ValueError, match="closes over"):
        grad(lambda w: ps.remat(lambda x: grad(lambda y: (y * y * w).sum())(x))(2 * w).sum())(W)


def test_what_the_function_itself_differentiates() -> None:
    """It may make what requires grad, and close over constants."""

    def by_engine(x: Tensor) -> Tensor:
        y = x.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad((y**3).sum(), y, create_graph=True)
        return slope * x * W

    def by_transform(x: Tensor) -> Tensor:
        return grad(lambda y: (y**3).sum())(x) * x * W

    both(lambda f: ps.grad_and_value(lambda w: f(w).sum())(W), by_engine)
    both(lambda f: ps.grad_and_value(lambda w: f(w).sum())(W), by_transform)
    both(lambda f: grad(lambda w: f(w).sum())(W), by_transform)


def test_what_writes_to_its_arguments_is_refused() -> None:
    def doubling(x: Tensor) -> Tensor:
        return x.mul_(2) * x

    with pytest.raises(ValueError, match="doubling wrote to one of its arguments in place"):
        ps.grad_and_value(lambda w: ps.remat(doubling)(w * 1).sum())(W)
