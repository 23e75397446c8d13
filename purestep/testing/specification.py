"""Defines the specification, as a trainer: the equation on one big batch, in ten plain lines."""

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from purestep.testing.problem import Batch, Params, Problem
from purestep.testing.trainer import Capabilities, Group, Observation


def spec(
    loss_fn: Callable[..., Any],
    update: Callable[..., Any],
    params: Any,
    opt_state: Any,
    batch: Any,
) -> Any:
    """Makes one update by the equation, on a batch with the weights ``batch["w"]``.

    The loss is the weighted mean of ``loss_fn(params, batch)``, one loss per weight, with weights
    in float64. Returns a tuple: what ``update(grads, opt_state, params)`` returns, the gradients,
    and the loss before the update. Without weight, the loss is NaN, and so are the gradients of the
    elements that it depends on. The gradients of all other elements are 0, as they always are.
    """
    weights = batch["w"].to(torch.float64)
    leaves, spec_of_params = optree.tree_flatten(params)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]

    losses = loss_fn(optree.tree_unflatten(spec_of_params, leaves), batch)
    loss = (weights * losses).sum() / weights.sum()
    grads = torch.autograd.grad(loss, leaves, materialize_grads=True)

    grads_tree = optree.tree_unflatten(spec_of_params, grads)
    return update(grads_tree, opt_state, params), grads_tree, loss.detach()


class ReferenceTrainer:
    """Trains by the equation: all microbatches of all ranks are one batch, in float64.

    The model is in evaluation mode, without dropout.
    """

    capabilities = Capabilities(ranks=64)

    def start(self, problem: Problem, ranks: int) -> None:
        """Begins anew, at float64 copies of the problem's parameters, with moments of zero.

        The number of ``ranks`` makes no difference.
        """
        self.problem = problem
        self._module = problem.module().double().eval()
        self.params: Params = {}
        self._moments: Params = {}
        for name, p in problem.params().items():
            wide = p.double()
            self.params[name] = wide
            self._moments[name] = torch.zeros_like(wide)
        self._reported: dict[str, Any] = {}

    def update(self, group: Group) -> None:
        """Computes θ, m ← SGD(∇ Σ wᵢ ℓᵢ(θ) / Σ wᵢ, m, θ), if any token has weight.

        ``observe`` reports its loss, gradient norm and number of tokens. Without weight, nothing
        changes; loss and number of tokens are reported as 0, and the norm as None.
        """
        self._reported = {"loss": 0.0, "num_tokens": 0.0}
        batch = join_group(group)
        if batch is None:
            return
        weights = self.problem.weights(batch)
        if not weights.any():
            return
        new_state, grads, loss = spec(
            self._losses,
            self._sgd,
            self.params,
            self._moments,
            {**batch, "w": weights},
        )
        self.params, self._moments = new_state
        squares = [grad.square().sum() for grad in grads.values()]
        grad_norm = torch.stack(squares).sum().sqrt()
        self._reported = {
            "loss": loss,
            "grad_norm": grad_norm,
            "num_tokens": weights.sum(),
        }

    def _losses(self, params: Params, batch: Batch) -> Tensor:
        def model(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(self._module, params, args, kwargs)

        return self.problem.losses(model, batch)

    def _sgd(
        self, grads: Params, moments: Params, params: Params
    ) -> tuple[Params, Params]:
        problem = self.problem
        new_params = {}
        new_moments = {}
        for name, p in params.items():
            grad = grads[name] + problem.weight_decay * p
            moment = problem.momentum * moments[name] + grad
            new_moments[name] = moment
            new_params[name] = p - problem.learning_rate * moment
        return new_params, new_moments

    def observe(self) -> Sequence[Observation]:
        """Returns one observation, for all ranks: the parameters, and the last update's reports.

        These are its loss, its gradient's norm and its number of tokens, without rounding below
        float64. Before the first update they are None.
        """
        return [Observation(self.params, **self._reported)]

    def evaluate(self, group: Group) -> float:
        """Returns Σ wᵢ ℓᵢ / Σ wᵢ over all microbatches of the group, at the current parameters.

        That is NaN without weight. A group without microbatches raises ``AssertionError``.
        """
        batch = join_group(group)
        assert batch is not None
        weights = self.problem.weights(batch).double()
        losses = self._losses(self.params, batch)
        mean = (weights * losses).sum() / weights.sum()
        return float(mean)


def join_group(group: Group) -> Batch | None:
    """Joins the microbatches of all ranks into one batch, in order of rank; None if there are none.

    It pads rows and converts floats to float64, as ``join_batches`` does.
    """
    return join_batches([batch for share in group for batch in share])


def join_batches(batches: Sequence[Batch]) -> Batch | None:
    """Joins all rows into one batch, with floats as float64; None if there are no batches.

    Shorter rows are padded with zeros, labels with -100. Entries of one dimension, such as "key",
    are not padded.
    """
    if not batches:
        return None
    length = max(_row_length(batch) for batch in batches)
    joined = {}
    for key in batches[0]:
        fill = -100 if key == "labels" else 0
        padded = [_pad_rows(batch[key], length, fill) for batch in batches]
        x = torch.cat(padded)
        if x.is_floating_point():
            x = x.double()
        joined[key] = x
    return joined


def _row_length(batch: Batch) -> int:
    return max(x.shape[1] for x in batch.values() if x.ndim > 1)


def _pad_rows(x: Tensor, length: int, fill: int) -> Tensor:
    if x.ndim == 1:  # Such as "key": one number for each row.
        return x
    num_rows, old_length, *features = x.shape
    missing = length - old_length
    if not missing:
        return x
    padding = x.new_full((num_rows, missing, *features), fill)
    return torch.cat([x, padding], 1)
