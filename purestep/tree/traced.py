"""Flattens trees while a compiler traces.

There, a call of optree is traced as Python: 400 instructions for each leaf, most of which look up
that a tensor is a leaf, and make a spec of it. These functions take 30.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch
from optree.utils import total_order_sorted

from purestep.tree.shard import NAMESPACE
from purestep.types import Tree


class TracedSpec(NamedTuple):
    """Holds the containers of a tree without its leaves, as an ``optree.PyTreeSpec`` does.

    Args:
        type: the class of the node; None for a leaf.
        metadata: what the class needs to build a node; of a dict its keys, in the dict's order.
        names: the entries of the children.
        nodes: the specs of the children.
        build_node: ``build_node(metadata, children)`` makes the node again, but for a dict.
        num_leaves: in the whole tree below.
    """

    type: Any
    metadata: Any
    names: tuple[Any, ...]
    nodes: tuple[TracedSpec, ...]
    build_node: Any
    num_leaves: int

    @property
    def num_children(self) -> int:
        return len(self.nodes)

    def is_leaf(self) -> bool:
        return self.type is None

    def entries(self) -> list[Any]:
        """Returns the keys, indices or fields of the children."""
        return list(self.names)

    def children(self) -> list[TracedSpec]:
        """Returns the specs of the children."""
        return list(self.nodes)

    def child(self, index: int) -> TracedSpec:
        """Returns the spec of one child."""
        return self.nodes[index]


LEAF = TracedSpec(None, None, (), (), None, 1)


def flatten_traced(
    tree: Tree, is_leaf: Callable[..., bool] | None
) -> tuple[list[Any], TracedSpec]:
    """Returns the leaves of a tree, in the order of optree's, and its containers."""
    leaves: list[Any] = []
    (spec,) = _flatten_nodes([tree], is_leaf, leaves)
    return leaves, spec


def _flatten_nodes(
    nodes: Sequence[Tree], is_leaf: Callable[..., bool] | None, leaves: list[Any]
) -> list[TracedSpec]:
    """Returns the containers of each node, and appends their leaves to ``leaves``."""
    specs = []
    for node in nodes:
        if isinstance(node, torch.Tensor) or optree.tree_is_leaf(
            node, is_leaf, namespace=NAMESPACE
        ):
            leaves.append(node)
            specs.append(LEAF)
        else:
            specs.append(_flatten_container(node, is_leaf, leaves))
    return specs


def _flatten_container(
    node: Tree, is_leaf: Callable[..., bool] | None, leaves: list[Any]
) -> TracedSpec:
    children: Sequence[Tree]
    metadata: Any
    build_node: Any
    if type(node) is dict:
        # Not by optree, which a compiler takes for a constant if the dict is empty.
        entries = tuple(total_order_sorted(node))
        children = [node[key] for key in entries]
        metadata = tuple(node)
        build_node = None
    else:
        children, metadata, entries, build_node = optree.tree_flatten_one_level(
            node, is_leaf, namespace=NAMESPACE
        )
    num_leaves_before = len(leaves)
    nodes = tuple(_flatten_nodes(children, is_leaf, leaves))
    num_leaves = len(leaves) - num_leaves_before
    return TracedSpec(
        type(node), metadata, tuple(entries), nodes, build_node, num_leaves
    )


def unflatten_traced(spec: TracedSpec, leaves: Sequence[Any]) -> Tree:
    """Builds a tree from its containers and leaves; raises ValueError for another number."""
    if len(leaves) != spec.num_leaves:
        raise ValueError(
            f"{len(leaves)} leaves for a tree of {spec.num_leaves}: pass a value for each leaf"
        )
    (tree,) = _build_nodes([spec], iter(leaves))
    return tree


def _build_nodes(specs: Sequence[TracedSpec], leaves: Iterator[Any]) -> list[Tree]:
    nodes = []
    for spec in specs:
        if spec.type is None:
            nodes.append(next(leaves))
        else:
            nodes.append(build_container(spec, _build_nodes(spec.nodes, leaves)))
    return nodes


def build_container(spec: TracedSpec, children: Sequence[Any]) -> Any:
    """Builds the node at the top of a spec over these children; a dict keeps the order of keys."""
    if spec.type is not dict:
        return spec.build_node(spec.metadata, children)
    container = dict.fromkeys(spec.metadata)
    for key, child in zip(spec.names, children, strict=True):
        container[key] = child
    return container
