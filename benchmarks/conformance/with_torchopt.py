"""TorchOpt's functional optimizers; it has no accumulation of its own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.conformance.column import Column, count
from purestep.testing.problem import Batch, Problem
from purestep.testing.trainer import Abilities, Group, Observation


class TorchOpt:
    """``torchopt.sgd`` over ``torch.func``: gradients of sums over the group's count are added, then given to it."""

    abilities = Abilities()

    def start(self, problem: Problem, ranks: int) -> None:
        """Params and state are values."""
        import torchopt

        self.problem, self.module, self.params = problem, problem.module(), problem.params()
        self.sgd: Any = torchopt.sgd(
            problem.learning_rate, momentum=problem.momentum, weight_decay=problem.weight_decay
        )
        self.opt_state = self.sgd.init(self.params)

    def update(self, group: Group) -> None:
        """Counts first."""
        import torchopt

        (microbatches,) = group
        num_tokens = count(self.problem, microbatches)
        if not num_tokens:
            return
        grads = {name: torch.zeros_like(p) for name, p in self.params.items()}
        for batch in microbatches:
            more = torch.func.grad(self.loss_of)(self.params, batch, num_tokens)
            grads = {name: grads[name] + more[name] for name in grads}
        updates, self.opt_state = self.sgd.update(
            grads, self.opt_state, params=self.params, inplace=False
        )
        self.params = torchopt.apply_updates(self.params, updates, inplace=False)

    def loss_of(self, params: Any, batch: Batch, num_tokens: Tensor) -> Tensor:
        """What a microbatch contributes."""

        def model(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(self.module, params, args, kwargs)

        losses = self.problem.losses(model, batch)
        return (losses * self.problem.weights(batch)).sum() / num_tokens

    def observe(self) -> Sequence[Observation]:
        """The parameters."""
        return [Observation(dict(self.params))]

    def save(self) -> Any:
        """Both are values."""
        return self.params, self.opt_state

    def load(self, saved: Any) -> None:
        """Both are values."""
        self.params, self.opt_state = saved


COLUMNS = [
    Column(
        "TorchOpt, sums",
        TorchOpt,
        ("torchopt", "torch"),
        "the README of metaopt/torchopt, “TorchOpt as Functional Optimizer”",
        "It has no accumulation of its own; gradients of sums over the group's count are added, and given to optimizer.update as its "
        "README says, with inplace=False:\n\nupdates, opt_state = optimizer.update(grads, opt_state)  # get updates\n"
        "params = torchopt.apply_updates(params, updates)         # update network parameters",
    ),
]
