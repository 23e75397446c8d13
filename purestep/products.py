"""Float32 matrix products of what is compiled for a CPU, by the faster of the two libraries that torch has.

The compiler leaves them to MKL, which keeps to vectors of half the width on processors of other makers than
its own. oneDNN, to which torch gives products in half precision, asks the processor what it has. On Intel's own
processors MKL is ahead.

Importing this defines an operator, so it is imported where something is compiled.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, library

from purestep.torch_private import lies_in_rows, onednn_linear

LEAST = 2**22
"""Multiplications that repay the ten microseconds by which a call of oneDNN begins later."""


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, of float32 matrices.

    >>> product(torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[1., 2.],
            [3., 4.]])
    """
    if a.shape[0] * b.numel() < LEAST:
        return torch.mm(a, b)
    (inner, length), (outer, _) = sorted(zip(b.stride(), b.shape, strict=True))
    if outer < inner * length:
        b = b.contiguous()  # Rows that overlap, of a sliding window, are refused.
    return onednn_linear(a, b.t(), None, "none", [], "")


_operators = library.Library("purestep", "DEF")
_operators.define(
    "product(Tensor a, Tensor b) -> Tensor", tags=(torch.Tag.needs_fixed_stride_order,)
)
_operators.impl("product", product, "CPU")
_operators.impl("product", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), "Meta")


def with_products(graph: torch.fx.Graph) -> None:
    """Puts ``product`` in the place of every product that repays it."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.mm.default):
        a, b = node.args
        if node.kwargs or not _repays(value_of(a), value_of(b)):
            continue
        with graph.inserting_before(node):
            if not lies_in_rows(value_of(a)):
                # Read along its columns it would cost more than this copy, which is often fused.
                contiguous = {"memory_format": torch.contiguous_format}
                a = appended(graph, aten.clone.default, a, **contiguous)
            node.replace_all_uses_with(appended(graph, torch.ops.purestep.product.default, a, b))
        graph.erase_node(node)


def onednn_is_quicker(cpu_name: str) -> bool:
    """Whether oneDNN is quicker than MKL on this processor, by what ``torch.cpu.get_capabilities`` calls it.

    >>> onednn_is_quicker("AMD EPYC"), onednn_is_quicker("Intel Xeon")
    (True, False)
    """
    available = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return available and "intel" not in cpu_name.lower()


def value_of(node: Any) -> Tensor:
    """The tensor without values that the compiler keeps for a node."""
    value: Tensor = node.meta["val"]
    return value


def appended(graph: torch.fx.Graph, function: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    """A call of a function, put where the graph inserts, with the tensor that comes of it."""
    node = graph.call_function(function, args, kwargs)
    values = torch.fx.node.map_arg(args, value_of)
    node.meta["val"] = function(*values, **kwargs)
    return node


def _repays(a: Tensor, b: Tensor) -> bool:
    """Sizes that are not known yet may: ``product`` asks again."""
    sizes = (*a.shape, b.shape[1])
    known = all(isinstance(size, int) for size in sizes)
    return (
        a.device.type == "cpu"
        and a.dtype == torch.float32
        and not (known and math.prod(sizes) < LEAST)
    )
