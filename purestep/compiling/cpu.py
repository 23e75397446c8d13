"""Rewrites graphs for CPUs before the compiler makes kernels of them.

Values stay the same, up to rounding. The compiler calls these rewrites by its public option
``post_grad_custom_post_pass``:

* ``c + a @ b`` becomes a product and a sum, which joins the next kernel.
* Large float32 products go to oneDNN, except on Intel's processors. MKL, which the compiler takes,
  uses vectors of half the width on processors of other makers.
* On those processors, small products become loops that the compiler generates: a call of MKL takes
  microseconds to begin.
* Values that are costly, few and used by many are computed once. Adam's powers bᵗ are two numbers
  for a network, and the compiler computes them in each loop over elements.

Three more keep errors of the compiler away, which are silent:

* A write to a part, as indices, a diagonal or a slice, writes to a copy, and its result is copied.
  Otherwise the compiler may put a loop on the wrong side of the write.
* Values that are compared are stored. Otherwise the compiler computes them once more to compare
  them, and rounds differently.
* What a loop carries unchanged is copied, on all devices. Otherwise the compiler takes its memory
  for other values. In the body of a loop, it also has to know anew which views share memory.

Each rewrite stays in this file: the key of the compiler's cache hashes this file alone. The import
defines an operator, so it happens with the first function that is compiled.
"""

import math
import operator
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, library
from torch.fx import Graph, Node

from purestep.torch_private import SCAN_NAME, graph_pass, onednn_linear

_aten = torch.ops.aten

MIN_ONEDNN_MULTIPLICATIONS = 2**23
"""Multiplications that repay the ten microseconds that a call of oneDNN takes to begin.

On an EPYC with a fast MKL 2²⁴ do. Where MKL takes twice as long, fewer do.
"""

MAX_LOOPED_MULTIPLICATIONS = 2**16
"""The most multiplications for which a plain loop takes no longer than a call of MKL."""

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


WRITES_TO_PARTS = re.compile(r"aten\.\w*(index_put|scatter)")
"""Operations that inductor makes of a copy and a loop that writes to it."""

GRADIENTS_OF_VIEWS = frozenset([_aten.slice_scatter.default, _aten.select_scatter.default])
"""Of those, what inductor computes in one loop if they write to zeros."""

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


def inductor_options() -> dict[str, Any]:
    """Returns options of ``torch.compile``, among them the rewrites of graphs for CPUs.

    ``cpp_wrapper`` is True unless there is an accelerator or a process group.

    >>> sorted(inductor_options())
    ['cpp_wrapper', 'post_grad_custom_post_pass', 'unsafe_marked_cacheable_functions']
    """
    has_ranks = distributed.is_available() and distributed.is_initialized()
    has_accelerator = torch.accelerator.is_available()
    rewrites = graph_pass(rewrite_graph, __file__, _cpu_name())
    return {
        "cpp_wrapper": not (has_accelerator or has_ranks),
        "post_grad_custom_post_pass": rewrites,
        # torch's cache on disk refuses a graph with ``scan`` unless it is named here. The loop's
        # body is part of the cache's key: another loss is another graph.
        "unsafe_marked_cacheable_functions": {SCAN_NAME: torch.__version__},
    }


def rewrite_graph(graph: Graph) -> None:
    """Rewrites a graph in place, for CPUs; on other devices, it adds copies that keep errors away.

    It splits ``addmm``, multiplies in loops or by oneDNN on processors where that is faster, and
    stores costly values and compared ones. Reads stay behind writes to parts.
    """
    renew_views(graph)
    renew_carries(graph)
    isolate_writes(graph)
    split_addmm(graph)
    if onednn_is_faster(_cpu_name()):
        sum_small_products(graph)
        use_onednn(graph)
    hoist_scalars(graph)
    store_compared(graph)


def renew_views(graph: Graph) -> None:
    """Computes the fake tensors of views anew, so that they share the memory of what they view.

    By these, inductor decides whether it may write to memory that a view reads later. In the body
    of a loop they are stale where a copy before the view was dropped: the gradient of
    ``y[:, :3] = y[:, 3:]`` was then read after zeros were written over it (torch 2.13).
    """
    for node in graph.nodes:
        if getattr(node.target, "is_view", False) or node.target is operator.getitem:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), _value)
            node.meta["val"] = node.target(*args, **kwargs)


def renew_carries(graph: Graph) -> None:
    """Copies what the body of a loop returns as it came, in place.

    The sum of gradients of a parameter that no loss reads is such a carry: the compiler drops the
    sum with zero. The result of the loop is then the memory that the loop began with, which the
    compiler takes for free and writes other values to (torch 2.11 to 2.15; the like with a loop
    that does not run: https://github.com/pytorch/pytorch/issues/146213).
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
    results = []
    for result in output.args[0]:
        source = result
        while isinstance(source, Node) and getattr(source.target, "is_view", False):
            source = source.all_input_nodes[0]
        if isinstance(source, Node) and source.op == "placeholder":
            if isinstance(source.meta.get("val"), Tensor):
                with graph.inserting_before(output):
                    result = _call(graph, _aten.clone.default, result)
        results.append(result)
    output.args = (results,)


def isolate_writes(graph: Graph) -> None:
    """Makes each write to a part one to a copy, and copies its result on the CPU, in place.

    Inductor makes of such a write a loop that writes to the memory of the tensor, and loses three
    gradients in silence (torch 2.11 to 2.15):

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
                node.replace_input_with(written, _insert_clone(graph, written))
        elif node.target in GRADIENTS_OF_VIEWS:
            continue
        if _is_on_cpu(node):
            _store_by_operator(graph, node)


def store_compared(graph: Graph) -> None:
    """Stores both sides of each comparison of floating-point tensors on the CPU, in place.

    Otherwise inductor may compute a side in two loops, by vectors in one of them, which rounds
    differently. The gradient of ``sin(x).amax(1)`` is where ``sin(x) == amax``: nowhere, then.
    """
    for comparison in list(graph.nodes):
        if comparison.target not in COMPARISONS:
            continue
        # A value is compared with itself to find NaN, which all loops agree on.
        sides = {_skip_views(side) for side in comparison.all_input_nodes}
        if len(sides) < 2:
            continue
        for side in sides:
            if _is_computed_float(side):
                _store_by_operator(graph, side)


def _skip_views(node: Node) -> Node:
    """Returns the node whose memory a view reads; a node that is no view as it is."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_computed_float(node: Node) -> bool:
    """Returns whether inductor may compute a node in each loop: a floating-point value on the CPU.

    An input and what is stored already are read.
    """
    is_read = node.op != "call_function" or node.target in STORED
    return not is_read and _is_on_cpu(node) and _value(node).is_floating_point()


def _store_by_operator(graph: Graph, node: Node) -> None:
    """Makes all users of a node read a copy by an operator, which inductor puts into no loop."""
    with graph.inserting_after(node):
        stored = _call(graph, torch.ops.purestep.stored.default, node)
    node.replace_all_uses_with(stored, lambda user: user is not stored)


def _cpu_name() -> str:
    capabilities = torch.cpu.get_capabilities()
    return str(capabilities.get("cpu_name", ""))


def split_addmm(graph: Graph) -> None:
    """Replaces each ``addmm(c, a, b)``, which would copy c first, by ``a @ b`` and a sum, in place.

    Leaves an ``addmm`` as it is on another device than the CPU, with ``beta`` or ``alpha``, and in
    other dtypes than float32 and float64.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.addmm.default):
        c, a, b = node.args
        a_value = _value(a)
        # The sum rounds once more: in float32 and float64, that is small.
        is_wide = a_value.dtype in (torch.float32, torch.float64)
        is_on_cpu = a_value.device.type == "cpu"
        # kwargs are the factors: beta * c + alpha * (a @ b).
        if node.kwargs or not is_wide or not is_on_cpu:
            continue
        with graph.inserting_before(node):
            matmul = _call(graph, _aten.mm.default, a, b)
            added = _call(graph, _aten.add.Tensor, matmul, c)
        node.replace_all_uses_with(added)
        graph.erase_node(node)


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
        if not _repays_loop(_value(a), _value(b)):
            continue
        # Views come last: once h is stored, its view h.t() needs no store.
        for matrix in sorted(node.all_input_nodes, key=_is_view):
            if _is_inlined(matrix):
                # The loop would compute each element anew for each product with it.
                _store(graph, matrix)
        a, b = node.args
        with graph.inserting_before(node):
            columns = _call(graph, _aten.unsqueeze.default, a, 2)
            rows = _call(graph, _aten.unsqueeze.default, b, 0)
            products = _call(graph, _aten.mul.Tensor, columns, rows)
            sums = _call(graph, _aten.sum.dim_IntList, products, [1])
        node.replace_all_uses_with(sums)
        graph.erase_node(node)


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
    node = _skip_views(node)
    return _is_pointwise(node) and node.target is not _aten.clone.default


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
_operators.define(
    "stored(Tensor x) -> Tensor", tags=(torch.Tag.needs_fixed_stride_order,)
)
_operators.impl("stored", torch.clone, "CPU")
_operators.impl("stored", torch.empty_like, "Meta")
STORED = frozenset([_aten.clone.default, torch.ops.purestep.stored.default])
"""Copies, which inductor does not compute again."""


def use_onednn(graph: Graph) -> None:
    """Replaces large float32 matrix products on the CPU by ``onednn_matmul``, in place.

    Inserts a contiguous copy of the first matrix if its rows are not contiguous. Sizes that are
    unknown count as large.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.mm.default):
        a, b = node.args
        a_value = _value(a)
        if not _repays_onednn(a_value, _value(b)):
            continue
        with graph.inserting_before(node):
            if not _has_dense_rows(a_value):
                # Columns cost more to read than this copy, which is often fused.
                a = _insert_clone(graph, a)
            replacement = _call(graph, torch.ops.purestep.product.default, a, b)
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

    A value is costly if a pointwise operation in ``COSTLY`` made it, or if it is computed from a
    costly value. It is stored if one loop computes at least ``MIN_USERS_PER_VALUE`` times as many
    elements from it. It is not stored if all of these come from one small value, for which the same
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
    """Counts, for each pointwise node and view, the most elements computed from it in one loop.

    Nodes on other devices than the CPU are left out. The loop begins at the node, whose own
    elements count too, and runs through pointwise users and views. The count is infinite if a size
    is unknown.
    """
    reach: dict[Node, float] = {}
    for node in reversed(graph.nodes):
        if not (_is_pointwise(node) or _is_view(node)):
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
    if not _is_pointwise(node) or num_elements == math.inf:
        return False
    enough = MIN_USERS_PER_VALUE * num_elements
    return reach >= enough and not _has_one_small_user(node, enough)


def _store(graph: Graph, node: Node) -> None:
    """Makes the compiler store the value of a node, in place: its users read a view of a copy.

    The view needs memory, so the compiler does not compute the value again in each loop.
    """
    users = list(node.users)
    with graph.inserting_after(node):
        copy = _insert_clone(graph, node)
    value = _value(copy)
    shape = list(value.shape)
    strides = list(value.stride())
    with graph.inserting_after(copy):
        view = _call(graph, _aten.as_strided.default, copy, shape, strides)
    for user in users:
        user.replace_input_with(node, view)


def _has_one_small_user(node: Node, enough: float) -> bool:
    """Returns whether exactly one value is computed from a node or its views, and is small.

    Small means that it is pointwise, and has fewer than ``enough`` elements. That value may then be
    stored instead.
    """
    users = list(_iterate_users(node))
    if len(users) != 1:
        return False
    (user,) = users
    return _is_pointwise(user) and _num_elements(user) < enough


def _iterate_users(node: Node) -> Iterator[Node]:
    """Yields the nodes that are computed from a node, or from views of it.

    Views are not among them. A node that reads two of these is yielded twice.
    """
    for user in node.users:
        if _is_view(user):
            yield from _iterate_users(user)
        else:
            yield user


def _num_elements(node: Node) -> float:
    """Returns the number of elements of a node's tensor; infinite where it is unknown."""
    number = _value(node).numel()
    return number if isinstance(number, int) else math.inf


def _is_pointwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and _is_on_cpu(node)


def _is_view(node: Node) -> bool:
    is_view = getattr(node.target, "is_view", False)
    return is_view and _is_on_cpu(node)


def _is_on_cpu(node: Node) -> bool:
    """Returns whether a node's value is one tensor, on the CPU."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _value(node: Any) -> Tensor:
    """Returns the fake tensor that the compiler keeps for a node."""
    value: Tensor = node.meta["val"]
    return value


def _insert_clone(graph: Graph, node: Node) -> Node:
    """Inserts a contiguous copy of a node where the graph inserts, and returns the new node."""
    return _call(
        graph, _aten.clone.default, node, memory_format=torch.contiguous_format
    )


def _call(graph: Graph, function: Any, *args: Any, **kwargs: Any) -> Node:
    """Inserts a call of a function where the graph inserts, and returns its node.

    Nodes among ``args`` are its inputs. The new node keeps the fake tensor that the call returns.
    """
    node = graph.call_function(function, args, kwargs)
    values = torch.fx.node.map_arg(args, _value)
    node.meta["val"] = function(*values, **kwargs)
    return node
