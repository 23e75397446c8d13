"""What a trainer is given to learn: a model, the loss of each token, and the numbers of plain SGD.

With the integers that are drawn here, and a sum of weights that is a power of two, the regression's arithmetic has no rounding
at all, in float64 and in float32: who divides once gets the bits of the specification. A trainer that divides in more steps is
given the a-priori bound of what rounding explains.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
Params = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """A kind of problem.

    Args:
        losses: ``losses(model, batch)`` gives each token's loss, of shape ``(rows, length)``.
        weights: ``weights(batch)`` gives each token's weight, in the same shape.
        ignored: for each key of a batch, what may stand where nothing counts: beyond a row's end, and in rows that do not count.
        roundings: how many roundings can follow one another in one update of a token, but for the sum over tokens.
    """

    name: str
    losses: Callable[[Callable[..., Any], Batch], Tensor]
    weights: Callable[[Batch], Tensor]
    ignored: Mapping[str, float]
    roundings: int


@dataclass(frozen=True, eq=False)
class Problem:
    """A model to start from, and how it is to be trained: plain SGD.

        g = ∇ Σ wᵢ ℓᵢ(θ) / Σ wᵢ + weight_decay · θ        m = momentum · m + g        θ = θ - learning_rate · m

    which is ``torch.optim.SGD`` with these three numbers.
    """

    task: Task
    model: nn.Module
    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def module(self) -> nn.Module:
        """The model, new."""
        return copy.deepcopy(self.model)

    def params(self) -> Params:
        """Its parameters by name, new."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """``torch.optim.SGD`` with the problem's numbers."""
        return torch.optim.SGD(
            module.parameters(),
            lr=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """Each token's loss, as the model has it now."""
        return self.task.losses(model, batch)

    def weights(self, batch: Batch) -> Tensor:
        """Each token's weight."""
        return self.task.weights(batch)


class Linear(nn.Module):
    """x · weight + bias, for each token; what x is dropped out, where the problem says so."""

    def __init__(self, weight: Sequence[float], bias: float, dtype: torch.dtype, dropout: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=dtype))
        self.bias = nn.Parameter(torch.tensor(bias, dtype=dtype))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """x is ``(rows, length, features)``, the predictions ``(rows, length)``."""
        return nn.functional.dropout(x, self.dropout, self.training) @ self.weight + self.bias


def squared_errors(model: Callable[..., Any], batch: Batch) -> Tensor:
    """(model(x) - y)² for each token."""
    predictions: Tensor = model(batch["x"])
    return (predictions - batch["y"]).square()


REGRESSION = Task(
    "regression",
    squared_errors,
    weights=lambda batch: batch["w"],
    ignored={"x": 1, "y": 3, "w": 0},
    roundings=32,
)
"""Batches have ``x`` of shape (rows, length, 2), and ``y`` and ``w``, the weights, of shape (rows, length)."""


def causal_lm(model: nn.Module) -> Task:
    """Next tokens, by a model with the calls of transformers: ``model(input_ids=, attention_mask=).logits``.

    Batches have ``input_ids``, ``attention_mask`` and ``labels``, all of shape (rows, length); labels are -100 where nothing
    counts, and are to be shifted: the prediction at one place is for the label at the next.
    """

    def losses(model: Callable[..., Any], batch: Batch) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        each = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none"
        )
        return nn.functional.pad(each.view(len(logits), -1), (1, 0))

    def weights(batch: Batch) -> Tensor:
        counts = batch["labels"] != -100
        counts[:, :1] = False
        return counts

    widths = sum(sum(p.shape) for p in model.parameters())
    ignored = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return Task("next tokens", losses, weights, ignored, roundings=3 * widths + 64)
