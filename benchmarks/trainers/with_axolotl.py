"""axolotl's ``AxolotlTrainer``, which its configuration files make.

It asks for transformers 5.16.1. Of packages that it imports and does not use here, there are empty modules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.trainers.absent import find_empty
from benchmarks.trainers.column import Column
from benchmarks.trainers.with_transformers import (
    SEEDS,
    HuggingFace,
    llama,
    of_tokens,
    plain_arguments,
)
from purestep.testing.problem import Batch, causal_lm

ABSENT = ("bitsandbytes", "xformers", "wandb", "mlflow", "trackio", "optimum")


@dataclass
class Axolotl(HuggingFace):
    """Its trainer, given microbatches that are ready."""

    def trainer(self, folder: str, microbatches: Sequence[Batch]) -> Any:
        """SGD at a constant rate, without clipping."""
        find_empty(*ABSENT)
        import transformers
        from axolotl.core.trainers.base import AxolotlTrainer
        from axolotl.core.training_args import AxolotlTrainingArguments

        transformers.logging.set_verbosity_error()
        data: Any = [dict(batch) for batch in microbatches]
        args = AxolotlTrainingArguments(
            **plain_arguments(self.problem, folder, len(data))
        )

        class Ready(AxolotlTrainer):  # type: ignore[misc]
            """Its batches are there already."""

            def get_train_dataloader(self) -> Any:
                return DataLoader(data, batch_size=None)

        trainer = Ready(
            model=self.model,
            args=args,
            train_dataset=data,
            optimizers=(self.optimizer, None),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer


COLUMNS = [
    Column(
        "axolotl, Llama",
        lambda: Axolotl(of_tokens(causal_lm(llama()))),
        ("axolotl", "transformers", "torch"),
        "axolotl.core.trainers.base.AxolotlTrainer, and its comment",
        "“HF Trainer interprets VAR_KEYWORD as "
        '"the model handles num_items_in_batch internally" and skips the loss ÷ gradient_accumulation_steps normalisation, which inflates '
        "the *logged* loss (the gradient itself is still correct). Override to False when the model doesn't actually consume "
        "num_items_in_batch.”\n"
        'if "num_items_in_batch" not in params:\n'
        "    self.model_accepts_loss_kwargs = False",
        gives="mean of means",
        promises=SEEDS,
        folder="axolotl",
    ),
]
