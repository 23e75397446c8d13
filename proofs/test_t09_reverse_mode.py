"""T9, reverse mode. ``ps.grad_and_value`` equals ``torch.func.grad_and_value``, bitwise.

A step may run on either: both are among the settings of the other theorems.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import purestep as ps
from proofs import models
from proofs.strategies import RealCase, assert_same, drawn, real_case

WAYS = (ps.grad_and_value, torch.func.grad_and_value)


def loss(params: Any, batch: Any) -> torch.Tensor:
    """The transformer's summed loss."""
    return models.transformer_loss(params, batch).sum()


@given(drawn(real_case))
def test_first_derivative(case: RealCase) -> None:
    """Value and gradients of a transformer, whose activations may be computed again."""
    expected = torch.func.grad_and_value(loss)(case.params, case.batch)
    assert_same(ps.grad_and_value(loss)(case.params, case.batch), expected)
    for transform in WAYS:
        assert_same(transform(ps.remat(loss))(case.params, case.batch), expected)
    if torch.__version__ < "2.12":
        zeros = pytest.raises(ValueError, match=r"derivatives of torch\.func for zero")
        with torch.inference_mode(), zeros:
            ps.grad_and_value(loss)(case.params, case.batch)
        return
    with torch.inference_mode():
        assert_same(ps.grad_and_value(loss)(case.params, case.batch), expected)


@given(drawn(real_case), st.booleans())
def test_aux(case: RealCase, both: bool) -> None:
    """Aux as a tree, and any positions; keywords go along."""

    def with_aux(scale: Any, params: Any, *, batch: Any) -> Any:
        losses = models.transformer_loss(params, batch)
        return scale * losses.sum(), {"losses": losses, "labels": [batch["labels"]]}

    argnums = (0, 1) if both else 1
    ours, theirs = (
        transform(with_aux, argnums=argnums, has_aux=True)(
            torch.tensor(0.3), case.params, batch=case.batch
        )
        for transform in WAYS
    )
    assert_same(ours, theirs)


OUTER: list[Any] = [
    lambda slope, x: torch.func.grad(slope)(x),
    lambda slope, x: torch.func.jvp(slope, (x,), (x,)),
    lambda slope, x: torch.func.vmap(slope)(torch.stack([x, x + 1])),
]


@given(drawn(real_case, [torch.float64]), st.sampled_from(OUTER))
def test_higher_derivatives(case: RealCase, outer: Any) -> None:
    """Inside vmap, grad and jvp: the same bits."""

    def by(transform: Any) -> Any:
        def slope(embedding: torch.Tensor) -> Any:
            params = {**case.params, "embedding": embedding}
            grads, value = transform(loss)(params, case.batch)
            return value + sum(
                leaf.square().sum() for leaf in grads["attention"].values()
            )

        return outer(slope, case.params["embedding"])

    assert_same(by(ps.grad_and_value), by(torch.func.grad_and_value))
