"""Reverse mode as a function: ``torch.func.grad_and_value`` in half its memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
    This function frees each activation as soon as the backward pass has used it. Under a transform
    it calls ``torch.func.vjp``, where second derivatives work. So it does, after a first try, where
    ``func`` closes over tensors that require grad, as a loss does that differentiates by its data.

    Args:
        func: a function that returns a scalar tensor, or ``(scalar, aux)`` with ``has_aux``.
        argnums: the positions to differentiate. Each argument is a tree of floating-point tensors.
        has_aux: whether ``func`` also returns a tree of tensors.

    Returns:
        A function that returns ``(grads, value)``, or ``(grads, (value, aux))`` with ``has_aux``.

    >>> grads, value = grad_and_value(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([3.0])})
    >>> grads, value
    ({'w': tensor([6.])}, tensor(9.))
    """
    positions = argnums if isinstance(argnums, tuple) else (argnums,)

    @functools.wraps(func)
    def grads_and_value_of(*args: Any, **kwargs: Any) -> Any:
        if not all(-len(args) <= position < len(args) for position in positions):
            raise ValueError(
                f"{argnums=} needs more than the {len(args)} arguments given"
            )
        leaves, structure = tree.flatten(
            tuple(args[position] for position in positions)
        )
        aux_structure: tree.TreeSpec = None

        def over_leaves(*leaves: Tensor) -> tuple[Tensor, list[Tensor]]:
            nonlocal aux_structure
            filled = list(args)
            given = tree.unflatten(structure, tree.views_for_dynamo(leaves))
            for position, argument in zip(positions, given, strict=True):
                filled[position] = argument
            value, aux = _value_and_aux(func(*filled, **kwargs), has_aux)
            aux_leaves, aux_structure = tree.flatten(aux)
            return value, aux_leaves

        plain = tree.is_plain_eager(args, kwargs) and not is_inference(leaves)
        if plain:
            sums = GradAccumulator(
                [None] * len(leaves), [leaf.dtype for leaf in leaves]
            )
            own = [leaf.detach().requires_grad_() for leaf in leaves]
            with torch.enable_grad():
                value, aux_leaves = over_leaves(*own)
            # What else it depends on may be differentiated later, as in a loss.
            others = {*map(id, validation.reachable_leaves([value]))} - {*map(id, own)}
            plain = not (others and torch.is_grad_enabled())
        if plain:
            with validation.forbid_module_recompute(own):
                run_backward_into([value], [torch.ones_like(value)], own, sums)
            pulled = zeros_for_missing(sums, leaves)
            value, aux_leaves = tree.detach((value, aux_leaves))
        else:
            pulled, value, aux_leaves = vjp_grads(over_leaves, leaves)
        grads = tree.unflatten(structure, pulled)
        grads = grads if isinstance(argnums, tuple) else grads[0]
        if has_aux:
            return grads, (value, tree.unflatten(aux_structure, aux_leaves))
        return grads, value

    return grads_and_value_of


def _value_and_aux(output: Any, has_aux: bool) -> tuple[Tensor, Tree]:
    paired = has_aux and isinstance(output, tuple) and len(output) == 2
    value, aux = output if paired else (output, None)
    if not isinstance(value, Tensor) or value.ndim != 0 or paired != has_aux:
        found = (
            f"shape {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else type(value).__name__
        )
        raise ValueError(
            f"the function must return a scalar tensor, or (scalar, aux) with has_aux=True; with "
            f"{has_aux=} it returned {found}"
        )
    return value, aux
