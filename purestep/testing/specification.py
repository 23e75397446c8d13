"""The specification, as a trainer: the equation on one big batch, in ten plain lines."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from purestep.testing.problem import Batch, Params, Problem
from purestep.testing.trainer import Abilities, Group, Observation


def spec(
    loss_fn: Callable[..., Any],
    update: Callable[..., Any],
    params: Any,
    opt_state: Any,
    batch: Any,
) -> Any:
    """One step on a batch with the weights ``batch["w"]``: ``(params, opt_state), grads, loss``."""
    weights = batch["w"].to(torch.float64)
    num_tokens = weights.sum()

    def loss_of(params: Any) -> Any:
        return (weights * loss_fn(params, batch)).sum() / num_tokens

    grads = torch.func.grad(loss_of)(params)
    return update(grads, opt_state, params), grads, loss_of(params)


class Specification:
    """The trainer that is right: all microbatches of all ranks are one batch, in float64."""

    abilities = Abilities(ranks=64)

    def start(self, problem: Problem, ranks: int) -> None:
        """Begins anew."""
        self.problem, self._module = problem, problem.module().to(torch.float64).eval()
        self.params = {
            name: p.to(torch.float64) for name, p in problem.params().items()
        }
        self._moments: Params = {
            name: torch.zeros_like(p) for name, p in self.params.items()
        }
        self._reported: dict[str, Any] = {}

    def update(self, group: Group) -> None:
        """θ, m ← SGD(∇ Σ wᵢ ℓᵢ(θ) / Σ wᵢ, m, θ), where there is a token at all."""
        batch = together([part for share in group for part in share])
        if batch is None or not self.problem.weights(batch).any():
            self._reported = {"loss": 0.0, "num_tokens": 0.0}
            return
        weighted = {**batch, "w": self.problem.weights(batch)}
        after = spec(self._losses, self._sgd, self.params, self._moments, weighted)
        (self.params, self._moments), grads, loss = after
        norm = (
            torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
        )
        self._reported = {
            "loss": loss,
            "grad_norm": norm,
            "num_tokens": weighted["w"].sum(),
        }

    def _losses(self, params: Params, batch: Batch) -> Tensor:
        def model(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(self._module, params, args, kwargs)

        return self.problem.losses(model, batch)

    def _sgd(
        self, grads: Params, moments: Params, params: Params
    ) -> tuple[Params, Params]:
        rate, momentum = self.problem.learning_rate, self.problem.momentum
        grads = {
            name: grads[name] + self.problem.weight_decay * p
            for name, p in params.items()
        }
        moments = {
            name: momentum * moments[name] + grad for name, grad in grads.items()
        }
        return {name: p - rate * moments[name] for name, p in params.items()}, moments

    def observe(self) -> Sequence[Observation]:
        """The parameters, and the true loss, norm and count."""
        return [Observation(self.params, **self._reported)]

    def evaluate(self, group: Group) -> float:
        """Σ wᵢ ℓᵢ / Σ wᵢ."""
        batch: Any = together([part for share in group for part in share])
        weights = self.problem.weights(batch).to(torch.float64)
        return float((weights * self._losses(self.params, batch)).sum() / weights.sum())


def together(parts: Sequence[Batch]) -> Batch | None:
    """All rows as one batch; shorter ones are padded with zeros, labels with -100."""
    if not parts:
        return None
    keys = parts[0]
    longest = max(
        part[key].shape[1] for part in parts for key in keys if part[key].ndim > 1
    )

    def filled(key: str, x: Tensor) -> Tensor:
        if x.ndim == 1:
            return x
        more = [0, 0] * (x.ndim - 2) + [0, longest - x.shape[1]]
        return torch.nn.functional.pad(x, more, value=-100 if key == "labels" else 0)

    wide = {key: torch.cat([filled(key, part[key]) for part in parts]) for key in keys}
    return {key: x.double() if x.is_floating_point() else x for key, x in wide.items()}
