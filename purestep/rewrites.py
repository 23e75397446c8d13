"""What is changed in a graph of the compiler's, before it makes kernels for a CPU of it. Values stay the same, to rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from purestep.products import appended, onednn_is_quicker, value_of, with_products

_aten = torch.ops.aten

COSTLY = frozenset([
    _aten.pow, _aten.exp, _aten.exp2, _aten.expm1, _aten.log, _aten.log2, _aten.log1p,
    _aten.sin, _aten.cos, _aten.tanh, _aten.sigmoid, _aten.erf,
])  # fmt: skip
"""What takes as long as many sums and products."""

MANY = 16
"""Elements for one that they all use, at the least, so that it repays memory of its own: those of one vector."""


def rewritten(graph: torch.fx.Graph) -> None:
    """All of it, in order."""
    summands_apart(graph)
    if onednn_is_quicker(torch.cpu.get_capabilities().get("cpu_name", "")):
        with_products(graph)
    few_once(graph)


def summands_apart(graph: torch.fx.Graph) -> None:
    """``c + a @ b`` in two steps: the sum becomes part of the kernel that comes next, where ``addmm`` copies c first."""
    for node in graph.find_nodes(op="call_function", target=_aten.addmm.default):
        summand, a, b = node.args
        if node.kwargs or not _is_wide(value_of(a)):
            continue
        with graph.inserting_before(node):
            product = appended(graph, _aten.mm.default, a, b)
            node.replace_all_uses_with(appended(graph, _aten.add.Tensor, product, summand))
        graph.erase_node(node)


def _is_wide(value: Tensor) -> bool:
    """Whether it is on a CPU, in a dtype in which one rounding more does not matter."""
    return value.device.type == "cpu" and value.dtype in (torch.float32, torch.float64)


def few_once(graph: torch.fx.Graph) -> None:
    """Gives memory of its own to what is costly and few, and used by many.

    The compiler computes it in the loop of whoever uses it: of Adam's powers bᵗ, two numbers for a whole network, it makes
    two for every vector of elements.
    """
    reach = _reach(graph)
    costly: set[torch.fx.Node] = set()
    for node in [node for node in graph.nodes if node in reach]:
        if node.target.overloadpacket in COSTLY or not costly.isdisjoint(node.all_input_nodes):
            costly.add(node)
            enough = MANY * _elements(node)
            if _can_be_kept(node) and reach[node] >= enough and not _is_handed_on(node, enough):
                _keep(graph, node)


def _reach(graph: torch.fx.Graph) -> dict[torch.fx.Node, float]:
    """Of what is computed element by element: the most elements of anything that is computed so from it."""
    reach: dict[torch.fx.Node, float] = {}
    for node in reversed(graph.nodes):
        if _is_pointwise(node) or _is_view(node):
            reach[node] = max(_elements(node), *(reach.get(user, 0) for user in node.users), 0)
    return reach


def _elements(node: torch.fx.Node) -> float:
    """Sizes that are not known yet are large."""
    number = value_of(node).numel()
    return number if isinstance(number, int) else math.inf


def _can_be_kept(node: torch.fx.Node) -> bool:
    """Whether its size is known."""
    return _is_pointwise(node) and _elements(node) < math.inf


def _is_handed_on(node: torch.fx.Node, enough: float) -> bool:
    """Whether all that comes of it is one value more that is few."""
    users = [*_users(node)]
    return len(users) == 1 and _is_pointwise(users[0]) and _elements(users[0]) < enough


def _is_pointwise(node: torch.fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and _is_tensor(node)


def _is_view(node: torch.fx.Node) -> bool:
    return getattr(node.target, "is_view", False) and _is_tensor(node)


def _is_tensor(node: torch.fx.Node) -> bool:
    """On the host: a kernel of a device is given numbers of the host in a way of its own."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _users(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Who computes with it, or with a view of it."""
    for user in node.users:
        if _is_view(user):
            yield from _users(user)
        else:
            yield user


def _keep(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """A view of memory, which has to be there for that: that of a copy, since a node may be a view itself to the compiler."""
    users = [*node.users]
    with graph.inserting_after(node):
        copy = appended(graph, _aten.clone.default, node, memory_format=torch.contiguous_format)
    value = value_of(copy)
    with graph.inserting_after(copy):
        kept = appended(graph, _aten.as_strided.default, copy, [*value.shape], [*value.stride()])
    for user in users:
        user.replace_input_with(node, kept)
