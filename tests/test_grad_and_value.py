"""``grad_and_value``: gradients of scalars, by any argument, of any tree."""

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree


def test_only_scalars_have_gradients() -> None:
    with pytest.raises(ValueError, match=r"with has_aux=False it returned shape \(3,\)"):
        ps.grad_and_value(lambda x: x)(torch.ones(3))
    with pytest.raises(ValueError, match="with has_aux=False it returned tuple"):
        ps.grad_and_value(lambda x: (x.sum(), x))(torch.ones(3))
    with pytest.raises(ValueError, match=r"with has_aux=True it returned shape \(\)"):
        ps.grad_and_value(lambda x: x.sum(), has_aux=True)(torch.ones(3))


def test_argnums() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x * y * y).sum()

    x, y = torch.tensor(2.0), torch.tensor(3.0)
    assert ps.grad_and_value(f, argnums=-1)(x, y)[0] == 12
    assert ps.grad_and_value(f, argnums=(1, 0))(x, y)[0] == (12, 9)
    with pytest.raises(ValueError, match="argnums=2 needs more than the 2 arguments"):
        ps.grad_and_value(f, argnums=2)(x, y)


def test_registered_classes_and_none() -> None:
    dataclass: Any = optree.dataclasses.dataclass

    @dataclass(namespace=tree.NAMESPACE)
    class Affine:
        weight: Tensor
        bias: Tensor | None = None

    grads, value = ps.grad_and_value(lambda p: (p.weight**2).sum())(Affine(torch.tensor([3.0])))
    assert value == 9
    assert torch.equal(grads.weight, torch.tensor([6.0]))
    assert grads.bias is None
