"""Trains rightly, in styles of code: by hand, joined, clipped, masked, switchable, evaluated."""

import copy
import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from purestep.testing import Capabilities, Observation, Problem
from purestep.testing.problem import Batch
from purestep.testing.trainer import Group


class Manual:
    """By torch.autograd.grad, summed by hand, with SGD by hand. It reports nothing."""

    capabilities = Capabilities(ranks=2)

    def start(self, problem: Problem, ranks: int) -> None:
        self.problem, self.ranks = problem, ranks
        self.module = problem.module()
        self.params = problem.params()
        self.velocity = {name: torch.zeros_like(p) for name, p in self.params.items()}

    def total_loss(self, params: Any, batch: Batch) -> Tensor:
        def call(*args: Any, **kw: Any) -> Any:
            return torch.func.functional_call(self.module, params, args, kw)

        return (self.problem.losses(call, batch) * self.problem.weights(batch)).sum()

    def step(self, gradient: Any) -> None:
        rate, mu, decay = (
            self.problem.learning_rate,
            self.problem.momentum,
            self.problem.weight_decay,
        )
        for name, p in self.params.items():
            g = gradient[name] + decay * p
            self.velocity[name] = mu * self.velocity[name] + g
            self.params[name] = p - rate * self.velocity[name]

    def update(self, group: Group) -> None:
        flat = [batch for microbatches in group for batch in microbatches]
        count = sum(self.problem.weights(batch).sum().item() for batch in flat)
        if count == 0:
            return
        gradient = {name: torch.zeros_like(p) for name, p in self.params.items()}
        for batch in flat:
            params = {
                name: p.clone().requires_grad_() for name, p in self.params.items()
            }
            loss = self.total_loss(params, batch)
            for name, g in zip(
                params, torch.autograd.grad(loss, list(params.values())), strict=False
            ):
                gradient[name] += g / count
        self.step(gradient)

    def observe(self) -> list[Observation]:
        return [
            Observation({k: v.clone() for k, v in self.params.items()})
        ] * self.ranks


def divide_once(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> Any:
    """A loop of the kit: sums of gradients, divided at the end. It reports only the loss."""
    optimizer.zero_grad()
    count: Any = 0
    loss_sum: Any = 0
    for batch in microbatches:
        tokens = problem.weights(batch).sum()
        if tokens == 0:
            continue
        loss = (problem.losses(model, batch) * problem.weights(batch)).sum()
        loss.backward()
        loss_sum, count = loss_sum + loss.detach(), count + tokens
    if count == 0:
        return None
    for p in model.parameters():
        p.grad.div_(count)
    optimizer.step()
    return {"loss": loss_sum / count}


class Joined:
    """All microbatches of a rank are padded and concatenated into one."""

    capabilities = Capabilities(ranks=2, merges_microbatches=True)
    report: Any

    def start(self, problem: Problem, ranks: int) -> None:
        self.problem, self.ranks = problem, ranks
        self.model = problem.module()
        self.optimizer = problem.optimizer(self.model)
        self.report = (None, None, None)

    def collate(self, microbatches: Sequence[Batch]) -> Batch:
        length = max(batch["w"].shape[1] for batch in microbatches)
        fill = {"w": 0}
        joined: Batch = {}
        for key in ("x", "y", "w"):
            parts = []
            for batch in microbatches:
                value = batch[key]
                padded = value.new_full(
                    (value.shape[0], length, *value.shape[2:]), fill.get(key, 0)
                )
                padded[:, : value.shape[1]] = value
                parts.append(padded)
            joined[key] = torch.cat(parts)
        return joined

    def update(self, group: Group) -> None:
        ranks = [
            self.collate(microbatches) for microbatches in group if len(microbatches)
        ]
        count = sum(batch["w"].sum() for batch in ranks)
        if count == 0:
            return
        self.model.zero_grad()
        loss: Any = sum(
            (self.problem.losses(self.model, batch) * batch["w"]).sum()
            for batch in ranks
        )
        loss = loss / count
        loss.backward()
        norm = torch.linalg.vector_norm(
            torch.stack(
                [torch.linalg.vector_norm(p.grad) for p in self.model.parameters()]
            )
        )
        self.optimizer.step()
        self.report = (loss.detach(), norm, count.clone())

    def observe(self) -> list[Observation]:
        params = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return [Observation(params, *self.report)] * self.ranks


class Adam:
    """AdamW with a schedule on two ranks; checkpoints are bytes."""

    capabilities = Capabilities(ranks=2, plain_sgd=False)
    model: Any
    metrics: dict[str, Any]

    def start(self, problem: Problem, ranks: int) -> None:
        self.problem, self.ranks = problem, ranks
        self.model = problem.module()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.05, weight_decay=0.1
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda n: 1 / (1 + n)
        )
        self.metrics = {}

    def local(self, microbatches: Sequence[Batch]) -> tuple[list[Tensor], float, float]:
        """A rank's sum of gradients, of losses, and of weights."""
        grads = [torch.zeros_like(p) for p in self.model.parameters()]
        loss = count = 0.0
        for batch in microbatches:
            weights = self.problem.weights(batch)
            total = (self.problem.losses(self.model, batch) * weights).sum()
            for sum_, g in zip(
                grads, torch.autograd.grad(total, self.model.parameters()), strict=False
            ):
                sum_ += g
            loss, count = loss + total.item(), count + weights.sum().item()
        return grads, loss, count

    def update(self, group: Group) -> None:
        ranks = [self.local(microbatches) for microbatches in group]
        count = sum(c for _, _, c in ranks)
        if count == 0:
            return
        for p, *parts in zip(
            self.model.parameters(), *(grads for grads, _, _ in ranks), strict=False
        ):
            p.grad = sum(parts) / count
        self.optimizer.step()
        self.schedule.step()
        self.metrics = {
            "loss": sum(s for _, s, _ in ranks) / count,
            "num_tokens": count,
        }

    def observe(self) -> list[Observation]:
        params = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return [Observation(params, **self.metrics) for _ in range(self.ranks)]

    def save(self) -> Any:
        file = io.BytesIO()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }
        torch.save(state, file)
        return file.getvalue()

    def load(self, saved: Any) -> None:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])


class Clip:
    """With clipping, and steps that are skipped where a gradient is not finite, on two ranks."""

    capabilities = Capabilities(ranks=2, plain_sgd=False, skips_nonfinite=True)
    max_norm = 1.0
    metrics: dict[str, Any]

    def start(self, problem: Problem, ranks: int) -> None:
        self.problem, self.ranks = problem, ranks
        self.model = problem.module()
        self.params = list(self.model.parameters())
        self.optimizer = problem.optimizer(self.model)
        self.metrics = {}

    def clip(self, grads: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))
        scale = self.max_norm / norm if norm > self.max_norm else torch.ones_like(norm)
        return [g * scale for g in grads], norm

    def reduce(self, parts: Sequence[Sequence[Tensor]]) -> list[Any]:
        return [sum(each) for each in zip(*parts, strict=False)]

    def update(self, group: Group) -> None:
        count = sum(
            self.problem.weights(b).sum()
            for microbatches in group
            for b in microbatches
        )
        if count == 0:
            return
        parts, loss = [], torch.zeros((), dtype=self.params[0].dtype)
        for microbatches in group:
            local = [torch.zeros_like(p) for p in self.params]
            for batch in microbatches:
                part = (
                    self.problem.losses(self.model, batch) * self.problem.weights(batch)
                ).sum()
                part = part / count
                loss = loss + part.detach()
                grads = torch.autograd.grad(part, self.params)
                local = [a + g for a, g in zip(local, grads, strict=False)]
            parts.append(local)
        total = self.reduce(parts)
        clipped, norm = self.clip(total)
        if not all(bool(torch.isfinite(g).all()) for g in total):
            return
        for p, g in zip(self.params, clipped, strict=False):
            p.grad = g
        self.optimizer.step()
        self.metrics = {"loss": loss, "grad_norm": norm, "num_tokens": count}

    def observe(self) -> list[Observation]:
        params = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return [Observation(params, **self.metrics) for _ in range(self.ranks)]


class Masked:
    """Masks alone: it selects tokens, counts them, reports 0 if none, and shows live parameters."""

    capabilities = Capabilities(weights="mask")
    loss: Any
    tokens: Any

    def start(self, problem: Problem, ranks: int) -> None:
        self.problem, self.model = problem, problem.module()
        self.optimizer = problem.optimizer(self.model)
        self.loss, self.tokens = None, None

    def count(self, batch: Batch) -> int:
        return int(self.mask(batch).sum())

    def mask(self, batch: Batch) -> Tensor:
        return self.problem.weights(batch) != 0

    def update(self, group: Group) -> None:
        self.loss, self.tokens = 0.0, sum(self.count(batch) for batch in group[0])
        if not self.tokens:
            return
        self.optimizer.zero_grad()
        for batch in group[0]:
            selected = self.problem.losses(self.model, batch)[self.mask(batch)]
            loss = selected.sum() / self.tokens
            loss.backward()
            self.loss += loss.item()
        self.optimizer.step()

    def observe(self) -> list[Observation]:
        params = dict(self.model.named_parameters())
        return [Observation(params, loss=self.loss, num_tokens=self.tokens)]


class Evaluator:
    """Dropout by the key of each row; evaluation goes microbatch by microbatch; two ranks."""

    capabilities = Capabilities(ranks=2, dropout=True)
    metrics: dict[str, Any]

    def start(self, problem: Problem, ranks: int) -> None:
        self.problem, self.ranks = problem, ranks
        self.model = problem.module().train()
        self.optimizer = problem.optimizer(self.model)
        self.metrics = {}

    def losses(self, batch: Batch, rank: int = 0, index: int = 0) -> Tensor:
        if "key" not in batch or not len(batch["key"]):
            return self.problem.losses(self.model, batch)
        rows = []
        for row in range(len(batch["key"])):
            one = {key: value[row : row + 1] for key, value in batch.items()}
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1000 + int(one["key"]))
                rows.append(self.problem.losses(self.model, one))
        return torch.cat(rows)

    def update(self, group: Group) -> None:
        count = sum(
            self.problem.weights(b).sum()
            for microbatches in group
            for b in microbatches
        )
        if count == 0:
            return
        self.optimizer.zero_grad()
        loss = 0.0
        for rank, microbatches in enumerate(group):
            for index, batch in enumerate(microbatches):
                losses = self.losses(batch, rank, index) * self.problem.weights(batch)
                (losses.sum() / count).backward()
                loss += losses.sum().item() / count.item()
        self.optimizer.step()
        self.metrics = {"loss": loss, "num_tokens": count.item()}

    def evaluate(self, group: Group) -> float:
        total: Any = 0.0
        count: Any = 0.0
        self.model.eval()
        with torch.no_grad():
            for microbatches in group:
                for batch in microbatches:
                    weights, losses = self.problem.weights(batch), self.losses(batch)
                    total, count = (
                        total + (losses * weights).sum(),
                        count + weights.sum(),
                    )
        self.model.train()
        return float(total / count) if count else 0.0

    def observe(self) -> list[Observation]:
        params = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return [Observation(params, **self.metrics) for _ in range(self.ranks)]

    def save(self) -> Any:
        return copy.deepcopy(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        )

    def load(self, saved: Any) -> None:
        saved = copy.deepcopy(saved)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])


class Switch(Evaluator):
    """With settings: by backward, by autograd.grad, or row by row; on one rank."""

    capabilities = Capabilities(dropout=True)
    settings = ("backward", "grad", "rows")
    setting = "backward"
    model: Any

    def select_setting(self, setting: str) -> None:
        self.setting = setting

    def start(self, problem: Problem, ranks: int) -> None:
        self.problem, self.model = problem, problem.module().train()
        self.way = {"backward": self.backward, "grad": self.grad, "rows": self.rows}[
            self.setting
        ]
        self.optimizer = problem.optimizer(self.model)
        self.metrics = {}

    def share(self, batch: Batch, count: float) -> Tensor:
        return (self.losses(batch) * self.problem.weights(batch)).sum() / count

    def backward(self, microbatches: Sequence[Batch], count: float) -> float:
        loss = 0.0
        for batch in microbatches:
            part = self.share(batch, count)
            part.backward()
            loss += part.item()
        return loss

    def grad(self, microbatches: Sequence[Batch], count: float) -> float:
        parts = torch.stack([self.share(batch, count) for batch in microbatches])
        params = list(self.model.parameters())
        for p, g in zip(params, torch.autograd.grad(parts.sum(), params), strict=False):
            p.grad = g
        return parts.sum().item()

    def rows(self, microbatches: Sequence[Batch], count: float) -> float:
        rows = [
            {key: value[row : row + 1] for key, value in batch.items()}
            for batch in microbatches
            for row in range(len(self.problem.weights(batch)))
        ]
        return self.backward(rows, count)

    def update(self, group: Group) -> None:
        count = sum(self.problem.weights(batch).sum().item() for batch in group[0])
        if count == 0:
            return
        self.optimizer.zero_grad()
        loss = self.way(group[0], count)
        squares = sum(p.grad.square().sum() for p in self.model.parameters())
        self.optimizer.step()
        self.metrics = {"loss": loss, "grad_norm": squares.sqrt(), "num_tokens": count}

    def observe(self) -> list[Observation]:
        params = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return [Observation(params, **self.metrics)]
