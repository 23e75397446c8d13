"""A column of the table, and what most of the loops share: torch's own losses, on tokens and on a regression."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from purestep.testing.problem import Batch, Problem, Task, causal_lm
from purestep.testing.trainer import Capabilities


@dataclass(frozen=True)
class Column:
    """A trainer as its users write it.

    Args:
        name: at the head of the column.
        make: the trainer; one that waits for others takes ``timeout``, in seconds.
        packages: whose versions are told.
        source: where the usage is documented.
        follows: what is said there, quoted; or what differs from the column before it.
        documented: whether the column is the documented usage, or a way to make more laws hold.
        gives: the formula of ``again.py`` for the coefficient of a token.
        promises: by law, the sentence in which the documentation promises no more than what is found; also for "T2 uneven", for ranks
            with different numbers of microbatches.
        vacuous: by law, why asking would compare a run with itself.
        folder: where packages are that are not installed beside the others, below ``build``.
        takes_uneven: whether each rank is given its own microbatches, so that their numbers may differ.
    """

    name: str
    make: Callable[..., Any]
    packages: tuple[str, ...]
    source: str
    follows: str
    documented: bool = True
    gives: str = "equation"
    promises: Mapping[str, str] = field(default_factory=dict)
    vacuous: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    takes_uneven: bool = True


class Bigram(nn.Module):
    """The smallest model of tokens: what comes next, from one token alone. It returns logits."""

    def __init__(self, embedding: Tensor, head: Tensor) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(embedding.clone(), freeze=False)
        self.head = nn.Linear(
            head.shape[1], head.shape[0], bias=False, dtype=head.dtype
        )
        self.head.weight = nn.Parameter(head.clone())

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits for each place."""
        logits: Tensor = self.head(self.embedding(input_ids))
        return logits

    def get_input_embeddings(self) -> nn.Module:
        """By the name that transformers gives it."""
        return self.embedding


def bigram(
    dtype: torch.dtype = torch.float64, vocabulary: int = 5, width: int = 3
) -> Bigram:
    """With parameters that are multiples of an eighth."""
    generator = torch.Generator().manual_seed(0)

    def drawn() -> Tensor:
        return (
            torch.randint(-8, 9, (vocabulary, width), generator=generator).to(dtype) / 8
        )

    return Bigram(drawn(), drawn())


def label_losses(model: Callable[..., Any], batch: Batch) -> Tensor:
    """Of a model that returns logits."""
    logits = model(input_ids=batch["input_ids"])
    return nn.functional.cross_entropy(logits.mT, batch["labels"], reduction="none")


def label_weights(batch: Batch) -> Tensor:
    """-100 is a label that does not count."""
    return batch["labels"] != -100


def labelled(
    model: nn.Module, name: str = "labels of tokens", losses: Any = label_losses
) -> Task:
    """A label for each token, -100 where none counts."""
    like = causal_lm(model)
    return Task(
        name,
        losses,
        label_weights,
        like.ignored,
        like.roundings,
        model,
        like.vocabulary,
    )


def of_labels(dtype: torch.dtype = torch.float64, **more: Any) -> Capabilities:
    """Of a trainer that learns labels by cross-entropy."""
    return Capabilities(
        weights="mask", dtype=dtype, task=labelled(bigram(dtype)), **more
    )


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """torch's own, which leaves out labels that are -100. Where all are, it is no number, and its gradient is zero."""
    return nn.functional.cross_entropy(logits.mT, labels, ignore_index=-100)


def mean_loss(model: Any, batch: Batch) -> Tensor:
    """The loss of most documentations: the mean over the labels of this batch."""
    return cross_entropy(model(batch["input_ids"]), batch["labels"])


def loss_sum(problem: Problem, model: Any, batch: Batch) -> Tensor:
    """The sum over what counts in this batch, as with ``reduction="sum"``."""
    return (problem.losses(model, batch) * problem.weights(batch)).sum()


def count(problem: Problem, microbatches: Sequence[Batch]) -> Tensor:
    """How much counts in all of them."""
    counts = [problem.weights(batch).sum() for batch in microbatches]
    return sum(counts, torch.zeros((), dtype=torch.float64))
