"""Gradients of one microbatch by a compiled graph of forward pass, backward pass and sums."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from purestep import tree
from purestep.compiling import Compiler, graph
from purestep.grads.functional import detach_results, in_graphs, microbatch_grads
from purestep.grads.inplace import (
    clone_aliased,
    inplace_backward,
    vjp_grads,
    zeros_for_missing,
)
from purestep.grads.microbatch import (
    GradAccumulator,
    GradFn,
    MicrobatchInputs,
    MicrobatchResult,
)
from purestep.tree.opaque import clone_opaque
from purestep.types import GradHook, LossFn, LossOutput, TokenCounts, Tree


def compiled_backward(loss_fn: LossFn, compile_: bool | Compiler) -> GradFn:
    """Makes a backend whose single graph differentiates the loss and makes or updates the sums.

    With ``needs_checks``, the first microbatch of a group also runs the loss eagerly. A loss with a
    checkpoint, say, has no single graph. Then the loss alone is compiled, autograd has a second
    graph for the backward pass, and ``inplace_backward`` adds the gradients. If there is no graph
    of the loss either, a warning says why, and the loss runs eagerly. Of another compiler than
    True, results are copied, but for the sums. ``on_grad_ready`` is called
    for every leaf by the single graph's backend, also where no gradient arrives.
    """

    grads_of = in_graphs(vjp_grads, is_autograd=True)

    def sum_grads(
        params: Tree,
        totals: list[Tensor] | None,
        dtypes: list[torch.dtype],
        microbatch: Any,
        weights: Tensor | None,
        denominators: TokenCounts | None,
    ) -> tuple[list[Tensor], Any]:
        grads, result = detach_results(
            *microbatch_grads(
                loss_fn, grads_of, params, microbatch, weights, denominators
            )
        )
        returned: Any = result.weights
        # For an input that it returns, a graph makes an alias, which takes ten microseconds.
        if weights is not None and weights.device == returned.device:
            returned = None
        # Not by ``_replace``, whose class torch 2.11's compiler does not find.
        result = MicrobatchResult(
            result.loss, returned, result.aux, result.depends_on_params
        )
        if totals is None:
            pairs = zip(grads, dtypes, strict=True)
            return [grad.to(dtype) for grad, dtype in pairs], result
        new_totals = []
        for total, grad in zip(totals, grads, strict=True):
            # Inductor drops what is written to a scalar on the host, so that is a new tensor.
            new_totals.append(total.add_(grad) if total.ndim else total + grad)
        return new_totals, result

    run_graph = graph.compile_one_graph(
        functools.wraps(loss_fn)(sum_grads), compile_, may_fix_sizes=False
    )

    def grad_fn(
        inputs: MicrobatchInputs,
        accumulator: GradAccumulator,
        on_grad_ready: GradHook | None,
    ) -> MicrobatchResult:
        params = tree.unflatten(inputs.spec, inputs.leaves)
        is_first = all(total is None for total in accumulator.values)
        if inputs.needs_checks and is_first:
            _check_eagerly(loss_fn, inputs)
        # A microbatch that ran without a graph leaves None where no gradient came.
        sums = None if is_first else zeros_for_missing(accumulator, inputs.leaves)
        totals, result = run_graph(
            params,
            sums,
            accumulator.dtypes,
            inputs.microbatch,
            inputs.weights,
            inputs.denominators,
        )
        if is_first:
            others = [*inputs.leaves, *inputs.data, inputs.weights]
            clone_aliased(totals, others)
        if on_grad_ready is not None:
            totals = [on_grad_ready(index, total) for index, total in enumerate(totals)]
        accumulator.values[:] = totals
        outputs: Any = (result.loss, result.weights, result.aux)
        # Other compilers than inductor may write to their results in the next call.
        if compile_ is not True:
            outputs = tree.map(torch.clone, outputs)
        loss, new_weights, aux = outputs
        weights: Any = inputs.weights if new_weights is None else new_weights
        return MicrobatchResult(loss, weights, aux, result.depends_on_params)

    otherwise = backward_of_compiled_loss(loss_fn, compile_)
    return graph.with_fallback(grad_fn, otherwise, warns=False)


def backward_of_compiled_loss(
    loss_fn: LossFn,
    compile_: bool | Compiler,
    own_leaves: Callable[[], list[Tensor]] | None = None,
) -> GradFn:
    """Makes a backend that runs ``inplace_backward`` of the compiled loss.

    Where the loss or its backward pass makes no graph, it warns, and runs the loss eagerly.
    ``own_leaves`` returns the leaves to differentiate, where they are the parameters of a module.
    """

    def loss_of_graph(params: Tree, microbatch: Any) -> Any:
        output: Any = loss_fn(params, microbatch)
        if isinstance(output, LossOutput):
            losses, term, aux, weights = output
            return LossOutput(_copy_output(losses), _copy_output(term), aux, weights)
        return _copy_output(output)

    compiled_loss = graph.compile_one_graph(
        functools.wraps(loss_fn)(loss_of_graph), compile_
    )
    by_autograd = inplace_backward(compiled_loss, own_leaves)

    def grad_fn(
        inputs: MicrobatchInputs,
        accumulator: GradAccumulator,
        on_grad_ready: GradHook | None,
    ) -> MicrobatchResult:
        try:
            return by_autograd(inputs, accumulator, on_grad_ready)
        except graph.NoGraph:
            raise
        except Exception as error:
            # The backward pass is compiled when it first runs. It has added to no sum by then,
            # since all gradients come from the graph.
            graph.raise_no_graph(loss_fn, error)

    return graph.with_fallback(grad_fn, inplace_backward(loss_fn, own_leaves))


def _copy_output(output: Any) -> Any:
    """Copies a tensor that a loss returns, in the graph; returns any other value as it is.

    A param that a loss returns itself, as ``LossOutput(losses, params["temperature"])``, would get
    its gradient outside of the graph, before the graph's backward pass is compiled. Where that
    fails, the microbatch runs again, and would add this gradient twice.
    """
    return output.clone() if isinstance(output, Tensor) else output


def _check_eagerly(loss_fn: LossFn, inputs: MicrobatchInputs) -> None:
    """Runs the loss once eagerly, for the checks inside it, as of a module's first call.

    The loss gets a copy of the microbatch, since it may write to it: ``m["x"] = m["x"] / 2``. Drops
    its output. Restores torch's generators of host and device, so that the graph draws the same
    numbers. Python's and numpy's go on.
    """
    leaves = [leaf.detach().requires_grad_() for leaf in inputs.leaves]
    data, spec = tree.flatten(inputs.microbatch)
    copied = tree.unflatten(spec, [clone_opaque(leaf) for leaf in data])
    with torch.enable_grad(), preserve_generators(inputs.leaves[0].device):
        loss_fn(tree.unflatten(inputs.spec, leaves), copied)


def preserve_generators(device: torch.device) -> Any:
    """Returns a context that restores torch's generators of the host and the device at its end."""
    has_generator = hasattr(getattr(torch, device.type, None), "get_rng_state")
    if device.type == "cpu" or not has_generator:
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)
