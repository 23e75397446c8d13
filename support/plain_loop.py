"""Trains by the loop that people write by hand, done right: the kit has to accept it, and finds bugs in it.

Its ranks are simulated one after the other: count, backward passes, reduction, step. Mutants here and in
benchmarks/ replace lines of it by their text.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from purestep.testing import Capabilities, Observation, Problem

Batch = dict[str, Tensor]


class PlainLoop:
    """Has one model and one optimizer for each rank."""

    capabilities = Capabilities(ranks=3, dropout=True, skips_nonfinite=True)

    def start(self, problem: Problem, ranks: int) -> None:
        """Begins anew: makes a model and an optimizer for each rank."""
        self.problem = problem
        # ``dropped`` does the dropout, so the modules stay in eval mode.
        self.models: list[Any] = [problem.module().eval() for _ in range(ranks)]
        self.optimizers = [problem.optimizer(model) for model in self.models]
        self.reports: list[dict[str, float]] = [{} for _ in range(ranks)]
        self.updates = 0

    def update(self, group: Sequence[Sequence[Batch]]) -> None:
        """Adds up gradients of Σ wᵢ ℓᵢ / N over microbatches and ranks, and steps.

        It does not step if there are no tokens or the gradient is not finite.
        """
        counts = [self.count(share) for share in group]
        total = sum(counts)
        sums = []
        for model, share in zip(self.models, group, strict=True):
            model.zero_grad()
            loss = 0.0
            for batch in share:
                objective = self.weighted_sum(model, batch) / max(total, 1e-300)
                objective.backward()
                loss += objective.item()
            sums.append(loss)
        for params in zip(*[model.parameters() for model in self.models], strict=True):
            grads = [
                p.grad if p.grad is not None else torch.zeros_like(p) for p in params
            ]
            whole = torch.stack(grads).sum(0)
            for p in params:
                p.grad = whole.clone()
        norms = [norm(model) for model in self.models]
        finite = [n < float("inf") for n in norms]
        for rank, optimizer in enumerate(self.optimizers):
            if total > 0 and finite[rank]:
                optimizer.step()
            said = {"loss": sum(sums), "grad_norm": norms[rank], "num_tokens": total}
            self.reports[rank] = said
        self.updates += 1

    def count(self, share: Sequence[Batch]) -> float:
        """Sums the weights of a rank's tokens."""
        return float(sum(self.problem.weights(batch).sum() for batch in share))

    def weighted_sum(
        self, model: nn.Module, batch: Batch, *, training: bool = True
    ) -> Tensor:
        """Computes Σ wᵢ ℓᵢ."""
        weights = self.problem.weights(batch).to(torch.float64)
        losses = self.problem.losses(model, self.dropped(batch) if training else batch)
        return torch.where(weights > 0, weights * losses, 0).sum()

    def dropped(self, batch: Batch) -> Batch:
        """Drops elements of ``x`` by the row's key and position in it, if there is dropout."""
        if not self.problem.model.dropout:
            return batch
        rows, length, features = batch["x"].shape
        x = batch["x"].clone()
        for row in range(rows):
            for column in range(length):
                key = int(batch["key"][row])
                generator = torch.Generator().manual_seed(1000 * key + column)
                x[row, column] *= 2 * torch.randint(
                    0, 2, (features,), generator=generator
                )
        return {**batch, "x": x}

    def observe(self) -> list[Observation]:
        """Reports the params and the metrics of each rank."""
        return [
            Observation(
                {name: p.detach().clone() for name, p in model.named_parameters()},
                **said,
            )
            for model, said in zip(self.models, self.reports, strict=True)
        ]

    def evaluate(self, group: Sequence[Sequence[Batch]]) -> float:
        """Computes the mean loss over all tokens."""
        total = sum(self.count(share) for share in group)
        batches = [batch for share in group for batch in share]
        with torch.no_grad():
            sums = [
                float(self.weighted_sum(self.models[0], b, training=False))
                for b in batches
            ]
        return sum(sums) / total

    def save(self) -> Any:
        """Copies the whole state."""
        return copy.deepcopy(
            (self.models, [o.state_dict() for o in self.optimizers], self.updates)
        )

    def load(self, saved: Any) -> None:
        """Restores a saved state."""
        self.models, states, self.updates = copy.deepcopy(saved)
        self.optimizers = [self.problem.optimizer(model) for model in self.models]
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def norm(model: nn.Module) -> float:
    """Computes the norm of all gradients."""
    squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())
