"""One microbatch, forward and backward: in place, as one compiled graph, or by whatever reverse mode is asked for.

All of them differentiate the same part of the objective, and give the same beside gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.backward import GradientSums, backward, own_leaves
from purestep.compiler import Compiler, NoGraph, compiled, one_graph
from purestep.loss_gathers import LossGathers
from purestep.objective import PartOf, value
from purestep.reverse_mode import by_vjp
from purestep.tokens import checked_weights
from purestep.torch_internals import functions_mark
from purestep.types import Count, GradAndValue, Microbatch, Params, Tally, Tree, WeightFn

Ready: TypeAlias = Callable[[int], None]
"""Is told the position of a leaf whose sum is final."""


class Task(NamedTuple):
    """What a pass is to differentiate: the part of the objective that belongs to this microbatch.

    ``differentiated`` says whether derivatives of what it gives may be asked for.
    """

    leaves: list[Tensor]
    structure: tree.Structure
    microbatch: Microbatch
    weights: Tensor | None
    total: Count | None
    loss_gathers: LossGathers | None = None
    differentiated: bool = False


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
        mark = functions_mark()
        with (
            task.loss_gathers.microbatch(own, sums)
            if task.loss_gathers
            else nullcontext() as gathered
        ):
            with torch.enable_grad():
                part = part_of(tree.unflatten(task.structure, own), *task[2:5])
            chain = gathered.chain() if gathered else []
            ends = [*part.terms, *chain], [*part.cotangents, *map(torch.zeros_like, chain)]
            reached = backward(*ends, own, sums, ready, mark=mark) or bool(chain)
        loss = value([term.detach() for term in part.terms], part.cotangents)
        return Told(loss, part.num_tokens, tree.detached(part.aux), reached)

    return run


def compiled_pass(part_of: PartOf, compile: Literal[True] | Compiler) -> Pass:
    """As one graph: forward, backward and the sums, which it makes, or writes to in place.

    Where there is no such graph, and where somebody waits for single sums, the forward pass is compiled alone.
    """
    in_pieces = in_place_pass(compiled(part_of, compile))
    makes_graph = True

    def add(
        params: Params, sums: list[Tensor] | None, dtypes: list[torch.dtype], *given: Any
    ) -> tuple[list[Tensor], Told]:
        grads, told = _constant(*_gradients(part_of, *tree.flatten(params), *given))
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
                if so_far is None:
                    sums.begin(made)
                else:
                    sums.values = [*so_far]  # with zeros for those that had not begun
                return told
        # What the loss itself raises is raised here, without a word about the compiler.
        told = in_pieces(task, sums, ready)
        makes_graph = makes_graph and ready is not None
        return told

    return run


def recorded_pass(part_of: PartOf) -> Pass:
    """By ``torch.func.vjp``, for whoever transforms, differentiates or compiles a step: sums keep their graph."""

    def run(task: Task, sums: GradientSums, ready: Ready | None) -> Told:
        grads, told = _gradients(part_of, *task[:5])
        if not task.differentiated:
            grads, told = _constant(grads, told)
        sums.add(grads, copy=False)
        return told

    return run


def _gradients(
    part_of: PartOf,
    leaves: list[Tensor],
    structure: tree.Structure,
    microbatch: Microbatch,
    weights: Tensor | None,
    total: Count | None,
) -> tuple[list[Tensor], Told]:
    """The gradients of the microbatch's part, by leaf, and what it gives beside them, all with their graph."""
    reached, counts, kind = True, 0, None

    def loss_of(*leaves: Tensor) -> tuple[Tensor, list[Tensor]]:
        nonlocal reached, counts, kind
        part = part_of(tree.unflatten(structure, leaves), microbatch, weights, total)
        loss = value(part.terms, part.cotangents)
        reached, counts = _reaches(loss, leaves), len(part.num_tokens)
        aux, kind = tree.flatten(part.aux)
        return loss, [*part.num_tokens, *aux]

    grads, loss, beside = by_vjp(loss_of, leaves)
    aux = tree.unflatten(kind, beside[counts:])
    return grads, Told(loss, beside[:counts], aux, reached)


def _reaches(loss: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Whether the loss depends on them; where they are not tracked, reverse mode has a way of its own."""
    return loss.requires_grad or not tree.any_requires_grad(leaves)


def _constant(grads: list[Tensor], told: Told) -> tuple[list[Tensor], Told]:
    """What the loss closes over is a constant, whether it requires grad or not."""
    loss, num_tokens, aux, reached = told
    told = Told(loss.detach(), tree.cut_off(num_tokens), tree.detached(aux), reached)
    return tree.cut_off(grads), told


def returning_pass(
    part_of: PartOf,
    grad_and_value: GradAndValue,
    weight_fn: WeightFn | None,
    compile: bool | Compiler,
) -> Pass:
    """By any reverse mode, which returns the gradients."""

    def gradients(
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
            params = tree.unflatten(structure, tree.known_to_compilers(leaves))
            part = part_of(params, given, here, total)
            loss = value(part.terms, part.cotangents)
            reached = _reaches(loss, leaves)
            return loss, Tally(part.num_tokens, part.aux)

        differentiate = grad_and_value(over_leaves, has_aux=True)
        grads, (loss, (num_tokens, aux)) = differentiate(leaves, microbatch)
        return list(grads), Told(loss, num_tokens, aux, reached)

    gradients = compiled(gradients, compile)

    def run(task: Task, sums: GradientSums, ready: Ready | None) -> Told:
        grads, told = gradients(tree.unflatten(task.structure, task.leaves), *task[2:5])
        if not task.differentiated:
            grads, told = _constant(grads, told)
        # What a reverse mode of the user's returns may be a buffer of theirs.
        sums.add(grads, copy=True)
        return told._replace(loss=told.loss.clone())

    return run
