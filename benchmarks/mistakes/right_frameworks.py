"""Trains rightly, as programs on frameworks do: nanoGPT, DDP, optax, transformers, Keras, accelerate."""

import copy
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import purestep as ps
from purestep.testing import Capabilities, Observation, Problem
from purestep.testing.problem import Batch
from purestep.testing.trainer import Group


class Nano:
    """As in nanoGPT: the count first, then backward of each microbatch's share."""

    capabilities = Capabilities()
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

    capabilities = Capabilities(ranks=3)
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


class State(NamedTuple):
    """Holds the state from which the next step starts."""

    params: Any
    trace: Any
    metrics: Any


class Optax:
    """As with optax: pure transformations and an immutable state."""

    capabilities = Capabilities(ranks=4)

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

    capabilities = Capabilities(
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

    capabilities = Capabilities(weights="whole", dtype=torch.float32)
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


class Lockstep:
    """As in accelerate: even ranks go in lockstep, and synchronise at the last microbatch."""

    capabilities = Capabilities(ranks=3, uneven_ranks=False)
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
