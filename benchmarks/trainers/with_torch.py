"""PyTorch's own recipes: accumulation in one process, DistributedDataParallel, and fully_shard."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.trainers.column import Column, count, loss_sum, mean_loss, of_labels
from purestep.testing.adapters import Loop, Processes, loop
from purestep.testing.problem import Batch, Problem
from purestep.testing.trainer import Capabilities

ON_RANKS = Capabilities(ranks=3, uneven_ranks=False)


def processes(
    update: Any,
    prepare: Any,
    capabilities: Capabilities = ON_RANKS,
    timeout: float = 60.0,
) -> Processes:
    """A loop on ranks; after so many seconds without an answer, it hangs."""
    return Processes(partial(Loop, update, prepare), capabilities, timeout)


def labels_on_ranks() -> Capabilities:
    """As many microbatches on each rank, unless told otherwise."""
    return of_labels(ranks=3, uneven_ranks=False)


def means(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> None:
    """The loop of torch's notes. Where there is no microbatch, it does not come to ``optimizer.step()``."""
    iters_to_accumulate = len(microbatches)
    for i, batch in enumerate(microbatches):
        loss = mean_loss(model, batch)
        loss = loss / iters_to_accumulate
        loss.backward()
        if (i + 1) % iters_to_accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def sums(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> dict[str, Any]:
    """Sums over the count of the group, and no step where nothing counts."""
    num_tokens = count(problem, microbatches)
    total = 0.0
    if num_tokens:
        for batch in microbatches:
            loss = loss_sum(problem, model, batch) / num_tokens
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": total, "num_tokens": num_tokens}


def distributed(module: nn.Module, problem: Problem) -> tuple[Any, Any]:
    """The module in DistributedDataParallel."""
    return DistributedDataParallel(module), problem.optimizer(module)


def ddp_means(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> None:
    """All microbatches but the last without synchronisation. A rank without any has nothing to do."""
    if not microbatches:
        return
    with model.no_sync():
        for batch in microbatches[:-1]:
            (mean_loss(model, batch) / len(microbatches)).backward()
    (mean_loss(model, microbatches[-1]) / len(microbatches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def ddp_sums(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> None:
    """Sums over the count of all ranks, times their number."""
    num_tokens = count(problem, microbatches)
    dist.all_reduce(num_tokens)
    if not num_tokens:
        return
    if not microbatches:
        return
    scale = dist.get_world_size() / num_tokens
    with model.no_sync():
        for batch in microbatches[:-1]:
            (loss_sum(problem, model, batch) * scale).backward()
    (loss_sum(problem, model, microbatches[-1]) * scale).backward()
    optimizer.step()
    optimizer.zero_grad()


class OneDimensional(nn.Module):
    """The kit's linear model with a bias of one element: ``fully_shard`` takes no parameters without a dimension."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.bias = nn.Parameter(bias.detach().clone().view(1))

    def forward(self, x: Tensor) -> Tensor:
        """x · weight + bias."""
        return x @ self.weight + self.bias


def sharded(module: nn.Module, problem: Problem) -> tuple[Any, Any]:
    """The module's parameters, spread over all ranks."""
    if not problem.task.vocabulary:
        params = dict(module.named_parameters())
        module = OneDimensional(params["weight"], params["bias"])
    model: Any = fully_shard(module)
    return model, problem.optimizer(model)


def fsdp_means(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> None:
    """Gradients are reduced in the last backward pass. A rank without any microbatch has nothing to do."""
    if not microbatches:
        return
    for i, batch in enumerate(microbatches):
        model.set_requires_gradient_sync(i == len(microbatches) - 1)
        (mean_loss(model, batch) / len(microbatches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def fsdp_sums(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> None:
    """Sums over the count of all ranks, times their number."""
    num_tokens = count(problem, microbatches)
    dist.all_reduce(num_tokens)
    if not num_tokens:
        return
    scale = dist.get_world_size() / num_tokens
    for i, batch in enumerate(microbatches):
        model.set_requires_gradient_sync(i == len(microbatches) - 1)
        (loss_sum(problem, model, batch) * scale).backward()
    optimizer.step()
    optimizer.zero_grad()


EFFECTIVE = (
    "“Gradient accumulation adds gradients over an effective batch of size ``batch_per_iter * iters_to_accumulate`` "
    "(``* num_procs`` if distributed).”"
)
AVERAGED = (
    "“When a model is trained on `M` nodes with `batch=N`, the gradient will be `M` times smaller when compared to the same model "
    "trained on a single node with `batch=M*N` if the loss is summed (NOT averaged as usual) across instances in a batch”"
)
JOIN = (
    "“This implicitly schedules all-reduces in each backward pass to synchronize gradients across ranks. Such collective communications "
    "require participation from all ranks in the process group, so if a rank has fewer inputs, then the other ranks will hang or error "
    "(depending on the backend). More generally, this problem persists for any class that performs per-iteration synchronous collective "
    "communications.” ([the tutorial on Join](https://docs.pytorch.org/tutorials/advanced/generic_join.html))"
)
COLUMNS = [
    Column(
        "PyTorch loop",
        lambda: loop(means, capabilities=of_labels()),
        ("torch",),
        "docs/source/notes/amp_examples.rst of pytorch/pytorch, “Gradient accumulation”",
        """loss = loss_fn(output, target)
loss = loss / iters_to_accumulate
scaler.scale(loss).backward()
if (i + 1) % iters_to_accumulate == 0:
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()""",
        gives="mean of means",
        promises=dict.fromkeys(("T1", "T4", "T14"), EFFECTIVE),
    ),
    Column(
        "PyTorch loop, sums",
        lambda: loop(sums),
        ("torch",),
        "",
        "The tokens of the group are counted first; each microbatch contributes the sum of its losses over that count; "
        "where nothing counts, there is no step.",
        documented=False,
    ),
    Column(
        "DDP",
        lambda **how: processes(ddp_means, distributed, labels_on_ranks(), **how),
        ("torch",),
        "the docstring of torch.nn.parallel.DistributedDataParallel.no_sync",
        """ddp = torch.nn.parallel.DistributedDataParallel(model, pg)
with ddp.no_sync():
    for input in inputs:
        ddp(input).backward()  # no synchronization, accumulate grads
ddp(another_input).backward()  # synchronize grads""",
        gives="mean of means",
        promises={
            **dict.fromkeys(("T1", "T4", "T14"), EFFECTIVE),
            "T2 uneven": f"{AVERAGED}; {JOIN}",
        },
    ),
    Column(
        "DDP, sums",
        lambda **how: processes(ddp_sums, distributed, **how),
        ("torch",),
        "the docstring of torch.nn.parallel.DistributedDataParallel",
        "“the gradient will be M times smaller [...] if the loss is summed (NOT averaged as usual) [...] (because the gradients "
        "between different nodes are averaged). You should take this into consideration”: sums, times the number of ranks, over the "
        "count of all ranks, which takes one small all_reduce before the first backward pass.",
        documented=False,
        promises={"T2 uneven": JOIN},
    ),
    Column(
        "FSDP2",
        lambda **how: processes(fsdp_means, sharded, labels_on_ranks(), **how),
        ("torch",),
        "the docstring of torch.distributed.fsdp.FSDPModule.set_requires_gradient_sync",
        "“Sets if the module should sync gradients. This can be used to implement gradient accumulation *without communication*. "
        "[...] This is the equivalence of `no_sync` in FSDP1.”",
        gives="mean of means",
        promises={**dict.fromkeys(("T1", "T4", "T14"), EFFECTIVE), "T2 uneven": JOIN},
    ),
    Column(
        "FSDP2, sums",
        lambda **how: processes(fsdp_sums, sharded, **how),
        ("torch",),
        "",
        "As for DDP: sums, times the number of ranks, over the count of all ranks.",
        documented=False,
        promises={"T2 uneven": JOIN},
    ),
]
