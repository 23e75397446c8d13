"""One batch to microbatches, and back."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from itertools import compress
from operator import not_

from einops import rearrange
from torch import Tensor

from purestep import tree
from purestep.types import Microbatch, Tree


def split(batch: Tree, k: int) -> list[Microbatch]:
    """One batch cut into ``k`` microbatches of equal size along the first dimension of every leaf.

    >>> import torch
    >>> split({"x": torch.arange(6)}, k=2)
    [{'x': tensor([0, 1, 2])}, {'x': tensor([3, 4, 5])}]
    """
    batch = tree.plain(batch)
    leaves, structure = tree.flatten(batch)
    length = common_length(batch, "batch")
    if k < 1 or length % k:
        raise ValueError(
            f"split: a batch of {length} cannot be cut into {k=} equal microbatches; {length} is "
            f"divisible by {', '.join(map(str, divisors(length))) or 'any number but 0'}"
        )
    pieces = [rearrange(leaf, "(k b) ... -> k b ...", k=k) for leaf in leaves]
    return [tree.unflatten(structure, [piece[i] for piece in pieces]) for i in range(k)]


def merge(microbatches: Sequence[Microbatch]) -> Tree:
    """The batch that ``split`` would cut into these: its exact inverse.

    >>> import torch
    >>> merge([{"x": torch.arange(2)}, {"x": torch.arange(2, 4)}])
    {'x': tensor([0, 1, 2, 3])}
    """
    if not microbatches:
        raise ValueError("merge: no microbatches, so no batch to put together")
    parts = [tree.plain(microbatch) for microbatch in microbatches]
    names = [f"microbatches[{i}]" for i in range(len(parts))]
    columns, structure = alike(parts, names)
    lengths = [common_length(part, name) for part, name in zip(parts, names, strict=True)]
    if len(set(lengths)) != 1:
        raise ValueError(
            f"merge: microbatches of one batch have the same length, but these have {lengths}"
        )
    return tree.unflatten(
        structure, [rearrange(column, "k b ... -> (k b) ...") for column in columns]
    )


def alike(
    examples: Sequence[Tree], names: Sequence[str], whole: Collection[str] = ()
) -> tuple[list[list[Tensor]], tree.Structure]:
    """Each leaf of all examples, side by side, and the structure that they share.

    Examples that differ in structure, or in the dtype or the shape of a leaf (the first dimension aside, but of one that belongs
    to its example as a whole), are refused: put together, values would end up in a different field, be broadcast, or be rounded.
    """
    rows: list[list[Tensor]] = []
    structure = None
    for example, name in zip(examples, names, strict=True):
        leaves, own = tree.flatten(example)
        kinds = _kinds(example, whole)
        if structure is None:
            structure, expected = own, kinds
        if own != structure:
            raise ValueError(
                f"{name} differs in structure from {names[0]}: {tree.describe(own)} against "
                f"{tree.describe(structure)}; give all of them the same fields"
            )
        if kinds != expected:
            raise ValueError(_difference(example, name, examples[0], names[0], whole))
        rows.append(leaves)
    return [list(column) for column in zip(*rows, strict=True)], structure


def _kinds(example: Tree, whole: Collection[str]) -> list[object]:
    """What examples that are put together must share in each leaf."""
    flags = whole_leaves(example, whole)
    return [_kind(leaf, flag) for leaf, flag in zip(tree.leaves_of(example), flags, strict=True)]


def _kind(leaf: Tensor, is_whole: bool) -> object:
    if is_whole:
        return tree.kind(leaf)
    return (leaf.dtype, leaf.shape[1:]) if isinstance(leaf, Tensor) else type(leaf)


def _difference(
    example: Tree, name: str, other: Tree, other_name: str, whole: Collection[str]
) -> str:
    """The first leaf in which two examples of one structure differ."""
    pairs = zip(_kinds(example, whole), _kinds(other, whole), strict=True)
    index = next(index for index, (ours, theirs) in enumerate(pairs) if ours != theirs)
    ours, theirs = (tree.kind(tree.leaves_of(each)[index]) for each in (example, other))
    path = tree.paths(example, "")[index]
    return (
        f"{name}{path} is {ours}, but {other_name}{path} is {theirs}: what is put "
        "together needs one dtype, and one shape but for the first dimension; convert it beforehand"
    )


def whole_leaves(example: Tree, named: Collection[str] = ()) -> list[bool]:
    """Which leaves belong to their example as a whole: those without a dimension, and those ``named`` by the last name on their path.

    >>> import torch
    >>> whole_leaves({"image": torch.ones(8, 8), "reward": torch.tensor(1.0), "tokens": torch.ones(3)}, ["image"])
    [True, True, False]
    """
    flags = [isinstance(leaf, Tensor) and leaf.ndim == 0 for leaf in tree.leaves_of(example)]
    if not named:
        return flags
    paths = tree.paths(example, "")
    for name in named:
        if not any(is_called(path, name) for path in paths):
            raise ValueError(
                f"whole={[*named]} names {name!r}, which an example does not have: it has {paths[:8]}"
            )
    return [
        flag or any(is_called(path, name) for name in named)
        for flag, path in zip(flags, paths, strict=True)
    ]


def is_called(path: str, name: str) -> bool:
    """Whether this is the last name on a path; what stands in a list is called as the list is."""
    return re.sub(r"(\[\d+\])+$", "", path).endswith((f"[{name!r}]", f".{name}"))


def common_length(example: Tree, name: str, whole: Sequence[bool] | None = None) -> int:
    """The first dimension that all leaves share, but for those that belong to the example as a ``whole``."""
    leaves = tree.leaves_of(example)
    along = leaves if whole is None else [*compress(leaves, map(not_, whole))]
    lengths = {leaf.shape[0] if isinstance(leaf, Tensor) and leaf.ndim else None for leaf in along}
    if len(lengths) != 1 or None in lengths:
        found = [
            f"{path} {tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__}"
            for path, leaf in zip(tree.paths(example, name), leaves, strict=True)
        ]
        raise ValueError(
            f"the leaves of {name} need one common first dimension, but are {found[:8]}"
            + (f" and {len(found) - 8} more" if len(found) > 8 else "")
            + ("" if all(isinstance(leaf, Tensor) for leaf in leaves) else "; make tensors of them")
        )
    (length,) = lengths
    assert length is not None
    return length


def divisors(number: int) -> list[int]:
    """What divides it, in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
