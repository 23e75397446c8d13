"""What a trainer has to learn: a model, the loss of each token, and the numbers of plain SGD."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Batch: TypeAlias = dict[str, Tensor]
Params: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """A kind of problem.

    Args:
        name: in words.
        losses: ``losses(model, batch)`` gives each token's loss, of shape ``(rows, length)``.
        weights: ``weights(batch)`` gives each token's weight, in the same shape.
        ignored: for each key of a batch, the value where nothing counts: in padding and in
            ignored rows.
        roundings: how many roundings can follow one another in one update of a token, but for the
            sum over tokens.
        model: to start from; None: it is drawn.
        vocabulary: how many different tokens there are, where they are numbers of a vocabulary.
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
    """A model to start from, and how it is to be trained: by plain SGD.

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
        """The model, new."""
        return copy.deepcopy(self.model)

    def params(self) -> Params:
        """Its parameters by name, new."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """``torch.optim.SGD`` with the problem's numbers."""
        params, rate, decay = module.parameters(), self.learning_rate, self.weight_decay
        return torch.optim.SGD(params, rate, self.momentum, weight_decay=decay)

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """Each token's loss, as the model has it now."""
        return self.task.losses(model, batch)

    def weights(self, batch: Batch) -> Tensor:
        """Each token's weight."""
        return self.task.weights(batch)


class Linear(nn.Module):
    """x · weight + bias for each token; in training with dropout of elements of x."""

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
        """x is ``(rows, length, features)``, the predictions ``(rows, length)``."""
        return (
            nn.functional.dropout(x, self.dropout, self.training) @ self.weight
            + self.bias
        )

    def __repr__(self) -> str:
        dropout = f", dropout={self.dropout}" if self.dropout else ""
        weight, bias = self.weight.tolist(), self.bias.item()
        return f"ps.testing.Linear({weight}, {bias}, {self.weight.dtype}{dropout})"


def squared_errors(model: Callable[..., Any], batch: Batch) -> Tensor:
    """(model(x) - y)² for each token."""
    predictions: Tensor = model(batch["x"])
    return (predictions - batch["y"]).square()


def given_weights(batch: Batch) -> Tensor:
    """The weights stand in the batch."""
    return batch["w"]


NOTHING = {"x": 1, "y": 3, "w": 0, "key": 0}
REGRESSION = Task("regression", squared_errors, given_weights, NOTHING, roundings=32)
"""``Linear`` by its squared errors. A batch has ``x`` of shape (rows, length, 2), and ``y`` and
``w``, the weights, of shape (rows, length); for dropout, ``key``, the number of each row."""


def causal_lm(model: nn.Module) -> Task:
    """Next tokens, for a model of transformers: ``model(input_ids=, attention_mask=).logits``.

    A batch has ``input_ids``, ``attention_mask`` and ``labels``, all of shape (rows, length).
    Labels are -100 where nothing counts, and the logits of one place are about the label of the
    next.
    """

    # Each dimension is summed once forward and twice backward; the rest takes a few for each leaf.
    shapes = [p.shape for p in model.parameters()]
    roundings = sum(3 * sum(shape) + 16 for shape in shapes)
    ignored = {"input_ids": 0, "attention_mask": 0, "labels": -100, "key": 0}
    embeddings: Any = model.get_submodule("")
    vocabulary = int(embeddings.get_input_embeddings().weight.shape[0])
    return Task(
        "next tokens", _next_tokens, _counted, ignored, roundings, model, vocabulary
    )


def _next_tokens(model: Callable[..., Any], batch: Batch) -> Tensor:
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).logits
    each = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none"
    )
    return nn.functional.pad(each.view(len(logits), -1), (1, 0))


def _counted(batch: Batch) -> Tensor:
    return nn.functional.pad(batch["labels"][:, 1:] != -100, (1, 0))
