"""One graph of forward, backward and sums of a microbatch, by ``torch.compile``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from purestep import tree
from purestep.compiling import Compiler, graph
from purestep.grads.functional import detach_results, microbatch_grads
from purestep.grads.inplace import clone_aliased, inplace_backward, vjp_grads
from purestep.grads.microbatch import (
    GradAccumulator,
    GradFn,
    MicrobatchInputs,
    MicrobatchResult,
)
from purestep.types import GradHook, LossFn, Tree


def compiled_backward(loss_fn: LossFn, compile: bool | Compiler) -> GradFn:
    """One graph of forward, backward and sums, which it makes, or writes to in place.

    Where the compiler makes no such graph, it is ``inplace_backward``, and a warning says why.
    """

    def sums_of(
        params: Tree, sums: list[Tensor] | None, dtypes: list[torch.dtype], *given: Any
    ) -> tuple[list[Tensor], MicrobatchResult]:
        grads, beside = detach_results(
            *microbatch_grads(loss_fn, vjp_grads, params, *given)
        )
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

    def reverse(
        inputs: MicrobatchInputs, sums: GradAccumulator, ready: GradHook | None
    ) -> MicrobatchResult:
        values, dtypes = sums
        params = tree.unflatten(inputs.structure, inputs.leaves)
        so_far = None if any(total is None for total in values) else values
        if inputs.check and so_far is None:
            # What refuses a call does not see a trace. Its draws are made again.
            own = [leaf.detach().requires_grad_() for leaf in inputs.leaves]
            with torch.enable_grad(), preserve_generators(inputs.leaves[0].device):
                loss_fn(tree.unflatten(inputs.structure, own), inputs.microbatch)
        beside: MicrobatchResult
        made, beside = one(params, so_far, dtypes, *inputs[2:5])
        if so_far is None:
            clone_aliased(
                made,
                [*inputs.leaves, *tree.leaves(inputs.microbatch), inputs.weights],
            )
        if ready is not None:
            made = [ready(index, total) for index, total in enumerate(made)]
        values[:] = made
        return beside

    return graph.with_fallback(reverse, inplace_backward(loss_fn))


def preserve_generators(device: torch.device) -> Any:
    """Restores the random generators of the host and of the device at the end of the context."""
    has_generator = hasattr(getattr(torch, device.type, None), "get_rng_state")
    if device.type == "cpu" or not has_generator:
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)
