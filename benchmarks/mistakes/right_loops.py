"""Trains rightly, by short loops that the kit wraps, by purestep, and in NumPy."""

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import purestep as ps
from purestep.testing import Capabilities, Observation, Problem

Batch = dict[str, Tensor]


def divided_first(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> None:
    """Σ wᵢ ℓᵢ / N of each microbatch; on several processes N and the gradients are summed."""
    optimizer.zero_grad()
    counts = [problem.weights(batch).sum().double() for batch in microbatches]
    count = torch.stack([torch.zeros((), dtype=torch.float64), *counts]).sum()
    parallel = torch.distributed.is_initialized()
    if parallel:
        torch.distributed.all_reduce(count)
    for batch in microbatches:
        (
            (problem.losses(model, batch) * problem.weights(batch)).sum() / count
        ).backward()
    for p in model.parameters() if parallel else []:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        torch.distributed.all_reduce(p.grad)
    if count > 0:
        optimizer.step()


def divided_last(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> None:
    """Gradients of sums, divided once."""
    optimizer.zero_grad()
    for batch in microbatches:
        (problem.losses(model, batch) * problem.weights(batch)).sum().backward()
    if count := float(sum(problem.weights(batch).sum() for batch in microbatches)):
        for p in model.parameters():
            p.grad /= count
        optimizer.step()


class Clipped(torch.optim.SGD):
    """SGD of gradients whose norm is 1 at most."""

    def step(self, closure: Any = None) -> Any:
        """Clips first."""
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


def clipped(module: nn.Module, problem: Problem) -> tuple[Any, Any]:
    """With the problem's rate and momentum."""
    return module, Clipped(module.parameters(), problem.learning_rate, problem.momentum)


def adamw(module: nn.Module, problem: Problem) -> tuple[Any, Any]:
    """At the problem's rate."""
    params, rate = module.parameters(), problem.learning_rate
    return module, torch.optim.AdamW(params, rate, weight_decay=0.5)


def pure(problem: Problem, axis: ps.Axis) -> tuple[Any, Any, Any]:
    """purestep's own step."""
    params, apply = ps.from_module(problem.module())
    optimizer = ps.optim.sgd(
        problem.learning_rate,
        momentum=problem.momentum,
        weight_decay=problem.weight_decay,
    )

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        return problem.losses(lambda x: apply(params, x), batch)

    step = ps.make_update_step(loss_fn, optimizer, weight_fn=problem.weights, axis=axis)
    return params, optimizer.init(params), step


class ByHand:
    """In NumPy."""

    capabilities = Capabilities()

    def start(self, problem: Problem, ranks: int) -> None:
        """Arrays."""
        self.problem = problem
        self.p: dict[str, Any] = {k: v.numpy() for k, v in problem.params().items()}
        self.m = {name: 0 * value for name, value in self.p.items()}

    def update(self, group: Sequence[Sequence[Batch]]) -> None:
        """The derivative is written out."""
        (microbatches,) = group
        count = sum(batch["w"].numpy().sum() for batch in microbatches)
        if count == 0:
            return
        grads = {
            name: self.problem.weight_decay * value for name, value in self.p.items()
        }
        for batch in microbatches:
            x, y, w = (batch[key].numpy() for key in ("x", "y", "w"))
            slope = 2 * (x @ self.p["weight"] + self.p["bias"] - y) * w / count
            grads["weight"] = grads["weight"] + numpy.einsum("rc,rcf->f", slope, x)
            grads["bias"] = grads["bias"] + slope.sum()
        for name in self.p:
            self.m[name] = self.problem.momentum * self.m[name] + grads[name]
            self.p[name] = self.p[name] - self.problem.learning_rate * self.m[name]

    def observe(self) -> list[Observation]:
        """Tensors."""
        return [Observation({name: torch.as_tensor(p) for name, p in self.p.items()})]
