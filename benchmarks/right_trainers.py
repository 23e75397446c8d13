"""Fourteen right trainers, each in another style: the kit has to accept them.

    python -m benchmarks.right_trainers [SEED]

It prints how many cases each was asked, and what the kit rejects.
"""

import copy
import io
import math
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import purestep as ps
from purestep.testing import Abilities, Observation, Problem
from purestep.testing.problem import Batch
from purestep.testing.trainer import Group


class Nano:
    """As in nanoGPT: the count first, then backward of each microbatch's share."""

    abilities = Abilities()
    metrics: dict[str, Any]

    def start(self, problem: Problem, ranks: int) -> None:
        self.problem = problem
        self.model = problem.module().train()
        self.optimizer = problem.optimizer(self.model)
        self.metrics = {}

    def update(self, group: Group) -> None:
        (microbatches,) = group
        count = sum(float(self.problem.weights(batch).sum()) for batch in microbatches)
        if count == 0:
            return
        self.optimizer.zero_grad(set_to_none=True)
        lossf = 0.0
        for batch in microbatches:
            losses = self.problem.losses(self.model, batch)
            loss = (losses * self.problem.weights(batch)).sum() / count
            loss.backward()
            lossf += loss.item()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), math.inf)
        self.optimizer.step()
        self.metrics = {"loss": lossf, "grad_norm": norm.item(), "num_tokens": count}

    def observe(self) -> list[Observation]:
        params = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return [Observation(params, **self.metrics)]

    def save(self) -> Any:
        return copy.deepcopy(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        )

    def load(self, saved: Any) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])


class Ddp:
    """As in DDP: a replica on each rank, sums of gradients and counts reduced, each rank steps."""

    abilities = Abilities(ranks=3)
    models: list[Any]
    reports: list[dict[str, Any]]

    def start(self, problem: Problem, ranks: int) -> None:
        self.problem, self.world = problem, ranks
        self.models = [problem.module() for _ in range(ranks)]
        self.optimizers = [problem.optimizer(model) for model in self.models]
        self.reports = [{} for _ in range(ranks)]

    def update(self, group: Group) -> None:
        sums, counts = [0.0] * self.world, [0.0] * self.world
        for rank, (model, microbatches) in enumerate(
            zip(self.models, group, strict=False)
        ):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            for batch in microbatches:
                weights = self.problem.weights(batch)
                loss = (self.problem.losses(model, batch) * weights).sum()
                loss.backward()
                sums[rank] += loss.item()
                counts[rank] += weights.sum().item()
        count = sum(counts)
        if count == 0:
            return
        for replicas in zip(
            *(model.parameters() for model in self.models), strict=False
        ):
            total = torch.stack([p.grad for p in replicas]).sum(0)
            for p in replicas:
                p.grad = total / count
        for rank, (model, optimizer) in enumerate(
            zip(self.models, self.optimizers, strict=False)
        ):
            norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            optimizer.step()
            self.reports[rank] = {
                "loss": sum(sums) / count,
                "grad_norm": norm.item(),
                "num_tokens": count,
            }

    def observe(self) -> list[Observation]:
        return [
            Observation(
                {n: p.detach().clone() for n, p in model.named_parameters()}, **report
            )
            for model, report in zip(self.models, self.reports, strict=False)
        ]

    def save(self) -> Any:
        return [
            copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            for model, optimizer in zip(self.models, self.optimizers, strict=False)
        ]

    def load(self, saved: Any) -> None:
        for rank in range(self.world):
            model, optimizer = copy.deepcopy(saved[rank])
            self.models[rank].load_state_dict(model)
            self.optimizers[rank].load_state_dict(optimizer)


class Manual:
    """By torch.autograd.grad, summed by hand, with SGD by hand. It reports nothing."""

    abilities = Abilities(ranks=2)

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


class State(NamedTuple):
    """What a step goes on from."""

    params: Any
    trace: Any
    metrics: Any


class Optax:
    """As with optax: pure transformations and an immutable state."""

    abilities = Abilities(ranks=4)

    def start(self, problem: Problem, ranks: int) -> None:
        self.problem, self.ranks, self.module = problem, ranks, problem.module()
        params = problem.params()
        self.state = State(
            params, {k: torch.zeros_like(v) for k, v in params.items()}, {}
        )

    def loss_fn(self, params: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        def model(*args: Any, **kw: Any) -> Any:
            return torch.func.functional_call(self.module, params, args, kw)

        weights = self.problem.weights(batch)
        return (self.problem.losses(model, batch) * weights).sum(), weights.sum()

    def rank_sums(self, params: Any, microbatches: Sequence[Batch]) -> Any:
        zero = torch.zeros((), dtype=next(iter(params.values())).dtype)
        loss, count = zero, zero
        grads = {k: torch.zeros_like(v) for k, v in params.items()}
        value_and_grad = torch.func.grad_and_value(self.loss_fn, has_aux=True)
        for batch in microbatches:
            g, (s, c) = value_and_grad(params, batch)
            grads = {k: grads[k] + g[k] for k in grads}
            loss, count = loss + s, count + c
        return grads, loss, count

    def update(self, group: Group) -> None:
        self.state = self.train_step(self.state, group)

    def train_step(self, state: State, group: Group) -> State:
        params, trace, _ = state
        parts = [self.rank_sums(params, microbatches) for microbatches in group]
        count = sum(c for _, _, c in parts)
        if count == 0:
            return state
        loss = sum(s for _, s, _ in parts) / count
        grads = {k: sum(g[k] for g, _, _ in parts) / count for k in params}
        norm = torch.sqrt(sum(g.square().sum() for g in grads.values()))
        decay, mu, rate = (
            self.problem.weight_decay,
            self.problem.momentum,
            self.problem.learning_rate,
        )
        updates = {k: grads[k] + decay * params[k] for k in params}
        trace = {k: updates[k] + mu * trace[k] for k in params}
        params = {k: params[k] - rate * trace[k] for k in params}
        return State(
            params, trace, {"loss": loss, "grad_norm": norm, "num_tokens": count}
        )

    def evaluate(self, group: Group) -> float:
        loss = count = 0.0
        for microbatches in group:
            for batch in microbatches:
                s, c = self.loss_fn(self.state.params, batch)
                loss, count = loss + float(s), count + float(c)
        return loss / count if count else math.nan

    def observe(self) -> list[Observation]:
        return [
            Observation(self.state.params, **self.state.metrics)
            for _ in range(self.ranks)
        ]

    def save(self) -> Any:
        return self.state

    def load(self, saved: Any) -> None:
        self.state = saved


class TinyLM(nn.Module):
    """A language model without context, always the same."""

    def __init__(self, vocabulary: int = 7, width: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.embed = nn.Embedding(vocabulary, width)
            self.head = nn.Linear(width, vocabulary)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(torch.tanh(self.embed(input_ids))))


class Transformers:
    """As transformers' Trainer: its loss of shifted labels, times ranks, as these are averaged."""

    abilities = Abilities(
        ranks=2, weights="mask", task=ps.testing.causal_lm(TinyLM().to(torch.float64))
    )
    models: list[Any]
    log: dict[str, Any]

    def start(self, problem: Problem, ranks: int) -> None:
        self.world = ranks
        self.models = [problem.module() for _ in range(ranks)]
        self.optimizers = [problem.optimizer(model) for model in self.models]
        self.log = {}

    def num_items(self, batch: Batch) -> int:
        return int((batch["labels"][:, 1:] != -100).sum())

    def compute_loss(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: int
    ) -> Tensor:
        logits = model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).logits
        shift_logits = logits[:, :-1, :].reshape(-1, logits.shape[-1])
        shift_labels = inputs["labels"][:, 1:].reshape(-1)
        loss = nn.functional.cross_entropy(
            shift_logits, shift_labels, ignore_index=-100, reduction="sum"
        )
        return loss / num_items_in_batch

    def update(self, group: Group) -> None:
        num_items = sum(
            self.num_items(batch) for microbatches in group for batch in microbatches
        )
        if num_items == 0:
            return
        tr_loss = 0.0
        for model, microbatches in zip(self.models, group, strict=False):
            model.train()
            model.zero_grad()
            for inputs in microbatches:
                loss = self.compute_loss(model, inputs, num_items)
                tr_loss += loss.item()
                (loss * self.world).backward()
        for replicas in zip(
            *(model.parameters() for model in self.models), strict=False
        ):
            grads = [
                torch.zeros_like(p) if p.grad is None else p.grad for p in replicas
            ]
            mean: Any = sum(grads) / self.world
            for p in replicas:
                p.grad = mean.clone()
        norms = [
            nn.utils.get_total_norm([p.grad for p in m.parameters()])
            for m in self.models
        ]
        for optimizer in self.optimizers:
            optimizer.step()
        self.log = {
            "loss": tr_loss,
            "grad_norm": norms[0].item(),
            "num_tokens": num_items,
        }

    @torch.no_grad()
    def evaluate(self, group: Group) -> float:
        self.models[0].eval()
        total: Any = 0
        items = 0
        for microbatches in group:
            for inputs in microbatches:
                total += self.compute_loss(self.models[0], inputs, 1).item()
                items += self.num_items(inputs)
        return total / items if items else 0.0

    def observe(self) -> list[Observation]:
        return [
            Observation(
                {n: p.detach().clone() for n, p in m.named_parameters()}, **self.log
            )
            for m in self.models
        ]

    def save(self) -> Any:
        return copy.deepcopy(
            [self.models[0].state_dict(), self.optimizers[0].state_dict()]
        )

    def load(self, saved: Any) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=False):
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(copy.deepcopy(saved[1]))


class Joined:
    """All microbatches of a rank are padded and concatenated into one."""

    abilities = Abilities(ranks=2, joins=True)
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


class Mean:
    """A metric: the mean by weights since the last reset."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, values: Tensor, weights: Tensor) -> None:
        self.total += float((values * weights).sum())
        self.count += int(weights.sum())

    def result(self) -> float:
        return self.total / self.count if self.count else math.nan


class Keras:
    """As in Keras: variables for accumulators, metrics with a reset; float32 and whole weights."""

    abilities = Abilities(weights="whole", dtype=torch.float32)
    logs: dict[str, Any]

    def start(self, problem: Problem, ranks: int) -> None:
        self.problem, self.model = problem, problem.module()
        self.optimizer = problem.optimizer(self.model)
        self.variables = list(self.model.parameters())
        self.accumulators = [torch.zeros_like(v) for v in self.variables]
        self.loss, self.logs = Mean(), {}

    def train_on(self, batch: Batch) -> None:
        weights = self.problem.weights(batch)
        losses = self.problem.losses(self.model, batch)
        grads = torch.autograd.grad((losses * weights).sum(), self.variables)
        for accumulator, grad in zip(self.accumulators, grads, strict=False):
            accumulator.add_(grad)
        self.loss.add(losses.detach(), weights)

    def apply(self, count: int) -> None:
        for variable, accumulator in zip(
            self.variables, self.accumulators, strict=False
        ):
            variable.grad = accumulator / count
        self.optimizer.step()

    def update(self, group: Group) -> None:
        self.loss.reset()
        for accumulator in self.accumulators:
            accumulator.zero_()
        for batch in group[0]:
            self.train_on(batch)
        if self.loss.count:
            self.apply(self.loss.count)
            self.logs = {"loss": self.loss.result(), "num_tokens": self.loss.count}

    def evaluate(self, group: Group) -> float:
        metric = Mean()
        with torch.no_grad():
            for batch in group[0]:
                metric.add(
                    self.problem.losses(self.model, batch), self.problem.weights(batch)
                )
        return metric.result()

    def observe(self) -> list[Observation]:
        params = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return [Observation(params, **self.logs)]


class Adam:
    """AdamW with a schedule on two ranks; checkpoints are bytes."""

    abilities = Abilities(ranks=2, sgd=False)
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

    abilities = Abilities(ranks=2, sgd=False, skips=True)
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

    abilities = Abilities(weights="mask")
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


class Lockstep:
    """As in accelerate: even ranks go in lockstep, and synchronise at the last microbatch."""

    abilities = Abilities(ranks=3, uneven=False)
    models: list[Any]
    metrics: dict[str, Any]

    def start(self, problem: Problem, ranks: int) -> None:
        self.problem, self.ranks = problem, ranks
        self.models = [problem.module() for _ in range(ranks)]
        self.optimizers = [problem.optimizer(model) for model in self.models]
        self.metrics = {}

    def all_reduce(self) -> None:
        for replicas in zip(
            *(model.parameters() for model in self.models), strict=False
        ):
            total = sum(p.grad for p in replicas)
            for p in replicas:
                p.grad = total.clone()

    def update(self, group: Group) -> None:
        steps = len(group[0])
        count = sum(
            self.problem.weights(batch).sum() for rank in group for batch in rank
        )
        if count == 0:
            return
        logged = 0.0
        for step in range(steps):
            for model, microbatches in zip(self.models, group, strict=False):
                batch = microbatches[step]
                loss = (
                    self.problem.losses(model, batch) * self.problem.weights(batch)
                ).sum()
                loss = loss / count
                loss.backward()
                logged += loss.item()
            sync_gradients = step == steps - 1
            if sync_gradients:
                self.all_reduce()
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        self.metrics = {"loss": logged, "num_tokens": count.item()}

    def observe(self) -> list[Observation]:
        return [
            Observation(
                {n: p.detach().clone() for n, p in m.named_parameters()}, **self.metrics
            )
            for m in self.models
        ]


class Switch:
    """With settings: by backward, by autograd.grad, or row by row."""

    abilities = Abilities()
    settings = ("backward", "grad", "rows")
    setting = "backward"
    model: Any
    metrics: dict[str, Any]

    def use(self, setting: str) -> None:
        self.setting = setting

    def start(self, problem: Problem, ranks: int) -> None:
        self.problem, self.model = problem, problem.module()
        self.way = {"backward": self.backward, "grad": self.grad, "rows": self.rows}[
            self.setting
        ]
        self.optimizer = problem.optimizer(self.model)
        self.metrics = {}

    def share(self, batch: Batch, count: float) -> Tensor:
        return (
            self.problem.losses(self.model, batch) * self.problem.weights(batch)
        ).sum() / count

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


class Evaluator:
    """Dropout by the key of each row; evaluation goes microbatch by microbatch; two ranks."""

    abilities = Abilities(ranks=2, dropout=True)
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


RIGHT: dict[str, Callable[[], Any]] = {
    "nano": Nano,
    "ddp": Ddp,
    "manual": Manual,
    "divide_once": lambda: ps.testing.loop(divide_once),
    "optax": Optax,
    "transformers": Transformers,
    "joined": Joined,
    "keras_float32": Keras,
    "adamw": Adam,
    "clip": Clip,
    "masked": Masked,
    "lockstep": Lockstep,
    "switch": Switch,
    "evaluator": Evaluator,
}
"""What makes each."""


def main(seed: int) -> None:
    """Prints how many cases each was asked, and those that the kit rejects."""
    torch.set_num_threads(1)
    for name, make in RIGHT.items():
        verdicts = ps.testing.judge(make(), seed=seed)
        print(
            f"{name:16} {sum(verdict.cases for verdict in verdicts)} cases", flush=True
        )
        for verdict in verdicts:
            if verdict.case is not None:
                print(f"{name}: {verdict}; {verdict.case.words()}", flush=True)


if __name__ == "__main__":
    main(int((sys.argv[1:] or ["0"])[0]))
