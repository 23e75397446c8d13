"""A column of the table, and what most of the loops share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from purestep.testing.problem import Batch, Problem


@dataclass(frozen=True)
class Column:
    """A trainer as its users write it.

    Args:
        name: at the head of the column.
        make: the trainer.
        packages: whose versions are told.
        source: where the usage is documented.
        follows: what is said there, quoted; or what differs from the column before it.
        documented: whether the column is the documented usage, or a way to make more laws hold.
    """

    name: str
    make: Callable[[], Any]
    packages: tuple[str, ...]
    source: str
    follows: str
    documented: bool = True


def mean_loss(problem: Problem, model: Any, batch: Batch) -> Tensor:
    """The mean over what counts in this batch.

    It is ``cross_entropy(..., ignore_index=-100)`` of labels, and ``mse_loss(..., weight=w)`` of a regression: torch's own means.
    """
    weights = problem.weights(batch)
    return (problem.losses(model, batch) * weights).sum() / weights.sum()


def loss_sum(problem: Problem, model: Any, batch: Batch) -> Tensor:
    """The sum over what counts in this batch, as with ``reduction="sum"``."""
    return (problem.losses(model, batch) * problem.weights(batch)).sum()


def count(problem: Problem, microbatches: Sequence[Batch]) -> Tensor:
    """How much counts in all of them."""
    counts = [problem.weights(batch).sum() for batch in microbatches]
    return torch.stack(counts).sum() if counts else torch.zeros(())
