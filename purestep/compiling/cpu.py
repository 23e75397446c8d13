"""Rewrites graphs for CPUs before the compiler makes kernels of them.

Values stay the same, up to rounding. The compiler calls these rewrites by its public option
``post_grad_custom_post_pass``:

* ``c + a @ b`` becomes a product and a sum, which joins the next kernel.
* Large float32 products go to oneDNN, except on Intel's processors. MKL, which the compiler takes,
  uses vectors of half the width on processors of other makers.
* On those processors, small products become loops that the compiler generates: a call of MKL takes
  microseconds to begin.
* A sum that keeps its dimensions for a view without them drops them: a view takes time to make.
  The gradient of a bias is such a sum.
* Values that are costly, few and used by many are computed once. Adam's powers bᵗ are two numbers
  for a network, and the compiler computes them in each loop over elements.

Others keep errors of the compiler away: ``workarounds`` has them.

The key of the compiler's cache hashes the files of the rewrites, which are the three of ``FILES``.
The import defines an operator, so it happens with the first function that is compiled.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, library
from torch.fx import Graph, Node

from purestep.compiling import nodes, workarounds
from purestep.compiling.nodes import (
    insert_call,
    insert_clone,
    is_on_cpu,
    is_pointwise,
    is_view,
    skip_views,
    value_of,
)
from purestep.torch_private import SCAN_NAME, graph_pass, onednn_linear

_aten = torch.ops.aten

FILES = (__file__, nodes.__file__, workarounds.__file__)

MIN_ONEDNN_MULTIPLICATIONS = 2**23
"""Multiplications that repay the ten microseconds that a call of oneDNN takes to begin.

On an EPYC with a fast MKL 2²⁴ do. Where MKL takes twice as long, fewer do.
"""

MAX_LOOPED_MULTIPLICATIONS = 2**16
"""The most multiplications for which a plain loop takes no longer than a call of MKL."""

MAX_PRODUCTS_PER_PASS = 4
"""The most products that a loop adds to its sum in one pass.

Each pass waits for the addition of the pass before, so a loop of fewer passes ends sooner. With
eight products it takes longer again.
"""

MIN_PASSES = 8
"""The fewest passes of a loop with several products in each.

The compiler unrolls a loop of fewer passes, and takes up to half a second to compile that.
"""

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
    rewrites = graph_pass(rewrite_graph, FILES, _cpu_name())
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
    if onednn_is_faster(_cpu_name()):
        sum_small_products(graph)
        use_onednn(graph)
    hoist_scalars(graph)
    # Last, when it shows which values are in memory.
    workarounds.store_compared(graph)


def _cpu_name() -> str:
    capabilities = torch.cpu.get_capabilities()
    return str(capabilities.get("cpu_name", ""))


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
    """Returns whether a node is a ``reshape`` or ``view`` to this shape, with all sizes known.

    Other operations that change a shape, such as ``squeeze``, do not count.
    """
    if node.target not in (_aten.reshape.default, _aten.view.default):
        return False
    new_shape = value_of(node).shape
    # To compare unknown sizes would be a guard, which fails if only the data tell them.
    sizes = (*new_shape, *shape)
    return all(isinstance(size, int) for size in sizes) and new_shape == shape


def onednn_is_faster(cpu_name: str) -> bool:
    """Returns whether oneDNN outruns MKL on a processor, by its name.

    ``cpu_name`` is that of ``torch.cpu.get_capabilities()``. True for all but Intel's, also for an
    empty name. False if this torch lacks oneDNN or MKL.

    >>> onednn_is_faster("AMD EPYC"), onednn_is_faster("Intel Xeon")
    (True, False)
    """
    has_mkl = torch.backends.mkl.is_available()
    has_onednn = torch.backends.mkldnn.is_available()
    return has_mkl and has_onednn and "intel" not in cpu_name.lower()


def sum_small_products(graph: Graph) -> None:
    """Replaces small float32 matrix products on the CPU by loops of the compiler, in place.

        (a @ b)[m, n] = Σₖ a[m, k] · b[k, n]

    A matrix that is computed pointwise is stored before. A product stays if the elements of a row
    of ``b`` do not lie side by side, or if a size is unknown.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.mm.default):
        a, b = node.args
        if not _repays_loop(value_of(a), value_of(b)):
            continue
        # Views come last: once h is stored, its view h.t() needs no store.
        for matrix in sorted(node.all_input_nodes, key=is_view):
            if _is_inlined(matrix):
                # The loop would compute each element anew for each product with it.
                _store(graph, matrix)
        a, b = node.args
        with graph.inserting_before(node):
            product = _insert_loop(graph, a, b)
        node.replace_all_uses_with(product)
        graph.erase_node(node)


def _insert_loop(graph: Graph, a: Node, b: Node) -> Node:
    """Inserts ``a @ b`` as a loop where the graph inserts, and returns the node of the product.

    Each of K / S passes adds S products:

        (a @ b)[m, n] = Σᵢ (a[m, Si] · b[Si, n] + ... + a[m, Si + S - 1] · b[Si + S - 1, n])

    S is the greatest common divisor of K and ``MAX_PRODUCTS_PER_PASS``. It is 1 if ``b`` has one
    column, or if there would be fewer than ``MIN_PASSES`` passes.
    """
    size, num_columns = value_of(b).shape
    step = math.gcd(size, MAX_PRODUCTS_PER_PASS)
    # A loop over one column reads vectors of a's rows, which must lie side by side.
    if num_columns == 1 or size // step < MIN_PASSES:
        step = 1
    products = []
    for first in range(step):
        columns = insert_call(graph, _aten.slice.Tensor, a, 1, first, size, step)
        rows = insert_call(graph, _aten.slice.Tensor, b, 0, first, size, step)
        columns = insert_call(graph, _aten.unsqueeze.default, columns, 2)
        rows = insert_call(graph, _aten.unsqueeze.default, rows, 0)
        products.append(insert_call(graph, _aten.mul.Tensor, columns, rows))
    added, *others = products
    for product in others:
        added = insert_call(graph, _aten.add.Tensor, added, product)
    return insert_call(graph, _aten.sum.dim_IntList, added, [1])


def _repays_loop(a: Tensor, b: Tensor) -> bool:
    """Returns whether ``a @ b`` is small, in float32 and on the CPU, with dense rows in ``b``.

    Small means at most ``MAX_LOOPED_MULTIPLICATIONS``. With an unknown size, it is not small.
    """
    is_small = _num_multiplications(a, b) <= MAX_LOOPED_MULTIPLICATIONS
    return is_small and _is_float32_on_cpu(a) and _has_dense_rows(b)


def _num_multiplications(a: Tensor, b: Tensor) -> float:
    """Returns the number of multiplications in ``a @ b``; infinite if a size is unknown."""
    sizes = (*a.shape, b.shape[1])
    if not all(isinstance(size, int) for size in sizes):
        return math.inf
    num_multiplications: int = math.prod(sizes)
    return num_multiplications


def _is_float32_on_cpu(matrix: Tensor) -> bool:
    return matrix.device.type == "cpu" and matrix.dtype == torch.float32


def _is_inlined(node: Node) -> bool:
    """Returns whether a node is pointwise, or a view of such a node, and no copy.

    A copy is what ``_store`` makes.
    """
    node = skip_views(node)
    return is_pointwise(node) and node.target is not _aten.clone.default


def onednn_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Computes ``a @ b`` of float32 matrices on the CPU by oneDNN; small products by ``torch.mm``.

    >>> onednn_matmul(torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[1., 2.],
            [3., 4.]])
    """
    if a.shape[0] * b.numel() < MIN_ONEDNN_MULTIPLICATIONS:
        return torch.mm(a, b)
    dims = sorted(zip(b.stride(), b.shape, strict=True))
    (inner_stride, inner_size), (outer_stride, _) = dims
    if inner_stride != 1 or outer_stride < inner_size:
        # oneDNN refuses rows that overlap, and takes a thousand times as long over gaps.
        b = b.contiguous()
    # Without a bias, and without an operation after the product.
    return onednn_linear(a, b.t(), None, "none", [], "")


def _product_shape(a: Tensor, b: Tensor) -> Tensor:
    num_rows, _ = a.shape
    _, num_columns = b.shape
    return a.new_empty(num_rows, num_columns)


_operators = library.Library("purestep", "DEF")
_operators.define(
    "product(Tensor a, Tensor b) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_operators.impl("product", onednn_matmul, "CPU")
_operators.impl("product", _product_shape, "Meta")


def use_onednn(graph: Graph) -> None:
    """Replaces large float32 matrix products on the CPU by ``onednn_matmul``, in place.

    Inserts a contiguous copy of the first matrix if its rows are not contiguous. Sizes that are
    unknown count as large.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.mm.default):
        a, b = node.args
        a_value = value_of(a)
        if not _repays_onednn(a_value, value_of(b)):
            continue
        with graph.inserting_before(node):
            if not _has_dense_rows(a_value):
                # Columns cost more to read than this copy, which is often fused.
                a = insert_clone(graph, a)
            replacement = insert_call(graph, torch.ops.purestep.product.default, a, b)
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)


def _repays_onednn(a: Tensor, b: Tensor) -> bool:
    """Returns whether ``a @ b`` is a float32 product on the CPU, and large.

    Sizes that are unknown count as large: ``onednn_matmul`` checks again.
    """
    is_large = _num_multiplications(a, b) >= MIN_ONEDNN_MULTIPLICATIONS
    return is_large and _is_float32_on_cpu(a)


def _has_dense_rows(matrix: Tensor) -> bool:
    stride = matrix.stride(1)
    # A stride that is not known yet is a torch.SymInt.
    return isinstance(stride, int) and stride == 1


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
            _store(graph, node)


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


def _store(graph: Graph, node: Node) -> None:
    """Makes the compiler store the value of a node, in place: its users read a view of a copy.

    The view needs memory, so the compiler does not compute the value again in each loop.
    """
    users = list(node.users)
    with graph.inserting_after(node):
        copy = insert_clone(graph, node)
    value = value_of(copy)
    shape = list(value.shape)
    strides = list(value.stride())
    with graph.inserting_after(copy):
        view = insert_call(graph, _aten.as_strided.default, copy, shape, strides)
    for user in users:
        user.replace_input_with(node, view)


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
