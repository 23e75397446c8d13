"""LLaMA-Factory's ``CustomSeq2SeqTrainer``, with ``use_asft_loss``.

It asks for transformers up to 5.6. Of torchaudio, which it imports and does not use here, there is an empty module.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.trainers.absent import find_empty
from benchmarks.trainers.column import Column
from benchmarks.trainers.with_transformers import (
    ARGUMENTS,
    SEEDS,
    HuggingFace,
    llama,
    of_tokens,
    plain_arguments,
)
from purestep.testing.problem import Batch, Task, causal_lm

ALPHA = 0.1
"""The default of ``asft_alpha``."""


def asft_losses(model: Callable[..., Any], batch: Batch) -> Tensor:
    """p · (-log p) + α KL(q ‖ π) for each label, where the p in front is not differentiated, and q is uniform."""
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).logits[:, :-1]
    each = nn.functional.cross_entropy(
        logits.mT, batch["labels"][:, 1:], reduction="none"
    )
    logs = logits.log_softmax(-1)
    kl = -logs.mean(-1) - torch.tensor(float(logs.shape[-1]), dtype=logs.dtype).log()
    return nn.functional.pad(each * (-each).exp().detach() + ALPHA * kl, (1, 0))


def asft(model: Any) -> Task:
    """Next tokens, by the ASFT loss."""
    like = causal_lm(model)
    return Task(
        "asft",
        asft_losses,
        like.weights,
        like.ignored,
        like.roundings,
        model,
        like.vocabulary,
    )


def uniform(model: Any) -> Any:
    """The reference: a copy whose logits are all 0."""
    import copy

    reference = copy.deepcopy(model)
    nn.init.zeros_(reference.lm_head.weight)
    return reference.requires_grad_(False)


@dataclass
class LlamaFactory(HuggingFace):
    """Its trainer of supervised fine-tuning, given microbatches that are ready."""

    def trainer(self, folder: str, microbatches: Sequence[Batch]) -> Any:
        """SGD at a constant rate, without clipping."""
        find_empty("torchaudio")
        import transformers
        from llamafactory.hparams import FinetuningArguments, TrainingArguments
        from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer

        transformers.logging.set_verbosity_error()
        data: Any = [dict(batch) for batch in microbatches]
        args = TrainingArguments(**plain_arguments(self.problem, folder, len(data)))

        class Ready(CustomSeq2SeqTrainer):  # type: ignore[misc]
            """Its batches are there already."""

            def get_train_dataloader(self) -> Any:
                return DataLoader(data, batch_size=None)

        trainer = Ready(
            finetuning_args=FinetuningArguments(use_asft_loss=True, asft_alpha=ALPHA),
            processor=None,
            tokenizer=None,
            ref_model=uniform(self.model),
            model=self.model,
            args=args,
            train_dataset=data,
            optimizers=(self.optimizer, None),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer


COLUMNS = [
    Column(
        "LLaMA-Factory, ASFT",
        lambda: LlamaFactory(of_tokens(asft(llama()))),
        ("llamafactory", "transformers", "torch"),
        "use_asft_loss of llamafactory.hparams.FinetuningArguments, “Whether to use the ASFT loss.”, and the docstring of TrainingArguments",
        f"{ARGUMENTS}\nllamafactory.train.sft.trainer.CustomSeq2SeqTrainer, as its run_sft makes it.",
        gives="asft",
        promises=SEEDS,
        folder="llamafactory",
    ),
]
