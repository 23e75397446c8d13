"""What is rewritten in a graph for CPUs, before the compiler makes kernels of it.

Values stay the same, to rounding. Three rewrites, which the compiler calls by its public option
``post_grad_custom_post_pass``:

* ``c + a @ b`` becomes a product and a sum, which joins the next kernel.
* Large float32 products go to oneDNN, except on Intel's processors. MKL, which the compiler takes,
  keeps to half-width vectors on processors of other makers.
* Values that are costly, few and used by many are computed once: Adam's powers bᵗ are two numbers
  for a network, and the compiler computes them in each loop over elements.

The import defines an operator, so it happens with the first function that is compiled.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, library
from torch.fx import Graph, Node

from purestep.torch_private import graph_pass, onednn_linear

_aten = torch.ops.aten

LEAST = 2**22
"""Multiplications that repay the ten microseconds that a call of oneDNN takes to begin."""

MANY = 16
"""Elements that use one costly value, at the least, so that memory for it is repaid."""

COSTLY = frozenset([
    _aten.pow, _aten.exp, _aten.exp2, _aten.expm1, _aten.log, _aten.log2, _aten.log1p,
    _aten.sin, _aten.cos, _aten.tanh, _aten.sigmoid, _aten.erf,
])  # fmt: skip
"""Operations that take as long as many sums and products."""


def options() -> dict[str, Any]:
    """Options of ``torch.compile``.

    >>> sorted(options())
    ['cpp_wrapper', 'post_grad_custom_post_pass']
    """
    ranks = distributed.is_available() and distributed.is_initialized()
    return {
        "cpp_wrapper": not (torch.accelerator.is_available() or ranks),
        "post_grad_custom_post_pass": graph_pass(post_grad_pass, __file__, _cpu_name()),
    }


def post_grad_pass(graph: Graph) -> None:
    """Rewrites a graph in place."""
    split_addmm(graph)
    if onednn_is_faster(_cpu_name()):
        use_onednn(graph)
    hoist_scalars(graph)


def _cpu_name() -> str:
    return str(torch.cpu.get_capabilities().get("cpu_name", ""))


def split_addmm(graph: Graph) -> None:
    """``c + a @ b`` in two steps, where ``addmm`` would copy c first."""
    for node in graph.find_nodes(op="call_function", target=_aten.addmm.default):
        summand, a, b = node.args
        wide = _value(a).dtype in (
            torch.float32,
            torch.float64,
        )  # One more rounding is small.
        if node.kwargs or not wide or _value(a).device.type != "cpu":
            continue
        with graph.inserting_before(node):
            product = _call(graph, _aten.mm.default, a, b)
            node.replace_all_uses_with(_call(graph, _aten.add.Tensor, product, summand))
        graph.erase_node(node)


def onednn_is_faster(cpu_name: str) -> bool:
    """Whether oneDNN outruns MKL on this processor of ``torch.cpu.get_capabilities``.

    >>> onednn_is_faster("AMD EPYC"), onednn_is_faster("Intel Xeon")
    (True, False)
    """
    available = (
        torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    )
    return available and "intel" not in cpu_name.lower()


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, of float32 matrices.

    >>> product(torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[1., 2.],
            [3., 4.]])
    """
    if a.shape[0] * b.numel() < LEAST:
        return torch.mm(a, b)
    (inner, length), (outer, _) = sorted(zip(b.stride(), b.shape, strict=True))
    if inner != 1 or outer < length:
        # oneDNN refuses rows that overlap, and takes a thousand times as long over gaps.
        b = b.contiguous()
    return onednn_linear(a, b.t(), None, "none", [], "")


_operators = library.Library("purestep", "DEF")
_operators.define(
    "product(Tensor a, Tensor b) -> Tensor", tags=(torch.Tag.needs_fixed_stride_order,)
)
_operators.impl("product", product, "CPU")
_operators.impl("product", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), "Meta")


def use_onednn(graph: Graph) -> None:
    """Puts ``product`` in the place of every product that repays it."""
    for node in graph.find_nodes(op="call_function", target=_aten.mm.default):
        a, b = node.args
        if node.kwargs or not _repays(_value(a), _value(b)):
            continue
        with graph.inserting_before(node):
            inner = _value(a).stride(1)
            if not (isinstance(inner, int) and inner == 1):
                # Columns cost more to read than this copy, which is often fused.
                a = _call(
                    graph, _aten.clone.default, a, memory_format=torch.contiguous_format
                )
            node.replace_all_uses_with(
                _call(graph, torch.ops.purestep.product.default, a, b)
            )
        graph.erase_node(node)


def _repays(a: Tensor, b: Tensor) -> bool:
    """Whether a product is large; yes, where sizes are unknown: ``product`` asks again."""
    sizes = (*a.shape, b.shape[1])
    known = all(isinstance(size, int) for size in sizes)
    large = not known or math.prod(sizes) >= LEAST
    return large and a.device.type == "cpu" and a.dtype == torch.float32


def hoist_scalars(graph: Graph) -> None:
    """Gives memory to values that are costly, few and used by many, so that no loop repeats them.

    A value is costly if a pointwise operation in COSTLY made it. It is kept if at least MANY times
    as many elements are computed from it.
    """
    reach: dict[
        Node, float
    ] = {}  # The most elements that are computed from a node in one loop.
    for node in reversed(graph.nodes):
        if _is_pointwise(node) or _is_view(node):
            reach[node] = max(
                _size(node), *(reach.get(user, 0) for user in node.users), 0
            )
    costly: set[Node] = set()
    for node in [node for node in graph.nodes if node in reach]:
        if node.target.overloadpacket in COSTLY or not costly.isdisjoint(
            node.all_input_nodes
        ):
            costly.add(node)
            few = _is_pointwise(node) and _size(node) < math.inf
            enough = MANY * _size(node)
            if few and reach[node] >= enough and not _has_one_small_user(node, enough):
                _keep(graph, node)


def _keep(graph: Graph, node: Node) -> None:
    """Reads a node by a view of a copy: the compiler computes what a view is of beforehand."""
    users = [*node.users]
    with graph.inserting_after(node):
        copy = _call(
            graph, _aten.clone.default, node, memory_format=torch.contiguous_format
        )
    value = _value(copy)
    with graph.inserting_after(copy):
        kept = _call(
            graph, _aten.as_strided.default, copy, [*value.shape], [*value.stride()]
        )
    for user in users:
        user.replace_input_with(node, kept)


def _has_one_small_user(node: Node, enough: float) -> bool:
    """Whether one small value is all that is computed from it: that one may be kept instead."""
    users = [*_users(node)]
    return len(users) == 1 and _is_pointwise(users[0]) and _size(users[0]) < enough


def _users(node: Node) -> Iterator[Node]:
    """What is computed from a node, or from views of it."""
    for user in node.users:
        if _is_view(user):
            yield from _users(user)
        else:
            yield user


def _size(node: Node) -> float:
    """How many elements it has; infinite, where that is unknown."""
    number = _value(node).numel()
    return number if isinstance(number, int) else math.inf


def _is_pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and _is_on_cpu(node)


def _is_view(node: Node) -> bool:
    return getattr(node.target, "is_view", False) and _is_on_cpu(node)


def _is_on_cpu(node: Node) -> bool:
    """Whether it is a tensor of the host: kernels of a device read such numbers otherwise."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _value(node: Any) -> Tensor:
    """The tensor without values that the compiler keeps for a node."""
    value: Tensor = node.meta["val"]
    return value


def _call(graph: Graph, function: Any, *args: Any, **kwargs: Any) -> Node:
    """A call of a function, put where the graph inserts, with the tensor that comes of it."""
    node = graph.call_function(function, args, kwargs)
    values = torch.fx.node.map_arg(args, _value)
    node.meta["val"] = function(*values, **kwargs)
    return node
