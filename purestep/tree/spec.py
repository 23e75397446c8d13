"""Flattens trees into leaves and a ``TreeSpec``, builds them again, and names their leaves.

A ``TreeSpec`` is a tree without its leaves: its containers, and where each one stands.
"""

import builtins
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias

import optree
import torch

from purestep.tree.shard import NAMESPACE, Shard, ShardSpec, ShardSpecs
from purestep.tree.traced import (
    Node,
    TracedSpec,
    build_container,
    flatten_traced,
    format_node,
    is_same_node,
    unflatten_traced,
)
from purestep.types import Tree

TreeSpec: TypeAlias = Any
"""The containers of a tree, without its leaves."""


def flatten(
    tree: Tree, is_leaf: Callable[..., bool] | None = None
) -> tuple[list[Any], TreeSpec]:
    """Returns the leaves from left to right, and the ``TreeSpec``.

    The keys of a plain dict are sorted; an ``OrderedDict`` keeps its order. ``unflatten`` builds
    the tree again. Nodes for which ``is_leaf(node)`` is True are leaves, too. None is a container
    without leaves.

    >>> flatten({"b": 2, "a": [1]})[0]
    [1, 2]
    """
    if torch.compiler.is_dynamo_compiling():
        return flatten_traced(tree, is_leaf)
    return optree.tree_flatten(tree, is_leaf, namespace=NAMESPACE)


def unflatten(spec: TreeSpec, leaves: Sequence[Any]) -> Tree:
    """Builds a tree from its ``TreeSpec`` and leaves: the inverse of ``flatten``.

    The leaves are in the order of ``flatten``, in which the keys of a plain dict are sorted. The
    new dict has its keys in their old order. Raises ValueError for another number of leaves.

    >>> unflatten(flatten({"b": 2, "a": [1]})[1], [3, 4])
    {'b': 4, 'a': [3]}
    """
    if isinstance(spec, TracedSpec):
        return unflatten_traced(spec, leaves)
    return optree.tree_unflatten(spec, leaves)


def _build_pruned(spec: TreeSpec, leaves: Iterator[Any]) -> Tree:
    """Builds a tree node by node, and takes its leaves from an iterator.

    It makes ``()`` of each container that holds nothing, or nothing but ``()``.
    """
    if spec.is_leaf():
        return next(leaves)
    children = [_build_pruned(child, leaves) for child in spec.children()]
    if all(builtins.map(is_empty, children)):
        return ()
    if isinstance(spec, TracedSpec):
        return build_container(spec.node, children)
    return spec.one_level().unflatten(children)


def shard_specs(spec: TreeSpec) -> ShardSpecs:
    """Returns how each leaf is sharded, None for a leaf that is not; ``()`` if none is."""
    if isinstance(spec, TracedSpec):
        specs = _traced_shard_specs(spec.node)
    elif spec.namespace:
        unsharded: list[list[None]] = [[None]] * spec.num_leaves
        specs = spec.walk(unsharded, _collect_shard_specs)
    else:
        # A spec has the namespace only if one of its nodes is registered there, as ``Shard`` is. A
        # step asks several times, so the usual answer, that there is none, is fast.
        return ()
    if not any(specs):
        return ()
    return tuple(specs)


def _collect_shard_specs(
    node_type: Any, metadata: Any, children: Sequence[list[ShardSpec | None]]
) -> list[ShardSpec | None]:
    specs: list[ShardSpec | None] = []
    for child in children:
        specs += child
    if node_type is not Shard:
        return specs
    return [inner.within(metadata) if inner else metadata for inner in specs]


def _traced_shard_specs(node: Node) -> list[ShardSpec | None]:
    """Returns how each leaf below a node is sharded, None for others."""
    if node is None:
        return [None]
    node_type, metadata, _, children, _ = node
    return _collect_shard_specs(
        node_type, metadata, [*builtins.map(_traced_shard_specs, children)]
    )


def leaves(tree: Tree) -> list[Any]:
    """Returns the leaves in the tree's order, in which the keys of a plain dict are sorted.

    >>> leaves({"b": 2, "a": [1]})
    [1, 2]
    """
    leaves, _ = flatten(tree)
    return leaves


def is_empty(tree: Tree) -> bool:
    """Returns whether a tree is ``()``, which stands for nothing.

    >>> is_empty(()), is_empty([])
    (True, False)
    """
    return type(tree) is tuple and len(tree) == 0


def map(func: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Returns the tree of the results of ``func`` on corresponding leaves of trees.

    All trees must have the same structure, else it raises ValueError. Unlike ``optree.tree_map``,
    it refuses a deeper second tree, and a ``None`` against a leaf:

    >>> map(lambda a, b: a + b, {"w": 1}, {"w": None})
    Traceback (most recent call last):
    ...
    ValueError: trees differ in structure: {'w': *} against {'w': None}
    """
    leaves, spec = flatten(tree)
    if not rest:
        return unflatten(spec, [func(leaf) for leaf in leaves])
    columns = [leaves_matching(spec, other) for other in rest]
    results = []
    for row in zip(leaves, *columns, strict=True):
        results.append(func(*row))
    return unflatten(spec, results)


def leaves_matching(spec: TreeSpec, tree: Tree) -> list[Any]:
    """Returns the leaves of a tree; raises ValueError if its containers are not those of ``spec``.

    >>> leaves_matching(flatten({"a": 1, "b": 2})[1], {"a": 3, "b": 4})
    [3, 4]
    """
    leaves, other = flatten(tree)
    if not is_same_spec(other, spec):
        raise ValueError(
            f"trees differ in structure: {format_spec(spec)} against {format_spec(other)}"
        )
    return leaves


def tensors_matching(spec: TreeSpec, tree: Tree) -> list[torch.Tensor] | None:
    """Returns the leaves of a tree of tensors in the order of ``spec``; None if containers differ.

    Outside of a trace, a dict, an ``OrderedDict`` and a ``defaultdict`` pair by key. Deques pair
    whatever their ``maxlen``. It then also returns None if a leaf is no tensor. It takes a third to
    a tenth of the time of ``flatten``, which makes a spec.

    >>> tensors_matching(flatten({"a": 1, "b": 2})[1], {"b": torch.ones(1), "a": torch.zeros(1)})
    [tensor([0.]), tensor([1.])]
    """
    if torch.compiler.is_dynamo_compiling():
        leaves, other = flatten(tree)
        return leaves if is_same_spec(other, spec) else None
    try:
        leaves = spec.flatten_up_to(tree)
    except ValueError:
        return None
    # A container in the place of a leaf is taken for one.
    is_tensor = builtins.map(isinstance, leaves, itertools.repeat(torch.Tensor))
    return leaves if all(is_tensor) else None


def is_same_spec(one: TreeSpec, other: TreeSpec) -> bool:
    """Returns whether two specs are equal, also in a trace.

    The order of a plain dict's keys makes no difference.

    >>> is_same_spec(flatten([1])[1], flatten([2])[1])
    True
    >>> is_same_spec(flatten([1])[1], flatten((1,))[1])
    False
    """
    if not isinstance(one, TracedSpec):
        return bool(one == other)
    return is_same_node(one.node, other.node)


def broadcast_prefix(prefix: Tree, tree: Tree) -> list[Any]:
    """Returns, for each leaf of ``tree``, the leaf of ``prefix`` above it; dicts pair by key.

    Raises ValueError if ``prefix`` has containers of other types, lengths or keys than the top of
    ``tree``. What else a node holds, as a ``Shard``'s axis, is not compared.

    >>> broadcast_prefix({"a": "all of it", "b": "one"}, {"a": [1, 2], "b": 3})
    ['all of it', 'all of it', 'one']
    """
    _, spec = flatten(tree)
    return _broadcast(prefix, spec)


def _broadcast(prefix: Tree, spec: TreeSpec) -> list[Any]:
    if prefix is not None and optree.tree_is_leaf(prefix, namespace=NAMESPACE):
        return [prefix] * spec.num_leaves
    parts: Sequence[Tree] | None = None
    if isinstance(prefix, dict) and issubclass(spec.type or object, dict):
        # By key: an OrderedDict has another order, and dynamo does not follow optree for labels.
        keys = spec.entries()
        if prefix.keys() == {*keys}:
            parts = [prefix[key] for key in keys]
    elif type(prefix) is spec.type:
        parts, *_ = optree.tree_flatten_one_level(prefix, namespace=NAMESPACE)
    if parts is None or len(parts) != spec.num_children:
        raise ValueError(
            f"{_describe_misfit(prefix, spec)}: give a value for each leaf of the tree, or one for "
            "a whole container"
        )
    values = []
    children = spec.children()
    for part, child in zip(parts, children, strict=True):
        values += _broadcast(part, child)
    return values


def _describe_misfit(prefix: Tree, spec: TreeSpec) -> str:
    """Describes how a prefix differs from a spec: keys that it lacks or adds, up to five of each.

    Unless both are dicts, the text has the whole prefix and the whole spec.

    >>> _describe_misfit({"a": 1}, flatten({"a": 2, "b": 3})[1])
    "the prefix lacks ['b'] and adds [] to the keys of the tree"
    """
    if not isinstance(prefix, dict) or not issubclass(spec.type or object, dict):
        return f"{prefix!r} is no prefix of a tree like {format_spec(spec)}"
    keys = spec.entries()
    missing = [key for key in keys if key not in prefix]
    added = [key for key in prefix if key not in keys]
    return (
        f"the prefix lacks {missing[:5]} and adds {added[:5]} to the keys of the tree"
    )


def subset(spec: TreeSpec, leaves: Sequence[Any], positions: Set[int]) -> Tree:
    """Builds the tree of ``spec`` with only those leaves whose position is in ``positions``.

    Other leaves become ``()``, and so does each container without a selected leaf.

    >>> params = {"a": [1, 2], "b": {"c": 3}}
    >>> subset(flatten(params)[1], leaves(params), {1})
    {'a': [(), 2], 'b': ()}
    """
    selected: list[Any] = [()] * spec.num_leaves
    for position in positions:
        selected[position] = leaves[position]
    return _build_pruned(spec, iter(selected))


def mappings_to_dicts(tree: Tree) -> Tree:
    """Returns a tree with a dict for each mapping that optree takes for a leaf, nested ones too.

    That is any mapping whose class optree does not know: a tokenizer's ``BatchEncoding``, other
    ``UserDict``, subclasses of dict. Without any, it returns the tree itself.

    >>> from collections import UserDict
    >>> mappings_to_dicts([UserDict(tokens=1, more=[UserDict(labels=2)])])
    [{'tokens': 1, 'more': [{'labels': 2}]}]
    """
    leaves, spec = flatten(tree)
    if not any(isinstance(leaf, Mapping) for leaf in leaves):
        return tree
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Mapping):
            leaves[index] = mappings_to_dicts(dict(leaf))
    return unflatten(spec, leaves)


def paths(tree: Tree, name: str) -> list[str]:
    """Returns for each leaf the Python expression that selects it from a tree called ``name``.

    A child of a class that is registered without ``path_entry_type`` may be written as
    ``[<flat index 0>]``, which is no Python.

    >>> paths({"layers": [1, 2]}, "params")
    ["params['layers'][0]", "params['layers'][1]"]
    """
    accessors = optree.tree_accessors(tree, namespace=NAMESPACE)
    return [accessor.codify(name) for accessor in accessors]


def format_spec(spec: TreeSpec) -> str:
    """Formats a spec for messages, with stars for its leaves.

    >>> format_spec(flatten({"a": [1, 2]})[1])
    "{'a': [*, *]}"
    """
    if isinstance(spec, TracedSpec):
        return format_node(spec.node)
    text = str(spec).removeprefix("PyTreeSpec(").removesuffix(")")
    return text.removesuffix(f", namespace={NAMESPACE!r}")
