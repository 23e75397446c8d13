"""Losses as other people write them: with hooks, backward passes, closures and checkpoints inside.

Each is the integer model's loss, or a polynomial more, and stands beside the same in plain arithmetic. What a
loss does to its parameters acts within one microbatch, so the cut does not matter to it either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import purestep as ps
from proofs.models import Batch, integer_loss

Loss = Callable[[Any, Batch], Tensor]

CLOSED_OVER = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
"""A parameter of somebody else's."""


class Program(NamedTuple):
    """A loss, made anew for each step, and what it computes."""

    make: Callable[[], Loss]
    plain: Loss


def twice_out(params: Any, batch: Batch) -> Tensor:
    """The gradient of the last layer is doubled."""
    out = params["out"][0]
    return integer_loss({**params, "out": [2 * out - out.detach()]}, batch)


def hooked() -> Loss:
    """A hook on a leaf doubles its gradient."""

    def loss(params: Any, batch: Batch) -> Tensor:
        params["out"][0].register_hook(lambda grad: 2 * grad)
        return integer_loss(params, batch)

    return loss


def hooked_node() -> Loss:
    """A hook on the node that accumulates, which is kept, does the same."""
    kept = []

    def loss(params: Any, batch: Batch) -> Tensor:
        out = params["out"][0]
        node = out.view_as(out).grad_fn.next_functions[0][0]
        node.register_prehook(lambda grads: tuple(2 * grad for grad in grads))
        kept.append(node)
        return integer_loss(params, batch)

    return loss


def backward_inside() -> Loss:
    """A backward pass of its own, for a purpose of its own."""

    def loss(params: Any, batch: Batch) -> Tensor:
        (params["hidden"]["weight"].square().sum() + params["out"][0].sum()).backward()
        return integer_loss(params, batch)

    return loss


def keeping() -> Loss:
    """The leaves are kept, and what has come of those of earlier microbatches is zeroed."""
    kept: list[Any] = []

    def loss(params: Any, batch: Batch) -> Tensor:
        for leaf in kept:
            if leaf.grad is not None:
                leaf.grad.zero_()
        kept.extend([params["hidden"]["weight"], params["out"][0]])
        return integer_loss(params, batch)

    return loss


def closed_over() -> Loss:
    """A parameter that is no part of params."""
    return lambda params, batch: CLOSED_OVER * integer_loss(params, batch)


def differentiating() -> Loss:
    """Forces: derivatives with respect to the inputs, which take part in the loss."""

    def loss(params: Any, batch: Batch) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        energy = (x @ params["hidden"]["weight"]).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return integer_loss(params, batch) + (force * batch["x"]).sum(-1)

    return loss


def forces(params: Any, batch: Batch) -> Tensor:
    """The same, in closed form."""
    return integer_loss(params, batch) + batch["x"] @ params["hidden"]["weight"].sum(1)


def checkpointed() -> Loss:
    """Activations are computed again, with the parameters that the function closes over."""

    def loss(params: Any, batch: Batch) -> Tensor:
        losses: Tensor = checkpoint(
            lambda x: integer_loss(params, {**batch, "x": x}), batch["x"], use_reentrant=False
        )
        return losses

    return loss


def rematerialised() -> Loss:
    """All of it is computed again, by ``ps.remat``."""
    return ps.remat(integer_loss)


PROGRAMS = {
    "plain": Program(lambda: integer_loss, integer_loss),
    "hooked": Program(hooked, twice_out),
    "hooked node": Program(hooked_node, twice_out),
    "backward inside": Program(backward_inside, integer_loss),
    "keeping": Program(keeping, integer_loss),
    "closed over": Program(closed_over, integer_loss),
    "differentiating": Program(differentiating, forces),
    "checkpointed": Program(checkpointed, integer_loss),
    "rematerialised": Program(rematerialised, integer_loss),
}


class Layers(torch.nn.Module):
    """Two layers as a module, of which the second is computed again in the backward pass, or is not."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
        self.second = torch.nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        """The sum over the last layer's outputs."""
        hidden = torch.relu(x @ self.first)
        out: Tensor
        if self.again:
            out = checkpoint(self.last, hidden, use_reentrant=False)
        else:
            out = self.last(hidden)
        return out

    def last(self, hidden: Tensor) -> Tensor:
        """Its derivative needs the parameter's own value."""
        return (hidden @ self.second).square().sum(-1)


def module_loss(again: bool, frozen: bool) -> Loss:
    """The module by ``torch.func.functional_call``; the parameters that it was made with may be frozen."""
    module = Layers(again).requires_grad_(not frozen)

    def loss(params: Any, batch: Batch) -> Tensor:
        losses: Tensor = torch.func.functional_call(module, params, (batch["x"],))
        return losses

    return loss
