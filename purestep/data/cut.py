"""One batch to microbatches, and back; what examples that are put together have in common."""

import math
import re
from collections.abc import Collection, Sequence
from itertools import compress
from operator import not_
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from purestep import tree
from purestep.types import Microbatch, Tree


def split(batch: Tree, k: int) -> list[Microbatch]:
    """Cuts a batch into ``k`` microbatches of equal size, along the first dimension of its leaves.

    >>> split({"x": torch.arange(6)}, k=2)
    [{'x': tensor([0, 1, 2])}, {'x': tensor([3, 4, 5])}]
    """
    batch = tree.mappings_to_dicts(batch)
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
    """Joins microbatches into the batch that ``split`` cut: its exact inverse.

    >>> merge([{"x": torch.arange(2)}, {"x": torch.arange(2, 4)}])
    {'x': tensor([0, 1, 2, 3])}
    """
    if not microbatches:
        raise ValueError("merge: no microbatches, so no batch to put together")
    parts = {
        f"microbatches[{i}]": tree.mappings_to_dicts(part)
        for i, part in enumerate(microbatches)
    }
    check_alike(parts)
    lengths = [common_length(part, name) for name, part in parts.items()]
    if len({*lengths}) != 1:
        raise ValueError(
            f"merge: microbatches of one batch have one length, these have {lengths}"
        )
    return tree.map(lambda *leaves: torch.cat(leaves), *parts.values())


def check_alike(examples: dict[str, Tree], whole: Collection[str] = ()) -> None:
    """Refuses examples, by name, that differ in structure, or in a leaf's dtype or shape.

    The first dimension may differ, except in a leaf that belongs to its example as a whole.
    Otherwise values would end up in another field, be broadcast, or be rounded.
    """
    first_name, first = next(iter(examples.items()), ("", None))
    wanted, structure = tree.flatten(first)
    flags = whole_leaves(first, whole)
    for name, example in examples.items():
        leaves, own = tree.flatten(example)
        if not tree.is_same_spec(own, structure):
            raise ValueError(
                f"{name} differs in structure from {first_name}: {tree.format_spec(own)} against "
                f"{tree.format_spec(structure)}; give all of them the same fields"
            )
        for i, (leaf, other, flag) in enumerate(
            zip(leaves, wanted, flags, strict=True)
        ):
            if _row_kind(leaf, flag) != _row_kind(other, flag):
                path = tree.paths(example, "")[i]
                raise ValueError(
                    f"{name}{path} is {tree.format_leaf(leaf)}, but {first_name}{path} is "
                    f"{tree.format_leaf(other)}: they may differ in the first dimension alone"
                )


def _row_kind(leaf: Any, is_whole: bool) -> Any:
    """What leaves have in common that are put together: all but the first dimension."""
    if not isinstance(leaf, Tensor):
        return type(leaf)
    return leaf.dtype, leaf.ndim, leaf.shape[0 if is_whole else 1 :]


def whole_leaves(example: Tree, named: Collection[str] = ()) -> list[bool]:
    """Which leaves belong to their example as a whole.

    These are the leaves without a dimension, and those ``named`` by the last name on their path.

    >>> example = {"image": torch.ones(8, 8), "reward": torch.tensor(1.0), "tokens": torch.ones(3)}
    >>> whole_leaves(example, ["image"])
    [True, True, False]
    """
    flags = [
        isinstance(leaf, Tensor) and leaf.ndim == 0 for leaf in tree.leaves(example)
    ]
    paths = tree.paths(example, "") if named else []
    for name in named:
        found = [is_called(path, name) for path in paths]
        if not any(found):
            raise ValueError(
                f"whole={[*named]} names {name!r}: an example has only {paths[:8]}"
            )
        flags = [a or b for a, b in zip(flags, found, strict=True)]
    return flags


def is_called(path: str, name: str) -> bool:
    """Whether this is the last name on a path; the items of a list are called as the list is."""
    return re.sub(r"(\[\d+\])+$", "", path).endswith((f"[{name!r}]", f".{name}"))


def common_length(example: Tree, name: str, whole: Sequence[bool] | None = None) -> int:
    """The first dimension that all leaves share, except those that ``whole`` flags."""
    leaves = tree.leaves(example)
    along = leaves if whole is None else [*compress(leaves, map(not_, whole))]
    lengths = {
        leaf.shape[0] if isinstance(leaf, Tensor) and leaf.ndim else -1
        for leaf in along
    }
    if len(lengths) != 1 or -1 in lengths:
        paths = tree.paths(example, name)
        found = [
            f"{path} {tree.format_leaf(leaf)}"
            for path, leaf in zip(paths, leaves, strict=True)
        ]
        raise ValueError(
            f"the leaves of {name} need one common first dimension, but are {found[:8]}, "
            f"{len(found)} in all: make tensors of them, or name in whole= what has no length"
        )
    return lengths.pop()


def divisors(number: int) -> list[int]:
    """The divisors, in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
