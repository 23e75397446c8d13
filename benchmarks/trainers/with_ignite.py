"""PyTorch-Ignite's ``create_supervised_trainer``, with ``gradient_accumulation_steps``."""

from collections.abc import Sequence
from typing import Any

from benchmarks.trainers.column import Column, cross_entropy, of_labels
from purestep.testing.adapters import loop
from purestep.testing.problem import Batch, Problem


def accumulate(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> None:
    """An engine for each update, which runs over as many batches as it accumulates."""
    from ignite.engine import create_supervised_trainer

    data = [(batch["input_ids"], batch["labels"]) for batch in microbatches]
    trainer = create_supervised_trainer(
        model, optimizer, cross_entropy, gradient_accumulation_steps=max(1, len(data))
    )
    trainer.run(data, max_epochs=1)


COLUMNS = [
    Column(
        "Ignite",
        lambda: loop(accumulate, capabilities=of_labels()),
        ("pytorch-ignite", "torch"),
        "the docstring of ignite.engine.create_supervised_trainer",
        "“gradient_accumulation_steps: Number of steps the gradients should be accumulated across. (default: 1 (means no gradient "
        "accumulation))”",
        gives="mean of means",
        promises=dict.fromkeys(
            ("T1", "T4", "T14"),
            "“gradient_accumulation_steps: Number of steps the gradients should be accumulated across.” (of labels nothing is said)",
        ),
    ),
]
