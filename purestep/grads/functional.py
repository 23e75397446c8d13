"""The reverse modes of a loss: plain, and for transforms, compilers and the user's functions.

    in_place      autograd's backward pass, which adds gradients to their sums as it goes
    returning     torch.func.vjp, under transforms and wherever a step is recorded; or the user's
                  ``grad_and_value``
    compiled      one graph of forward, backward and sums

All differentiate the same part of the objective, and have one signature.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from purestep import tree
from purestep.compiling import Compiler, graph
from purestep.grads.microbatch import Beside, Inputs, Reverse, Sums
from purestep.objective import part_of, value
from purestep.torch_private import check_inference_mode
from purestep.types import Count, GradAndValue, LossFn, Microbatch, Ready, Tree

Differentiate = Callable[..., tuple[list[Tensor], Tensor, list[Tensor]]]
"""From ``function(*leaves) -> (value, aux)`` and leaves to gradients, value and aux."""


def returning(
    loss_fn: LossFn,
    differentiate: Differentiate,
    compile: bool | Compiler = False,
    *,
    copy: bool = False,
) -> Reverse:
    """A reverse mode that returns gradients, which are added out of place; ``copy`` what it keeps.

    By ``torch.func.vjp`` it serves transforms, derivatives and compilers: sums keep their graph.
    """
    run = graph.compiled(functools.partial(gradients, loss_fn, differentiate), compile)

    def reverse(inputs: Inputs, sums: Sums, ready: Ready | None) -> Beside:
        params = tree.unflatten(inputs.structure, inputs.leaves)
        beside: Beside
        grads, beside = run(params, *inputs[2:5])
        given = tree.leaves_of(
            (inputs.leaves, inputs.microbatch, inputs.divisors or ())
        )
        if not tree.differentiated(given):
            grads, beside = constant(grads, beside)
        add(sums, grads, copy=copy)
        return beside._replace(loss=beside.loss.clone()) if copy else beside

    return reverse


def gradients(
    loss_fn: LossFn,
    differentiate: Differentiate,
    params: Tree,
    microbatch: Microbatch,
    weights: Tensor | None,
    divisors: Count | None,
) -> tuple[list[Tensor], Beside]:
    """The gradients of the microbatch's part, and the results beside them, with their graph."""
    leaves, structure = tree.flatten(params)
    reached, kind = True, None

    def loss_of(*leaves: Tensor) -> tuple[Tensor, list[Tensor]]:
        nonlocal reached, kind
        params = tree.unflatten(structure, tree.known_to_compilers(leaves))
        with (
            graph.flat_linear()
            if torch.compiler.is_dynamo_compiling()
            else nullcontext()
        ):
            part = part_of(loss_fn, params, microbatch, weights, divisors)
        loss = value(part.terms, part.cotangents)
        reached = loss.requires_grad or not tree.any_requires_grad(leaves)
        aux, kind = tree.flatten(part.aux)
        return loss, [part.weights, *aux]

    grads, loss, (weights, *aux) = differentiate(loss_of, leaves)
    return grads, Beside(loss, weights, tree.unflatten(kind, aux), reached)


def by_users(grad_and_value: GradAndValue) -> Differentiate:
    """The same by the user's ``grad_and_value(f, has_aux=True)(leaves)``."""

    def differentiate(
        function: Callable[..., tuple[Tensor, list[Tensor]]], leaves: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        check_inference_mode()
        run = grad_and_value(lambda leaves: function(*leaves), has_aux=True)
        grads, (value, aux) = run(leaves)
        return [*grads], value, aux

    return differentiate


def constant(grads: list[Tensor], beside: Beside) -> tuple[list[Tensor], Beside]:
    """The same, detached: what the loss closes over is a constant, even if it requires grad."""
    loss, weights, aux, reached = beside
    beside = Beside(loss.detach(), weights.detach(), tree.detached(aux), reached)
    return tree.cut_off(grads), beside


def add(sums: Sums, grads: Sequence[Tensor], *, copy: bool = False) -> None:
    """Adds gradients out of place, so that sums may be recorded; ``copy`` of what others hold."""
    values, dtypes = sums
    for index, grad in enumerate(grads):
        so_far = values[index]
        grad = grad.to_dense() if grad.is_sparse else grad
        grad = grad.to(dtypes[index], copy=copy and so_far is None)
        values[index] = grad if so_far is None else so_far + grad
