"""Replaces float32 matrix products on CPUs by faster ones, before the compiler makes kernels.

The compiler takes MKL for products. On processors that are not Intel's, MKL computes with vectors
of 256 bits, and a call of it takes microseconds to begin. So large products go to oneDNN there,
and small ones become loops that the compiler generates.

The import defines an operator, so it happens with the first function that is compiled.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, library
from torch.fx import Graph, Node

from purestep.compiling.nodes import (
    insert_call,
    insert_clone,
    insert_stored,
    is_pointwise,
    is_view,
    skip_views,
    store_value,
    value_of,
)
from purestep.torch_private import onednn_linear

_aten = torch.ops.aten


class Limits(NamedTuple):
    """Holds between how many multiplications a product stays with MKL."""

    max_looped: int
    """The most for which a plain loop takes no longer than a call of MKL."""
    min_onednn: int
    """The fewest for which oneDNN is faster. A call of it takes ten microseconds to begin."""


NARROW = Limits(max_looped=2**16, min_onednn=2**23)
"""For all other processors that are not Intel's."""

WIDE = Limits(max_looped=2**17, min_onednn=2**21)
"""For processors that multiply 512 bits at once, of which MKL takes half.

From 2²³ multiplications on, MKL takes twice as long as oneDNN there.
"""

MAX_PRODUCTS_PER_PASS = 4
"""How many products each pass of a loop adds to its sum, at most.

Each pass waits for the addition of the pass before, so a loop of fewer passes ends sooner. With
eight products it takes longer again.
"""

MIN_PASSES = 8
"""The fewest passes of a loop with several products in each.

The compiler unrolls a loop of fewer passes, and takes up to half a second to compile that.
"""

MAX_COPIED_ELEMENTS = 2**12
"""The most elements of a matrix whose copy and loop take less time than a call of MKL."""


def find_limits(capabilities: Mapping[str, Any]) -> Limits | None:
    """Returns the limits of products on a processor; None where MKL is best for all sizes.

    ``capabilities`` are those of ``torch.cpu.get_capabilities()``. None for Intel's processors, and
    if this torch lacks oneDNN or MKL.

    >>> find_limits({"cpu_name": "AMD EPYC"}) == NARROW
    True
    >>> find_limits({"cpu_name": "AMD EPYC", "avx512_vp2intersect": True}) == WIDE
    True
    >>> find_limits({"cpu_name": "Intel Xeon"}) is None
    True
    """
    has_mkl = torch.backends.mkl.is_available()
    has_onednn = torch.backends.mkldnn.is_available()
    is_intel = "intel" in str(capabilities.get("cpu_name", "")).lower()
    if is_intel or not (has_mkl and has_onednn):
        return None
    # Zen 5 is the first of AMD's to have this instruction, and to multiply 512 bits at once.
    return WIDE if capabilities.get("avx512_vp2intersect") else NARROW


def sum_small_products(graph: Graph, max_multiplications: int) -> None:
    """Replaces small float32 matrix products on the CPU by loops of the compiler, in place.

        (a @ b)[m, n] = Σₖ a[m, k] · b[k, n]

    Small are those of at most ``max_multiplications``. A matrix that is computed pointwise is
    stored before. So is ``b`` if the elements of a row do not lie side by side: loops read rows. A
    product stays if such a ``b`` has more than ``MAX_COPIED_ELEMENTS``, or if a size is unknown.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.mm.default):
        a, b = node.args
        if not _repays_loop(value_of(a), value_of(b), max_multiplications):
            continue
        # Views come last: once h is stored, its view h.t() needs no store.
        for matrix in sorted(node.all_input_nodes, key=is_view):
            if _is_inlined(matrix):
                # The loop would compute each element anew for each product with it.
                store_value(graph, matrix)
        a, b = node.args
        with graph.inserting_before(node):
            if not _has_dense_rows(value_of(b)):
                b = insert_stored(graph, b)
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


def _repays_loop(a: Tensor, b: Tensor, max_multiplications: int) -> bool:
    """Returns whether ``a @ b`` is small, in float32 and on the CPU.

    With an unknown size, it is not small. A ``b`` whose rows are not dense may have no more than
    ``MAX_COPIED_ELEMENTS``.
    """
    is_small = _num_multiplications(a, b) <= max_multiplications
    repays_copy = _has_dense_rows(b) or b.numel() <= MAX_COPIED_ELEMENTS
    return is_small and _is_float32_on_cpu(a) and repays_copy


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

    A copy is what ``store_value`` makes.
    """
    node = skip_views(node)
    return is_pointwise(node) and node.target is not _aten.clone.default


def onednn_matmul(a: Tensor, b: Tensor, min_multiplications: int = 1) -> Tensor:
    """Computes ``a @ b`` of float32 matrices on the CPU by oneDNN.

    A product of fewer than ``min_multiplications`` is one by ``torch.mm``. So is an empty one,
    which oneDNN does not take.

    >>> onednn_matmul(torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[1., 2.],
            [3., 4.]])
    """
    if a.shape[0] * b.numel() < min_multiplications:
        return torch.mm(a, b)
    dims = sorted(zip(b.stride(), b.shape, strict=True))
    (inner_stride, inner_size), (outer_stride, _) = dims
    if inner_stride != 1 or outer_stride < inner_size:
        # oneDNN refuses rows that overlap, and takes a thousand times as long over gaps.
        b = b.contiguous()
    # Without a bias, and without an operation after the product.
    return onednn_linear(a, b.t(), None, "none", [], "")


def _product_shape(a: Tensor, b: Tensor, min_multiplications: int) -> Tensor:
    num_rows, _ = a.shape
    _, num_columns = b.shape
    return a.new_empty(num_rows, num_columns)


_operators = library.Library("purestep", "DEF")
_operators.define(
    "product(Tensor a, Tensor b, int min_multiplications) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_operators.impl("product", onednn_matmul, "CPU")
_operators.impl("product", _product_shape, "Meta")


def use_onednn(graph: Graph, min_multiplications: int) -> None:
    """Replaces large float32 matrix products on the CPU by ``onednn_matmul``, in place.

    Large are those of at least ``min_multiplications``, and of unknown sizes: ``onednn_matmul``
    checks again. Inserts a contiguous copy of the first matrix if its rows are not contiguous.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.mm.default):
        a, b = node.args
        a_value = value_of(a)
        is_large = _num_multiplications(a_value, value_of(b)) >= min_multiplications
        if not (is_large and _is_float32_on_cpu(a_value)):
            continue
        with graph.inserting_before(node):
            if not _has_dense_rows(a_value):
                # Columns cost more to read than this copy, which is often fused.
                a = insert_clone(graph, a)
            replacement = insert_call(
                graph, torch.ops.purestep.product.default, a, b, min_multiplications
            )
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)


def _has_dense_rows(matrix: Tensor) -> bool:
    stride = matrix.stride(1)
    # A stride that is not known yet is a torch.SymInt.
    return isinstance(stride, int) and stride == 1
