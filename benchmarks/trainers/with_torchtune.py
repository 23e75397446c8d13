"""torchtune's recipe: the lines of its accumulation, as they stand.

torchtune 0.6.1 is in the index, but cannot be imported beside the torchao of today, so that its recipe is quoted.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.trainers.column import Column
from benchmarks.trainers.with_transformers import gpt2, of_tokens
from purestep.testing.adapters import loop
from purestep.testing.problem import Batch, Problem, causal_lm


def scale_grads(model: nn.Module, scaler: Tensor) -> None:
    """``torchtune.training.scale_grads``."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad *= scaler


def recipe(
    model: Any,
    optimizer: Any,
    microbatches: Sequence[Batch],
    problem: Problem,
    first_label: bool = True,
) -> dict[str, Any]:
    """The quoted lines on one device, with ``CrossEntropyLoss`` as its ``_loss_fn``."""
    loss_fn = nn.CrossEntropyLoss(ignore_index=-100)
    running_loss: Any = 0
    num_tokens: Any = 0
    for batch in microbatches:
        labels = labels_of(batch, first_label)
        current_num_tokens = (labels != loss_fn.ignore_index).sum()
        num_tokens += current_num_tokens
        logits = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits
        ignore_labels_cache = torch.full((len(labels), 1), loss_fn.ignore_index)
        labels = torch.hstack((labels[..., 1:], ignore_labels_cache))
        labels = labels.reshape(-1)
        logits = logits.reshape(-1, logits.size(-1))
        current_loss = loss_fn(logits, labels) * current_num_tokens
        running_loss += current_loss.detach()
        current_loss.backward()
    if microbatches:
        scale_grads(model, 1 / num_tokens)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"loss": float(running_loss / num_tokens)}
    return {}


def recipe_first_ignored(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> dict[str, Any]:
    """The same, on labels of which the first of each row is ignored."""
    return recipe(model, optimizer, microbatches, problem, first_label=False)


def labels_of(batch: Batch, first_label: bool) -> Tensor:
    """``labels = tokens.copy()`` in torchtune's text data sets has a label at the first place, too, which nothing predicts."""
    labels = batch["labels"].clone()
    counts = (labels[:, 1:] != -100).any(1) & first_label
    labels[:, 0] = torch.where(counts, batch["input_ids"][:, 0], -100)
    return labels


COLUMNS = [
    Column(
        "torchtune's recipe",
        lambda: loop(recipe, capabilities=of_tokens(causal_lm(gpt2()))),
        ("torch",),
        "torchtune 0.6.1, recipes/full_finetune_single_device.py and full_finetune_distributed.py",
        """current_num_tokens = (batch["labels"] != self._loss_fn.ignore_index).sum()
num_tokens += current_num_tokens
[...]
labels = torch.hstack((labels[..., 1:], self.ignore_labels_cache[: labels.shape[0]]))
[...]
# Loss is normalized by default so we multiply by the number of tokens
# This way we can normalize by the total number of tokens if we're accumulating gradients
current_loss = self._loss_fn(logits, labels) * current_num_tokens
running_loss += current_loss
current_loss.backward()
[...]
training.scale_grads(self._model, 1 / num_tokens)""",
        gives="labels",
    ),
    Column(
        "torchtune's recipe, first labels ignored",
        lambda: loop(recipe_first_ignored, capabilities=of_tokens(causal_lm(gpt2()))),
        ("torch",),
        "",
        "The first label of each row is -100, as where a prompt is masked: what is counted is what is predicted.",
        documented=False,
        gives="predictions",
    ),
]
