"""Compiles whole steps, with the checks that a trace cannot make."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from purestep.compiling.graph import compile_function
from purestep.counts import PreweightedMicrobatches
from purestep.torch_private import (
    forward_level,
    has_transforms,
)

_ATTRIBUTE = "_graph_step"


class GraphStep(NamedTuple):
    """Says how ``ps.compile`` compiles a step."""

    owner: weakref.ref[Any]
    """The step itself: ``functools.wraps`` copies attributes to functions of other arguments."""
    traced: Callable[..., Any]
    """The compiler traces this function in place of the step. It writes to donated arguments."""
    check: Callable[..., None]
    """``check(*args)`` raises unless the step takes these. It runs before each call."""


def set_graph_step(
    step: Callable[..., Any],
    traced: Callable[..., Any],
    check: Callable[..., None],
) -> None:
    """Attaches to a step the function that ``compile`` traces instead, and a check of each call.

    ``check(*args)`` runs before each call, and may raise for its arguments. In a trace, as of a
    function that makes a step, nothing is attached.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    vars(step)[_ATTRIBUTE] = GraphStep(weakref.ref(step), traced, check)


def compile(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Compiles a whole update step, or any function that runs often.

    It is ``torch.compile`` with other options.

        step = ps.make_update_step(loss_fn, optimizer, donate=True)
        step = ps.compile(step, fullgraph=True)

    A small network runs fastest if the whole step is one graph. Each number of microbatches makes a
    graph, unless ``ps.stack`` has stacked them: then one graph serves all numbers from two on. For
    large networks use ``make_update_step(compile=True)``, which compiles one microbatch once, for
    any number of them.

    * With ``donate=True``, the graph of a step writes to its arguments. A function around a step,
      and a transform around its graph, get new tensors.
    * The first call of a step checks params, state and microbatches as an eager one does; later
      calls may not. Weights go unchecked. A step runs eagerly under
      dual numbers of ``torch.autograd.forward_ad`` and transforms such as ``torch.func.grad``.
    * The loss and its gradient are in one graph, also without ``fullgraph``: a graph break there is
      an error.
    * Each function has its own cache, and sizes may vary. torch shares one cache among all steps.
    * torch checks guards before each call. Guards on globals of torch, optree, einops, purestep and
      Python are left out. Guards on what the loss reads stay, its globals included.
    * Without an accelerator and process groups, ``cpp_wrapper`` also compiles what calls the
      kernels. Where it fails, a full graph is compiled without it. Embeddings with sparse gradients
      need ``options={"cpp_wrapper": False}``, and no graph of a whole step has them.
    * Graphs for CPUs are rewritten (``purestep.compiling.cpu``).

    Your ``options=`` override these. ``mode=`` replaces them, since torch takes only one of the
    two.

    >>> double = compile(lambda x: 2 * x)
    """
    compiled = compile_function(function, **settings)
    graph_step: GraphStep | None = getattr(function, _ATTRIBUTE, None)
    if graph_step is None or graph_step.owner() is not function:
        return compiled
    _, traced, check = graph_step
    compiled_step = compiled
    if traced is not function:
        compiled_step = compile_function(traced, **settings)

    @functools.wraps(compiled)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return compiled(*args, **kwargs)
        if forward_level() >= 0:  # Graphs lose the tangents of dual numbers.
            return function(*args, **kwargs)
        if has_transforms():  # torch makes no full graph in them.
            return function(*args, **kwargs)
        if len(args) == 3:
            args = (*args[:2], _as_list(args[2]))
        check(*args)
        return compiled_step(*args, **kwargs)

    return run


def _as_list(arg: Any) -> Any:
    """Returns a group of ``prefetch``, whose thread no compiler traces, as a list; others stay."""
    return [*arg] if isinstance(arg, PreweightedMicrobatches) else arg
