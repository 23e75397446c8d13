"""A tree and its leaves: how it is taken apart and put together, and the name of each leaf.

A structure is a tree without its leaves: what containers there are, and what stands where in them.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor

from purestep import torch_internals
from purestep.tree.shard import NAMESPACE, Place, Shard, Spread
from purestep.types import Tree

Structure: TypeAlias = Any


def flatten(
    tree: Tree, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Structure]:
    """The leaves from left to right (dict keys sorted), and the structure that ``unflatten`` fills.

    ``is_leaf`` says which nodes are leaves, too.

    >>> flatten({"b": 2, "a": [1]})[0]
    [1, 2]
    """
    leaves, structure = optree.tree_flatten(tree, is_leaf, namespace=NAMESPACE)
    return leaves, structure


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Tree:
    """The tree of this structure over these leaves: the inverse of ``flatten``.

    >>> unflatten(flatten({"b": 2, "a": [1]})[1], [3, 4])
    {'b': 4, 'a': [3]}
    """
    if torch.compiler.is_dynamo_compiling() and not any(
        isinstance(leaf, Tensor) for leaf in leaves
    ):
        return _constants(structure, iter(leaves))
    return optree.tree_unflatten(structure, leaves)


def _constants(structure: Structure, leaves: Iterator[Any]) -> Tree:
    """``unflatten`` for a compiler, which takes a dict without tensors for one of optree's own."""
    if structure.is_leaf():
        return next(leaves)
    return _node(structure, [_constants(child, leaves) for child in structure.children()])


def _node(structure: Structure, children: list[Tree]) -> Tree:
    """The container at the top of this structure, over these children."""
    if torch.compiler.is_dynamo_compiling():
        return torch_internals.traced_container(structure, children)
    return structure.one_level().unflatten(children)


def spread(structure: Any) -> Spread:
    """How each leaf of a tree of this structure is sharded; empty where none is."""
    if not hasattr(structure, "walk"):
        found = _traced(structure)  # one of a compiler's own
        return tuple(found) if any(place is not None for place in found) else ()
    leaves = [False] * structure.num_leaves
    if not structure.walk(leaves, _holds_shard):
        return ()
    return tuple(structure.walk([[None]] * structure.num_leaves, _places))


def _holds_shard(kind: type, data: Any, children: Sequence[bool]) -> bool:
    return kind is Shard or any(children)


def _places(kind: type, data: Any, children: Sequence[list[Place | None]]) -> list[Place | None]:
    found = [place for child in children for place in child]
    return _below(data, found) if kind is Shard else found


def _traced(structure: Any) -> list[Place | None]:
    if structure.is_leaf():
        return [None]
    found = [place for child in structure.children() for place in _traced(child)]
    if structure.type is Shard:
        return _below(torch_internals.traced_metadata(structure), found)
    return found


def _below(place: Place, found: list[Place | None]) -> list[Place | None]:
    for other in found:
        if other is not None:
            raise ValueError(
                f"a leaf is sharded over {place.axis} and over {other.axis}: a Shard within a "
                "Shard is not supported; shard it over one axis"
            )
    return [place] * len(found)


def leaves_of(tree: Tree) -> list[Any]:
    """The leaves alone.

    >>> leaves_of({"b": 2, "a": [1]})
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
    """``func`` of corresponding leaves, for trees of one and the same structure.

    Unlike ``optree.tree_map``, a deeper second tree or a ``None`` against a leaf is an error:

    >>> map(lambda a, b: a + b, {"w": 1}, {"w": None})
    Traceback (most recent call last):
    ...
    ValueError: trees differ in structure: {'w': *} against {'w': None}
    """
    if is_empty(tree) and all(builtins.map(is_empty, rest)):
        return tree
    if not rest:
        leaves, structure = flatten(tree)
        return unflatten(structure, [func(leaf) for leaf in leaves])
    columns_, structure = columns(tree, *rest)
    return unflatten(structure, [func(*row) for row in zip(*columns_, strict=True)])


def columns(*trees: Tree) -> tuple[list[list[Any]], Structure]:
    """The leaves of each of some trees of one and the same structure, and the structure.

    >>> columns({"a": 1, "b": 2}, {"a": 3, "b": 4})[0]
    [[1, 2], [3, 4]]
    """
    flat = [flatten(tree) for tree in trees]
    structure = flat[0][1]
    for _, other in flat:
        check_same(structure, other)
    return [leaves for leaves, _ in flat], structure


def check_same(structure: Structure, other: Structure) -> None:
    """An error that shows both structures, unless they are one and the same."""
    if other != structure:
        raise ValueError(
            f"trees differ in structure: {describe(structure)} against {describe(other)}"
        )


def flatten_up_to(structure: Structure, tree: Tree) -> list[Tree]:
    """The subtrees of ``tree`` where ``structure`` has its leaves.

    >>> flatten_up_to(flatten({"a": 0, "b": 0})[1], {"a": [1, 2], "b": 3})
    [[1, 2], 3]
    """
    subtrees: list[Tree] = structure.flatten_up_to(tree)
    return subtrees


def broadcast_prefix(prefix: Tree, tree: Tree) -> list[Any]:
    """For each leaf of ``tree`` the leaf of ``prefix`` that stands for it; dicts pair by key.

    >>> broadcast_prefix({"a": "all of it", "b": "one"}, {"a": [1, 2], "b": 3})
    ['all of it', 'all of it', 'one']
    """
    return _spread(prefix, flatten(tree)[1])


def _spread(prefix: Tree, structure: Structure) -> list[Any]:
    # Not optree's: it orders what an OrderedDict holds in a way of its own, and no compiler follows
    # it for labels.
    if isinstance(prefix, dict) and issubclass(structure.type or object, dict):
        children = dict(zip(structure.entries(), structure.children(), strict=True))
        if prefix.keys() == children.keys():
            return [leaf for key in children for leaf in _spread(prefix[key], children[key])]
    elif prefix is not None and optree.tree_is_leaf(prefix, namespace=NAMESPACE):
        return [prefix] * structure.num_leaves
    elif type(prefix) is structure.type:
        parts = [] if prefix is None else _children(prefix)
        if len(parts) == structure.num_children:
            pairs = zip(parts, structure.children(), strict=True)
            return [leaf for part, child in pairs for leaf in _spread(part, child)]
    raise ValueError(
        f"{prefix!r} is no prefix of a tree like {describe(structure)}: give a value for each of "
        "its leaves, or one for a whole container"
    )


def _children(node: Tree) -> list[Tree]:
    return list(optree.tree_flatten_one_level(node, namespace=NAMESPACE)[0])


def part(structure: Structure, leaves: Sequence[Any], where: Collection[int]) -> Tree:
    """The tree of some of its leaves, by position; ``()`` stands where others are left out.

    >>> whole = {"a": [1, 2], "b": {"c": 3}}
    >>> part(flatten(whole)[1], leaves_of(whole), {1})
    {'a': [(), 2], 'b': ()}
    """
    chosen = {*where}
    kept = (leaf if position in chosen else () for position, leaf in enumerate(leaves))
    return _pruned(structure, iter([*kept]))


def _pruned(structure: Structure, leaves: Iterator[Any]) -> Tree:
    if structure.is_leaf():
        return next(leaves)
    children = [_pruned(child, leaves) for child in structure.children()]
    return () if all(builtins.map(is_empty, children)) else _node(structure, children)


def plain(tree: Tree) -> Tree:
    """The same tree, in which every mapping that optree takes for a leaf is a dict, at any depth.

    Such are a tokenizer's ``BatchEncoding`` and other ``UserDict``, and subclasses of dict.

    >>> from collections import UserDict
    >>> plain([UserDict(tokens=1, more=[UserDict(labels=2)])])
    [{'tokens': 1, 'more': [{'labels': 2}]}]
    """
    leaves, structure = flatten(tree)
    if not any(isinstance(leaf, Mapping) for leaf in leaves):
        return tree
    return unflatten(
        structure,
        [
            {key: plain(value) for key, value in leaf.items()}
            if isinstance(leaf, Mapping)
            else leaf
            for leaf in leaves
        ],
    )


def paths(tree: Tree, name: str) -> list[str]:
    """How Python would reach each leaf, for messages.

    >>> paths({"layers": [1, 2]}, "params")
    ["params['layers'][0]", "params['layers'][1]"]
    """
    return [accessor.codify(name) for accessor in optree.tree_accessors(tree, namespace=NAMESPACE)]


def describe(structure: Structure) -> str:
    """A structure as text, its leaves as stars.

    >>> describe(flatten({"a": [1, 2]})[1])
    "{'a': [*, *]}"
    """
    text = str(structure).removeprefix("PyTreeSpec(").removesuffix(")")
    return text.removesuffix(f", namespace={NAMESPACE!r}")
