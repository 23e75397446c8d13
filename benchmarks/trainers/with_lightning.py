"""Lightning's ``accumulate_grad_batches``, as its page "Effective Training Techniques" says."""

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.trainers.column import Column, count, loss_sum, mean_loss, of_labels
from purestep.testing.adapters import loop
from purestep.testing.problem import Batch, Problem


def _identity(batch: Any) -> Any:
    return batch


def _fit(
    model: Any,
    optimizer: Any,
    microbatches: Sequence[Batch],
    loss_of: Callable[[Batch], Tensor],
) -> None:
    """``Trainer.fit`` for one step of the optimizer, which keeps its state."""
    import lightning

    base: Any = lightning.LightningModule

    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            return loss_of(batch)

        def configure_optimizers(self) -> Any:
            return optimizer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accumulate_grad_batches=max(1, len(microbatches)),
            max_steps=1,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        examples: Any = [*microbatches]
        # A loader without a generator draws from torch's global one each time that it is iterated over.
        data: Any = DataLoader(
            examples, batch_size=None, collate_fn=_identity, generator=torch.Generator()
        )
        trainer.fit(Module(), data)


def accumulate(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> None:
    """``training_step`` returns the mean of its batch."""
    _fit(model, optimizer, microbatches, lambda batch: mean_loss(model, batch))


def counted(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> None:
    """``training_step`` returns its sum, times the number of microbatches, over the count that the data brings along."""
    num_tokens = count(problem, microbatches)
    if num_tokens:
        scale = len(microbatches) / num_tokens
        _fit(
            model,
            optimizer,
            microbatches,
            lambda batch: loss_sum(problem, model, batch) * scale,
        )


COLUMNS = [
    Column(
        "Lightning",
        lambda: loop(accumulate, capabilities=of_labels()),
        ("lightning", "torch"),
        "https://lightning.ai/docs/pytorch/stable/advanced/training_tricks.html, “Accumulate Gradients”",
        """“Accumulated gradients run K small batches of size N before doing a backward pass. The effect is a large effective batch size of size KxN”

# Accumulate gradients for 7 batches
trainer = Trainer(accumulate_grad_batches=7)""",
        gives="mean of means",
        promises=dict.fromkeys(
            ("T1", "T4", "T14"),
            "“Accumulated gradients run K small batches of size N before doing a backward pass.”",
        ),
    ),
    Column(
        "Lightning, sums",
        lambda: loop(counted),
        ("lightning", "torch"),
        "",
        "training_step returns the sum of its losses, times accumulate_grad_batches, over the count of the group, which the data "
        "brings along; groups without tokens are left out.",
        documented=False,
    ),
]
