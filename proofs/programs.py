"""Writes losses as other people do: with hooks, backward passes, closures and checkpoints inside.

Each computes the integer model's loss, or a polynomial, and has an equal in plain arithmetic.
What a loss does to its parameters acts within one microbatch, so the cut does not matter to it either.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import purestep as ps
from support.models import Batch, integer_loss

Loss = Callable[[Any, Batch], Tensor]

CLOSED_OVER = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
"""A parameter that is no part of params."""


def hidden_weight(params: Any) -> Tensor:
    """Returns the hidden layer's matrix."""
    weight: Tensor = params["hidden"]["weight"]
    return weight


def with_hidden_weight(params: Any, weight: Tensor) -> Any:
    """Replaces the hidden layer's matrix."""
    return {**params, "hidden": {**params["hidden"], "weight": weight}}


def with_out(params: Any, out: Tensor) -> Any:
    """Replaces the last layer's vector."""
    return {**params, "out": [out]}


def double_out_grad(params: Any, batch: Batch) -> Tensor:
    """Doubles the gradient of the last layer."""
    out = params["out"][0]
    return integer_loss(with_out(params, 2 * out - out.detach()), batch)


def hook_leaf(params: Any, batch: Batch) -> Tensor:
    """Doubles a leaf's gradient by a hook."""
    params["out"][0].register_hook(lambda grad: 2 * grad)
    return integer_loss(params, batch)


def make_node_hook() -> Loss:
    """Doubles it by a hook on the node that accumulates, to which a reference is kept."""
    nodes = []

    def loss(params: Any, batch: Batch) -> Tensor:
        out = params["out"][0]
        node = out.view_as(out).grad_fn.next_functions[0][0]
        node.register_prehook(lambda grads: tuple(2 * grad for grad in grads))
        nodes.append(node)
        return integer_loss(params, batch)

    return loss


def backward_inside(params: Any, batch: Batch) -> Tensor:
    """Runs a backward pass for another purpose."""
    total = hidden_weight(params).square().sum() + params["out"][0].sum()
    total.backward()
    return integer_loss(params, batch)


def make_leaf_collector() -> Loss:
    """Collects the leaves, and zeroes the gradients of those of this rank's earlier microbatches."""
    leaves_by_thread: dict[int, list[Any]] = {}

    def loss(params: Any, batch: Batch) -> Tensor:
        leaves = leaves_by_thread.setdefault(threading.get_ident(), [])
        for leaf in leaves:
            if leaf.grad is not None:
                leaf.grad.zero_()
        leaves.append(hidden_weight(params))
        leaves.append(params["out"][0])
        return integer_loss(params, batch)

    return loss


def freeze_leaf(params: Any, batch: Batch) -> Tensor:
    """Freezes a leaf."""
    params["out"][0].requires_grad_(False)
    return integer_loss(params, batch)


def detach_out(params: Any, batch: Batch) -> Tensor:
    """Freezes the same leaf by ``detach``."""
    return integer_loss(with_out(params, params["out"][0].detach()), batch)


def assign_data(params: Any, batch: Batch) -> Tensor:
    """Gives a leaf other values."""
    hidden_weight(params).data = 2 * hidden_weight(params).data
    return integer_loss(params, batch)


def add_detached(params: Any, batch: Batch) -> Tensor:
    """Computes the gradient at those values."""
    weight = hidden_weight(params)
    return integer_loss(with_hidden_weight(params, weight + weight.detach()), batch)


def close_over(params: Any, batch: Batch) -> Tensor:
    """Depends on a parameter that is no part of params, so that its graph could grow."""
    return CLOSED_OVER * integer_loss(params, batch)


def differentiate_energy(params: Any, batch: Batch) -> Tensor:
    """Adds forces: derivatives by the inputs, for which the loss marks them."""
    x = batch["x"].requires_grad_()
    energy = (x @ hidden_weight(params)).sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return integer_loss(params, batch) + (force * batch["x"]).sum(-1)


def closed_form_forces(params: Any, batch: Batch) -> Tensor:
    """Adds the same in closed form, without the energy's derivative."""
    forces = batch["x"] @ hidden_weight(params).sum(1)
    return integer_loss(params, batch) + forces


def route_to_experts(params: Any, batch: Batch) -> Tensor:
    """Reaches leaves only by some tokens, and so only in some microbatches."""
    to_first = batch["y"] > 0
    losses = torch.stack(params["hidden"]["biases"]).sum() + 0 * batch["y"]
    if to_first.any():
        losses = losses + torch.where(to_first, hidden_weight(params).sum(), 0)
    if not to_first.all():
        losses = losses + torch.where(to_first, 0, params["out"][0].sum())
    return losses


def run_all_experts(params: Any, batch: Batch) -> Tensor:
    """Reaches each leaf in every microbatch."""
    weight = hidden_weight(params).sum()
    out = params["out"][0].sum()
    biases = torch.stack(params["hidden"]["biases"]).sum()
    return biases + torch.where(batch["y"] > 0, weight, out)


def sparse_embedding(params: Any, batch: Batch) -> Tensor:
    """Looks up an embedding whose gradient is sparse."""
    indices = batch["y"].long() % 3
    rows = functional.embedding(indices, hidden_weight(params), sparse=True)
    return rows.sum(-1) * batch["x"].sum(-1)


def dense_embedding(params: Any, batch: Batch) -> Tensor:
    """Looks up the same with a dense gradient."""
    rows = hidden_weight(params)[batch["y"].long() % 3]
    return rows.sum(-1) * batch["x"].sum(-1)


class First(torch.autograd.Function):
    """Returns the first of two tensors, with no gradient for the second."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        """Copies the first."""
        return a.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Returns None for the second."""
        return grad, None


def without_gradient(params: Any, batch: Batch) -> Tensor:
    """Calls a function that has no gradient for a leaf."""
    apply: Any = First.apply
    weight: Tensor = apply(hidden_weight(params), params["out"][0])
    return weight.sum() * batch["y"]


def weight_sum(params: Any, batch: Batch) -> Tensor:
    """Computes what ``without_gradient`` does, in plain arithmetic."""
    return hidden_weight(params).sum() * batch["y"]


def recompute_activations(params: Any, batch: Batch) -> Tensor:
    """Computes activations again, with the parameters that the function closes over."""
    losses: Tensor = checkpoint(
        lambda x: integer_loss(params, {**batch, "x": x}),
        batch["x"],
        use_reentrant=False,
    )
    return losses


class ProgramPair(NamedTuple):
    """A function that makes a loss anew for each step, and the same loss in plain arithmetic."""

    make: Callable[[], Loss]
    plain: Loss


PROGRAMS = {
    "plain": ProgramPair(lambda: integer_loss, integer_loss),
    "hooked": ProgramPair(lambda: hook_leaf, double_out_grad),
    "hooked node": ProgramPair(make_node_hook, double_out_grad),
    "backward inside": ProgramPair(lambda: backward_inside, integer_loss),
    "keeping": ProgramPair(make_leaf_collector, integer_loss),
    "freezing": ProgramPair(lambda: freeze_leaf, detach_out),
    "other values": ProgramPair(lambda: assign_data, add_detached),
    "closed over": ProgramPair(lambda: close_over, integer_loss),
    "differentiating": ProgramPair(lambda: differentiate_energy, closed_form_forces),
    "experts": ProgramPair(lambda: route_to_experts, run_all_experts),
    "sparse": ProgramPair(lambda: sparse_embedding, dense_embedding),
    "without a gradient": ProgramPair(lambda: without_gradient, weight_sum),
    "checkpointed": ProgramPair(lambda: recompute_activations, integer_loss),
    "rematerialised": ProgramPair(lambda: ps.remat(integer_loss), integer_loss),
}


class TwoLayers(torch.nn.Module):
    """Has two layers, of which the second may be computed again in the backward pass."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
        self.second = torch.nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        """Returns, for each token, the sum of squares of the second layer's outputs."""
        hidden = torch.relu(x @ self.first)
        if not self.recomputes:
            return self.last(hidden)
        out: Tensor = checkpoint(self.last, hidden, use_reentrant=False)
        return out

    def last(self, hidden: Tensor) -> Tensor:
        """Sums the second layer's squared outputs: their derivative needs the parameter's value."""
        return (hidden @ self.second).square().sum(-1)


def make_module_loss(*, recomputes: bool, frozen: bool) -> Loss:
    """Makes a loss that calls a module by ``torch.func.functional_call``.

    ``frozen``: the module's parameters require no gradient.
    """
    module = TwoLayers(recomputes=recomputes).requires_grad_(not frozen)

    def loss(params: Any, batch: Batch) -> Tensor:
        losses: Tensor = torch.func.functional_call(module, params, (batch["x"],))
        return losses

    return loss
