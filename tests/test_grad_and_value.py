"""Tests ``grad_and_value``: gradients of scalars, by any argument, of any tree."""

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree

REFUSED: list[dict[str, Any]] = [
    {
        "function": lambda x: x,
        "settings": {},
        "message": r"with has_aux=False it returned torch.float32 of shape \(3,\)",
    },
    {
        "function": lambda x: (x.sum(), x),
        "settings": {},
        "message": "with has_aux=False it returned tuple",
    },
    {
        "function": lambda x: x.sum(),
        "settings": {"has_aux": True},
        "message": r"with has_aux=True it returned torch.float32 of shape \(\)",
    },
    {
        "function": lambda x: x.sum(),
        "settings": {"argnums": 1},
        "message": "argnums=1 needs more than the 1 arguments",
    },
    {
        "function": lambda x: x.sum(),
        "settings": {"argnums": (0, -1)},
        "message": "must name each argument once",
    },
    {
        "function": lambda x: x.sum(),
        "settings": {"argnums": ()},
        "message": "must name each argument once, and one at least",
    },
    {
        "function": lambda x: x.sum() * 1j,
        "settings": {},
        "message": "a real scalar, .* it returned torch.complex64",
    },
]


@pytest.mark.parametrize("case", REFUSED)
def test_grad_and_value_refuses(case: dict[str, Any]) -> None:
    transformed = ps.grad_and_value(case["function"], **case["settings"])
    with pytest.raises(ValueError, match=case["message"]):
        transformed(torch.ones(3))


def test_argnums() -> None:
    x = torch.tensor(2.0)
    y = torch.tensor(3.0)

    def function(x: Tensor, y: Tensor) -> Tensor:
        return x * y * y

    last, _ = ps.grad_and_value(function, argnums=-1)(x, y)
    both, _ = ps.grad_and_value(function, argnums=(1, 0))(x, y)

    assert last == 12
    assert both == (12, 9)


def energy(w: Tensor, x: Tensor) -> Tensor:
    product = w * x
    return product.sin().sum() + product.square().prod()


def run_in_a_loss(grad_and_value: Any, w: Tensor, x: Tensor) -> list[Tensor]:
    """Runs it in the loss of a step, in a function that it differentiates, and alone."""
    sgd = ps.optim.sgd(1.0)

    def squared_forces(w: Tensor, x: Tensor) -> Tensor:
        forces: Tensor
        forces, _ = grad_and_value(lambda x: energy(w, x))(x)
        return forces**2

    step = ps.make_update_step(squared_forces, sgd, weight_fn=torch.ones_like)
    new_w, _, _ = step(w, sgd.init(w), [x])
    grads, _ = grad_and_value(lambda w: squared_forces(w, x).sum())(w)
    with torch.no_grad():
        without_grad = squared_forces(w.clone().requires_grad_(), x)
    return [new_w, grads, without_grad]


def test_in_a_function_that_is_differentiated() -> None:
    """As torch.func's does, for example in a loss that matches forces."""
    w = torch.rand(3, dtype=torch.float64)
    x = torch.rand(3, dtype=torch.float64)

    results = run_in_a_loss(ps.grad_and_value, w, x)

    expected = run_in_a_loss(torch.func.grad_and_value, w, x)
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert not ours.requires_grad


class Doubled(torch.autograd.Function):
    """Has a name on its ctx by which torch's leaves hold their tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.variable = "mine"
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad


def test_a_function_with_a_variable_is_no_leaf() -> None:
    apply: Any = Doubled.apply
    assert ps.grad_and_value(apply)(torch.tensor(3.0)) == (2, 6)


def test_registered_classes_and_none() -> None:
    dataclass: Any = optree.dataclasses.dataclass

    @dataclass(namespace=tree.NAMESPACE)
    class Affine:
        weight: Tensor
        bias: Tensor | None = None

    function: Any = ps.grad_and_value(lambda p: (p.weight**2).sum())
    grads, value = function(Affine(torch.tensor([3.0])))

    assert float(value) == 9
    assert grads.weight.tolist() == [6]
    assert grads.bias is None
