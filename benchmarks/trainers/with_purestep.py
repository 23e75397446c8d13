"""purestep, as its pages write it: the pure step, on threads and on processes of a gloo group, and a loop around make_backward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import purestep as ps
from benchmarks.trainers.column import Column
from purestep.testing.adapters import Processes, PureTrainer
from purestep.testing.problem import Batch, Problem
from purestep.testing.trainer import Capabilities, Observation


def make(
    problem: Problem, axis: ps.Axis, **how: Any
) -> tuple[Any, Any, Callable[..., Any]]:
    """Params, state and step."""
    params, apply = ps.from_module(problem.module())

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        keys = (
            ps.random.fold_in(ps.random.key(0), batch["key"])
            if "key" in batch
            else None
        )

        def model(*args: Any, **kwargs: Any) -> Any:
            return apply(params, *args, key=keys, **kwargs)

        return problem.losses(model, batch)

    optimizer = ps.optim.from_torch(
        torch.optim.SGD,
        lr=problem.learning_rate,
        momentum=problem.momentum,
        weight_decay=problem.weight_decay,
    )
    step = ps.make_update_step(
        loss_fn, optimizer, weight_fn=problem.weights, axis=axis, **how
    )
    return params, optimizer.init(params), step


class Rank:
    """One process of several."""

    def start(self, problem: Problem) -> None:
        """Makes the step."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        self._params, self._state, self._step = make(problem, ps.MeshAxis(mesh, "dp"))
        self._metrics: Any = None

    def update(self, microbatches: Sequence[Batch]) -> None:
        """One update."""
        self._params, self._state, self._metrics = self._step(
            self._params, self._state, microbatches
        )

    def observe(self) -> Observation:
        """The parameters, and the metrics."""
        names = ("loss", "grad_norm", "num_tokens")
        reports = {name: getattr(self._metrics, name, None) for name in names}
        return Observation(dict(self._params), **reports)


class BridgedRank:
    """One process of several, whose loop calls ``make_backward``, as howto/bridge.md has it."""

    def start(self, problem: Problem) -> None:
        """Makes the module, the optimizer and the backward pass."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        self._model = problem.module()
        self._optimizer = problem.optimizer(self._model)
        self._backward = ps.make_backward(
            self._model,
            problem.losses,
            weight_fn=problem.weights,
            axis=ps.MeshAxis(mesh, "dp"),
        )
        self._metrics: Any = None

    def update(self, microbatches: Sequence[Batch]) -> None:
        """One update."""
        self._metrics = self._backward(microbatches)
        if self._metrics.num_tokens:
            self._optimizer.step()

    def observe(self) -> Observation:
        """The parameters, and the metrics."""
        parameters = {
            name: parameter.detach()
            for name, parameter in self._model.named_parameters()
        }
        names = ("loss", "grad_norm", "num_tokens")
        reports = {name: getattr(self._metrics, name, None) for name in names}
        return Observation(parameters, **reports)


COLUMNS = [
    Column(
        "purestep",
        lambda: PureTrainer(make, Capabilities(ranks=3, dropout=True)),
        ("purestep", "torch"),
        "README.md",
        "ps.make_update_step(loss_fn, optimizer, weight_fn=..., axis=...), on ranks that are threads.",
    ),
    Column(
        "purestep, gloo",
        lambda: Processes(Rank, Capabilities(ranks=3, dropout=True)),
        ("purestep", "torch"),
        "README.md",
        "The same, on ranks that are processes.",
    ),
    Column(
        "purestep, make_backward",
        lambda: Processes(BridgedRank, Capabilities(ranks=3)),
        ("purestep", "torch"),
        "docs/pages/howto/bridge.md",
        "metrics = backward(microbatches); optimizer.step() where metrics.num_tokens is not 0; on processes.",
    ),
]
