"""Rewrites graphs for CPUs before the compiler makes kernels of them.

Values stay the same, up to rounding. The compiler calls these rewrites by its public option
``post_grad_custom_post_pass``:

* ``c + a @ b`` becomes a product and a sum, which joins the next kernel.
* Large and small float32 products leave MKL, which the compiler takes, except on Intel's
  processors: ``products`` has them.
* A sum that keeps its dimensions for a view without them drops them: a view takes time to make.
  The gradient of a bias is such a sum.
* Values that are costly, few and used by many are computed once. Adam's powers bᵗ are two numbers
  for a network, and the compiler computes them in each loop over elements.

Others keep errors of the compiler away: ``workarounds`` has them.

The key of the compiler's cache hashes the files of the rewrites, which are those of ``FILES``.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed
from torch.fx import Graph, Node

from purestep.compiling import nodes, products, workarounds
from purestep.compiling.nodes import (
    insert_call,
    is_on_cpu,
    is_pointwise,
    is_view,
    store_value,
    value_of,
)
from purestep.torch_private import SCAN_NAME, graph_pass

_aten = torch.ops.aten

FILES = (__file__, nodes.__file__, products.__file__, workarounds.__file__)

MIN_USERS_PER_VALUE = 16
"""Elements for each costly value that repay the memory to store it."""

COSTLY = frozenset(
    [
        _aten.pow,
        _aten.exp,
        _aten.exp2,
        _aten.expm1,
        _aten.log,
        _aten.log2,
        _aten.log1p,
        _aten.sin,
        _aten.cos,
        _aten.tanh,
        _aten.sigmoid,
        _aten.erf,
    ]
)
"""Operations that take as long as many sums and products."""


def inductor_options() -> dict[str, Any]:
    """Returns options of ``torch.compile``, among them the rewrites of graphs for CPUs.

    ``cpp_wrapper`` is True unless there is an accelerator or a process group.

    >>> sorted(inductor_options())
    ['cpp_wrapper', 'post_grad_custom_post_pass', 'unsafe_marked_cacheable_functions']
    """
    has_ranks = distributed.is_available() and distributed.is_initialized()
    has_accelerator = torch.accelerator.is_available()
    limits = products.find_limits(torch.cpu.get_capabilities())
    rewrites = graph_pass(rewrite_graph, FILES, repr(limits))
    return {
        "cpp_wrapper": not (has_accelerator or has_ranks),
        "post_grad_custom_post_pass": rewrites,
        # torch's cache on disk refuses a graph with ``scan`` unless it is named here. The loop's
        # body is part of the cache's key: another loss is another graph.
        "unsafe_marked_cacheable_functions": {SCAN_NAME: torch.__version__},
    }


def rewrite_graph(graph: Graph) -> None:
    """Rewrites a graph in place, for CPUs; on other devices, it only keeps errors away.

    It splits ``addmm``, drops summed dimensions, multiplies in loops or by oneDNN on processors
    where that is faster, and stores costly values.
    """
    workarounds.renew_views(graph)
    workarounds.lift_constants(graph)
    workarounds.renew_carries(graph)
    workarounds.isolate_writes(graph)
    split_addmm(graph)
    drop_summed_dims(graph)
    limits = products.find_limits(torch.cpu.get_capabilities())
    if limits is not None:
        products.sum_small_products(graph, limits.max_looped)
        products.use_onednn(graph, limits.min_onednn)
    hoist_scalars(graph)
    # Last, when it shows which values are in memory.
    workarounds.store_compared(graph)


def split_addmm(graph: Graph) -> None:
    """Replaces each ``addmm(c, a, b)`` by ``a @ b`` and a sum, and changes the graph in place.

    An ``addmm`` would copy c first. It stays on another device than the CPU, with ``beta`` or
    ``alpha``, and in other dtypes than float32 and float64.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.addmm.default):
        c, a, b = node.args
        a_value = value_of(a)
        # The sum rounds once more: in float32 and float64, that is small.
        is_wide = a_value.dtype in (torch.float32, torch.float64)
        # kwargs are the factors: beta * c + alpha * (a @ b).
        if node.kwargs or not is_wide or not is_on_cpu(node):
            continue
        with graph.inserting_before(node):
            matmul = insert_call(graph, _aten.mm.default, a, b)
            added = insert_call(graph, _aten.add.Tensor, matmul, c)
        node.replace_all_uses_with(added)
        graph.erase_node(node)


def drop_summed_dims(graph: Graph) -> None:
    """Drops the dimensions that a sum on the CPU keeps and its users reshape away, in place.

        sum(x, dims, keepdim=True).reshape(shape) = sum(x, dims)

    A sum stays if one of its users does not reshape it to the shape without these dimensions. It
    also stays if a size of the result is unknown.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.sum.dim_IntList):
        x, dims, *keepdim = node.args
        if not any(keepdim) or not is_on_cpu(node):
            continue
        shape = torch.sum(value_of(x), dims).shape
        if not all(_reshapes_to(user, shape) for user in node.users):
            continue
        with graph.inserting_before(node):
            dropped = insert_call(graph, _aten.sum.dim_IntList, x, dims, **node.kwargs)
        for user in list(node.users):
            user.replace_all_uses_with(dropped)
            graph.erase_node(user)
        graph.erase_node(node)


def _reshapes_to(node: Node, shape: torch.Size) -> bool:
    """Returns whether a node is a ``reshape`` or ``view`` whose result has this shape.

    Sizes that vary, in the result or in ``shape``, make it False. Other operations that change a
    shape, such as ``squeeze``, do not count.
    """
    if node.target not in (_aten.reshape.default, _aten.view.default):
        return False
    new_shape = value_of(node).shape
    # To compare unknown sizes would be a guard, which fails if only the data tell them.
    sizes = (*new_shape, *shape)
    return all(isinstance(size, int) for size in sizes) and new_shape == shape


def hoist_scalars(graph: Graph) -> None:
    """Stores values that are costly, few and used by many, so that no loop repeats them; in place.

    A value is costly if a pointwise operation in ``COSTLY`` made it. A pointwise operation or view
    that reads a costly value is costly, too, unless that value is stored. A pointwise result is
    stored if one loop computes at least ``MIN_USERS_PER_VALUE`` times as many elements from it. It
    is not stored if all of these come from one small value that reads it once, for which the same
    rule then decides. Values on other devices than the CPU stay as they are.
    """
    reach = _measure_reach(graph)
    costly: set[Node] = set()
    # A list, since the loop inserts nodes.
    candidates = [node for node in graph.nodes if node in reach]
    for node in candidates:
        is_costly = node.target.overloadpacket in COSTLY
        reads_costly = not costly.isdisjoint(node.all_input_nodes)
        if not (is_costly or reads_costly):
            continue
        costly.add(node)
        if _repays_memory(node, reach[node]):
            store_value(graph, node)


def _measure_reach(graph: Graph) -> dict[Node, float]:
    """Returns, for each pointwise node and view, the size of the largest tensor in its loop.

    A size is a number of elements; it is infinite if it is unknown. The loop begins at the node,
    whose own size counts too, and runs through pointwise users and views. Nodes whose value is not
    one tensor on the CPU are left out.
    """
    reach: dict[Node, float] = {}
    for node in reversed(graph.nodes):
        joins_loop = is_pointwise(node) or is_view(node)
        if not joins_loop or not is_on_cpu(node):
            continue
        most = _num_elements(node)
        for user in node.users:
            most = max(most, reach.get(user, 0))
        reach[node] = most
    return reach


def _repays_memory(node: Node, reach: float) -> bool:
    """Returns whether to store a costly value: a pointwise result of few elements, used by many.

    ``reach`` is the most elements that one loop computes from it. Views, unknown sizes, and values
    with one small user are not stored. It does not ask whether the value is costly.
    """
    num_elements = _num_elements(node)
    if not is_pointwise(node) or num_elements == math.inf:
        return False
    enough = MIN_USERS_PER_VALUE * num_elements
    return reach >= enough and not _has_one_small_user(node, enough)


def _has_one_small_user(node: Node, enough: float) -> bool:
    """Returns whether exactly one value is computed from a node or its views, and is small.

    Small means that it is pointwise, and has fewer than ``enough`` elements. That value may then be
    stored instead. Returns False if it reads two of the node and its views.
    """
    users = list(_iterate_users(node))
    if len(users) != 1:
        return False
    (user,) = users
    return is_pointwise(user) and _num_elements(user) < enough


def _iterate_users(node: Node) -> Iterator[Node]:
    """Yields the nodes that are computed from a node, or from views of it.

    Views are not among them. A node that reads two of these is yielded twice.
    """
    for user in node.users:
        if is_view(user):
            yield from _iterate_users(user)
        else:
            yield user


def _num_elements(node: Node) -> float:
    """Returns the number of elements of a node's tensor; infinite where it is unknown."""
    number = value_of(node).numel()
    return number if isinstance(number, int) else math.inf
