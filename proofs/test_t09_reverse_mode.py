"""T9, reverse mode. ``ps.grad_and_value`` equals ``torch.func.grad_and_value``, bitwise; and so does a step that runs on either."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, strategies as st

import purestep as ps
from proofs import models
from proofs.strategies import RealCase, assert_same, real_cases
from purestep import tree

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def loss(params: Any, batch: Any) -> torch.Tensor:
    """The transformer's summed loss."""
    return models.transformer_loss(params, batch).sum()


@given(real_cases(DTYPES))
def test_first_derivative(case: RealCase) -> None:
    """Value and gradients of a transformer."""
    ours = ps.grad_and_value(loss)(case.params, case.batch)
    assert_same(ours, torch.func.grad_and_value(loss)(case.params, case.batch))


@given(real_cases(DTYPES))
def test_rematerialised(case: RealCase) -> None:
    """The transformer under ``ps.remat``, by either: the gradients of the transformer itself."""
    expected = torch.func.grad_and_value(loss)(case.params, case.batch)
    for transform in (ps.grad_and_value, torch.func.grad_and_value):
        assert_same(transform(ps.remat(loss))(case.params, case.batch), expected)


@given(real_cases([torch.float64]), st.booleans())
def test_aux(case: RealCase, both: bool) -> None:
    """Aux as a tree, and any positions; keywords go along."""

    def with_aux(scale: Any, params: Any, *, batch: Any) -> Any:
        losses = models.transformer_loss(params, batch)
        return scale * losses.sum(), {"losses": losses, "labels": [batch["labels"]]}

    scale = torch.tensor(0.3, dtype=torch.float64)
    argnums = (0, 1) if both else 1
    ours, theirs = (
        transform(with_aux, argnums=argnums, has_aux=True)(scale, case.params, batch=case.batch)
        for transform in (ps.grad_and_value, torch.func.grad_and_value)
    )
    assert_same(ours, theirs)


@given(real_cases([torch.float64]))
def test_higher_derivatives(case: RealCase) -> None:
    """Inside vmap, grad and jvp: the same bits."""
    embedding = case.params["embedding"]

    def slope(transform: Any, embedding: torch.Tensor) -> Any:
        params = {**case.params, "embedding": embedding}
        grads, value = transform(loss)(params, case.batch)
        return value + sum(leaf.square().sum() for leaf in grads["attention"].values())

    for outer in (
        lambda transform: torch.func.grad(lambda e: slope(transform, e))(embedding),
        lambda transform: torch.func.jvp(lambda e: slope(transform, e), (embedding,), (embedding,)),
        lambda transform: torch.func.vmap(lambda e: slope(transform, e))(
            torch.stack([embedding, embedding + 1])
        ),
    ):
        assert_same(outer(ps.grad_and_value), outer(torch.func.grad_and_value))


@given(real_cases([torch.float32, torch.float64]), st.booleans(), st.booleans(), st.data())
def test_the_steps_own_path(case: RealCase, counted: bool, term: bool, data: st.DataObject) -> None:
    """Sums over microbatches by either: the backward pass that begins with weights / N is that of the whole objective."""
    rows = len(case.batch["labels"])
    edge = data.draw(st.integers(1, rows))
    group = [
        tree.map(lambda leaf, span=span: leaf[span], case.batch)
        for span in (slice(edge), slice(edge, rows))
    ]
    group = [microbatch for microbatch in group if len(microbatch["labels"])]

    def loss_fn(params: Any, microbatch: Any) -> ps.LossTerms:
        losses = models.transformer_loss(params, microbatch)
        extra = params["embedding"].square().mean() if term and counted else None
        return ps.LossTerms(losses, microbatch=extra, aux={"greatest": losses.detach().max()})

    total = ps.count(group) if counted else None
    ours, theirs = (
        ps.accumulate(loss_fn, case.params, group, total=total, grad_and_value=transform)
        for transform in (ps.grad_and_value, torch.func.grad_and_value)
    )
    assert_same(ours, theirs)
