"""``grad_and_value``: gradients of scalars, by any argument, of any tree."""

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree

REFUSED: list[tuple[str, Any, dict[str, Any]]] = [
    (r"with has_aux=False it returned shape \(3,\)", lambda x: x, {}),
    ("with has_aux=False it returned tuple", lambda x: (x.sum(), x), {}),
    (r"with has_aux=True it returned shape \(\)", lambda x: x.sum(), {"has_aux": True}),
    ("argnums=1 needs more than the 1 arguments", lambda x: x.sum(), {"argnums": 1}),
]


@pytest.mark.parametrize(("message", "function", "settings"), REFUSED)
def test_refused(message: str, function: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        ps.grad_and_value(function, **settings)(torch.ones(3))


def test_argnums() -> None:
    x, y = torch.tensor(2.0), torch.tensor(3.0)
    assert ps.grad_and_value(lambda x, y: x * y * y, argnums=-1)(x, y)[0] == 12
    assert ps.grad_and_value(lambda x, y: x * y * y, argnums=(1, 0))(x, y)[0] == (12, 9)


def energy(w: Tensor, x: Tensor) -> Tensor:
    return (w * x).sin().sum() + (w * x).square().prod()


def test_in_a_function_that_is_differentiated() -> None:
    """As torch.func's: in a loss that matches forces, and in one of the same kind."""
    w, x = torch.rand(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    sgd, made = ps.optim.sgd(1.0), list[Tensor]()
    for grad in (ps.grad_and_value, torch.func.grad_and_value):

        def forces(w: Tensor, x: Tensor, grad: Any = grad) -> Tensor:
            found: Tensor = grad(lambda x: energy(w, x))(x)[0]
            return found**2

        step = ps.make_update_step(forces, sgd, weight_fn=torch.ones_like)
        made += [step(w, sgd.init(w), [x])[0], grad(lambda w: forces(w, x).sum())(w)[0]]
        with torch.no_grad():
            made.append(forces(w.clone().requires_grad_(), x))
    for ours, theirs in zip(made[:3], made[3:], strict=True):
        torch.testing.assert_close(ours, theirs)
        assert not ours.requires_grad


def test_registered_classes_and_none() -> None:
    dataclass: Any = optree.dataclasses.dataclass

    @dataclass(namespace=tree.NAMESPACE)
    class Affine:
        weight: Tensor
        bias: Tensor | None = None

    grads, value = ps.grad_and_value(lambda p: (p.weight**2).sum())(
        Affine(torch.tensor([3.0]))
    )
    assert (float(value), grads.weight.tolist(), grads.bias) == (9, [6], None)
