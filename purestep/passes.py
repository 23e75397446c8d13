"""One microbatch, forward and backward: in place, as one compiled graph, or by whatever reverse mode is asked for.

All of them differentiate the same part of the objective, and give the same beside gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.backward import GradientSums, backward, own_leaves
from purestep.compiler import Compiler, NoGraph, compiled, one_graph
from purestep.loss_gathers import LossGathers
from purestep.objective import PartOf, value
from purestep.tokens import checked_weights
from purestep.types import Count, GradAndValue, Microbatch, Params, Tally, Tree, WeightFn

Ready: TypeAlias = Callable[[int], None]
"""Is told the position of a leaf whose sum is final."""


class Task(NamedTuple):
    """What a pass is to differentiate: the part of the objective that belongs to this microbatch."""

    leaves: list[Tensor]
    structure: tree.Structure
    microbatch: Microbatch
    weights: Tensor | None
    total: Count | None
    loss_gathers: LossGathers | None = None


class Told(NamedTuple):
    """What it gives beside gradients, and whether the loss depends on the leaves at all."""

    loss: Tensor
    num_tokens: list[Tensor]
    aux: Tree
    reached: bool


Pass: TypeAlias = Callable[[Task, GradientSums, Ready | None], Told]
"""Adds the gradients to the sums."""


def in_place_pass(part_of: PartOf) -> Pass:
    """By autograd's own backward pass, on leaves of the step's own."""

    def run(task: Task, sums: GradientSums, ready: Ready | None) -> Told:
        own = own_leaves(task.leaves)
        with (
            task.loss_gathers.microbatch(own, sums)
            if task.loss_gathers
            else nullcontext() as gathered
        ):
            with torch.enable_grad():
                part = part_of(tree.unflatten(task.structure, own), *task[2:5])
            chain = gathered.chain() if gathered else []
            ends = [*part.terms, *chain], [*part.cotangents, *map(torch.zeros_like, chain)]
            reached = backward(*ends, own, sums, ready) or bool(chain)
        loss = value([term.detach() for term in part.terms], part.cotangents)
        return Told(loss, part.num_tokens, tree.detached(part.aux), reached)

    return run


def compiled_pass(
    part_of: PartOf, grad_and_value: GradAndValue, compile: Literal[True] | Compiler
) -> Pass:
    """As one graph: forward, backward and the sums, which it makes, or writes to in place.

    Where there is no such graph, and where somebody waits for single sums, the forward pass is compiled alone.
    """
    returned = returning_pass(part_of, grad_and_value, None)
    in_pieces = in_place_pass(compiled(part_of, compile))
    makes_graph = True

    def add(
        params: Params, sums: list[Tensor] | None, dtypes: list[torch.dtype], *given: Any
    ) -> tuple[list[Tensor], Told]:
        # What the loss closes over is a constant, whether it requires grad or not.
        grads, told = tree.detached(returned(params, *given))
        if sums is None:
            return [grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)], told
        for so_far, grad in zip(sums, grads, strict=True):
            so_far.add_(grad)
        return [], told

    graph = one_graph(add, compile)

    def run(task: Task, sums: GradientSums, ready: Ready | None) -> Told:
        nonlocal makes_graph
        told: Told
        if makes_graph and ready is None:
            params, so_far = tree.unflatten(task.structure, task.leaves), sums.begun()
            try:
                made, told = graph(params, so_far, sums.dtypes, *task[2:5])
            except NoGraph:
                pass
            else:
                sums.begin(so_far or made)
                return told
        # What the loss itself raises is raised here, without a word about the compiler.
        told = in_pieces(task, sums, ready)
        makes_graph = makes_graph and ready is not None
        return told

    return run


def returning_pass(
    part_of: PartOf, grad_and_value: GradAndValue, weight_fn: WeightFn | None
) -> Callable[..., tuple[list[Tensor], Told]]:
    """``run(params, microbatch, weights, total)`` by any reverse mode, which returns the gradients of the leaves."""

    def run(
        params: Params, microbatch: Microbatch, weights: Tensor | None, total: Count | None, /
    ) -> tuple[list[Tensor], Told]:
        leaves, structure = tree.flatten(params)
        reached = True

        def over_leaves(leaves: list[Tensor], given: Microbatch) -> Any:
            nonlocal reached
            here = weights
            if weight_fn is not None and not tree.same(given, microbatch):
                # A piece of the microbatch, from a reverse mode that looks at examples one by one.
                here = checked_weights(weight_fn(given))
            part = part_of(tree.unflatten(structure, leaves), given, here, total)
            loss = value(part.terms, part.cotangents)
            # Where the leaves are not tracked, this reverse mode has a way of its own.
            tracked = any(leaf.requires_grad for leaf in leaves)
            reached = loss.requires_grad or not tracked
            return loss, Tally(part.num_tokens, part.aux)

        differentiate = grad_and_value(over_leaves, has_aux=True)
        grads, (loss, (num_tokens, aux)) = differentiate(leaves, microbatch)
        return list(grads), Told(loss, num_tokens, aux, reached)

    return run
