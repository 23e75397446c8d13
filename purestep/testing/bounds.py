"""Computes how far rounding can take two computations of one update apart.

    γₙ = n u / (1 - n u)        u: the unit roundoff of the dtype, n: roundings in a row

Take a sum of products of inputs, each after at most n roundings. It is off by at most γₙ times the
sum of the products' absolute values: its majorant.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from purestep.testing.problem import Batch, Linear, Problem
from purestep.testing.specification import ReferenceTrainer, join_batches
from purestep.testing.trainer import Capabilities

Batches: TypeAlias = Sequence[Batch | None]
"""For each update what all ranks hold together; None: nothing."""

UNBOUNDED = 1e9
"""A factor that no error exceeds; times 0 it is 0, unlike infinity."""


def rounding_bound(n: int, dtype: torch.dtype) -> float:
    """Returns γₙ = n u / (1 − n u), where u is the unit roundoff of the dtype.

    Raises ``AssertionError`` if n u is 1 or more.

    >>> rounding_bound(1, torch.float64)
    1.1102230246251568e-16
    """
    nu = n * torch.finfo(dtype).eps / 2
    assert nu < 1, f"{n} roundings in {dtype} have no bound"
    return nu / (1 - nu)


class Bound(NamedTuple):
    """Bounds the rounding errors of a run: the error's norm for each parameter, and each report."""

    params: dict[str, float]
    reports: dict[str, float]

    def widened(self, other: "Bound") -> "Bound":
        """Returns a bound of the sums: entry by entry, this one's plus that of ``other``."""
        params = {name: size + other.params[name] for name, size in self.params.items()}
        reports = {
            name: size + other.reports[name] for name, size in self.reports.items()
        }
        return Bound(params, reports)


class _Majorants(NamedTuple):
    """Holds majorants of a run's results: each sum of products, with absolute values of these.

    For a model other than ``Linear``, they are estimates. ``params`` has norms.
    """

    params: dict[str, float]
    loss: float
    grad_norm: float
    evaluation: float


def compute_bound(
    problem: Problem,
    batches: Batches,
    tokens: int,
    capabilities: Capabilities,
) -> Bound:
    """Returns bounds on the rounding errors of params and reports after an update on each batch.

    A bound of a param is on the error's norm. Those of "loss", "grad_norm", "num_tokens" and
    "evaluation" are for the last update. Each of ``batches`` holds the data of all ranks; None is
    an update without data. ``tokens`` is how many tokens the updates sum in all, padding included.
    For a model other than ``Linear`` the bounds are estimates. Raises ``AssertionError`` if there
    are too many roundings.

    In a coarse dtype a param has the bound of one rounding of its start. That is enough where all
    numbers are exact before a single step; later updates and other roundings may exceed it. A
    report has the bound of a sum over tokens: a huge number, in place of an error, for too many
    roundings.
    """
    if isinstance(problem.model, Linear):
        majorants = _linear_majorants(problem, batches)
    else:
        majorants = _gradient_majorants(problem, batches)
    factor = bound_relative_error(problem, len(batches), tokens, capabilities)
    if capabilities.is_coarse:
        starts = _compute_norms(problem.params())
        majorants = majorants._replace(params=starts)
    params = {}
    for name, size in majorants.params.items():
        params[name] = factor * size
    if capabilities.is_coarse:
        factor = _bound_coarse_sum(tokens, capabilities.dtype)
    reports = {
        "loss": factor * majorants.loss,
        "grad_norm": factor * majorants.grad_norm,
        "num_tokens": factor * _largest_count(problem, batches),
        "evaluation": factor * majorants.evaluation,
    }
    return Bound(params, reports)


def _bound_coarse_sum(tokens: int, dtype: torch.dtype) -> float:
    """Returns γₙ for a sum of squared errors over tokens, with n = 2 · ``tokens`` + 16 roundings.

    Returns ``UNBOUNDED`` if n u is 0.5 or more, where u is the unit roundoff of the dtype.
    """
    unit = torch.finfo(dtype).eps / 2
    num_roundings = 2 * tokens + 16
    if num_roundings * unit >= 0.5:
        return UNBOUNDED
    return rounding_bound(num_roundings, dtype)


def bound_relative_error(
    problem: Problem, num_updates: int, tokens: int, capabilities: Capabilities
) -> float:
    """Returns γₙ, where n is the number of roundings in a row in a run; n is 1 if coarse.

    In a coarse dtype, that is enough for a param if all numbers are exact before a single step.
    Other roundings are not counted there, and reports have another bound. ``tokens`` is how many
    tokens the updates sum in all, padding included. Raises ``AssertionError`` if n roundings have
    no bound in the dtype.
    """
    if capabilities.is_coarse:
        return rounding_bound(1, capabilities.dtype)
    per_update = problem.task.roundings + 8
    num_roundings = per_update * max(1, num_updates) + 2 * tokens
    return rounding_bound(num_roundings, capabilities.dtype)


def _largest_count(problem: Problem, batches: Batches) -> float:
    largest = 0.0
    for batch in batches:
        if batch is not None:
            count = problem.weights(batch).sum()
            largest = max(largest, float(count))
    return largest


def _linear_majorants(problem: Problem, batches: Batches) -> _Majorants:
    """Returns the majorants of a ``Linear`` model's run: its results on absolute values.

    Each update is a polynomial of the data. Here no two terms of it have different signs: the
    targets are negative, since they are subtracted, and so is the learning rate. Inputs are as
    large as dropout makes them. Reports are those of the last batch with weight, and the evaluation
    is on it, afterwards. Without any, all but the parameters' norms are 0.
    """
    params = problem.params()
    weight = params["weight"].abs()
    bias = params["bias"].abs()
    absolute = Problem(
        problem.task,
        Linear(weight.tolist(), bias.item(), torch.float64),
        -problem.learning_rate,
        problem.momentum,
        problem.weight_decay,
    )
    dropout = getattr(problem.model, "dropout", 0.0)
    scale = 1 / (1 - dropout)
    trainer = ReferenceTrainer()
    trainer.start(absolute, 1)
    evaluation = 0.0
    last = None
    for batch in batches:
        if batch is not None and problem.weights(batch).any():
            x = batch["x"].double().abs()
            y = batch["y"].double().abs()
            last = {**batch, "x": scale * x, "y": -y}
            trainer.update([[last]])
    if last is not None:
        evaluation = trainer.evaluate([[last]])
    (seen,) = trainer.observe()
    return _Majorants(
        params=_compute_norms(seen.params),
        loss=float(seen.loss or 0.0),
        grad_norm=float(seen.grad_norm or 0.0),
        evaluation=evaluation,
    )


def _compute_norms(params: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(p.norm()) for name, p in params.items()}


def _gradient_majorants(problem: Problem, batches: Batches) -> _Majorants:
    """Estimates the majorants from losses and gradients of single rows, at the initial parameters.

    The gradient's majorant is G = Σ sₘ‖gₘ‖, where row m of all batches has the share sₘ of all
    weight. Each norm is over all parameters together, since a gradient that cancels to zero has
    errors, too. The loss's majorant is the sum of the rows' losses with the same shares.

    A parameter's majorant p begins as its norm, and its moment m as 0. Each update sets m to
    momentum · m + G + weight decay · p, and adds learning rate · m to p.

    The majorant of an evaluation is the larger one of the losses before and after one update on all
    batches. Without weight, all but the parameters' norms are 0.
    """
    trainer = ReferenceTrainer()
    sizes = _compute_norms(problem.params())
    batch = join_batches([batch for batch in batches if batch is not None])
    if batch is None or not problem.weights(batch).any():
        return _Majorants(sizes, loss=0.0, grad_norm=0.0, evaluation=0.0)
    weights = problem.weights(batch).double().sum(1)
    shares = weights / weights.sum()
    loss = 0.0
    norm = 0.0
    for row, share in enumerate(shares.tolist()):
        if share:
            trainer.start(problem, 1)
            trainer.update([[_take_row(batch, row)]])
            (seen,) = trainer.observe()
            loss += share * float(seen.loss or 0.0)
            norm += share * float(seen.grad_norm or 0.0)
    trainer.start(problem, 1)
    trainer.update([[batch]])
    # A loss near zero is a difference of larger numbers: those of the loss before stand for them.
    evaluation = max(loss, trainer.evaluate([[batch]]))
    params = {}
    for name, size in sizes.items():
        moment = 0.0
        for _ in batches:
            moment = problem.momentum * moment + norm + problem.weight_decay * size
            size += problem.learning_rate * moment
        params[name] = size
    return _Majorants(params, loss, norm, evaluation)


def _take_row(batch: Batch, row: int) -> Batch:
    rows = slice(row, row + 1)
    return {key: x[rows] for key, x in batch.items()}
