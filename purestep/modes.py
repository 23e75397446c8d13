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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep import tree
from purestep.compiling import Compiler, graph
from purestep.grad_and_value import grad_and_value as plain_grad_and_value
from purestep.objective import part_of, value
from purestep.reverse import Beside, Inputs, Reverse, Sums, by_vjp, in_place, unshare
from purestep.torch_private import check_inference_mode
from purestep.types import Count, GradAndValue, LossFn, Microbatch, Ready, Tree

Differentiate = Callable[..., tuple[list[Tensor], Tensor, list[Tensor]]]
"""From ``function(*leaves) -> (value, aux)`` and leaves to gradients, value and aux."""


class ReverseModes(NamedTuple):
    """The reverse mode of a plain step, and of one that is transformed or recorded."""

    plain: Reverse
    recorded: Reverse


def reverse_modes(
    loss_fn: LossFn, grad_and_value: GradAndValue, compile: bool | Compiler = False
) -> ReverseModes:
    """The reverse modes of a loss, made once, so that a compiler compiles it once."""
    if grad_and_value is not plain_grad_and_value:
        mode = returning(loss_fn, by_users(grad_and_value), compile, copy=True)
        return ReverseModes(mode, mode)
    eager = in_place(loss_fn) if compile is False else compiled(loss_fn, compile)
    return ReverseModes(eager, returning(loss_fn, by_vjp))


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


def keep_generators(device: torch.device) -> Any:
    """Restores the random generators of the host and of the device at the end of the context."""
    has_generator = hasattr(getattr(torch, device.type, None), "get_rng_state")
    if device.type == "cpu" or not has_generator:
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


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


def compiled(loss_fn: LossFn, compile: bool | Compiler) -> Reverse:
    """One graph of forward, backward and sums, which it makes, or writes to in place.

    Where the compiler makes no such graph, it is ``in_place``, and a warning says why.
    """

    def sums_of(
        params: Tree, sums: list[Tensor] | None, dtypes: list[torch.dtype], *given: Any
    ) -> tuple[list[Tensor], Beside]:
        grads, beside = constant(*gradients(loss_fn, by_vjp, params, *given))
        if sums is None:
            return [
                grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)
            ], beside
        made = []
        for so_far, grad in zip(sums, grads, strict=True):
            # Compilers drop what is written to a scalar on the host: it is made anew.
            made.append(so_far.add_(grad) if so_far.ndim else so_far + grad)
        return made, beside

    one = graph.one_graph(functools.wraps(loss_fn)(sums_of), compile)

    def reverse(inputs: Inputs, sums: Sums, ready: Ready | None) -> Beside:
        values, dtypes = sums
        params = tree.unflatten(inputs.structure, inputs.leaves)
        so_far = None if any(total is None for total in values) else values
        if inputs.check and so_far is None:
            # What refuses a call does not see a trace. Its draws are made again.
            own = [leaf.detach().requires_grad_() for leaf in inputs.leaves]
            with torch.enable_grad(), keep_generators(inputs.leaves[0].device):
                loss_fn(tree.unflatten(inputs.structure, own), inputs.microbatch)
        beside: Beside
        made, beside = one(params, so_far, dtypes, *inputs[2:5])
        if so_far is None:
            unshare(
                made,
                [*inputs.leaves, *tree.leaves_of(inputs.microbatch), inputs.weights],
            )
        if ready is not None:
            made = [ready(index, total) for index, total in enumerate(made)]
        values[:] = made
        return beside

    return graph.with_fallback(reverse, in_place(loss_fn))
