"""Describes what a trainer learns: a model, the loss of each token, and numbers of plain SGD."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch: TypeAlias = dict[str, Tensor]
Params: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """Describes how losses and weights follow from a batch.

    With a vocabulary, batches have "input_ids", "attention_mask" and "labels"; else "x", "y" and
    "w". They also have "key" where elements are dropped.

    Args:
        name: in words.
        losses: ``losses(model, batch)`` gives each token's loss, of shape ``(rows, length)``.
        weights: ``weights(batch)`` gives each token's weight, in the same shape.
        ignored: for each key of a batch, the value where nothing counts: in padding and in
            ignored rows.
        roundings: how many roundings can follow one another in one update of a token, but for the
            sum over tokens.
        model: to start from; None: a ``Linear`` is drawn.
        vocabulary: how many different tokens there are; 0: tokens are no numbers of a vocabulary.
    """

    name: str
    losses: Callable[[Callable[..., Any], Batch], Tensor]
    weights: Callable[[Batch], Tensor]
    ignored: Mapping[str, float]
    roundings: int
    model: nn.Module | None = None
    vocabulary: int = 0


@dataclass(frozen=True, eq=False)
class Problem:
    """Describes a model to start from, and its training by plain SGD.

        g = ∇ Σ wᵢ ℓᵢ(θ) / Σ wᵢ + weight_decay · θ
        m = momentum · m + g
        θ = θ - learning_rate · m

    which is ``torch.optim.SGD`` with these three numbers.
    """

    task: Task
    model: nn.Module
    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def module(self) -> nn.Module:
        """Returns a new copy of the model, which shares no memory with it."""
        return copy.deepcopy(self.model)

    def params(self) -> Params:
        """Returns new copies of the model's parameters, by name, which require no grad."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Makes a ``torch.optim.SGD`` of the module's parameters, with the problem's numbers."""
        return torch.optim.SGD(
            module.parameters(),
            lr=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """Returns each token's loss under ``model``, of shape ``(rows, length)``."""
        return self.task.losses(model, batch)

    def weights(self, batch: Batch) -> Tensor:
        """Returns each token's weight, of shape ``(rows, length)``."""
        return self.task.weights(batch)


class Linear(nn.Module):
    """Computes x · weight + bias for each token; in training with dropout of elements of x."""

    def __init__(
        self,
        weight: Sequence[float],
        bias: float,
        dtype: torch.dtype,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=dtype))
        self.bias = nn.Parameter(torch.tensor(bias, dtype=dtype))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Predicts ``(rows, length)`` of ``(rows, length, features)``, with dropout in training."""
        x = functional.dropout(x, self.dropout, self.training)
        return x @ self.weight + self.bias

    def __repr__(self) -> str:
        args = [
            str(self.weight.tolist()),
            str(self.bias.item()),
            str(self.weight.dtype),
        ]
        if self.dropout:
            args.append(f"dropout={self.dropout}")
        return f"ps.testing.Linear({', '.join(args)})"


def squared_errors(model: Callable[..., Any], batch: Batch) -> Tensor:
    """Returns (model(x) - y)² for each token, with "x" and "y" of the batch."""
    predictions: Tensor = model(batch["x"])
    return (predictions - batch["y"]).square()


def weights_in_batch(batch: Batch) -> Tensor:
    """Returns ``batch["w"]``, the weight of each token."""
    return batch["w"]


REGRESSION = Task(
    "regression",
    squared_errors,
    weights_in_batch,
    # Not zero for data: padding that counts for something has to show.
    ignored={"x": 1, "y": 3, "w": 0, "key": 0},
    roundings=32,
)
"""``Linear`` by its squared errors. A batch has ``x`` of shape (rows, length, 2), and ``y`` and
``w``, the weights, of shape (rows, length); for dropout, ``key``, the number of each row."""


def causal_lm(model: nn.Module) -> Task:
    """Makes a task of next tokens, for ``model(input_ids=, attention_mask=).logits``.

    The model must also have ``get_input_embeddings``, as in transformers. A batch has
    ``input_ids``, ``attention_mask`` and ``labels``, all of shape (rows, length). Labels of -100
    do not count, nor does the first label of a row, whatever it is. The logits of one position are
    about the label of the next. The task starts from ``model``.
    """
    # Each dimension is summed once forward and twice backward; the rest takes a few for each leaf.
    roundings = [3 * sum(p.shape) + 16 for p in model.parameters()]
    transformer: Any = model
    embeddings = transformer.get_input_embeddings()
    return Task(
        "next tokens",
        next_token_losses,
        count_labels,
        ignored={"input_ids": 0, "attention_mask": 0, "labels": -100, "key": 0},
        roundings=sum(roundings),
        model=model,
        vocabulary=int(embeddings.weight.shape[0]),
    )


def next_token_losses(model: Callable[..., Any], batch: Batch) -> Tensor:
    """Returns the cross entropy of each label under the logits of the position before.

    The shape is that of the labels. It is zero for the first label of each row, and for labels of
    -100.
    """
    output = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
    )
    predicted = output.logits[:, :-1]
    labels = batch["labels"][:, 1:]
    losses = functional.cross_entropy(
        predicted.flatten(0, 1),
        labels.flatten(),
        reduction="none",
    )
    return functional.pad(losses.view_as(labels), (1, 0))


def count_labels(batch: Batch) -> Tensor:
    """Returns booleans in the shape of the labels: True for each label that counts.

    The first of each row and labels of -100 do not count.
    """
    counted = batch["labels"][:, 1:] != -100
    return functional.pad(counted, (1, 0))
