"""Hugging Face Accelerate, as its guide "Performing gradient accumulation with Accelerate" says."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.trainers.column import Column, count, loss_sum, mean_loss
from benchmarks.trainers.with_torch import labels_on_ranks, processes
from purestep.testing.problem import Batch, Problem

GUIDE = "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"


def _accelerator(gradient_accumulation_steps: int) -> Any:
    from accelerate import Accelerator

    if dist.is_initialized():
        # As a launcher sets them; the process group is there already.
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(
            RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size
        )
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
    return Accelerator(
        cpu=True, gradient_accumulation_steps=max(1, gradient_accumulation_steps)
    )


def accumulate(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> None:
    """The guide's "finished code", without a scheduler."""
    accelerator = _accelerator(len(microbatches))
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in microbatches:
        with accelerator.accumulate(model):
            loss = mean_loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def variable_size(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> None:
    """The guide's loop for samples of variable size, without a scheduler."""
    gradient_accumulation_steps = len(microbatches)
    accelerator = _accelerator(gradient_accumulation_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    batch_samples = [*microbatches]
    num_items = torch.as_tensor(
        sum([problem.weights(batch).sum() for batch in batch_samples])
    )
    num_items_in_batch = accelerator.gather(num_items).sum().item()
    for i, batch in enumerate(batch_samples):
        if i < len(batch_samples) - 1 and accelerator.num_processes > 1:
            ctx = model.no_sync
        else:
            ctx = contextlib.nullcontext
        with ctx():
            loss = loss_sum(problem, model, batch)
            scale = gradient_accumulation_steps * accelerator.num_processes
            loss = (loss * scale) / num_items_in_batch
            accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def variable_size_guarded(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> None:
    """The same, where something counts on any rank."""
    num_items = count(problem, microbatches)
    dist.all_reduce(num_items)
    if num_items:
        variable_size(model, optimizer, microbatches, problem)


VARIABLE = (
    "“This is not the same as the average of the per-batch loss values. In other words, some adjustments must be made on losses that "
    "operate on a token-level basis.” (the guide's section on samples of variable size)"
)
EVEN = (
    "“even_batches (`bool`, defaults to `True`): If set to `True`, in cases where the total batch size across all processes does not exactly "
    "divide the dataset, samples at the start of the dataset will be duplicated so the batch can be divided equally among all workers.” "
    "([DataLoaderConfiguration](https://huggingface.co/docs/accelerate/package_reference/utilities#accelerate.DataLoaderConfiguration))"
)
"""So the loaders that it prepares bring no different numbers."""
COLUMNS = [
    Column(
        "Accelerate, accumulate",
        lambda **how: processes(accumulate, None, labels_on_ranks(), **how),
        ("accelerate", "torch"),
        f"{GUIDE}, “The finished code”",
        """accelerator = Accelerator(gradient_accumulation_steps=2)
[...]
for batch in training_dataloader:
    with accelerator.accumulate(model):
        inputs, targets = batch
        outputs = model(inputs)
        loss = loss_function(outputs, targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()""",
        gives="mean of means",
        promises={**dict.fromkeys(("T1", "T4", "T14"), VARIABLE), "T2 uneven": EVEN},
    ),
    Column(
        "Accelerate, variable size",
        lambda **how: processes(variable_size, None, labels_on_ranks(), **how),
        ("accelerate", "torch"),
        f"{GUIDE}, “Gradient accumulation on training samples of variable size”",
        """num_items_in_batch = sum([(batch["labels"].ne(-100)).sum() for batch in batch_samples])
num_items_in_batch = accelerator.gather(num_items_in_batch).sum().item()
for i, batch in enumerate(batch_samples):
    [...]
    with ctx():
        inputs, targets = batch
        outputs = model(inputs)
        loss = loss_function(outputs, targets) # the loss function should sum over samples rather than averaging
        loss = (loss * gradient_accumulation_steps * accelerator.num_processes) / num_items_in_batch
        accelerator.backward(loss)
optimizer.step()
scheduler.step()
optimizer.zero_grad()""",
        gives="sums",
        promises={"T2 uneven": EVEN},
    ),
    Column(
        "Accelerate, variable size, guarded",
        lambda **how: processes(variable_size_guarded, None, **how),
        ("accelerate", "torch"),
        "",
        "The same, and no step where num_items_in_batch is 0.",
        documented=False,
        promises={"T2 uneven": EVEN},
    ),
]
