"""transformers' ``Trainer``: one item of its data set is one microbatch, ``gradient_accumulation_steps`` their number."""

import gc
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.trainers.column import Column, labelled
from purestep.testing.adapters import Processes
from purestep.testing.problem import REGRESSION, Batch, Problem, Task, causal_lm
from purestep.testing.trainer import Capabilities, Group, Observation

VOCABULARY, PADDING = 5, 0


def gpt2(kind: str = "GPT2LMHeadModel", **more: Any) -> Any:
    """A small GPT-2 without dropout, with one of its heads."""
    import transformers

    torch.manual_seed(0)
    none = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    ids = {"pad_token_id": PADDING, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"n_positions": 64, "n_embd": 4, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, **sizes, **none, **ids, **more
    )
    return getattr(transformers, kind)(config)


def llama() -> Any:
    """A small Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"hidden_size": 4, "num_hidden_layers": 1, "intermediate_size": 4, **heads}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, **sizes, pad_token_id=PADDING)
    )


def classes_of(batch: Batch) -> Tensor:
    """A class for each row, of three; -100 where no token of it counts."""
    counts = batch["labels"] != -100
    classes = (batch["labels"] * counts).sum(1) % 3
    return torch.where(counts.any(1), classes, -100)


def at_first(rows: Tensor, batch: Batch) -> Tensor:
    """One number for each row, at its first place, with as many places as it has tokens."""
    return nn.functional.pad(rows[:, None], (0, batch["labels"].shape[1] - 1))


def classification(model: Any) -> Task:
    """A class for each row."""

    def losses(model: Callable[..., Any], batch: Batch) -> Tensor:
        logits = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits
        each = nn.functional.cross_entropy(logits, classes_of(batch), reduction="none")
        return at_first(each, batch)

    def weights(batch: Batch) -> Tensor:
        return at_first(classes_of(batch) != -100, batch)

    like = causal_lm(model)
    return Task(
        "classes of rows",
        losses,
        weights,
        like.ignored,
        like.roundings,
        model,
        VOCABULARY,
    )


def token_classification(model: Any) -> Task:
    """A class for each token, where it counts."""

    def losses(model: Callable[..., Any], batch: Batch) -> Tensor:
        logits = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits
        return nn.functional.cross_entropy(logits.mT, batch["labels"], reduction="none")

    return labelled(model, "classes of tokens", losses)


class Own(nn.Module):
    """A module of a user's own: its forward takes labels, and returns a loss, torch's mean over what counts."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """-100 is what does not count."""
        logits = self.linear(x)
        counts = labels != -100
        loss = nn.functional.mse_loss(logits[counts], labels[counts])
        return {"loss": loss, "logits": logits}


def items_as_they_are(batch: Batch) -> list[Any]:
    """What a microbatch is, for a model of next or of masked tokens."""
    return [batch]


def items_of_classes(batch: Batch) -> list[Any]:
    """One label for each row."""
    return [{**batch, "labels": classes_of(batch)}]


def items_of_regression(batch: Batch) -> list[Any]:
    """Labels are -100 where nothing counts."""
    return [{"x": batch["x"], "labels": batch["y"].where(batch["w"], -100.0)}]


def items_flattened(batch: Batch) -> list[Any]:
    """The rows without padding, one behind the other, by transformers' own collator."""
    from transformers import DataCollatorWithFlattening

    lengths = batch["attention_mask"].sum(1).tolist()
    rows = [
        {"input_ids": ids[:length], "labels": labels[:length]}
        for ids, labels, length in zip(
            batch["input_ids"].tolist(), batch["labels"].tolist(), lengths, strict=True
        )
        if length
    ]
    return [DataCollatorWithFlattening()(rows)] if rows else []


@dataclass
class HuggingFace:
    """A new ``Trainer`` for each update, which is given the model and the optimizer of the last."""

    capabilities: Capabilities
    items: Callable[[Batch], list[Any]] = items_as_they_are
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module
    compute_loss_func: Callable[..., Tensor] | None = None
    accepts_loss_kwargs: bool | None = None
    ranks: int = 1

    def start(self, problem: Problem, ranks: int) -> None:
        """At the problem's own parameters."""
        self.problem, self.module, self.loss = problem, problem.module(), None
        model: Any = self.wrap(self.module)
        if self.accepts_loss_kwargs is not None:
            model.accepts_loss_kwargs = self.accepts_loss_kwargs
        self.model = model
        self.optimizer = problem.optimizer(self.module)

    def trainer(self, folder: str, microbatches: Sequence[Batch]) -> Any:
        """SGD at a constant rate, without clipping."""
        import transformers

        transformers.logging.set_verbosity_error()
        data = [item for batch in microbatches for item in self.items(batch)]
        args = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            gradient_accumulation_steps=max(1, len(data) // self.ranks),
            max_steps=1,
            learning_rate=self.problem.learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            prediction_loss_only=True,
            remove_unused_columns=False,
            ddp_find_unused_parameters=False,
        )
        trainer = transformers.Trainer(
            model=self.model,
            args=args,
            train_dataset=data,
            eval_dataset=data,
            data_collator=lambda items: dict(items[0]),
            optimizers=(self.optimizer, None),
            compute_loss_func=self.compute_loss_func,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    def update(self, group: Group) -> None:
        """One step of the optimizer."""
        with tempfile.TemporaryDirectory() as folder:
            self.loss = self.trainer(folder, group[0]).train().training_loss

    def observe(self) -> Sequence[Observation]:
        """The parameters, and ``training_loss`` of what ``train`` returns."""
        params = {
            name: p.detach().clone() for name, p in self.module.named_parameters()
        }
        return [Observation(params, loss=self.loss)]


class Rank:
    """One process of several. ``Trainer`` deals out the items itself, equally many to each rank."""

    def start(self, problem: Problem) -> None:
        """The environment is that of a launcher; the process group is there already."""
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(
            RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size
        )
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        self._it = HuggingFace(of_tokens(problem.task), ranks=int(size))
        gc.freeze()  # Trainer collects garbage after each run.
        self._it.start(problem, 1)

    def update(self, microbatches: Sequence[Batch]) -> None:
        """All ranks are given the items of all."""
        gathered: list[Any] = [None] * self._it.ranks
        dist.all_gather_object(gathered, [*microbatches])
        self._it.update([[batch for share in gathered for batch in share]])

    def observe(self) -> Observation:
        """What this rank sees; its ``training_loss`` is that of its own items."""
        return self._it.observe()[0]._replace(loss=None)


def plain_arguments(problem: Problem, folder: str, steps: int) -> dict[str, Any]:
    """Of TrainingArguments, for one step of SGD at a constant rate, without clipping."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": max(1, steps),
        "max_steps": 1,
        "learning_rate": problem.learning_rate,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }


class Evaluation(HuggingFace):
    """``Trainer.evaluate``, too."""

    def evaluate(self, group: Group) -> float:
        """Each microbatch is a batch of the evaluation."""
        with tempfile.TemporaryDirectory() as folder:
            return float(self.trainer(folder, group[0]).evaluate()["eval_loss"])


def of_tokens(task: Task) -> Capabilities:
    """transformers computes losses in float32."""
    return Capabilities(weights="mask", dtype=torch.float32, task=task)


OF_ROWS = Capabilities(weights="mask", dtype=torch.float32, task=REGRESSION)


def class_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The sum over the number of items."""
    total = nn.functional.cross_entropy(outputs.logits, labels, reduction="sum")
    return total / num_items_in_batch


def regression_loss(
    outputs: Any, labels: Tensor, num_items_in_batch: Any = None
) -> Tensor:
    """The sum over the number of items."""
    counts = labels != -100
    total = nn.functional.mse_loss(
        outputs["logits"][counts], labels[counts], reduction="sum"
    )
    return total / num_items_in_batch


def unlabelled(module: nn.Module) -> nn.Module:
    """A module that computes no loss."""

    class Unlabelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = module

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.linear(x)}

    return Unlabelled()


PACKAGES = ("transformers", "accelerate", "torch")
TRAINER = "the docstring of transformers.Trainer"
SEEDS = {
    "T6": "“seed: Random seed that will be set at the beginning of training. To ensure reproducibility across runs, use the "
    "[`~Trainer.model_init`] function to instantiate the model if it has some randomly initialized parameters.”"
}
ARGUMENTS = (
    "“gradient_accumulation_steps: Number of update steps to accumulate gradients before performing a backward/update pass. "
    "Simulates larger batch sizes without additional memory.”"
)
SIZED = dict.fromkeys(
    ("T1", "T4", "T14"),
    "“Effective batch size = `per_device_train_batch_size × num_devices × gradient_accumulation_steps`.” (the docstring of TrainingArguments)",
)
"""Of a loss that a module returns, Trainer knows no more than the number of microbatches."""
COLUMNS = [
    Column(
        "Trainer, GPT-2",
        lambda: HuggingFace(of_tokens(causal_lm(gpt2()))),
        PACKAGES,
        "the docstring of transformers.TrainingArguments",
        ARGUMENTS,
        gives="unshifted labels",
        promises=SEEDS,
    ),
    Column(
        "Trainer, Llama",
        lambda: HuggingFace(of_tokens(causal_lm(llama()))),
        PACKAGES,
        "the docstring of transformers.TrainingArguments",
        ARGUMENTS,
        gives="sums",
        promises=SEEDS,
    ),
    Column(
        "Trainer, Llama, gloo",
        lambda: Processes(
            Rank, of_tokens(causal_lm(llama()))._replace(ranks=3, uneven_ranks=False)
        ),
        PACKAGES,
        "the docstring of transformers.TrainingArguments",
        "“average_tokens_across_devices: Whether or not to average tokens across devices. If enabled, will use all_reduce to synchronize "
        "num_tokens_in_batch for precise loss calculation.” It is, unless told otherwise. Trainer deals out the items itself.",
        gives="sums",
        promises=SEEDS,
        takes_uneven=False,
    ),
    Column(
        "Trainer, Llama, padding-free",
        lambda: HuggingFace(of_tokens(causal_lm(llama())), items_flattened),
        PACKAGES,
        "the docstring of transformers.DataCollatorWithFlattening",
        "“Data collator used for padding free approach. [...] concatenates the entire mini batch into single long sequence”",
        gives="sums",
        promises=SEEDS,
    ),
    Column(
        "Trainer, GPT-2 classes",
        lambda: HuggingFace(
            of_tokens(
                classification(gpt2("GPT2ForSequenceClassification", num_labels=3))
            ),
            items_of_classes,
        ),
        PACKAGES,
        "the docstring of transformers.TrainingArguments",
        ARGUMENTS,
        gives="sum of means",
        promises=SEEDS,
    ),
    Column(
        "Trainer, GPT-2 classes, accepts_loss_kwargs=False",
        lambda: HuggingFace(
            of_tokens(
                classification(gpt2("GPT2ForSequenceClassification", num_labels=3))
            ),
            items_of_classes,
            accepts_loss_kwargs=False,
        ),
        PACKAGES,
        TRAINER,
        "`model.accepts_loss_kwargs = False`, which Trainer asks for, and which other classes of transformers set.",
        documented=False,
        gives="mean of means",
        promises={**SIZED, **SEEDS},
    ),
    Column(
        "Trainer, GPT-2 classes, compute_loss_func",
        lambda: HuggingFace(
            of_tokens(
                classification(gpt2("GPT2ForSequenceClassification", num_labels=3))
            ),
            items_of_classes,
            compute_loss_func=class_loss,
        ),
        PACKAGES,
        TRAINER,
        "`compute_loss_func`: “A function that accepts the raw model outputs, labels, and the number of items in the entire accumulated "
        "batch (batch_size * gradient_accumulation_steps) and returns the loss.” It divides the sum by that number.",
        documented=False,
        gives="sums",
        promises=SEEDS,
    ),
    Column(
        "Trainer, GPT-2 token classes",
        lambda: HuggingFace(
            of_tokens(
                token_classification(
                    gpt2(
                        "GPT2ForTokenClassification",
                        num_labels=VOCABULARY,
                        classifier_dropout=0.0,
                    )
                )
            )
        ),
        PACKAGES,
        "the docstring of transformers.TrainingArguments",
        ARGUMENTS,
        gives="sum of means",
        promises=SEEDS,
    ),
    Column(
        "Trainer, own module",
        lambda: HuggingFace(OF_ROWS, items_of_regression, wrap=Own),
        PACKAGES,
        TRAINER,
        "“You can still use your own models defined as `torch.nn.Module` as long as they work the same way as the 🤗 Transformers "
        "models.” Its forward takes labels and returns the mean of its losses, and has no **kwargs.",
        gives="mean of means",
        promises={**SIZED, **SEEDS},
    ),
    Column(
        "Trainer, own module, compute_loss_func",
        lambda: HuggingFace(
            OF_ROWS,
            items_of_regression,
            wrap=unlabelled,
            compute_loss_func=regression_loss,
        ),
        PACKAGES,
        TRAINER,
        "`compute_loss_func` divides the sum by the number of items in the accumulated batch.",
        documented=False,
        gives="sums",
        promises=SEEDS,
    ),
    Column(
        "Trainer.evaluate, Llama",
        lambda: Evaluation(of_tokens(causal_lm(llama()))),
        PACKAGES,
        "the docstring of transformers.Trainer.evaluate",
        "“Run evaluation and returns metrics.” Each microbatch is one batch of the evaluation.",
        gives="evaluation",
        promises=SEEDS,
    ),
]
