"""TorchOpt's functional optimizers; it has no accumulation of its own."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.trainers.column import Column, count, loss_sum
from purestep.testing.problem import Batch, Problem
from purestep.testing.trainer import Capabilities, Group, Observation


class TorchOpt:
    """``torchopt.sgd`` over ``torch.func``: gradients of sums over the group's count are added, then given to it."""

    capabilities = Capabilities()

    def start(self, problem: Problem, ranks: int) -> None:
        """Params and state are values."""
        import torchopt

        self.problem, self.module, self.params = (
            problem,
            problem.module(),
            problem.params(),
        )
        self.sgd: Any = torchopt.sgd(
            problem.learning_rate,
            momentum=problem.momentum,
            weight_decay=problem.weight_decay,
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


class TorchOptObject(TorchOpt):
    """``torchopt.SGD``, which is stepped like an optimizer of torch, and has a ``state_dict``."""

    def start(self, problem: Problem, ranks: int) -> None:
        """Params are leaves, which it updates in place."""
        import torchopt

        self.problem, self.module = problem, problem.module()
        self.params = dict(self.module.named_parameters())
        self.optimizer: Any = torchopt.SGD(
            self.module.parameters(),
            problem.learning_rate,
            momentum=problem.momentum,
            weight_decay=problem.weight_decay,
        )

    def update(self, group: Group) -> None:
        """Counts first."""
        (microbatches,) = group
        num_tokens = count(self.problem, microbatches)
        if num_tokens:
            self.optimizer.zero_grad()
            for batch in microbatches:
                (loss_sum(self.problem, self.module, batch) / num_tokens).backward()
            self.optimizer.step()

    def observe(self) -> Sequence[Observation]:
        """The parameters."""
        return [
            Observation({name: p.detach().clone() for name, p in self.params.items()})
        ]

    def save(self) -> Any:
        """Copies of both."""
        return copy.deepcopy((self.module.state_dict(), self.optimizer.state_dict()))

    def load(self, saved: Any) -> None:
        """Into the new module and the new optimizer."""
        params, opt_state = saved
        self.module.load_state_dict(params)
        self.optimizer.load_state_dict(opt_state)


COLUMNS = [
    Column(
        "TorchOpt, functions",
        TorchOpt,
        ("torchopt", "torch"),
        "the README of metaopt/torchopt, “TorchOpt as Functional Optimizer”",
        "It has no accumulation; gradients of sums over the group's count are added, and given to optimizer.update as its "
        "README says, with inplace=False:\n\nupdates, opt_state = optimizer.update(grads, opt_state)  # get updates\n"
        "params = torchopt.apply_updates(params, updates)         # update network parameters",
        gives="first call",
    ),
    Column(
        "TorchOpt, object",
        TorchOptObject,
        ("torchopt", "torch"),
        "the docstring of torchopt.optim.Optimizer",
        "“A base class for classic optimizers that similar to :class:`torch.optim.Optimizer`”; “state_dict: Return the state of the "
        "optimizer”; “load_state_dict: Load the optimizer state.”",
        gives="first call",
    ),
]
