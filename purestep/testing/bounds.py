"""How far rounding can take two computations of one update apart: computed, never chosen.

    γₙ = n u / (1 - n u)        u: the unit roundoff of the dtype, n: roundings in a row

Take a sum of products of inputs, each after at most n roundings. It is off by at most γₙ times the
sum of the products' absolute values: its majorant.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from purestep.testing.problem import Batch, Linear, Problem
from purestep.testing.specification import Specification, together
from purestep.testing.trainer import Abilities

AMPLIFIED = 1e8
"""By how much an update that is not SGD may enlarge roundings: AdamW divides by 1e-8 at most."""


def gamma(n: int, dtype: torch.dtype) -> float:
    """γₙ = n u / (1 − n u).

    >>> gamma(1, torch.float64)
    1.1102230246251568e-16
    """
    nu = n * torch.finfo(dtype).eps / 2
    assert nu < 1, f"{n} roundings in {dtype} have no bound"
    return nu / (1 - nu)


class Bound(NamedTuple):
    """How far a run may be off: the norm of each parameter's error, and the errors of reports."""

    params: dict[str, float]
    reports: dict[str, float]


def bound(
    problem: Problem, batches: Sequence[Batch | None], tokens: int, abilities: Abilities
) -> Bound:
    """The bound after updates on these whole batches, with so many tokens summed."""
    n = (problem.task.roundings + 8) * max(1, len(batches)) + 2 * tokens
    factor = gamma(n, abilities.dtype)
    of = _of_polynomials if isinstance(problem.model, Linear) else _of_gradients
    params, loss, norm, evaluation = of(problem, batches)
    moved = factor * (1 if abilities.sgd else AMPLIFIED)
    sizes = {name: moved * size for name, size in params.items()}
    count = max(
        (float(problem.weights(b).sum()) for b in batches if b is not None), default=0.0
    )
    reports = {
        "loss": factor * loss,
        "grad_norm": factor * norm,
        "num_tokens": factor * count,
    }
    return Bound(sizes, reports | {"evaluation": moved * evaluation})


def _of_polynomials(
    problem: Problem, batches: Sequence[Batch | None]
) -> tuple[dict[str, float], float, float, float]:
    """Updates of the linear model are polynomials of the data: here, of its absolute values.

    They are updates of the specification in which no two terms have different signs.
    """
    params = {name: p.abs() for name, p in problem.params().items()}
    scale = 1 / (1 - getattr(problem.model, "dropout", 0.0))
    model = Linear(params["weight"].tolist(), params["bias"].item(), torch.float64)
    numbers = problem.momentum, problem.weight_decay
    it = Specification()
    it.start(Problem(problem.task, model, -problem.learning_rate, *numbers), 1)
    sizes: Batch = {}
    for batch in batches:
        if batch is not None and problem.weights(batch).any():
            x, y = (batch[key].to(torch.float64).abs() for key in ("x", "y"))
            sizes = {**batch, "x": scale * x, "y": -y}
            it.update([[sizes]])
    (seen,) = it.observe()
    norms = {name: float(p.norm()) for name, p in seen.params.items()}
    evaluation = it.evaluate([[sizes]]) if sizes else 0.0
    return norms, float(seen.loss or 0.0), float(seen.grad_norm or 0.0), evaluation


def _of_gradients(
    problem: Problem, batches: Sequence[Batch | None]
) -> tuple[dict[str, float], float, float, float]:
    """For other models the norms of each row's gradient stand for the products: Σ‖gₘ‖, one update.

    Of all parameters together: one whose gradient is zero gets differences of others' terms.
    """
    it = Specification()
    it.start(problem, 1)
    start, sizes = it.params, {name: float(p.norm()) for name, p in it.params.items()}
    batch = together([each for each in batches if each is not None])
    if batch is None or not problem.weights(batch).any():
        return sizes, 0.0, 0.0, 0.0
    weights = problem.weights(batch).to(torch.float64).sum(1)
    loss = norm = 0.0
    for row, share in enumerate((weights / weights.sum()).tolist()):
        if share:
            it.params = start
            it.update([[{key: value[row : row + 1] for key, value in batch.items()}]])
            (seen,) = it.observe()
            loss += share * float(seen.loss or 0.0)
            norm += share * float(seen.grad_norm or 0.0)
    it.params = start
    it.update([[batch]])
    # A loss near zero is a difference of larger numbers: those of the loss before stand for them.
    evaluation = max(loss, it.evaluate([[batch]]))
    sizes = {name: size + problem.learning_rate * norm for name, size in sizes.items()}
    return sizes, loss, norm, evaluation
