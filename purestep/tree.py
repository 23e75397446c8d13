"""Trees of tensors: the one optree namespace, and arithmetic on trees.

Containers that optree knows (dict, list, tuple, NamedTuple, ...) are nodes, ``None`` is an empty
subtree, everything else is a leaf. Your own classes become nodes when they are registered in
``NAMESPACE`` (or globally):

>>> import optree
>>> @optree.dataclasses.dataclass(namespace=NAMESPACE)
... class Weights:
...     w: float
>>> map(lambda x: x + 1, {"layer": Weights(w=1.0), "nothing": None})
{'layer': Weights(w=2.0), 'nothing': None}
"""

from __future__ import annotations

import builtins
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor

from purestep import pieces, torch_internals
from purestep.types import Tree

NAMESPACE = pieces.NAMESPACE

SUM_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
"""Those in which floating point values may be added up."""

SMALL = 4096
"""Leaves of fewer elements are joined where each would cost a kernel's call of its own."""

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
    """``unflatten`` for a compiler, which takes a dict without tensors, as labels and masks are, for one of optree's own."""
    if structure.is_leaf():
        return next(leaves)
    return _node(structure, [_constants(child, leaves) for child in structure.children()])


def _node(structure: Structure, children: list[Tree]) -> Tree:
    """The container at the top of this structure, over these children."""
    if torch.compiler.is_dynamo_compiling():
        return torch_internals.traced_container(structure, children)
    return structure.one_level().unflatten(children)


def part(structure: Structure, leaves: Sequence[Any], where: Collection[int]) -> Tree:
    """The tree of some of its leaves, by position; ``()`` stands where a container or a leaf is left out.

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


def flatten_up_to(structure: Structure, tree: Tree) -> list[Tree]:
    """The subtrees of ``tree`` where ``structure`` has its leaves.

    >>> flatten_up_to(flatten({"a": 0, "b": 0})[1], {"a": [1, 2], "b": 3})
    [[1, 2], 3]
    """
    subtrees: list[Tree] = structure.flatten_up_to(tree)
    return subtrees


def broadcast_prefix(prefix: Tree, tree: Tree) -> list[Any]:
    """For each leaf of ``tree`` the leaf of ``prefix`` that stands for it. Dicts of all kinds are paired by key.

    >>> broadcast_prefix({"a": "all of it", "b": "one"}, {"a": [1, 2], "b": 3})
    ['all of it', 'all of it', 'one']
    """
    return _spread(prefix, flatten(tree)[1])


def _spread(prefix: Tree, structure: Structure) -> list[Any]:
    # Not optree's: it orders what an OrderedDict holds in a way of its own, and no compiler follows it for labels.
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
        f"{prefix!r} is no prefix of a tree like {describe(structure)}: give a value for each of its leaves, or one "
        "for a whole container"
    )


def _children(node: Tree) -> list[Tree]:
    return list(optree.tree_flatten_one_level(node, namespace=NAMESPACE)[0])


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


def is_empty(tree: Tree) -> bool:
    """Whether this is the tree without leaves that stands for nothing, ``()``.

    >>> is_empty(()), is_empty([])
    (True, False)
    """
    return type(tree) is tuple and len(tree) == 0


def leaves_of(tree: Tree) -> list[Any]:
    """The leaves alone.

    >>> leaves_of({"b": 2, "a": [1]})
    [1, 2]
    """
    return flatten(tree)[0]


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
        _check_same(structure, other)
    return [leaves for leaves, _ in flat], structure


def _check_same(structure: Structure, other: Structure) -> None:
    if other != structure:
        raise ValueError(
            f"trees differ in structure: {describe(structure)} against {describe(other)}"
        )


def paths(tree: Tree, name: str) -> list[str]:
    """How Python would reach each leaf, for messages.

    >>> paths({"layers": [1, 2]}, "params")
    ["params['layers'][0]", "params['layers'][1]"]
    """
    return [accessor.codify(name) for accessor in optree.tree_accessors(tree, namespace=NAMESPACE)]


def difference(found: Tree, wanted: Tree, name: str) -> str | None:
    """The first leaf in which ``found`` is not like ``wanted``; None where all are alike.

    Floating point dtypes that sums can be kept in are alike.

    >>> difference({"w": torch.ones(2)}, {"v": torch.ones(2)}, "params")
    "params['w'] stands where params['v'] was expected"
    >>> difference({"w": torch.ones(2)}, {"w": torch.ones(3)}, "params")
    "params['w'] is torch.float32 of shape (2,), and torch.float32 of shape (3,) was expected"
    """
    ours, theirs = paths(found, name), paths(wanted, name)
    for mine, other in itertools.zip_longest(ours, theirs):
        if mine != other:
            if mine in {None, *theirs}:
                return f"{other} is missing"
            if other in {None, *ours}:
                return f"{mine} has no place"
            return f"{mine} stands where {other} was expected"
    for path, mine, other in zip(ours, leaves_of(found), leaves_of(wanted), strict=True):
        if _form(mine) != _form(other):
            return f"{path} is {kind(mine)}, and {kind(other)} was expected"
    return None if flatten(found)[1] == flatten(wanted)[1] else f"{name} has other containers"


def _form(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf)
    return leaf.shape, "a sum" if leaf.dtype in SUM_DTYPES else leaf.dtype


def describe(structure: Structure) -> str:
    """A structure as text, its leaves as stars.

    >>> describe(flatten({"a": [1, 2]})[1])
    "{'a': [*, *]}"
    """
    text = str(structure).removeprefix("PyTreeSpec(").removesuffix(")")
    return text.removesuffix(f", namespace={NAMESPACE!r}")


def zeros_like(tree: Tree) -> Tree:
    """Zeros in the dtype in which values of each leaf are summed (``accumulation_dtype``).

    >>> zeros_like({"w": torch.ones(2, dtype=torch.bfloat16)})
    {'w': tensor([0., 0.])}
    """
    return map(lambda leaf: torch.zeros_like(leaf, dtype=accumulation_dtype(leaf.dtype)), tree)


def select(condition: Tensor, chosen: Tree, other: Tree) -> Tree:
    """``chosen`` where the scalar ``condition`` holds, else ``other``: fresh tensors, never a product.

    Hands over ``chosen`` leaf by leaf: where the caller keeps no hold of it, one leaf is alive twice, not
    the tree.

    >>> select(torch.tensor(False), {"w": torch.ones(2)}, {"w": torch.zeros(2)})
    {'w': tensor([0., 0.])}
    """
    chosen_leaves, structure = flatten(chosen)
    del chosen
    other_leaves, other_structure = flatten(other)
    _check_same(structure, other_structure)
    selected = []
    for position, leaf in reversed(list(enumerate(other_leaves))):
        new = chosen_leaves.pop()
        _check_alike(new, leaf, other, position)
        # What has stayed may be on the host, and the condition on a device.
        selected.append(leaf.clone() if new is leaf else torch.where(condition, new, leaf))
        del new
    return unflatten(structure, selected[::-1])


def overwrite(old: Tree, new: Tree, condition: Tensor | None) -> Tree:
    """``new`` written over ``old``, in its buffers, where the scalar ``condition`` holds (None: always).

    Where somebody records or transforms the values, the buffers stay as they are and fresh tensors come back.

    >>> old = {"w": torch.zeros(2)}
    >>> overwrite(old, {"w": torch.ones(2)}, None)["w"] is old["w"], old
    (True, {'w': tensor([1., 1.])})
    """
    if torch.compiler.is_dynamo_compiling():
        writes = not requires_grad((old, new))
    else:
        writes = untransformed(old, new)
    new_leaves, structure = flatten(new)
    del new
    old_leaves, old_structure = flatten(old)
    _check_same(structure, old_structure)
    written = []
    for position, leaf in reversed(list(enumerate(old_leaves))):
        value = new_leaves.pop()
        _check_alike(value, leaf, old, position)
        # What has stayed needs no writing, wherever it is: flags on the host, under a condition on a device.
        if value is not leaf:
            if condition is not None:
                value = torch.where(condition, value, leaf)
            value = leaf.copy_(value) if writes else value
        written.append(value)
        del value
    return unflatten(structure, written[::-1])


def _check_alike(new: Any, old: Any, tree: Tree, position: int) -> None:
    """State keeps its shapes and dtypes: what broadcasts or promotes belongs to other parameters."""

    if kind(new) != kind(old) or not isinstance(old, Tensor):
        name = paths(tree, "(params, opt_state)")[position]
        raise ValueError(
            f"the optimizer turned {name} from {kind(old)} into {kind(new)}: params and state keep their "
            "shapes and dtypes; was opt_state made by optimizer.init of these params?"
        )


def kind(leaf: Any) -> str:
    """What a leaf is: all that its values leave open.

    >>> kind(torch.ones(2, 3))
    'torch.float32 of shape (2, 3)'
    """
    if not isinstance(leaf, Tensor):
        return repr(leaf) if isinstance(leaf, str) else f"{type(leaf).__name__}, no tensor"
    return f"{leaf.dtype} of shape {tuple(leaf.shape)}"


def untransformed(*trees: Tree) -> bool:
    """Whether nobody differentiates or batches what is done with these leaves.

    Only then may a buffer be written to, or a kernel be used that no transform knows.

    >>> untransformed({"w": torch.ones(2)}), untransformed(torch.ones(2, requires_grad=True))
    (True, False)
    """
    if torch_internals.transformed() or torch_internals.in_forward_mode():
        return False
    return not (trees and requires_grad(trees))


def detached(tree: Tree) -> Tree:
    """The same tensors, of which nothing is recorded; other leaves as they are.

    >>> detached({"w": torch.ones(2, requires_grad=True), "name": "w"})
    {'w': tensor([1., 1.]), 'name': 'w'}
    """
    if is_empty(tree):
        return tree
    leaves, structure = flatten(tree)
    return unflatten(structure, cut_off(leaves))


def cut_off(leaves: Sequence[Any]) -> list[Any]:
    """``detached`` of a tree's leaves."""
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def requires_grad(tree: Tree) -> bool:
    """Whether autograd follows any of these leaves, those in mappings that optree takes for a leaf included.

    >>> requires_grad([torch.ones(2), torch.ones(2, requires_grad=True)])
    True
    """
    return any_requires_grad(leaves_of(tree))


def any_requires_grad(leaves: Sequence[Any]) -> bool:
    """``requires_grad`` of a tree's leaves."""
    if are_tensors(leaves):
        return True in [leaf.requires_grad for leaf in leaves]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                return True
        elif isinstance(leaf, Mapping) and requires_grad(plain(leaf)):
            return True
    return False


def devices(tree: Tree) -> set[torch.device]:
    """Where the tensors of a tree are.

    >>> devices({"w": torch.ones(2), "name": "w"})
    {device(type='cpu')}
    """
    return {leaf.device for leaf in leaves_of(tree) if isinstance(leaf, Tensor)}


def are_tensors(leaves: Sequence[Any]) -> bool:
    """Whether all of them are, and of no class that makes its own attributes."""
    return set(builtins.map(type, leaves)) <= {Tensor, torch.nn.Parameter}


def differentiated(*trees: Tree) -> bool:
    """Whether derivatives of what is computed from these leaves may be asked for: a ``vmap`` alone asks for none."""
    if torch_internals.in_forward_mode():
        return True
    if torch.compiler.is_dynamo_compiling():
        # A compiler cannot ask which transforms there are, nor look below them.
        return torch_internals.transformed() or requires_grad(trees)
    if torch_internals.transforms_differentiate():
        return True
    return requires_grad([_below_transforms(leaf) for leaf in leaves_of(trees)])


def _below_transforms(leaf: Any) -> Any:
    while isinstance(leaf, Tensor) and torch_internals.is_wrapped(leaf):
        leaf = torch_internals.unwrapped(leaf)
    return leaf


def eager(*trees: Tree) -> bool:
    """Whether neither a compiler nor a transform sees what is done with these leaves."""
    # Not ``is_compiling``, which is true of every thread while one of them compiles.
    return not torch.compiler.is_dynamo_compiling() and untransformed(*trees)


def same(seen: Tree, given: Tree) -> bool:
    """Whether these are one and the same tree, through which reverse mode may look: not a piece of it, or a copy."""
    if seen is given or torch.compiler.is_dynamo_compiling():
        return seen is given
    seen_leaves, structure = flatten(seen)
    leaves, other = flatten(given)
    return structure == other and all(
        _below_gradients(one) is two for one, two in zip(seen_leaves, leaves, strict=True)
    )


def _below_gradients(leaf: Any) -> Any:
    """The leaf as it was before functorch began to differentiate."""
    while isinstance(leaf, Tensor) and torch_internals.is_differentiated(leaf):
        leaf = torch_internals.unwrapped(leaf)
    return leaf


def at_hand(tensor: Tensor) -> Tensor | None:
    """The values below all wrappers of ``torch.func``; None where the host cannot read them at once.

    >>> torch.vmap(lambda x: x + at_hand(x).sum())(torch.tensor([1.0, 2.0]))
    tensor([4., 5.])
    """
    if torch.compiler.is_dynamo_compiling() or torch_internals.is_watched():
        return None
    tensor = _below_transforms(tensor)
    return tensor if type(tensor) is Tensor and tensor.device.type == "cpu" else None


def number_at_hand(tensor: Tensor) -> float | None:
    """The value of a scalar; None where the host cannot read it at once, or a ``vmap`` has several."""
    known = at_hand(tensor)
    return None if known is None or known.ndim else known.item()


def brought(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, waited for only on the host, where it could be read before it has come."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def has_address(tensor: Tensor) -> bool:
    """Whether its values lie in memory; not on devices that compute later what they are told now (lazy, XLA)."""
    return not torch_internals.is_deferred(tensor)


def address(tensor: Tensor) -> int:
    """Where a tensor's values begin; its storage's own identity where they have no address.

    >>> x = torch.ones(4)
    >>> address(x[1:]) - address(x)
    4
    """
    if has_address(tensor):
        return tensor.data_ptr()
    return torch_internals.storage_address(tensor.untyped_storage())


Span: TypeAlias = tuple[int, int]
"""From which byte to which a leaf reaches."""


def span(leaf: Any) -> list[Span]:
    """From where to where a leaf reaches in memory, twice where its elements overlap each other.

    A leaf without memory that could be told lies nowhere. Where there are no addresses, a storage counts as one byte: whatever lies in it overlaps.
    """
    if not isinstance(leaf, Tensor):
        return []
    if leaf.layout is not torch.strided or leaf.is_nested:
        return span(torch_internals.values_inside(leaf))
    if not has_address(leaf):
        storage = address(leaf)
        return [(storage, storage + 1)]
    start, size = leaf.data_ptr(), leaf.nbytes
    if not (start and size):
        return []
    if leaf.is_contiguous():
        return [(start, start + size)]
    reach, folded = 0, False
    for stride, length in sorted(zip(leaf.stride(), leaf.shape, strict=True)):
        # Rows that are as far apart as they reach cannot meet. Others may, and then an element is written twice.
        folded = folded or (length > 1 and stride <= reach)
        reach += (length - 1) * stride
    return [(start, start + (1 + reach) * leaf.element_size())] * (1 + folded)


def global_norm(tree: Tree) -> Tensor:
    """‖tree‖₂ over all its leaves, with a zero gradient at zero; of a ``Shard`` over its axis, too.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    tensor(5.)
    """
    leaves, structure = flatten(tree)
    return norm_of(leaves, pieces.spread(structure))


def norm_of(leaves: list[Tensor], spread: pieces.Spread) -> Tensor:
    """``global_norm`` of a tree's leaves, of which ``spread`` tells over what they are spread."""
    if spread:
        return _norm_of_pieces(leaves, spread)
    parts = _joined(leaves)
    if not parts:
        return torch.zeros(())
    if not eager() or any_requires_grad(parts):
        return _norm(torch.stack([_norm(part) for part in parts]))
    norms = _norms(parts)
    norm: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _norm_of_pieces(leaves: list[Tensor], spread: pieces.Spread) -> Tensor:
    """The root of the sum of all squares, of which those of pieces are summed over their axes."""
    squares = []
    for axis, parts in _by_axis(leaves, spread):
        square = torch.stack([_square(part) for part in _joined(parts)]).sum()
        squares.append(square if axis is None else axis.apply("psum", square))
    root = _root(torch.stack(squares).sum())
    dtypes = [accumulation_dtype(leaf.dtype) for leaf in leaves]
    return root.to(functools.reduce(torch.promote_types, dtypes))


def _root(total: Tensor) -> Tensor:
    """√total, whose derivative at zero is zero."""
    known = number_at_hand(total)
    if known is not None and known >= 0 and not differentiated(total):
        # MKL's root, which torch takes, is not correctly rounded.
        return total.new_tensor(math.sqrt(known))
    return torch.where(total > 0, torch.where(total > 0, total, 1).sqrt(), total)


def _square(x: Tensor) -> Tensor:
    """‖x‖² in float64, and not by way of its root, which rounds."""
    x = x.to(accumulation_dtype(x.dtype))
    return torch.sum(x * x, dtype=torch.float64)


def _by_axis(leaves: list[Tensor], spread: pieces.Spread) -> list[tuple[Any, list[Tensor]]]:
    """The leaves that are spread over each axis, with zeros where pieces are filled up; in one order on all ranks."""
    found: dict[Any, list[Tensor]] = {}
    for leaf, place in zip(leaves, spread, strict=True):
        axis = None if place is None else place.axis
        found.setdefault(axis, []).append(pieces.own(leaf, place))
    return list(found.items())


def _norm(x: Tensor) -> Tensor:
    """‖x‖₂, all of whose derivatives are zero at zero: those of torch's are NaN from the second one on."""
    dtype = accumulation_dtype(x.dtype)
    held = (x != 0).any()
    norm = torch.linalg.vector_norm(torch.where(held, x, 1), dtype=dtype)
    return torch.where(held, norm, 0)


def _joined(leaves: list[Tensor]) -> list[Tensor]:
    """The leaves, with those that are too small to repay a call of their own in one piece for each dtype."""
    sizes, dtypes = [leaf.numel() for leaf in leaves], [leaf.dtype for leaf in leaves]
    if sizes and sum(sizes) <= 4 * SMALL and dtypes.count(dtypes[0]) == len(dtypes):
        return [_in_one(leaves)]
    small = [leaf for leaf, size in zip(leaves, sizes, strict=True) if size < SMALL]
    large = [leaf for leaf, size in zip(leaves, sizes, strict=True) if size >= SMALL]
    for dtype in dict.fromkeys([leaf.dtype for leaf in small]):
        large.append(_in_one([leaf for leaf in small if leaf.dtype == dtype]))
    return large


def _in_one(leaves: list[Tensor]) -> Tensor:
    if eager():
        return torch_internals.joined(leaves)
    return torch.cat([leaf.reshape(-1) for leaf in leaves])


def _norms(leaves: list[Tensor]) -> list[Tensor]:
    """The norm of each leaf, by one kernel for all of a dtype."""
    if len(leaves) == 1:
        return [torch.linalg.vector_norm(leaves[0], dtype=accumulation_dtype(leaves[0].dtype))]
    dtypes = {leaf.dtype for leaf in leaves}
    if len(dtypes) > 1:
        return [norm for leaf in leaves for norm in _norms([leaf])]
    return list(torch_internals.foreach_norm(leaves, 2, dtype=accumulation_dtype(*dtypes)))


def all_finite(tree: Tree) -> Tensor:
    """Whether no leaf holds an infinity or a NaN; of a ``Shard``, on no rank of its axis.

    >>> all_finite({"w": torch.tensor([1.0, float("nan")])})
    tensor(False)
    """
    leaves, structure = flatten(tree)
    return are_finite(leaves, pieces.spread(structure))


def are_finite(leaves: list[Tensor], spread: pieces.Spread) -> Tensor:
    """``all_finite`` of a tree's leaves, of which ``spread`` tells over what they are spread."""
    if spread:
        broken = []
        for axis, parts in _by_axis(leaves, spread):
            here = (~are_finite(parts, ())).to(torch.int64)
            broken.append(here if axis is None else axis.apply("psum", here))
        return torch.stack(broken).sum() == 0
    # Both ends are as finite as all that lies between, and are found without writing anything.
    ends = [end for leaf in leaves if leaf.numel() for end in torch.aminmax(leaf)]
    if not ends:
        return torch.tensor(True, device=leaves[0].device if leaves else None)
    return torch.stack([end.isfinite() for end in ends]).all()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which many values of ``dtype`` are summed: int64 for integers, at least float32 else.

    >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.bool)
    (torch.float32, torch.int64)
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.int64
    return torch.promote_types(dtype, torch.float32)
