"""Reverse mode as a function: ``torch.func.grad_and_value`` in half its memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from purestep import tree, validation
from purestep.grads.inplace import (
    is_inference,
    run_backward_into,
    vjp_grads,
    zeros_for_missing,
)
from purestep.grads.microbatch import GradAccumulator
from purestep.types import Tree


def grad_and_value(
    func: Callable[..., Any],
    /,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Differentiates like ``torch.func.grad_and_value``, to the bit, in half the memory.

    ``torch.func`` keeps every activation until the backward pass ends, for a second derivative.
    This function frees each activation as soon as the backward pass has used it. It calls
    ``torch.func.vjp``, where second derivatives work, under a transform or a compiler, and in
    inference or forward mode. It does so, too, if an argument requires grad, or was made in
    inference mode. In grad mode, it also does so where the value, not only aux, depends on other
    tensors that require grad. A loss that differentiates by its data is an example. Only in this
    last case, ``func`` runs twice. Where ``vjp`` is not called, gradients, value and aux are
    detached.

    Args:
        func: a function that returns a real scalar tensor, or ``(scalar, aux)`` with ``has_aux``.
        argnums: the positions to differentiate. Each argument is a tree of floating-point tensors.
        has_aux: whether ``func`` also returns a tree of tensors.

    Returns:
        A function that returns ``(grads, value)``, or ``(grads, (value, aux))`` with ``has_aux``.
        ``grads`` is a tree like the argument; for a tuple ``argnums``, it is a tuple of these. The
        function raises ``ValueError`` for an output of another form. It also does so for a position
        without an argument, for one that comes twice, and for none. On torch 2.11, it also does so
        in inference mode, unless a compiler traces.

    >>> grads, value = grad_and_value(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([3.0])})
    >>> grads, value
    ({'w': tensor([6.])}, tensor(9.))
    """
    positions = argnums if isinstance(argnums, tuple) else (argnums,)

    @functools.wraps(func)
    def compute_grads_and_value(*args: Any, **kwargs: Any) -> Any:
        _check_positions(argnums, positions, len(args))
        differentiated = tuple(args[position] for position in positions)
        leaves, spec = tree.flatten(differentiated)
        aux_spec: tree.TreeSpec = None

        def value_and_aux(*leaves: Tensor) -> tuple[Tensor, list[Tensor]]:
            nonlocal aux_spec
            new_args = list(args)
            replaced = tree.unflatten(spec, tree.views_for_dynamo(leaves))
            for position, argument in zip(positions, replaced, strict=True):
                new_args[position] = argument
            value, aux = _split_output(func(*new_args, **kwargs), has_aux)
            aux_leaves, aux_spec = tree.flatten(aux)
            return value, aux_leaves

        results = None
        if tree.is_plain_eager(args, kwargs) and not is_inference(leaves):
            results = _free_as_it_runs(value_and_aux, leaves)
        if results is None:
            results = vjp_grads(value_and_aux, leaves)
        grad_leaves, value, aux_leaves = results
        grads = tree.unflatten(spec, grad_leaves)
        if not isinstance(argnums, tuple):
            (grads,) = grads
        if has_aux:
            return grads, (value, tree.unflatten(aux_spec, aux_leaves))
        return grads, value

    return compute_grads_and_value


def _check_positions(
    argnums: int | tuple[int, ...], positions: Sequence[int], num_args: int
) -> None:
    """Raises ``ValueError`` unless each position has an argument, and none comes twice."""
    for position in positions:
        if not -num_args <= position < num_args:
            raise ValueError(
                f"{argnums=} needs more than the {num_args} arguments given"
            )
    distinct = {position % num_args for position in positions}
    if not positions or len(distinct) < len(positions):
        raise ValueError(f"{argnums=} must name each argument once, and one at least")


def _free_as_it_runs(
    function: Callable[..., tuple[Tensor, list[Tensor]]], leaves: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor, list[Tensor]] | None:
    """Differentiates by autograd's own pass, which frees activations as it runs.

    Returns gradients, value and aux, all detached. In grad mode, it returns None where the value
    depends on other tensors that require grad, since it may be differentiated by these later. Then
    ``function`` has run, but no backward pass.
    """
    accumulator = GradAccumulator([None] * len(leaves), [leaf.dtype for leaf in leaves])
    variables = [leaf.detach().requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        value, aux = function(*variables)
    variable_ids = {id(variable) for variable in variables}
    reachable = validation.reachable_leaves([value])
    if torch.is_grad_enabled() and any(id(x) not in variable_ids for x in reachable):
        return None
    with validation.forbid_module_recompute(variables):
        run_backward_into([value], [torch.ones_like(value)], variables, accumulator)
    grads = zeros_for_missing(accumulator, leaves)
    return grads, value.detach(), tree.detach_leaves(aux)


def _split_output(output: Any, has_aux: bool) -> tuple[Tensor, Tree]:
    """Splits an output into scalar and aux, which is None without ``has_aux``.

    Raises ``ValueError`` if it has another form.
    """
    is_pair = has_aux and isinstance(output, tuple) and len(output) == 2
    value, aux = output if is_pair else (output, None)
    is_real = isinstance(value, Tensor) and not value.is_complex()
    if not is_real or value.ndim != 0 or is_pair != has_aux:
        returned = type(value).__name__
        if isinstance(value, Tensor):
            returned = f"{value.dtype} of shape {tuple(value.shape)}"
        raise ValueError(
            "the function must return a real scalar, or (scalar, aux) with has_aux=True; with "
            f"{has_aux=} it returned {returned}"
        )
    return value, aux
