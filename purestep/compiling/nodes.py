"""Reads and inserts nodes of a graph between the compiler's operators and its kernels."""

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node


def is_pointwise(node: Node) -> bool:
    """Returns whether a node is computed element by element, on the CPU."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and is_on_cpu(node)


def is_view(node: Node) -> bool:
    """Returns whether a node's operation may return views of the tensor that it reads."""
    returns_views: bool = getattr(node.target, "is_view", False)
    return returns_views


def is_on_cpu(node: Node) -> bool:
    """Returns whether a node's value is one tensor, on the CPU."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.device.type == "cpu"


def skip_views(node: Node) -> Node:
    """Returns the node whose memory a view reads; a node that is no view as it is.

    A piece of several views, as of ``split``, is a view, too.
    """
    while is_view(node) or _is_piece(node):
        node = node.all_input_nodes[0]
    return node


def _is_piece(node: Node) -> bool:
    """Returns whether a node is one of several views, such as ``split(x, 2)[0]``."""
    return node.target is operator.getitem and is_view(node.all_input_nodes[0])


def value_of(node: Any) -> Tensor:
    """Returns the fake tensor that the compiler keeps for a node."""
    value: Tensor = node.meta["val"]
    return value


def insert_clone(graph: Graph, node: Node) -> Node:
    """Inserts a contiguous copy of a node where the graph inserts, and returns the new node."""
    return insert_call(
        graph, torch.ops.aten.clone.default, node, memory_format=torch.contiguous_format
    )


def insert_call(graph: Graph, function: Any, *args: Any, **kwargs: Any) -> Node:
    """Inserts a call of a function where the graph inserts, and returns its node.

    Nodes among ``args`` are its inputs. The new node keeps the fake tensor that the call returns.
    """
    node = graph.call_function(function, args, kwargs)
    values = torch.fx.node.map_arg(args, value_of)
    node.meta["val"] = function(*values, **kwargs)
    return node


def store_value(graph: Graph, node: Node) -> None:
    """Makes the compiler store the value of a node, in place: its users read a stored copy."""
    users = list(node.users)
    with graph.inserting_after(node):
        stored = insert_stored(graph, node)
    for user in users:
        user.replace_input_with(node, stored)


def insert_stored(graph: Graph, node: Node) -> Node:
    """Inserts a contiguous copy of a node, and returns a view that reads it from memory.

    The view needs memory, so the compiler does not compute the value again in each loop.
    """
    copy = insert_clone(graph, node)
    value = value_of(copy)
    shape = list(value.shape)
    strides = list(value.stride())
    with graph.inserting_after(copy):
        return insert_call(
            graph, torch.ops.aten.as_strided.default, copy, shape, strides
        )
