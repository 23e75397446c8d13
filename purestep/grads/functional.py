"""Gradients of one microbatch as a function's result, which may itself be differentiated.

It serves transforms, compilers, and a ``grad_and_value`` of the user's: sums keep their graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.compiling import Compiler, graph
from purestep.grads.inplace import vjp_grads
from purestep.grads.microbatch import (
    GradAccumulator,
    GradFn,
    MicrobatchInputs,
    MicrobatchResult,
)
from purestep.objective import forward_microbatch, weighted_sum
from purestep.torch_private import (
    TRACES_AUTOGRAD,
    autograd_grad,
    check_inference_mode,
    one_graph,
)
from purestep.tree.opaque import has_graph
from purestep.types import (
    GradAndValue,
    GradHook,
    LossFn,
    Microbatch,
    TokenCounts,
    Tree,
)

GradsOf: TypeAlias = Callable[..., tuple[list[Tensor], Tensor, list[Tensor]]]
"""Takes ``function(*leaves) -> (value, aux)``, leaves, and a tree of data that it reads, too.

Returns gradients by the leaves, value and aux."""


def functional_backward(
    loss_fn: LossFn,
    grads_of: GradsOf,
    compile_: bool | Compiler = False,
    *,
    copy: bool = False,
) -> GradFn:
    """Makes a backend that differentiates the loss by ``grads_of`` and adds gradients out of place.

    It never calls ``on_grad_ready``. It detaches gradients and results unless params or data may be
    differentiated. ``compile_`` compiles the differentiation, or runs it eagerly with a warning
    where it has no graph. ``copy`` clones the loss and each leaf's first gradient: a compiler
    writes to its results in the next call.
    """
    differentiate = functools.partial(microbatch_grads, loss_fn, grads_of)
    run = graph.compile_or_fall_back(differentiate, compile_)

    def grad_fn(
        inputs: MicrobatchInputs,
        accumulator: GradAccumulator,
        on_grad_ready: GradHook | None,
    ) -> MicrobatchResult:
        params = tree.unflatten(inputs.spec, inputs.leaves)
        result: MicrobatchResult
        grads, result = run(
            params, inputs.microbatch, inputs.weights, inputs.denominators
        )
        # The denominators are sums of weights, which are detached.
        if not tree.may_be_differentiated([*inputs.leaves, *inputs.data]):
            grads, result = detach_results(grads, result)
        add_grads(accumulator, grads, copy=copy)
        return result._replace(loss=result.loss.clone()) if copy else result

    return grad_fn


def microbatch_grads(
    loss_fn: LossFn,
    grads_of: GradsOf,
    params: Tree,
    microbatch: Microbatch,
    weights: Tensor | None,
    denominators: TokenCounts | None,
) -> tuple[list[Tensor], MicrobatchResult]:
    """Returns the gradients of a microbatch's part of the loss by params' leaves, and its result.

    Both keep the graph that ``grads_of`` gives them. ``weights`` and ``denominators`` are as in
    ``MicrobatchInputs``.
    """
    leaves, spec = tree.flatten(params)
    depends_on_params = True
    aux_spec: tree.TreeSpec = None

    def value_and_aux(*leaves: Tensor) -> tuple[Tensor, list[Tensor]]:
        nonlocal depends_on_params, aux_spec
        params = tree.unflatten(spec, tree.views_for_dynamo(leaves))
        weighted = forward_microbatch(
            loss_fn, params, microbatch, weights, denominators
        )
        loss = weighted_sum(weighted.terms, weighted.cotangents)
        # A trace takes the leaves of ``vjp`` for constants, and knows what depends on them.
        is_known = grads_of is vjp_grads or tree.leaves_require_grad(leaves)
        depends_on_params = loss.requires_grad or not is_known
        aux, aux_spec = tree.flatten(weighted.aux)
        return loss, [weighted.weights, *aux]

    grads, loss, (weights, *aux) = grads_of(value_and_aux, leaves, microbatch)
    result = MicrobatchResult(
        loss, weights, tree.unflatten(aux_spec, aux), depends_on_params
    )
    return grads, result


def in_graphs(grads_of: GradsOf, *, is_autograd: bool = False) -> GradsOf:
    """Wraps ``grads_of`` to work in a compiler's trace, too, in a graph whose sizes may vary.

    ``is_autograd`` says that autograd would give the same gradients. Then autograd takes the place
    of ``grads_of`` in a trace. It does not on torch 2.11, under any transform (a ``vmap`` too), or
    where further derivatives may be taken. Autograd takes more operations: a custom one may have a
    backward pass that ``torch.func`` does not take.

    A graph break in the function is an error, also without ``fullgraph``.
    """

    def grads_in_graphs(
        function: Callable[..., tuple[Tensor, list[Tensor]]],
        leaves: Sequence[Tensor],
        data: Tree,
    ) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        if not torch.compiler.is_dynamo_compiling():
            return grads_of(function, leaves, data)
        # A graph of the first piece would hand on values without their derivatives: zeros.
        with one_graph():
            has_data_graph = any(has_graph(leaf) for leaf in tree.leaves(data))
            is_recorded = has_data_graph or tree.may_be_differentiated(leaves)
            if is_autograd and TRACES_AUTOGRAD and not is_recorded:
                return _traced_grads(function, leaves)

            def function_at_any_size(*leaves: Tensor) -> tuple[Tensor, list[Tensor]]:
                with graph.LetSizesVary():
                    return function(*leaves)

            return grads_of(function_at_any_size, leaves, data)

    return grads_in_graphs


def _traced_grads(
    function: Callable[..., tuple[Tensor, list[Tensor]]], leaves: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Differentiates ``function(*leaves) -> (value, aux)`` by autograd, in a trace.

    Returns gradients, value and aux, all detached. Makes the compiler fail in the body of a
    ``torch.cond``, say, where autograd would give zeros.
    """
    graph.refuse_bodies()
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        value, aux = function(*leaves)
    grads = autograd_grad([value], leaves, create_graph=False)
    return [*grads], value.detach(), tree.detach_leaves(aux)


def from_user_grad_and_value(grad_and_value: GradAndValue) -> GradsOf:
    """Turns the user's ``grad_and_value(f, has_aux=True)(leaves)`` into a ``GradsOf``.

    On torch 2.11, the result raises ``ValueError`` in inference mode, unless a compiler traces.
    """

    def grads_of(
        function: Callable[..., tuple[Tensor, list[Tensor]]],
        leaves: Sequence[Tensor],
        data: Tree,
    ) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        check_inference_mode()
        run = grad_and_value(lambda leaves: function(*leaves), has_aux=True)
        grads, (value, aux) = run(leaves)
        return [*grads], value, aux

    return grads_of


def detach_results(
    grads: list[Tensor], result: MicrobatchResult
) -> tuple[list[Tensor], MicrobatchResult]:
    """Returns gradients and result without a graph, not even to tensors that a loss closes over."""
    detached = MicrobatchResult(
        result.loss.detach(),
        result.weights.detach(),
        tree.detach(result.aux),
        result.depends_on_params,
    )
    return tree.detach_leaves(grads), detached


def add_grads(
    accumulator: GradAccumulator, grads: Sequence[Tensor], *, copy: bool = False
) -> None:
    """Adds gradients to the accumulator's sums out of place, so that sums may be recorded.

    Each is made dense and cast to its sum's dtype. A first gradient becomes the sum itself, or with
    ``copy`` its clone. Changes the list ``accumulator.values``.
    """
    values = accumulator.values
    for index, (grad, dtype) in enumerate(zip(grads, accumulator.dtypes, strict=True)):
        total = values[index]
        dense: Any = grad.to_dense() if grad.is_sparse else grad
        if total is None:
            values[index] = dense.to(dtype, copy=copy)
        else:
            values[index] = total + dense.to(dtype)
