"""Flattens trees while a compiler traces.

There, a call of optree is traced as Python: 400 instructions for each leaf, most of which look up
that a tensor is a leaf, and make a spec of it. These functions take 25.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

import optree
from optree.utils import total_order_sorted
from torch import Tensor, nn

from purestep.tree.shard import NAMESPACE, Shard, flatten_shard, unflatten_shard
from purestep.types import Tree

Node: TypeAlias = tuple[Any, ...] | None
"""A container of a tree; None is a leaf.

It is ``(type, metadata, names, children, build_node)``: its class, what the class needs to build it
again (of a dict its keys, in the dict's order), the entries of its children, their nodes, and
``build_node(metadata, children)``. A plain tuple, since a trace takes 35 instructions to make an
object of a class.
"""

PLAIN = dict, list, tuple
"""Containers of Python."""

KNOWN = *PLAIN, Shard
"""Containers that are not looked up in optree's registry.

Looking up shards takes a quarter of the instructions of a step over two of them.
"""

TENSORS = frozenset((Tensor, nn.Parameter))
"""Types of leaves that need no other test. Those of a subclass take the longer way."""


class TracedSpec(NamedTuple):
    """Holds the containers of a tree without its leaves, as an ``optree.PyTreeSpec`` does."""

    node: Node

    @property
    def type(self) -> Any:
        return None if self.node is None else self.node[0]

    @property
    def num_leaves(self) -> int:
        return count_leaves(self.node)

    @property
    def num_children(self) -> int:
        return len(self.children())

    def is_leaf(self) -> bool:
        return self.node is None

    def entries(self) -> list[Any]:
        """Returns the entries of the children: keys of a dict, indices of a list or NamedTuple."""
        return [] if self.node is None else list(self.node[2])

    def children(self) -> list[TracedSpec]:
        """Returns the specs of the children."""
        if self.node is None:
            return []
        return [TracedSpec(child) for child in self.node[3]]

    def child(self, index: int) -> TracedSpec:
        """Returns the spec of one child."""
        return self.children()[index]


def flatten_traced(
    tree: Tree, is_leaf: Callable[..., bool] | None
) -> tuple[list[Any], TracedSpec]:
    """Returns the leaves of a tree, in the order of optree's, and its containers."""
    leaves: list[Any] = []
    try:
        (node,) = _flatten_each((tree,), is_leaf, leaves, sorted)
    except TypeError:
        # Keys that do not compare, such as 1 and "a": optree sorts them by type first.
        leaves = []
        (node,) = _flatten_each((tree,), is_leaf, leaves, total_order_sorted)
    return leaves, TracedSpec(node)


def _flatten_each(
    trees: Sequence[Tree],
    is_leaf: Callable[..., bool] | None,
    leaves: list[Any],
    sort: Callable[[Iterable[Any]], list[Any]],
) -> tuple[Node, ...]:
    """Returns the node of each tree, None for a leaf, and appends their leaves to ``leaves``.

    ``sort`` sorts the keys of a dict. One call flattens all children of a container: in a trace,
    a call takes as long as ten instructions.
    """
    # Most containers hold tensors alone. Of those, a trace takes no instruction for each.
    if frozenset(map(type, trees)) <= TENSORS:
        leaves.extend(trees)
        return (None,) * len(trees)
    nodes: list[Node] = []
    for tree in trees:
        tree_type = type(tree)
        if (
            isinstance(tree, Tensor)
            or (
                tree_type not in KNOWN
                and optree.tree_is_leaf(tree, namespace=NAMESPACE)
            )
            or (is_leaf is not None and is_leaf(tree))
        ):
            leaves.append(tree)
            nodes.append(None)
            continue
        children: Sequence[Tree] = tree
        names: tuple[Any, ...]
        metadata: Any = None
        build_node: Any = None
        if tree_type is dict:
            names = tuple(sort(tree))
            # By map, and not by a comprehension, which a trace calls as a function.
            children = tuple(map(tree.__getitem__, names))
            metadata = tuple(tree)
        elif tree_type in PLAIN:
            names = tuple(range(len(tree)))
        elif tree_type is Shard:
            children, metadata, names = flatten_shard(tree)
            build_node = unflatten_shard
        else:
            children, metadata, names, build_node = optree.tree_flatten_one_level(
                tree, namespace=NAMESPACE
            )
        children_nodes = _flatten_each(children, is_leaf, leaves, sort)
        nodes.append((tree_type, metadata, names, children_nodes, build_node))
    return tuple(nodes)


def count_leaves(node: Node) -> int:
    """Returns the number of leaves in a node's tree: 1 for a leaf itself."""
    if node is None:
        return 1
    _, _, _, children, _ = node
    return sum(count_leaves(child) for child in children)


def unflatten_traced(spec: TracedSpec, leaves: Sequence[Any]) -> Tree:
    """Builds a tree from its containers and leaves; raises ValueError for another number."""
    # Without ``num_leaves``, for which a trace walks through all containers.
    rest = iter(leaves)
    try:
        (tree,) = _build_each([spec.node], rest)
        is_exhausted = next(rest, rest) is rest
    except StopIteration:
        is_exhausted = False
    if not is_exhausted:
        raise ValueError(
            f"{len(leaves)} leaves for a tree of {spec.num_leaves}: pass a value for each leaf"
        )
    return tree


def _build_each(nodes: Sequence[Node], leaves: Iterator[Any]) -> list[Tree]:
    trees = []
    for node in nodes:
        if node is None:
            trees.append(next(leaves))
        else:
            trees.append(build_container(node, _build_each(node[3], leaves)))
    return trees


def build_container(node: Node, children: Sequence[Any]) -> Any:
    """Builds the container of a node over these children; a dict keeps the order of its keys."""
    assert node is not None
    node_type, metadata, names, _, build_node = node
    if build_node is not None:
        return build_node(metadata, children)
    if node_type is not dict:
        return node_type(children)
    container = dict.fromkeys(metadata)
    for name, child in zip(names, children, strict=True):
        container[name] = child
    return container


def format_node(node: Node) -> str:
    """Formats a node for messages, with stars for its leaves.

    Plain dicts, lists, tuples, NamedTuples and None are formatted as optree formats them. Any other
    class is its name with the entries of its children, as in ``Shard(local=*)``.
    """
    if node is None:
        return "*"
    node_type, _, names, children, _ = node
    if node_type is NoneType:
        return "None"
    texts = [format_node(child) for child in children]
    if node_type is list:
        return f"[{', '.join(texts)}]"
    if node_type is tuple:
        return f"({', '.join(texts)}{',' * (len(texts) == 1)})"
    # Of a NamedTuple, ``names`` are the positions.
    labels: Any = getattr(node_type, "_fields", names)
    pairs = zip(labels, texts, strict=True)
    if node_type is dict:
        return "{" + ", ".join(f"{name!r}: {text}" for name, text in pairs) + "}"
    fields = ", ".join(f"{name}={text}" for name, text in pairs)
    return f"{node_type.__name__}({fields})"


def is_same_node(one: Node, other: Node) -> bool:
    """Returns whether two trees have the same containers; plain dicts in any order of keys."""
    if one is None or other is None:
        return one is other
    node_type, metadata, names, children, _ = one
    other_type, other_metadata, other_names, other_children, _ = other
    if node_type is not other_type or names != other_names:
        return False
    # A dict's metadata is the order of its keys.
    if node_type is not dict and metadata != other_metadata:
        return False
    return all(map(is_same_node, children, other_children))
