"""OLMo-core's ``TransformerTrainModule``: it is given the rows of a rank, and cuts them into microbatches itself."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from benchmarks.trainers.column import Column
from purestep.testing.adapters import Loop, OneRank, Processes
from purestep.testing.problem import Batch, Problem, Task, causal_lm
from purestep.testing.trainer import Capabilities

VOCABULARY = 5


def small(vocabulary: int = VOCABULARY, width: int = 4, heads: int = 2) -> Any:
    """A small ``Transformer`` of OLMo-core's, like Llama."""
    from olmo_core.nn.transformer import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig.llama_like(
        d_model=width,
        vocab_size=vocabulary,
        n_layers=1,
        n_heads=heads,
        hidden_size_multiple_of=4,
    )
    model = config.build(init_device="cpu")
    model.init_weights(device=torch.device("cpu"))
    return model


def next_labels(batch: Batch) -> Tensor:
    """Labels as OLMo-core has them: of the place before."""
    return pad(batch["labels"][:, 1:], (0, 1), value=-100)


def next_losses(model: Callable[..., Any], batch: Batch) -> Tensor:
    """Of a model that returns logits; the loss of a label stands where the label stands."""
    logits = model(batch["input_ids"])[:, :-1]
    each = nn.functional.cross_entropy(
        logits.mT, batch["labels"][:, 1:], reduction="none"
    )
    return pad(each, (1, 0))


class _Embeddings:
    """By the name that transformers gives it."""

    def __init__(self, model: Any) -> None:
        self.get_input_embeddings = lambda: model.embeddings
        self.parameters = model.parameters


def logits_task(like: Task) -> Task:
    """Returns the task for a model that returns logits, where ``like`` has transformers' output."""
    return replace(like, name="next tokens of logits", losses=next_losses)


def olmo_task(model: Any) -> Task:
    """Next tokens."""
    like = causal_lm(_Embeddings(model))  # type: ignore[arg-type]
    return replace(logits_task(like), model=model)


def ignore(*args: Any, **more: Any) -> None:
    """Takes the metrics that a ``Trainer`` would."""


class Training:
    """The train module around a model; its optimizer is torch's SGD."""

    def __init__(self, model: Any, problem: Problem, cut: bool) -> None:
        from olmo_core.optim import AdamWConfig
        from olmo_core.train.train_module import TransformerTrainModule
        from olmo_core.train.train_module.transformer import (
            TransformerDataParallelConfig,
        )

        parallel: Any = importlib.import_module("olmo_core.distributed.parallel")
        more: dict[str, Any] = {}
        if dist.is_initialized():
            vars(parallel)["_WORLD_MESH"] = (
                None  # It can be built once for each process.
            )
            more["dp_config"] = TransformerDataParallelConfig(
                name=parallel.DataParallelType.ddp
            )
        started = {name: p.detach().clone() for name, p in model.named_parameters()}
        with torch.random.fork_rng():
            # It draws its parameters anew, whatever they were.
            self.module = TransformerTrainModule(
                model,
                AdamWConfig(),
                rank_microbatch_size=64,
                max_sequence_length=64,
                device=torch.device("cpu"),
                **more,
            )
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(started[name])
        self.module.record_metric = self.module.record_ce_loss = ignore
        self.module.optim = problem.optimizer(self.module.model)
        self.cut = cut

    def named_parameters(self) -> Any:
        """Those of the model."""
        return self.module.model.named_parameters()


def prepare(cut: bool, module: nn.Module, problem: Problem) -> tuple[Any, Any]:
    """A train module with its optimizer."""
    training = Training(module, problem, cut)
    return training, training.module.optim


def update(
    model: Training, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> None:
    """As ``Trainer`` calls it: gradients to zero, the rank's batch, a step. A rank without rows has no batch."""
    if not microbatches:
        return
    longest = max(batch["labels"].shape[1] for batch in microbatches)

    def joined(rows: Sequence[Tensor], value: int) -> Tensor:
        return torch.cat([pad(x, (0, longest - x.shape[1]), value=value) for x in rows])

    batch = {
        "input_ids": joined([each["input_ids"] for each in microbatches], 0),
        "labels": joined([next_labels(each) for each in microbatches], -100),
    }
    rows = 1 if model.cut else len(batch["labels"])
    train: Any = model.module
    train.rank_microbatch_size = rows * longest
    train.zero_grads()
    train.train_batch(batch)
    train.optim_step()


class Cutting(OneRank):
    """One rank; how many rows a microbatch has is a setting."""

    settings = ("one row", "all rows")

    def __init__(self) -> None:
        self._of = {
            name: Loop(update, partial(prepare, name == self.settings[0]))
            for name in self.settings
        }
        super().__init__(self._of[self.settings[0]], of_olmo(merges=True))

    def select_setting(self, setting: str) -> None:
        """How it cuts."""
        self.program = self._of[setting]


def of_olmo(ranks: int = 1, merges: bool = False) -> Capabilities:
    """It computes in float32."""
    return Capabilities(
        ranks=ranks,
        uneven_ranks=False,
        weights="mask",
        dtype=torch.float32,
        task=olmo_task(small()),
        merges_microbatches=merges,
    )


MODULE = "the docstring of olmo_core.train.train_module.TransformerTrainModule"
COLUMNS = [
    Column(
        "OLMo-core",
        Cutting,
        ("ai2-olmo-core", "torch"),
        MODULE,
        "“rank_microbatch_size: The microbatch size *in tokens* per rank, i.e. the number of tokens to process at a time from each rank.”\n"
        "Each row is a microbatch; in the other setting all rows are one.",
        gives="sums",
        folder="olmo",
    ),
    Column(
        "OLMo-core, DDP",
        lambda **how: Processes(
            partial(Loop, update, partial(prepare, False)),
            of_olmo(ranks=3, merges=True),
            **{"timeout": 60.0, **how},
        ),
        ("ai2-olmo-core", "torch"),
        MODULE,
        "“dp_config: Data parallel configuration for the model.”\n"
        "TransformerDataParallelConfig(name=DataParallelType.ddp), on gloo; a rank has one microbatch.",
        gives="rank means",
        folder="olmo",
        # Its loader gives each rank as many rows.
        takes_uneven=False,
    ),
]
