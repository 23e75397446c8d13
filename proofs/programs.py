"""Losses as other people write them: with hooks, backward passes, closures and checkpoints inside.

Each is the integer model's loss, or a polynomial more, and stands beside the same in plain
arithmetic. What a loss does to its parameters acts within one microbatch, so the cut does not
matter to it either.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import purestep as ps
from proofs.models import Batch, integer_loss

Loss = Callable[[Any, Batch], Tensor]

CLOSED_OVER = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
"""A parameter that is no part of params."""


def weight_of(params: Any) -> Tensor:
    """The hidden layer's matrix."""
    found: Tensor = params["hidden"]["weight"]
    return found


def twice_out(params: Any, batch: Batch) -> Tensor:
    """The gradient of the last layer is doubled."""
    out = params["out"][0]
    return integer_loss({**params, "out": [2 * out - out.detach()]}, batch)


def hooked(params: Any, batch: Batch) -> Tensor:
    """A hook on a leaf doubles its gradient."""
    params["out"][0].register_hook(lambda grad: 2 * grad)
    return integer_loss(params, batch)


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


def backward_inside(params: Any, batch: Batch) -> Tensor:
    """A backward pass for another purpose."""
    (weight_of(params).square().sum() + params["out"][0].sum()).backward()
    return integer_loss(params, batch)


def keeping() -> Loss:
    """The leaves are kept, and the gradients of those of this rank's earlier microbatches are zeroed."""
    kept: dict[int, list[Any]] = {}

    def loss(params: Any, batch: Batch) -> Tensor:
        own = kept.setdefault(threading.get_ident(), [])
        for leaf in own:
            if leaf.grad is not None:
                leaf.grad.zero_()
        own.extend([weight_of(params), params["out"][0]])
        return integer_loss(params, batch)

    return loss


def freezing(params: Any, batch: Batch) -> Tensor:
    """A leaf is frozen."""
    params["out"][0].requires_grad_(False)
    return integer_loss(params, batch)


def frozen_out(params: Any, batch: Batch) -> Tensor:
    """The same by ``detach``."""
    return integer_loss({**params, "out": [params["out"][0].detach()]}, batch)


def other_values(params: Any, batch: Batch) -> Tensor:
    """A leaf gets other values."""
    weight_of(params).data = 2 * weight_of(params).data
    return integer_loss(params, batch)


def doubled_weight(params: Any, batch: Batch) -> Tensor:
    """The gradient at those values."""
    weight = weight_of(params) + weight_of(params).detach()
    return integer_loss(
        {**params, "hidden": {**params["hidden"], "weight": weight}}, batch
    )


def closed_over(params: Any, batch: Batch) -> Tensor:
    """A parameter that is no part of params, beside a graph that grows."""
    return CLOSED_OVER * integer_loss(params, batch)


def differentiating(params: Any, batch: Batch) -> Tensor:
    """Forces: derivatives by the inputs, which the loss marks, take part in it."""
    x = batch["x"].requires_grad_()
    energy = (x @ weight_of(params)).sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return integer_loss(params, batch) + (force * batch["x"]).sum(-1)


def forces(params: Any, batch: Batch) -> Tensor:
    """The same in closed form, without the energy's derivative."""
    x = batch["x"]
    return integer_loss(params, batch) + x @ weight_of(params).sum(1)


def experts(params: Any, batch: Batch) -> Tensor:
    """Leaves that only some tokens reach, and so only some microbatches."""
    first, weight, out = batch["y"] > 0, weight_of(params), params["out"][0]
    losses = torch.stack(params["hidden"]["biases"]).sum() + 0 * batch["y"]
    if first.any():
        losses = losses + torch.where(first, weight.sum(), 0)
    if not first.all():
        losses = losses + torch.where(first, 0, out.sum())
    return losses


def all_experts(params: Any, batch: Batch) -> Tensor:
    """Each leaf is reached by every microbatch."""
    weight, out = weight_of(params).sum(), params["out"][0].sum()
    biases = torch.stack(params["hidden"]["biases"]).sum()
    return biases + torch.where(batch["y"] > 0, weight, out)


def sparse(params: Any, batch: Batch) -> Tensor:
    """An embedding whose gradient is sparse."""
    found = functional.embedding(batch["y"].long() % 3, weight_of(params), sparse=True)
    return found.sum(-1) * batch["x"].sum(-1)


def dense(params: Any, batch: Batch) -> Tensor:
    """The same with a dense one."""
    return weight_of(params)[batch["y"].long() % 3].sum(-1) * batch["x"].sum(-1)


class First(torch.autograd.Function):
    """The first of two tensors, with no gradient for the second."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        """A copy of the first."""
        return a.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """None for the second."""
        return grad, None


def without_gradient(params: Any, batch: Batch) -> Tensor:
    """A function has no gradient for a leaf."""
    apply: Any = First.apply
    found: Tensor = apply(weight_of(params), params["out"][0]).sum() * batch["y"]
    return found


def checkpointed(params: Any, batch: Batch) -> Tensor:
    """Activations are computed again, with the parameters that the function closes over."""
    losses: Tensor = checkpoint(
        lambda x: integer_loss(params, {**batch, "x": x}),
        batch["x"],
        use_reentrant=False,
    )
    return losses


PROGRAMS: dict[str, tuple[Callable[[], Loss], Loss]] = {
    "plain": (lambda: integer_loss, integer_loss),
    "hooked": (lambda: hooked, twice_out),
    "hooked node": (hooked_node, twice_out),
    "backward inside": (lambda: backward_inside, integer_loss),
    "keeping": (keeping, integer_loss),
    "freezing": (lambda: freezing, frozen_out),
    "other values": (lambda: other_values, doubled_weight),
    "closed over": (lambda: closed_over, integer_loss),
    "differentiating": (lambda: differentiating, forces),
    "experts": (lambda: experts, all_experts),
    "sparse": (lambda: sparse, dense),
    "without a gradient": (
        lambda: without_gradient,
        lambda p, b: weight_of(p).sum() * b["y"],
    ),
    "checkpointed": (lambda: checkpointed, integer_loss),
    "rematerialised": (lambda: ps.remat(integer_loss), integer_loss),
}
"""Each loss, made anew for each step, and the same in plain arithmetic."""


class Layers(torch.nn.Module):
    """Two layers, of which the second is computed again in the backward pass, or is not."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
        self.second = torch.nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        """The sum over the last layer's outputs."""
        hidden = torch.relu(x @ self.first)
        if not self.again:
            return self.last(hidden)
        out: Tensor = checkpoint(self.last, hidden, use_reentrant=False)
        return out

    def last(self, hidden: Tensor) -> Tensor:
        """Its derivative needs the parameter's own value."""
        return (hidden @ self.second).square().sum(-1)


def module_loss(again: bool, frozen: bool) -> Loss:
    """The module by ``torch.func.functional_call``; its own parameters may be frozen."""
    module = Layers(again).requires_grad_(not frozen)

    def loss(params: Any, batch: Batch) -> Tensor:
        losses: Tensor = torch.func.functional_call(module, params, (batch["x"],))
        return losses

    return loss
