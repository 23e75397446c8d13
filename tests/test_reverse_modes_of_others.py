"""Gradients by a ``grad_and_value`` of the user's are added up like our own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.strategies import assert_same
from tests.squares import x_ones

GROUP = [{"x": torch.tensor([2.0**m])} for m in range(3)]
Run = Callable[[Callable[..., Any], list[Tensor]], Any]


def with_run(run: Run) -> Any:
    """A ``grad_and_value`` that runs ``run(func, leaves)``."""

    def mine(func: Callable[..., Any], /, argnums: Any = 0, has_aux: bool = False) -> Any:
        assert (argnums, has_aux) == (0, True)
        return lambda leaves: run(func, leaves)

    return mine


def sums_by(run: Run, dtype: torch.dtype = torch.float32) -> ps.Sums:
    return ps.accumulate(
        lambda w, m: w * m["x"],
        torch.ones(1, dtype=dtype),
        GROUP,
        weight_fn=x_ones,
        grad_and_value=with_run(run),
    )


@pytest.mark.parametrize("compile", [False, True])
def test_it_differentiates_a_function_of_the_list_of_leaves(compile: bool) -> None:
    """The very call of ``torch.func.grad_and_value``, whose answer is the step's, to the bit."""
    seen: list[Any] = []

    def run(func: Callable[..., Any], leaves: list[Tensor]) -> Any:
        seen.append((type(leaves), [leaf.shape for leaf in leaves]))
        return torch.func.grad_and_value(func, has_aux=True)(leaves)

    def loss_fn(params: dict[str, Tensor], m: dict[str, Tensor]) -> ps.LossTerms:
        losses = (params["w"] * m["x"]).square() + params["b"]
        return ps.LossTerms(losses, aux={"sum": losses.detach().sum()})

    sgd, params = ps.optim.sgd(0.5), {"w": torch.ones(1), "b": torch.zeros(())}
    one, other = (
        ps.make_update_step(loss_fn, sgd, weight_fn=x_ones, **how)(params, sgd.init(params), GROUP)
        for how in ({"grad_and_value": with_run(run), "compile": compile}, {})
    )
    assert_same(one, other)
    assert (list, [(), (1,)]) in seen


def test_what_it_returns_is_what_is_added() -> None:
    """One that shortens a microbatch's gradient to the length 1, say."""

    def shortened(func: Callable[..., Any], leaves: list[Tensor]) -> Any:
        grads, beside = torch.func.grad_and_value(func, has_aux=True)(leaves)
        return [grad / grad.norm().clamp(min=1) for grad in grads], beside

    sums = sums_by(shortened)
    assert [float(each) for each in (sums.grads, sums.loss, sums.counted.num_tokens)] == [3, 7, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_that_reuses_its_buffers(dtype: torch.dtype) -> None:
    """Gradient and loss are copied before those of the next microbatch take their place."""
    buffer, value = torch.empty(1, dtype=dtype), torch.empty(())

    def run(func: Callable[..., Any], leaves: list[Tensor]) -> Any:
        (grad,), (loss, beside) = ps.grad_and_value(func, has_aux=True)(leaves)
        return [buffer.copy_(grad)], (value.copy_(loss), beside)

    sums = sums_by(run, dtype)
    assert sums.grads == sums.loss == 7
