"""Gradients by a ``grad_and_value`` of the user's are added up like our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from tests.squares import x_ones

GROUP = [{"x": torch.tensor([2.0**m])} for m in range(3)]


def linear(w: Tensor, m: dict[str, Tensor]) -> Tensor:
    return w * m["x"]


def with_run(run: Callable[[Callable[..., Any], list[Tensor]], Any]) -> Any:
    """A ``grad_and_value`` that runs ``run(func, leaves)``."""

    def mine(func: Callable[..., Any], /, argnums: Any = 0, has_aux: bool = False) -> Any:
        assert argnums == 0
        assert has_aux
        return lambda leaves: run(func, leaves)

    return mine


def sums_by(run: Callable[[Callable[..., Any], list[Tensor]], Any], w: Tensor) -> ps.Sums:
    return ps.accumulate(linear, w, GROUP, weight_fn=x_ones, grad_and_value=with_run(run))


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("normalize", ["loss", "grads"])
def test_it_differentiates_a_function_of_the_list_of_leaves(normalize: Any, compile: bool) -> None:
    """The very call of ``torch.func.grad_and_value``, whose answer is the step's, to the bit."""
    seen: list[Any] = []

    def run(func: Callable[..., Any], leaves: list[Tensor]) -> Any:
        seen.append((type(leaves), [leaf.shape for leaf in leaves]))
        return torch.func.grad_and_value(func, has_aux=True)(leaves)

    def loss_fn(params: dict[str, Tensor], m: dict[str, Tensor]) -> ps.LossTerms:
        losses = linear(params["w"], m).square() + params["b"]
        return ps.LossTerms(losses, aux={"sum": losses.detach().sum()})

    sgd, params = ps.optim.sgd(0.5), {"w": torch.ones(1), "b": torch.zeros(())}
    one, other = (
        ps.make_update_step(
            loss_fn, sgd, weight_fn=x_ones, normalize=normalize, compile=how, grad_and_value=mode
        )(params, sgd.init(params), GROUP)
        for mode, how in ((with_run(run), compile), (ps.grad_and_value, False))
    )
    assert tree.map(torch.equal, one, other) == tree.map(lambda _: True, one)
    assert (list, [(), (1,)]) in seen


def test_what_it_returns_is_what_is_added() -> None:
    """One that shortens a microbatch's gradient to the length 1, say."""

    def shortened(func: Callable[..., Any], leaves: list[Tensor]) -> Any:
        grads, beside = torch.func.grad_and_value(func, has_aux=True)(leaves)
        return [grad / grad.norm().clamp(min=1) for grad in grads], beside

    sums = sums_by(shortened, torch.ones(1))
    assert [float(each) for each in (sums.grads, sums.loss, sums.counted.num_tokens)] == [3, 7, 3]


def test_one_that_reuses_the_buffer_of_its_value() -> None:
    """The loss of one microbatch is copied before that of the next takes its place."""
    value = torch.empty(())

    def run(func: Callable[..., Any], leaves: list[Tensor]) -> Any:
        grads, (loss, beside) = ps.grad_and_value(func, has_aux=True)(leaves)
        return grads, (value.copy_(loss), beside)

    assert sums_by(run, torch.ones(1)).loss == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_that_reuses_its_buffer(dtype: torch.dtype) -> None:
    """What is returned is copied before the next microbatch writes over it."""
    buffer = torch.empty(1, dtype=dtype)

    def run(func: Callable[..., Any], leaves: list[Tensor]) -> Any:
        (grad,), beside = ps.grad_and_value(func, has_aux=True)(leaves)
        return [buffer.copy_(grad)], beside

    assert sums_by(run, torch.ones(1)).grads == 7
