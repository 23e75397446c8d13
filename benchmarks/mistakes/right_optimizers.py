"""Trains rightly by optimizers whose updates are not plain SGD: schedules, signs, trust ratios, averages."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from purestep.testing import Capabilities, Observation, Problem
from purestep.testing.problem import Batch
from purestep.testing.trainer import Group


class Optimized:
    """Sums gradients over microbatches and two ranks, divides once, and steps by AdamW."""

    capabilities = Capabilities(ranks=2, plain_sgd=False)
    metrics: dict[str, Any]

    def start(self, problem: Problem, ranks: int) -> None:
        self.problem, self.ranks = problem, ranks
        self.model = problem.module()
        self.params = list(self.model.parameters())
        self.optimizer = self.make_optimizer()
        self.metrics = {}

    def make_optimizer(self) -> Any:
        return torch.optim.AdamW(self.params, lr=0.05, weight_decay=0.1)

    def before_step(self, group: Group, count: Tensor) -> None:
        """Changes gradients or rates."""

    def after_step(self) -> None:
        """Does what follows a step."""

    def sum_losses(self, batch: Batch) -> Tensor:
        losses = self.problem.losses(self.model, batch)
        return (losses * self.problem.weights(batch)).sum()

    def update(self, group: Group) -> None:
        flat = [batch for share in group for batch in share]
        weights = [self.problem.weights(batch).sum().double() for batch in flat]
        count = torch.stack([torch.zeros((), dtype=torch.float64), *weights]).sum()
        if count == 0:
            return
        totals = [torch.zeros_like(p) for p in self.params]
        loss = torch.zeros((), dtype=torch.float64)
        for share in group:
            sums = [torch.zeros_like(p) for p in self.params]
            for batch in share:
                part = self.sum_losses(batch)
                for total, grad in zip(
                    sums, torch.autograd.grad(part, self.params), strict=True
                ):
                    total += grad
                loss += part.detach()
            for total, grad in zip(totals, sums, strict=True):
                total += grad
        for p, total in zip(self.params, totals, strict=True):
            p.grad = total / float(count)
        self.before_step(group, count)
        self.optimizer.step()
        self.after_step()
        self.metrics = {"loss": loss / count, "num_tokens": count}

    def evaluate(self, group: Group) -> float:
        with torch.no_grad():
            batches = [batch for share in group for batch in share]
            total = sum(float(self.sum_losses(batch)) for batch in batches)
            return total / sum(
                float(self.problem.weights(batch).sum()) for batch in batches
            )

    def observe(self) -> list[Observation]:
        params = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return [Observation(params, **self.metrics)] * self.ranks

    def save(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, saved: Any) -> None:
        model, optimizer = copy.deepcopy(saved)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


class TokenSchedule(Optimized):
    """Lowers the rate with the tokens consumed, as Composer's "tok" and OLMo-core do."""

    # A weight of 2 is no second token.
    capabilities = Capabilities(ranks=2, plain_sgd=False, weights="mask")

    def start(self, problem: Problem, ranks: int) -> None:
        super().start(problem, ranks)
        self.consumed = 0.0

    def consume(self, group: Group, count: Tensor) -> float:
        return float(count)

    def before_step(self, group: Group, count: Tensor) -> None:
        self.consumed += self.consume(group, count)
        for options in self.optimizer.param_groups:
            options["lr"] = 0.2 / (1 + self.consumed / 8)

    def save(self) -> Any:
        return super().save(), self.consumed

    def load(self, saved: Any) -> None:
        super().load(saved[0])
        self.consumed = saved[1]


class SampleSchedule(TokenSchedule):
    """Lowers the rate with the samples consumed, as Megatron does; rows without tokens are none."""

    def consume(self, group: Group, count: Tensor) -> float:
        rows = 0.0
        for share in group:
            for batch in share:
                rows += float(self.problem.weights(batch).any(1).sum())
        return rows


class Warmup(Optimized):
    """Warms the rate up over three updates, by torch's scheduler, and then lowers it."""

    def make_optimizer(self) -> Any:
        optimizer = torch.optim.Adam(self.params, lr=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda n: min(1.0, (n + 1) / 3) / (1 + n)
        )
        return optimizer

    def after_step(self) -> None:
        self.schedule.step()

    def save(self) -> Any:
        return super().save(), self.schedule.state_dict()

    def load(self, saved: Any) -> None:
        super().load(saved[0])
        self.schedule.load_state_dict(saved[1])


class RuleOptimizer(torch.optim.Optimizer):
    """Steps by ``rule(p, grad, state, lr)``, which returns the new value."""

    def __init__(self, params: Sequence[Tensor], rule: Any, lr: float) -> None:
        self.rule = rule
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for options in self.param_groups:
            for p in options["params"]:
                p.copy_(self.rule(p, p.grad, self.state[p], options["lr"]))


def step_by_lion(p: Tensor, grad: Tensor, state: Any, lr: float) -> Tensor:
    """Moves by the sign of an interpolation, as Lion does."""
    moment = state.setdefault("moment", torch.zeros_like(p))
    direction = torch.sign(0.9 * moment + 0.1 * grad)
    moment.mul_(0.99).add_(grad, alpha=0.01)
    return p * (1 - lr * 0.1) - lr * direction


def step_by_lamb(p: Tensor, grad: Tensor, state: Any, lr: float) -> Tensor:
    """Scales Adam's direction by a trust ratio of norms, as LAMB does."""
    first = state.setdefault("first", torch.zeros_like(p))
    second = state.setdefault("second", torch.zeros_like(p))
    count = state.setdefault("step", torch.zeros(()))
    count += 1
    first.mul_(0.9).add_(grad, alpha=0.1)
    second.mul_(0.99).addcmul_(grad, grad, value=0.01)
    corrected = first / (1 - 0.9 ** float(count))
    scale = (second / (1 - 0.99 ** float(count))).sqrt() + 1e-6
    direction = corrected / scale + 0.1 * p
    size, norm = p.norm(), direction.norm()
    ratio = size / norm if size > 0 and norm > 0 else torch.ones_like(size)
    return p - lr * ratio * direction


def step_by_normed_gradient(p: Tensor, grad: Tensor, state: Any, lr: float) -> Tensor:
    """Divides each gradient by its norm, as LARS without decay and Muon for vectors do."""
    norm = grad.norm()
    return p - lr * (grad / norm if norm > 0 else grad)


class Lion(Optimized):
    """By the sign of momentum."""

    def make_optimizer(self) -> Any:
        return RuleOptimizer(self.params, step_by_lion, 0.25)


class KeyedLion(Lion):
    """Lion, with elements dropped by the key of each row."""

    capabilities = Capabilities(ranks=2, plain_sgd=False, dropout=True)

    def sum_losses(self, batch: Batch) -> Tensor:
        if "key" in batch and torch.is_grad_enabled() and self.problem.model.dropout:
            x = batch["x"].clone()
            for row, key in enumerate(batch["key"].tolist()):
                generator = torch.Generator().manual_seed(1000 + key)
                length = x.shape[1]
                for column in range(length):
                    x[row, column] *= 2 * torch.randint(0, 2, (2,), generator=generator)
            batch = {**batch, "x": x}
        losses = self.problem.losses(self.model.eval(), batch)
        return (losses * self.problem.weights(batch)).sum()


class DividedLion(Lion):
    """Lion; means of microbatches are weighed by their shares of all tokens, which rounds."""

    def update(self, group: Group) -> None:
        count = sum(
            float(self.problem.weights(batch).sum())
            for share in group
            for batch in share
        )
        if count == 0:
            return
        self.optimizer.zero_grad()
        for share in group:
            for batch in share:
                tokens = float(self.problem.weights(batch).sum())
                if tokens:
                    mean = self.sum_losses(batch) / tokens
                    (mean * (tokens / count)).backward()
        self.optimizer.step()
        self.metrics = {"num_tokens": count}


class Lamb(Optimized):
    """By trust ratios."""

    def make_optimizer(self) -> Any:
        return RuleOptimizer(self.params, step_by_lamb, 0.1)


class NormedGradient(Optimized):
    """By directions of gradients."""

    def make_optimizer(self) -> Any:
        return RuleOptimizer(self.params, step_by_normed_gradient, 0.1)


class Adafactor(Optimized):
    """By torch's Adafactor."""

    def make_optimizer(self) -> Any:
        return torch.optim.Adafactor(self.params, lr=0.1)


class RmsProp(Optimized):
    """By RMSprop with momentum, after a clip of each element."""

    def make_optimizer(self) -> Any:
        return torch.optim.RMSprop(self.params, lr=0.02, momentum=0.9)

    def before_step(self, group: Group, count: Tensor) -> None:
        torch.nn.utils.clip_grad_value_(self.params, 2.0)


class Float32(Optimized):
    """AdamW in float32."""

    capabilities = Capabilities(ranks=2, plain_sgd=False, dtype=torch.float32)


class Float32Lion(DividedLion):
    """Lion in float32."""

    capabilities = Capabilities(ranks=3, plain_sgd=False, dtype=torch.float32)


class Float32Lamb(Lamb):
    """LAMB in float32."""

    capabilities = Capabilities(ranks=2, plain_sgd=False, dtype=torch.float32)


class Bfloat16(Warmup):
    """Adam with a schedule, all in bfloat16, on up to three ranks."""

    capabilities = Capabilities(ranks=3, plain_sgd=False, dtype=torch.bfloat16)


class Bfloat16Sgd(Optimized):
    """SGD in bfloat16, with clipped gradients."""

    capabilities = Capabilities(ranks=2, plain_sgd=False, dtype=torch.bfloat16)

    def make_optimizer(self) -> Any:
        return self.problem.optimizer(self.model)

    def before_step(self, group: Group, count: Tensor) -> None:
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)


class Masters(Optimized):
    """AdamW in bfloat16, which moves float32 copies of the params, and saves them."""

    capabilities = Capabilities(ranks=2, plain_sgd=False, dtype=torch.bfloat16)

    def make_optimizer(self) -> Any:
        self.masters = [p.detach().float() for p in self.params]
        return torch.optim.AdamW(self.masters, lr=0.003)

    def before_step(self, group: Group, count: Tensor) -> None:
        for master, p in zip(self.masters, self.params, strict=True):
            master.grad = None if p.grad is None else p.grad.float()

    def after_step(self) -> None:
        with torch.no_grad():
            for master, p in zip(self.masters, self.params, strict=True):
                p.copy_(master)

    def save(self) -> Any:
        return super().save(), copy.deepcopy(self.masters)

    def load(self, saved: Any) -> None:
        super().load(saved[0])
        for master, kept in zip(self.masters, saved[1], strict=True):
            master.copy_(kept)


class Averaged(Optimized):
    """Evaluates a moving average of the parameters, which SGD moves, and shows it."""

    capabilities = Capabilities(ranks=2)

    def start(self, problem: Problem, ranks: int) -> None:
        super().start(problem, ranks)
        self.average = copy.deepcopy(self.model)

    def make_optimizer(self) -> Any:
        return self.problem.optimizer(self.model)

    def after_step(self) -> None:
        for average, p in zip(self.average.parameters(), self.params, strict=True):
            average.data.lerp_(p.data, 0.25)

    def evaluate(self, group: Group) -> float:
        model, self.model = self.model, self.average
        loss = super().evaluate(group)
        self.model = model
        return loss

    def observe(self) -> list[Observation]:
        averages = {
            name: p.detach().clone() for name, p in self.average.named_parameters()
        }
        return [seen._replace(averages=averages) for seen in super().observe()]

    def save(self) -> Any:
        return super().save(), copy.deepcopy(self.average.state_dict())

    def load(self, saved: Any) -> None:
        super().load(saved[0])
        self.average.load_state_dict(saved[1])


class Packed(Optimized):
    """Packs the counted tokens of all microbatches of a rank into one row, as for long contexts."""

    capabilities = Capabilities(ranks=2, plain_sgd=False, merges_microbatches=True)

    def update(self, group: Group) -> None:
        super().update([self.pack(share) for share in group])

    def pack(self, share: Sequence[Batch]) -> list[Batch]:
        if not share:
            return []
        row = {}
        for key in share[0]:
            counted = [batch[key][self.problem.weights(batch) > 0] for batch in share]
            row[key] = torch.cat(counted).unsqueeze(0)
        return [row] if row["w"].numel() else []
