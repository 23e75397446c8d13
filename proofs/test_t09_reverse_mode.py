"""T9, reverse mode. ``ps.grad_and_value`` equals ``torch.func.grad_and_value``, bitwise.

A step may run on either: both are among the settings of the other theorems.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import purestep as ps
from support import models
from support.strategies import assert_same, builds
from support.texts import RealCase, make_real_case

Transform = Callable[..., Callable[..., Any]]
TRANSFORMS: tuple[Transform, ...] = (ps.grad_and_value, torch.func.grad_and_value)


def loss(params: Any, batch: Any) -> torch.Tensor:
    """Computes the transformer's summed loss."""
    return models.transformer_loss(params, batch).sum()


@given(builds(make_real_case))
def test_first_derivative(case: RealCase) -> None:
    """Value and gradients of a transformer, whose activations may be computed again."""
    inputs = case.params, case.batch
    expected = torch.func.grad_and_value(loss)(*inputs)

    assert_same(ps.grad_and_value(loss)(*inputs), expected)

    for transform in TRANSFORMS:
        assert_same(transform(ps.remat(loss))(*inputs), expected)
    with torch.inference_mode():
        if torch.__version__ < "2.12":
            # torch.func returns zeros there, and purestep refuses.
            refusal = r"derivatives of torch\.func for zero"
            with pytest.raises(ValueError, match=refusal):
                ps.grad_and_value(loss)(*inputs)
        else:
            assert_same(ps.grad_and_value(loss)(*inputs), expected)


@given(builds(make_real_case), st.booleans())
def test_aux(case: RealCase, both: bool) -> None:
    """Aux as a tree, and any positions; keywords go along."""

    def loss_with_aux(scale: Any, params: Any, *, batch: Any) -> Any:
        losses = models.transformer_loss(params, batch)
        return scale * losses.sum(), {"losses": losses, "labels": [batch["labels"]]}

    def differentiate(transform: Transform) -> Any:
        argnums = (0, 1) if both else 1
        grad_fn = transform(loss_with_aux, argnums=argnums, has_aux=True)
        return grad_fn(torch.tensor(0.3), case.params, batch=case.batch)

    expected = differentiate(torch.func.grad_and_value)
    assert_same(differentiate(ps.grad_and_value), expected)


OUTER: list[Any] = [
    lambda slope, x: torch.func.grad(slope)(x),
    lambda slope, x: torch.func.jvp(slope, (x,), (x,)),
    lambda slope, x: torch.func.vmap(slope)(torch.stack([x, x + 1])),
]


@given(builds(make_real_case, [torch.float64]), st.sampled_from(OUTER))
def test_higher_derivatives(case: RealCase, outer: Any) -> None:
    """Inside vmap, grad and jvp: the same bits."""

    def transform_twice(transform: Transform) -> Any:
        def slope(embedding: torch.Tensor) -> Any:
            params = {**case.params, "embedding": embedding}
            grads, value = transform(loss)(params, case.batch)
            squares = [leaf.square().sum() for leaf in grads["attention"].values()]
            return value + sum(squares)

        return outer(slope, case.params["embedding"])

    expected = transform_twice(torch.func.grad_and_value)
    assert_same(transform_twice(ps.grad_and_value), expected)
