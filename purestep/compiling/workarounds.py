"""Rewrites graphs that inductor would compile wrong, mostly in silence.

Most rewrites insert copies, so that what the compiler gets wrong does not occur; each docstring has
the failing example. A torch that gets it right computes the copy in vain. The import defines an
operator, so it happens with the first function that is compiled.

``python -m benchmarks.random_losses`` looks for further errors.
"""

import operator
import re

import torch
from torch import Tensor, library
from torch.fx import Graph, Node

from purestep.compiling.nodes import (
    insert_call,
    is_on_cpu,
    is_view,
    skip_views,
    value_of,
)

_aten = torch.ops.aten

WRITES_TO_PARTS = re.compile(r"aten\.\w*(index_put|scatter)")
"""Operations that inductor makes of a copy and a loop that writes to it."""

GRADIENTS_OF_VIEWS = frozenset(
    [_aten.slice_scatter.default, _aten.select_scatter.default]
)
"""Of those, what inductor computes in one loop if they write to zeros."""

PRODUCTS = frozenset([_aten.mm.default, _aten.addmm.default, _aten.bmm.default])
"""Operations that inductor calls, so that their results are in memory."""

COMPARISONS = frozenset(
    [
        _aten.eq.Tensor,
        _aten.ne.Tensor,
        _aten.lt.Tensor,
        _aten.le.Tensor,
        _aten.gt.Tensor,
        _aten.ge.Tensor,
    ]
)
"""Operations whose result the last bit of a value decides."""

_operators = library.Library("purestep", "FRAGMENT")
_operators.define(
    "stored(Tensor x) -> Tensor", tags=(torch.Tag.needs_fixed_stride_order,)
)
_operators.impl("stored", torch.clone, "CPU")
_operators.impl("stored", torch.empty_like, "Meta")


def renew_views(graph: Graph) -> None:
    """Computes the fake tensors of views anew, so that they share the memory of what they view.

    By these, inductor decides whether it may write to memory that a view reads later. In the body
    of a loop they are stale where a copy before the view was dropped: the gradient of
    ``y[:, :3] = y[:, 3:]`` was then read after zeros were written over it (torch 2.13).
    """
    for node in graph.nodes:
        if not is_view(node) and node.target is not operator.getitem:
            continue
        inputs_are_known = all("val" in source.meta for source in node.all_input_nodes)
        # A size that only the data know gets its name once.
        if inputs_are_known and "unbacked_bindings" not in node.meta:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value_of)
            node.meta["val"] = node.target(*args, **kwargs)


def lift_constants(graph: Graph) -> None:
    """Passes a ``scan`` the tensors that its body holds, as ``torch.tensor([[1, 2]])``, in place.

    Inductor gives None to kernels that read them in the body (torch 2.13).
    """
    scan = torch.ops.higher_order.scan
    for loop in graph.find_nodes(op="call_function", target=scan):
        body_node, init, xs, inputs = loop.args
        body = getattr(graph.owning_module, body_node.target)
        for inside in body.graph.find_nodes(op="get_attr"):
            constant = getattr(body, inside.target)
            if not isinstance(constant, Tensor) or "val" not in inside.meta:
                continue
            name = f"{body_node.target}_{inside.target}"
            graph.owning_module.register_buffer(name, constant)
            with graph.inserting_before(loop):
                outside = graph.get_attr(name)
            *_, last = body.graph.find_nodes(op="placeholder")
            with body.graph.inserting_after(last):
                passed = body.graph.placeholder(name)
            outside.meta["val"] = passed.meta["val"] = value_of(inside)
            inside.replace_all_uses_with(passed)
            body.graph.erase_node(inside)
            inputs = (*inputs, outside)
        loop.args = (body_node, init, xs, inputs)
        body.recompile()


def renew_carries(graph: Graph) -> None:
    """Copies what the body of a loop returns as it came, in place.

    The sum of gradients of a parameter that no loss reads is such a carry: the compiler drops the
    sum with zero. The loop then returns the memory that it began with. The compiler takes that for
    free, and writes other values to it (torch 2.13). It errs in the same way about a loop that does
    not run: https://github.com/pytorch/pytorch/issues/146213.
    """
    bodies = {
        torch.ops.higher_order.scan: 0,
        torch.ops.higher_order.while_loop: 1,
    }
    for loop, position in bodies.items():
        for node in graph.find_nodes(op="call_function", target=loop):
            body = getattr(graph.owning_module, node.args[position].target)
            _copy_returned_inputs(body.graph)


def _copy_returned_inputs(graph: Graph) -> None:
    """Makes a graph return a copy of each tensor that is one of its inputs, or a view of one."""
    output = graph.output_node()
    (results,) = output.args
    renewed = []
    for result in results:
        value = result.meta.get("val") if isinstance(result, Node) else None
        if isinstance(value, Tensor) and skip_views(result).op == "placeholder":
            with graph.inserting_before(output):
                result = insert_call(graph, _aten.clone.default, result)
        renewed.append(result)
    output.args = (renewed,)


def isolate_writes(graph: Graph) -> None:
    """Rewrites a graph, in place, so that each write to a part of a tensor is to a copy of it.

    The result of such a write is copied, too, if it lies on the CPU. A tensor made by ``aten.full``
    is not copied before the write. If an operation in ``GRADIENTS_OF_VIEWS`` writes to such a
    tensor, the result is not copied either.

    Inductor makes of such a write a loop that writes to the memory of the tensor, and gets three
    gradients wrong in silence (torch 2.13):

    * That of ``y[:, i] = 0; y.sum()`` begins as an expanded tensor, many elements of which are one.
    * In ``y[h > 0] = 0``, a loop may read h after it was written over. A copy has no other reader.
    * In the gradient of a lookup, ``zeros.index_put(indices, grads)``, or of a diagonal, a loop may
      read zeros before the write. The operator that copies the result joins no loop.
    """
    for node in list(graph.nodes):
        if not WRITES_TO_PARTS.match(str(node.target)):
            continue
        written = node.args[0]
        if written.target is not _aten.full.default:
            with graph.inserting_before(node):
                copy = insert_call(graph, _aten.clone.default, written)
            node.replace_input_with(written, copy)
        elif node.target in GRADIENTS_OF_VIEWS:
            continue
        if is_on_cpu(node):
            _store_by_operator(graph, node)


def store_compared(graph: Graph) -> None:
    """Stores both sides of each comparison of floating-point tensors on the CPU, in place.

    An input, a product, or a result of an operator that is not torch's stays: it is in memory. So
    does a value that is compared with itself. Otherwise inductor may compute a side in two loops,
    by vectors in one of them, which rounds differently. The gradient of ``sin(x).amax(1)`` is where
    ``sin(x) == amax``: nowhere, then.
    """
    for comparison in list(graph.nodes):
        if comparison.target not in COMPARISONS:
            continue
        # A value is compared with itself to find NaN, which all loops agree on.
        if len(comparison.all_input_nodes) < 2:
            continue
        # Ties, ``y[None, :] == y[:, None]``, compare two views of one value.
        for side in {skip_views(side) for side in comparison.all_input_nodes}:
            if _is_computed_float(side):
                _store_by_operator(graph, side)


def _is_computed_float(node: Node) -> bool:
    """Returns whether inductor may compute a node in each loop: a floating-point value on the CPU.

    Returns False for inputs, products, and results of operators that are not torch's: inductor
    reads these from memory. Results of torch's other kernels, as of a convolution, count as
    computed.
    """
    is_called = getattr(node.target, "namespace", "aten") not in ("aten", "prims")
    if node.op != "call_function" or node.target in PRODUCTS or is_called:
        return False
    return is_on_cpu(node) and value_of(node).is_floating_point()


def _store_by_operator(graph: Graph, node: Node) -> None:
    """Makes all users of a node read a copy by an operator, which inductor puts into no loop."""
    with graph.inserting_after(node):
        stored = insert_call(graph, torch.ops.purestep.stored.default, node)
    node.replace_all_uses_with(stored, lambda user: user is not stored)
