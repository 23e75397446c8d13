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
from purestep.grads.microbatch import (
    GradAccumulator,
    GradFn,
    MicrobatchInputs,
    MicrobatchResult,
)
from purestep.objective import forward_microbatch, weighted_sum
from purestep.torch_private import check_inference_mode
from purestep.types import GradAndValue, GradHook, LossFn, Microbatch, TokenCounts, Tree

GradsOf = Callable[..., tuple[list[Tensor], Tensor, list[Tensor]]]
"""From ``function(*leaves) -> (value, aux)`` and leaves to gradients, value and aux."""


def functional_backward(
    loss_fn: LossFn,
    differentiate: GradsOf,
    compile: bool | Compiler = False,
    *,
    copy: bool = False,
) -> GradFn:
    """A reverse mode that returns gradients, which are added out of place; ``copy`` what it keeps.

    By ``torch.func.vjp`` it serves transforms, derivatives and compilers: sums keep their graph.
    """
    run = graph.compile_or_call(
        functools.partial(microbatch_grads, loss_fn, differentiate), compile
    )

    def reverse(
        inputs: MicrobatchInputs, sums: GradAccumulator, ready: GradHook | None
    ) -> MicrobatchResult:
        params = tree.unflatten(inputs.structure, inputs.leaves)
        beside: MicrobatchResult
        grads, beside = run(params, *inputs[2:5])
        given = tree.leaves((inputs.leaves, inputs.microbatch, inputs.divisors or ()))
        if not tree.may_be_differentiated(given):
            grads, beside = detach_results(grads, beside)
        add_grads(sums, grads, copy=copy)
        return beside._replace(loss=beside.loss.clone()) if copy else beside

    return reverse


def microbatch_grads(
    loss_fn: LossFn,
    differentiate: GradsOf,
    params: Tree,
    microbatch: Microbatch,
    weights: Tensor | None,
    divisors: TokenCounts | None,
) -> tuple[list[Tensor], MicrobatchResult]:
    """The gradients of the microbatch's part, and the results beside them, with their graph."""
    leaves, structure = tree.flatten(params)
    reached, kind = True, None

    def loss_of(*leaves: Tensor) -> tuple[Tensor, list[Tensor]]:
        nonlocal reached, kind
        params = tree.unflatten(structure, tree.views_for_dynamo(leaves))
        with (
            graph.flat_linear()
            if torch.compiler.is_dynamo_compiling()
            else nullcontext()
        ):
            part = forward_microbatch(loss_fn, params, microbatch, weights, divisors)
        loss = weighted_sum(part.terms, part.cotangents)
        reached = loss.requires_grad or not tree.leaves_require_grad(leaves)
        aux, kind = tree.flatten(part.aux)
        return loss, [part.weights, *aux]

    grads, loss, (weights, *aux) = differentiate(loss_of, leaves)
    return grads, MicrobatchResult(loss, weights, tree.unflatten(kind, aux), reached)


def from_user_grad_and_value(grad_and_value: GradAndValue) -> GradsOf:
    """The same by the user's ``grad_and_value(f, has_aux=True)(leaves)``."""

    def differentiate(
        function: Callable[..., tuple[Tensor, list[Tensor]]], leaves: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        check_inference_mode()
        run = grad_and_value(lambda leaves: function(*leaves), has_aux=True)
        grads, (value, aux) = run(leaves)
        return [*grads], value, aux

    return differentiate


def detach_results(
    grads: list[Tensor], beside: MicrobatchResult
) -> tuple[list[Tensor], MicrobatchResult]:
    """The same, detached: what the loss closes over is a constant, even if it requires grad."""
    loss, weights, aux, reached = beside
    beside = MicrobatchResult(
        loss.detach(), weights.detach(), tree.detach(aux), reached
    )
    return tree.detach_leaves(grads), beside


def add_grads(
    sums: GradAccumulator, grads: Sequence[Tensor], *, copy: bool = False
) -> None:
    """Adds gradients out of place, so that sums may be recorded; ``copy`` of what others hold."""
    values, dtypes = sums
    for index, grad in enumerate(grads):
        so_far = values[index]
        grad = grad.to_dense() if grad.is_sparse else grad
        grad = grad.to(dtypes[index], copy=copy and so_far is None)
        values[index] = grad if so_far is None else so_far + grad
