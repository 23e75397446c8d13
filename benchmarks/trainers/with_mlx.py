"""mlx-lm's ``train``, with ``grad_accumulation_steps`` and its own ``default_loss``."""

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.trainers.column import Column, bigram
from purestep.testing.problem import Batch, Problem, Task, causal_lm
from purestep.testing.trainer import Capabilities, Group, Observation


def completion(batch: Batch) -> Tensor:
    """mlx-lm masks a prompt, so that all tokens of a row count from the first one that does."""
    counts = batch["labels"] != -100
    return (counts.cumsum(1) > 0) & (batch["attention_mask"] > 0)


def next_losses(model: Any, batch: Batch) -> Tensor:
    """Of each token, from the one before."""
    logits = model(input_ids=batch["input_ids"])[:, :-1]
    each = torch.nn.functional.cross_entropy(
        logits.mT, batch["input_ids"][:, 1:], reduction="none"
    )
    return torch.nn.functional.pad(each, (1, 0))


def completions() -> Task:
    """The tokens of completions."""
    model = bigram(torch.float32)
    like = causal_lm(model)
    return Task(
        "completions",
        next_losses,
        completion,
        like.ignored,
        like.roundings,
        model,
        like.vocabulary,
    )


class Mlx:
    """The bigram model in layers of mlx, on the CPU."""

    capabilities = Capabilities(weights="mask", dtype=torch.float32, task=completions())

    def start(self, problem: Problem, ranks: int) -> None:
        """At the problem's own parameters."""
        import mlx.core as mx
        from mlx import nn, optimizers

        base: Any = nn.Module

        class Model(base):  # type: ignore[misc]
            def __init__(self, size: int, width: int) -> None:
                super().__init__()
                self.embedding = nn.Embedding(size, width)
                self.head = nn.Linear(width, size, bias=False)

            def __call__(self, ids: Any) -> Any:
                return self.head(self.embedding(ids))

        mx.set_default_device(mx.cpu)
        params = {name: mx.array(p.numpy()) for name, p in problem.params().items()}
        self.model = Model(*params["embedding.weight"].shape)
        self.model.load_weights([*params.items()])
        self.optimizer = optimizers.SGD(
            problem.learning_rate,
            momentum=problem.momentum,
            weight_decay=problem.weight_decay,
        )

    def update(self, group: Group) -> None:
        """``train`` for as many iterations as are accumulated; the batches are as its own data sets make them."""
        import mlx.core as mx
        from mlx_lm.tuner.trainer import TrainingArgs, train

        (microbatches,) = group
        if not microbatches:
            return

        def batches(**how: Any) -> Iterator[Any]:
            for batch in microbatches:
                lengths = batch["attention_mask"].sum(1)
                starts = torch.where(
                    (counts := completion(batch)).any(1),
                    counts.int().argmax(1),
                    lengths,
                )
                ids = torch.nn.functional.pad(batch["input_ids"], (0, 1))
                yield (
                    mx.array(ids.numpy()),
                    mx.array(torch.stack([starts, lengths], 1).numpy()),
                )

        steps = len(microbatches)
        args = TrainingArgs(
            batch_size=1,
            iters=steps,
            steps_per_report=steps + 1,
            steps_per_save=steps + 1,
            grad_accumulation_steps=steps,
            adapter_file="/dev/null",
        )
        with contextlib.redirect_stdout(io.StringIO()):
            train(self.model, self.optimizer, [], None, args, iterate_batches=batches)

    def observe(self) -> Sequence[Observation]:
        """The parameters, as torch's."""
        import numpy as np
        from mlx.utils import tree_flatten

        leaves = tree_flatten(self.model.parameters())
        return [Observation({name: torch.tensor(np.array(p)) for name, p in leaves})]


COLUMNS = [
    Column(
        "mlx-lm",
        Mlx,
        ("mlx-lm", "mlx"),
        "mlx_lm.lora --help, and the docstring of mlx_lm.tuner.trainer.TrainingArgs",
        "“grad_accumulation_steps: Number of steps to accumulate gradients before applying an optimizer update.” The loss is its "
        "default_loss, on prompts that are masked.",
        gives="mlx",
    ),
]
