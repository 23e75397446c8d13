"""A tree and its leaves: how it is taken apart and put together, and the name of each leaf.

A structure is a tree without its leaves: what containers there are, and what stands where in them.
"""

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias

import optree
import torch

from purestep import torch_private
from purestep.tree.shard import NAMESPACE, Shard, ShardSpec, ShardSpecs
from purestep.types import Tree

TreeSpec: TypeAlias = Any
"""The containers of a tree, without its leaves."""


def flatten(
    tree: Tree, is_leaf: Callable[..., bool] | None = None
) -> tuple[list[Any], TreeSpec]:
    """Returns the leaves from left to right, with dict keys sorted, and the structure.

    ``unflatten`` fills the structure again. ``is_leaf`` makes more nodes leaves.

    >>> flatten({"b": 2, "a": [1]})[0]
    [1, 2]
    """
    return optree.tree_flatten(tree, is_leaf, namespace=NAMESPACE)


def unflatten(structure: TreeSpec, leaves: Sequence[Any]) -> Tree:
    """Rebuilds a tree from its structure and leaves: the inverse of ``flatten``.

    >>> unflatten(flatten({"b": 2, "a": [1]})[1], [3, 4])
    {'b': 4, 'a': [3]}
    """
    # A compiler takes a dict without tensors for one of optree's own.
    if torch.compiler.is_dynamo_compiling() and not any(
        builtins.map(torch.is_tensor, leaves)
    ):
        return _rebuild(structure, iter(leaves))
    return optree.tree_unflatten(structure, leaves)


def _rebuild(
    structure: TreeSpec, leaves: Iterator[Any], *, pruned: bool = False
) -> Tree:
    """``unflatten``, node by node; ``pruned``: with ``()`` for containers that hold no others."""
    if structure.is_leaf():
        return next(leaves)
    children = [
        _rebuild(child, leaves, pruned=pruned) for child in structure.children()
    ]
    if pruned and all(builtins.map(is_empty, children)):
        return ()
    if torch.compiler.is_dynamo_compiling():
        return torch_private.traced_container(structure, children)
    return structure.one_level().unflatten(children)


def shard_specs(structure: TreeSpec) -> ShardSpecs:
    """How each leaf of a tree of this structure is sharded; empty where none is."""
    if hasattr(structure, "walk"):
        if not structure.walk([False] * structure.num_leaves, _contains_shard):
            return ()
        found = structure.walk([[None]] * structure.num_leaves, _collect_shard_specs)
    else:
        found = _traced_shard_specs(structure)  # one of a compiler's own
    return tuple(found) if any(found) else ()


def _contains_shard(kind: Any, data: Any, children: Sequence[bool]) -> bool:
    return kind is Shard or any(children)


def _collect_shard_specs(
    kind: Any, data: Any, children: Sequence[list[ShardSpec | None]]
) -> list[ShardSpec | None]:
    found = [place for child in children for place in child]
    if kind is not Shard:
        return found
    for other in filter(None, found):
        raise ValueError(
            f"a leaf is sharded over {data.axis} and over {other.axis}: a Shard within a "
            "Shard is not supported; shard it over one axis"
        )
    return [data] * len(found)


def _traced_shard_specs(structure: TreeSpec) -> list[ShardSpec | None]:
    if structure.is_leaf():
        return [None]
    children = [_traced_shard_specs(child) for child in structure.children()]
    return _collect_shard_specs(
        structure.type, torch_private.traced_metadata(structure), children
    )


def leaves(tree: Tree) -> list[Any]:
    """Returns the leaves from left to right.

    >>> leaves({"b": 2, "a": [1]})
    [1, 2]
    """
    return flatten(tree)[0]


def is_empty(tree: Tree) -> bool:
    """Whether this is the tree without leaves that stands for nothing, ``()``.

    >>> is_empty(()), is_empty([])
    (True, False)
    """
    return type(tree) is tuple and len(tree) == 0


def map(func: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Applies ``func`` to corresponding leaves of trees of the same structure.

    Unlike ``optree.tree_map``, it refuses a deeper second tree, and a ``None`` against a leaf:

    >>> map(lambda a, b: a + b, {"w": 1}, {"w": None})
    Traceback (most recent call last):
    ...
    ValueError: trees differ in structure: {'w': *} against {'w': None}
    """
    leaves, structure = flatten(tree)
    if not rest:
        return unflatten(structure, [func(leaf) for leaf in leaves])
    columns = [leaves_matching(structure, other) for other in rest]
    return unflatten(
        structure, [func(*row) for row in zip(leaves, *columns, strict=True)]
    )


def leaves_matching(structure: TreeSpec, tree: Tree) -> list[Any]:
    """The leaves of a tree that must have this structure.

    >>> leaves_matching(flatten({"a": 1, "b": 2})[1], {"a": 3, "b": 4})
    [3, 4]
    """
    leaves, other = flatten(tree)
    if not is_same_spec(other, structure):
        raise ValueError(
            f"trees differ in structure: {format_spec(structure)} against {format_spec(other)}"
        )
    return leaves


def is_same_spec(one: TreeSpec, other: TreeSpec) -> bool:
    """Compares two structures, also in a trace.

    >>> is_same_spec(flatten([1])[1], flatten([2])[1])
    True
    >>> is_same_spec(flatten([1])[1], flatten((1,))[1])
    False
    """
    if not torch.compiler.is_dynamo_compiling():
        return bool(one == other)
    # There a structure is a dataclass of torch's. torch 2.11 compares none of these, and torch 2.13
    # on Python 3.13 none of a dict ("Missing richcompare_impl override"). Where it does compare,
    # {"a": 1, "b": 2} differs from {"b": 2, "a": 1}, which optree, sorting keys, calls equal.
    if one.type is not other.type or one.entries() != other.entries():
        return False
    metadata = torch_private.traced_metadata(one), torch_private.traced_metadata(other)
    if (
        one.type is not dict and metadata[0] != metadata[1]
    ):  # a dict's is the order of its keys
        return False
    return all(builtins.map(is_same_spec, one.children(), other.children()))


def broadcast_prefix(prefix: Tree, tree: Tree) -> list[Any]:
    """Returns, for each leaf of ``tree``, the leaf of ``prefix`` above it; dicts pair by key.

    >>> broadcast_prefix({"a": "all of it", "b": "one"}, {"a": [1, 2], "b": 3})
    ['all of it', 'all of it', 'one']
    """
    return _broadcast(prefix, flatten(tree)[1])


def _broadcast(prefix: Tree, structure: TreeSpec) -> list[Any]:
    if prefix is not None and optree.tree_is_leaf(prefix, namespace=NAMESPACE):
        return [prefix] * structure.num_leaves
    parts: Sequence[Tree] | None = None
    if isinstance(prefix, dict) and issubclass(structure.type or object, dict):
        # By key: an OrderedDict has another order, and no compiler follows optree for labels.
        if prefix.keys() == {*structure.entries()}:
            parts = [prefix[key] for key in structure.entries()]
    elif type(prefix) is structure.type:
        parts = optree.tree_flatten_one_level(prefix, namespace=NAMESPACE)[0]
    if parts is None or len(parts) != structure.num_children:
        raise ValueError(
            f"{prefix!r} is no prefix of a tree like {format_spec(structure)}: give a "
            "value for each "
            "of its leaves, or one for a whole container"
        )
    pairs = zip(parts, structure.children(), strict=True)
    return [leaf for part, child in pairs for leaf in _broadcast(part, child)]


def subset(structure: TreeSpec, leaves: Sequence[Any], where: Set[int]) -> Tree:
    """The tree of some of its leaves, by position; ``()`` stands where others are left out.

    >>> whole = {"a": [1, 2], "b": {"c": 3}}
    >>> subset(flatten(whole)[1], leaves(whole), {1})
    {'a': [(), 2], 'b': ()}
    """
    kept = [leaf if position in where else () for position, leaf in enumerate(leaves)]
    return _rebuild(structure, iter(kept), pruned=True)


def mappings_to_dicts(tree: Tree) -> Tree:
    """Returns the tree with a dict in place of each mapping that optree takes for a leaf.

    Such are a tokenizer's ``BatchEncoding`` and other ``UserDict``, and subclasses of dict.

    >>> from collections import UserDict
    >>> mappings_to_dicts([UserDict(tokens=1, more=[UserDict(labels=2)])])
    [{'tokens': 1, 'more': [{'labels': 2}]}]
    """
    leaves, structure = flatten(tree)
    if not any(isinstance(leaf, Mapping) for leaf in leaves):
        return tree
    dicts = [
        mappings_to_dicts(dict(leaf)) if isinstance(leaf, Mapping) else leaf
        for leaf in leaves
    ]
    return unflatten(structure, dicts)


def paths(tree: Tree, name: str) -> list[str]:
    """Returns how Python reaches each leaf, for messages.

    >>> paths({"layers": [1, 2]}, "params")
    ["params['layers'][0]", "params['layers'][1]"]
    """
    return [
        accessor.codify(name)
        for accessor in optree.tree_accessors(tree, namespace=NAMESPACE)
    ]


def format_spec(structure: TreeSpec) -> str:
    """Returns a structure as text, with stars for its leaves.

    >>> format_spec(flatten({"a": [1, 2]})[1])
    "{'a': [*, *]}"
    """
    text = str(structure).removeprefix("PyTreeSpec(").removesuffix(")")
    return text.removesuffix(f", namespace={NAMESPACE!r}")
