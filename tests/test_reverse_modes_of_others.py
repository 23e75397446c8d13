"""Gradients by somebody else's ``grad_and_value`` are added up like our own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from tests.squares import x_ones


def test_any_grad_and_value() -> None:
    """One that does as it likes with its inputs still has its gradients added up."""
    params, group = {"w": torch.zeros(2)}, [torch.tensor([[3.0, 4.0]]), torch.tensor([[0.3, 0.4]])]
    grads, *_ = ps.accumulate(
        lambda p, x: x @ p["w"],
        params,
        group,
        weight_fn=lambda x: torch.ones(len(x)),
        grad_and_value=ps.per_example(clip=1.0),
    )
    assert torch.allclose(grads["w"], torch.tensor([0.9, 1.2]))


def test_a_reverse_mode_that_reuses_the_buffer_of_its_value() -> None:
    """The loss of one microbatch is copied before that of the next takes its place."""
    value = torch.empty(())

    def mine(func: Any, argnums: Any = 0, has_aux: bool = False) -> Any:
        def run(leaves: list[Tensor], microbatch: Any) -> Any:
            grads, (loss, aux) = ps.grad_and_value(func, has_aux=True)(leaves, microbatch)
            return grads, (value.copy_(loss), aux)

        return run

    group = [{"x": torch.tensor([2.0**m])} for m in range(3)]
    sums = ps.accumulate(
        lambda w, m: w * m["x"], torch.ones(1), group, weight_fn=x_ones, grad_and_value=mine
    )
    assert sums.loss == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reverse_mode_that_reuses_its_buffer(dtype: torch.dtype) -> None:
    """What is returned is copied before the next microbatch writes over it."""
    buffer = torch.empty(1, dtype=dtype)

    def mine(func: Any, argnums: Any = 0, has_aux: bool = False) -> Any:
        def run(leaves: list[Tensor], microbatch: Any) -> Any:
            return [buffer.copy_(microbatch["x"])], func(leaves, microbatch)

        return run

    group = [{"x": torch.tensor([2.0**m])} for m in range(3)]
    grads, *_ = ps.accumulate(
        lambda w, m: w * m["x"], torch.ones(1), group, weight_fn=x_ones, grad_and_value=mine
    )
    assert grads == 7
