"""fastai's callback ``GradientAccumulation``."""

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.trainers.column import Column, cross_entropy, of_labels
from purestep.testing.adapters import loop
from purestep.testing.problem import Batch, Problem


class Batches:
    """A data loader of batches that are there already, equally many each time."""

    def __init__(self, microbatches: Sequence[Batch]) -> None:
        self._batches = [
            (batch["input_ids"], batch["labels"]) for batch in microbatches
        ]
        self.device = torch.device("cpu")

    def __iter__(self) -> Any:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def to(self, device: Any) -> "Batches":
        """They are where they should be."""
        return self


def accumulate(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> None:
    """``Learner.fit`` for one step of the optimizer, when it has seen all rows of the group."""
    from fastai.callback.training import GradientAccumulation
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    if not microbatches:
        return
    rows = sum(len(batch["labels"]) for batch in microbatches)
    data = Batches(microbatches)
    # The same optimizer at each update: fastai's own loop would call one fit for all of them.
    learner = Learner(
        DataLoaders(data, Batches([])),
        model,
        loss_func=cross_entropy,
        opt_func=lambda params, **how: OptimWrapper(opt=optimizer),
        lr=problem.learning_rate,
        cbs=[GradientAccumulation(n_acc=rows)],
        default_cbs=True,
        train_bn=False,
    )
    with learner.no_bar(), learner.no_logging():
        learner.fit(1)


COLUMNS = [
    Column(
        "fastai",
        lambda: loop(accumulate, capabilities=of_labels(torch.float32)),
        ("fastai", "torch"),
        "https://docs.fast.ai/callback.training.html, “GradientAccumulation”",
        "“Accumulate gradients before updating weights”; before_step: “Skip weight update if we have not seen enough items”. n_acc is the "
        "number of items, which are rows.",
        gives="rows",
        promises=dict.fromkeys(
            ("T1", "T4", "T14"),
            "“Skip weight update if we have not seen enough items” (items are rows; of labels nothing is said)",
        ),
        folder="fastai",
    ),
]
