"""TRL's ``SFTTrainer``, and the losses of its ``GRPOTrainer`` and ``DPOTrainer``.

Generation is left out: completions, their advantages and the reference's logs of probabilities are in the batch already.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.trainers.column import Column
from benchmarks.trainers.with_transformers import (
    SEEDS,
    SIZED,
    HuggingFace,
    at_first,
    llama,
    of_tokens,
)
from purestep.testing.problem import Batch, Task, causal_lm


def tokenizer() -> Any:
    """Of five words; TRL asks for one, and does not use it here."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(5)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        pad_token="w0",
        bos_token="w1",
        eos_token="w2",
    )


def advantages(batch: Batch) -> Tensor:
    """One for each row, from its tokens. They are negative, so that no loss is a difference of others."""
    return -(batch["input_ids"][:, 0] % 3 + 1).float()


def policy_losses(model: Callable[..., Any], batch: Batch) -> Tensor:
    """-A π / π' for each token, where π' is the policy of now, which is not differentiated."""
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).logits
    logs = -nn.functional.cross_entropy(
        logits[:, :-1].mT, batch["input_ids"][:, 1:], reduction="none"
    )
    ratios = (logs - logs.detach()).exp()
    return nn.functional.pad(
        -ratios * advantages(batch)[:, None].to(ratios.dtype), (1, 0)
    )


def policy(model: Any) -> Task:
    """The tokens of completions, with advantages."""
    like = causal_lm(model)
    return Task(
        "policy gradient",
        policy_losses,
        like.weights,
        like.ignored,
        like.roundings,
        model,
        like.vocabulary,
    )


def rejected(batch: Batch) -> Tensor:
    """For each row another one: its tokens after the first, each moved on by one."""
    ids = batch["input_ids"]
    return torch.cat([ids[:, :1], (ids[:, 1:] + 1) % 5], 1)


def pair_losses(model: Callable[..., Any], batch: Batch) -> Tensor:
    """-log σ(β (log π/π' of the row - log π/π' of the other one)) for each row; the reference π' is the policy of now."""
    mask = batch["labels"][:, 1:] != -100

    def logs(ids: Tensor) -> Tensor:
        logits = model(input_ids=ids, attention_mask=batch["attention_mask"]).logits[
            :, :-1
        ]
        each = -nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
        return (each * mask).sum(1)

    margins = logs(batch["input_ids"]) - logs(rejected(batch))
    return at_first(
        -nn.functional.logsigmoid(0.1 * (margins - margins.detach())), batch
    )


def pair_weights(batch: Batch) -> Tensor:
    """A row in which no token counts is no pair."""
    return at_first((batch["labels"][:, 1:] != -100).any(1), batch)


def preferences(model: Any) -> Task:
    """Pairs of completions."""
    like = causal_lm(model)
    return Task(
        "preferences",
        pair_losses,
        pair_weights,
        like.ignored,
        2 * like.roundings,
        model,
        like.vocabulary,
    )


@dataclass
class Trl(HuggingFace):
    """One of TRL's trainers, given microbatches that are ready."""

    kind: str = "SFT"
    loss_type: str = ""

    def trainer(self, folder: str, microbatches: Sequence[Batch]) -> Any:
        """SGD at a constant rate, without clipping."""
        import transformers
        import trl
        from datasets import Dataset

        transformers.logging.set_verbosity_error()
        inputs = [*self.inputs(microbatches)]
        steps = max(1, len(inputs))
        more: dict[str, Any] = {"SFT": {}, "DPO": {}, "GRPO": {"num_generations": 2}}[
            self.kind
        ]
        if self.kind == "SFT":
            more["dataset_kwargs"] = {"skip_prepare_dataset": True}
        if self.loss_type:
            more["loss_type"] = self.loss_type
        args = getattr(trl, f"{self.kind}Config")(
            output_dir=folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=steps,
            max_steps=1,
            learning_rate=self.problem.learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            remove_unused_columns=False,
            **more,
        )
        base: Any = getattr(trl, f"{self.kind}Trainer")

        class Ready(base):  # type: ignore[misc]
            """Its batches are there already."""

            def get_train_dataloader(self) -> Any:
                data: Any = inputs
                return DataLoader(data, batch_size=None)

            def _prepare_inputs(self, batch: Any) -> Any:
                return batch

            def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
                return dataset

        rows = Dataset.from_dict({"prompt": ["w1"] * 4, "input_ids": [[1, 2]] * 4})
        given: dict[str, Any] = {}
        if self.kind == "GRPO":
            given["reward_funcs"] = lambda **_: [0.0]
        if self.kind == "DPO":
            given["ref_model"] = copy.deepcopy(self.model)
        trainer = Ready(
            model=self.model,
            args=args,
            train_dataset=rows,
            processing_class=tokenizer(),
            optimizers=(self.optimizer, None),
            **given,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    def inputs(self, microbatches: Sequence[Batch]) -> Sequence[Any]:
        """What the loss is given."""
        if self.kind == "GRPO":
            masks = [(batch["labels"][:, 1:] != -100).long() for batch in microbatches]
            total = (
                torch.stack([mask.sum() for mask in masks]).sum()
                if masks
                else torch.zeros(())
            )
            return [
                {
                    "prompt_ids": batch["input_ids"][:, :1],
                    "prompt_mask": batch["attention_mask"][:, :1],
                    "completion_ids": batch["input_ids"][:, 1:],
                    "completion_mask": batch["attention_mask"][:, 1:],
                    "tool_mask": mask,
                    "advantages": advantages(batch),
                    "num_items_in_batch": total,
                }
                for batch, mask in zip(microbatches, masks, strict=True)
            ]
        if self.kind == "DPO":
            pairs = [
                {key: value[pair_weights(batch)[:, 0]] for key, value in batch.items()}
                for batch in microbatches
            ]
            return [
                {
                    "input_ids": torch.cat([batch["input_ids"], rejected(batch)]),
                    "attention_mask": batch["attention_mask"].repeat(2, 1),
                    "completion_mask": (batch["labels"] != -100).long().repeat(2, 1),
                }
                for batch in pairs
                if len(batch["labels"])
            ]
        return [dict(batch) for batch in microbatches]


PACKAGES = ("trl", "transformers", "torch")
PAIRS = (
    "“The loss used in DPO is defined as follows:” minus the expectation over pairs of log σ "
    "([its guide](https://huggingface.co/docs/trl/dpo_trainer#computing-the-loss)); and"
)
GRPO = "the docstring of trl.GRPOConfig"
COLUMNS = [
    Column(
        "TRL SFT, Llama",
        lambda: Trl(of_tokens(causal_lm(llama()))),
        PACKAGES,
        "the docstring of trl.SFTTrainer",
        "Its compute_loss: “loss = per_token_loss.sum() / torch.as_tensor(num_tokens).clamp(min=1)”, where num_tokens is "
        "num_items_in_batch.",
        gives="sums",
        promises=SEEDS,
    ),
    Column(
        "TRL GRPO, dapo",
        lambda: Trl(of_tokens(policy(llama())), kind="GRPO"),
        PACKAGES,
        GRPO,
        "“"
        '"dapo" (default): Aggregates token-level losses by normalizing with the number of active token in the global accumulated '
        "batch.”",
        gives="sums",
        promises=SEEDS,
    ),
    Column(
        "TRL GRPO, bnpo",
        lambda: Trl(of_tokens(policy(llama())), kind="GRPO", loss_type="bnpo"),
        PACKAGES,
        GRPO,
        "“"
        '"bnpo": Aggregates token-level losses by normalizing with the number of active token in the local batch.”',
        gives="mean of means",
        promises={
            **dict.fromkeys(
                ("T1", "T4", "T14"),
                "“Note that normalization is performed over the local batch only, so results may slightly vary depending on the local "
                "batch size, despite a constant effective batch size.”",
            ),
            **SEEDS,
        },
    ),
    Column(
        "TRL DPO",
        lambda: Trl(of_tokens(preferences(llama())), kind="DPO"),
        PACKAGES,
        "the docstring of trl.DPOTrainer",
        "Its compute_loss: “loss += per_sequence_loss.mean() * loss_weight”, the mean over the pairs of a microbatch, which `Trainer` divides "
        "by gradient_accumulation_steps.",
        gives="mean of means that are there",
        promises={
            **{law: f"{PAIRS} {sized}" for law, sized in SIZED.items()},
            **SEEDS,
        },
        vacuous=dict.fromkeys(("T4", "T7"), "a pair counts, or is not there"),
    ),
]
