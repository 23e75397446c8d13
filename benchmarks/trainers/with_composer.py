"""Composer's ``Trainer``: microbatches weighted by samples, and by tokens.

Composer 0.32.1 asks for torch 2.6. Here it runs on the torch of the others; of torchvision and of mcli, which it imports and does not use
here, there are empty modules.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.trainers.absent import find_empty
from benchmarks.trainers.column import Column, cross_entropy, of_labels
from purestep.testing.adapters import loop
from purestep.testing.problem import Batch, Problem


def imported() -> Any:
    """Composer."""
    find_empty("torchvision", "mcli")
    import composer

    return composer


def accumulate(
    model: nn.Module,
    optimizer: Any,
    microbatches: Sequence[Batch],
    problem: Problem,
    on_tokens: bool = False,
) -> None:
    """One batch of a ``DataSpec`` that splits it into these microbatches."""
    composer = imported()
    logging.getLogger("composer").setLevel(logging.ERROR)
    base: Any = composer.ComposerModel

    class Model(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: Batch) -> Any:
            return self.model(batch["input_ids"])

        def loss(self, outputs: Any, batch: Batch) -> Any:
            return cross_entropy(outputs, batch["labels"])

    def parts(batch: Any) -> list[Batch]:
        return batch if isinstance(batch, list) else [batch]

    def samples(batch: Any) -> int:
        return sum(len(part["labels"]) for part in parts(batch))

    def tokens(batch: Any) -> Any:
        number = sum(int((part["labels"] != -100).sum()) for part in parts(batch))
        return {"total": number, "loss_generating": number}

    data = composer.core.DataSpec(
        [[*microbatches]],
        split_batch=lambda batch, size: batch,
        get_num_samples_in_batch=samples,
        get_num_tokens_in_batch=tokens,
        num_samples=samples([*microbatches]),
    )
    trainer = composer.Trainer(
        model=Model(),
        train_dataloader=data,
        optimizers=optimizer,
        max_duration="1ba",
        device="cpu",
        device_train_microbatch_size=1,
        accumulate_train_batch_on_tokens=on_tokens,
        progress_bar=False,
        auto_log_hparams=False,
    )
    trainer.fit()
    trainer.close()


SEED = "“seed: The seed used in randomization. If ``None``, then a random seed will be created.”"
SAMPLES = (
    "“accumulate_train_batch_on_tokens: Whether training loss is accumulated over the number of tokens in a batch, rather than the "
    "number of samples. [...] (default: ``False``)”"
)
PACKAGES = ("mosaicml", "torch")
COLUMNS = [
    Column(
        "Composer, samples",
        lambda: loop(accumulate, capabilities=of_labels(torch.float32)),
        PACKAGES,
        "the docstring of composer.Trainer",
        "“device_train_microbatch_size: The number of samples to process on each device per microbatch during training. Gradients are "
        "summed over the microbatches per device.” A DataSpec's split_batch makes the microbatches.",
        gives="rows",
        promises={**dict.fromkeys(("T1", "T4", "T14"), SAMPLES), "T6": SEED},
        folder="composer",
    ),
    Column(
        "Composer, tokens",
        lambda: loop(
            partial(accumulate, on_tokens=True), capabilities=of_labels(torch.float32)
        ),
        PACKAGES,
        "the docstring of composer.Trainer",
        "“accumulate_train_batch_on_tokens: Whether training loss is accumulated over the number of tokens in a batch, rather than the "
        "number of samples. Only works if the train data spec implements `get_num_tokens_in_batch`.” It counts the labels.",
        gives="sums",
        promises={"T6": SEED},
        folder="composer",
    ),
]
