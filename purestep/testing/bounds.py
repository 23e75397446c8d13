"""How far rounding can take two computations of one update apart: computed, never chosen.

    γₙ = n u / (1 - n u)        u: the unit roundoff of the dtype, n: roundings in a row

Take a sum of products of inputs, each after at most n roundings. It is off by at most γₙ times the
sum of the products' absolute values: its majorant.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from purestep.testing.problem import Batch, Linear, Problem
from purestep.testing.specification import together


def gamma(n: int, dtype: torch.dtype) -> float:
    """γₙ = n u / (1 − n u).

    >>> gamma(1, torch.float64)
    1.1102230246251568e-16
    """
    nu = n * torch.finfo(dtype).eps / 2
    assert nu < 1, f"{n} roundings in {dtype} have no bound"
    return nu / (1 - nu)


class Bound(NamedTuple):
    """How far a run may be off: the norm of each parameter's error, and the errors of the reports.

    ``evaluation`` bounds the loss after the last update.
    """

    params: dict[str, float]
    loss: float
    grad_norm: float
    evaluation: float


def bound(
    problem: Problem, batches: Sequence[Batch | None], tokens: int, dtype: torch.dtype
) -> Bound:
    """The bound after updates on these whole batches, with so many tokens summed in this dtype."""
    n = (problem.task.roundings + 8) * max(1, len(batches)) + 2 * tokens
    factor = gamma(n, dtype)
    model = problem.model
    params, *numbers = (
        _of_polynomials(problem, model, batches)
        if isinstance(model, Linear)
        else _of_gradients(problem, batches)
    )
    sizes = {name: factor * size for name, size in params.items()}
    return Bound(sizes, *(factor * number for number in numbers))


def _of_polynomials(
    problem: Problem, model: Linear, batches: Sequence[Batch | None]
) -> tuple[dict[str, float], float, float, float]:
    """Updates of the linear model are polynomials of the data: here, of its absolute values."""
    weight, bias = (p.detach().to(torch.float64).abs() for p in (model.weight, model.bias))
    moments = [torch.zeros_like(weight), torch.zeros_like(bias)]
    loss = norm = evaluation = 0.0
    scale = 1 / (1 - model.dropout)

    def residuals(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        x, y = (batch[key].to(torch.float64).abs() for key in ("x", "y"))
        w, x = problem.weights(batch).to(torch.float64), scale * x
        return x, w / w.sum(), x @ weight + bias + y

    for batch in batches:
        if batch is None or not problem.weights(batch).any():
            continue
        x, share, residual = residuals(batch)
        grads = [((2 * share * residual)[..., None] * x).sum((0, 1)), (2 * share * residual).sum()]
        loss = float((share * residual.square()).sum())
        norm = float(torch.stack([grad.square().sum() for grad in grads]).sum().sqrt())
        for at, (grad, p) in enumerate(zip(grads, (weight, bias), strict=True)):
            moments[at] = problem.momentum * moments[at] + grad + problem.weight_decay * p
        weight, bias = (
            p + problem.learning_rate * moment
            for p, moment in zip((weight, bias), moments, strict=True)
        )
        _, share, residual = residuals(batch)
        evaluation = float((share * residual.square()).sum())
    return {"weight": float(weight.norm()), "bias": float(bias)}, loss, norm, evaluation


def _of_gradients(
    problem: Problem, batches: Sequence[Batch | None]
) -> tuple[dict[str, float], float, float, float]:
    """For other models the norms of each row's gradient stand for the products: Σ‖gₘ‖, one update.

    Of all parameters together: one whose gradient is zero gets differences of others' terms.
    """
    params = {name: p.to(torch.float64) for name, p in problem.params().items()}
    sizes = {name: float(p.norm()) for name, p in params.items()}
    batch = together([each for each in batches if each is not None])
    if batch is None:
        return sizes, 0.0, 0.0, 0.0
    module = problem.module().to(torch.float64).eval()
    share = problem.weights(batch).to(torch.float64)
    share = share / share.sum().clamp(min=1)

    def of_row(params: dict[str, Tensor], row: int) -> Tensor:
        one = {key: value[row : row + 1] for key, value in batch.items()}
        losses = problem.losses(
            lambda **given: torch.func.functional_call(module, params, (), given), one
        )
        return (share[row] * losses).sum()

    loss = total = 0.0
    decay = problem.learning_rate * problem.weight_decay
    after = {name: (1 - decay) * p for name, p in params.items()}
    for row in range(len(share)):
        grads, value = torch.func.grad_and_value(of_row)(params, row)
        loss += float(value)
        total += float(torch.stack([grad.norm() for grad in grads.values()]).norm())
        after = {name: p - problem.learning_rate * grads[name] for name, p in after.items()}
    # A loss near zero is a difference of larger numbers: those of the loss before stand for them.
    evaluation = max(loss, sum(float(of_row(after, row)) for row in range(len(share))))
    sizes = {name: size + problem.learning_rate * total for name, size in sizes.items()}
    return sizes, loss, total, evaluation
