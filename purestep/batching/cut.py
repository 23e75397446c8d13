"""One batch to microbatches, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    examples: Sequence[Tree], names: Sequence[str]
) -> tuple[list[list[Tensor]], tree.Structure]:
    """Each leaf of all examples, side by side, and the structure that they share.

    Examples that differ in structure, or in the dtype or the shape of a leaf (the first dimension aside), are
    refused: put together, values would end up in a different field, be broadcast, or be rounded.
    """
    rows: list[list[Tensor]] = []
    structure = None
    for example, name in zip(examples, names, strict=True):
        leaves, own = tree.flatten(example)
        kinds = [_kind(leaf) for leaf in leaves]
        if structure is None:
            structure, expected = own, kinds
        if own != structure:
            raise ValueError(
                f"{name} differs in structure from {names[0]}: {tree.describe(own)} against "
                f"{tree.describe(structure)}; give all of them the same fields"
            )
        if kinds != expected:
            raise ValueError(_difference(example, name, examples[0], names[0]))
        rows.append(leaves)
    return [list(column) for column in zip(*rows, strict=True)], structure


def _kind(leaf: Tensor) -> object:
    """What examples that are put together must share in a leaf."""
    if is_whole(leaf):
        return tree.kind(leaf)
    return (leaf.dtype, leaf.shape[1:]) if isinstance(leaf, Tensor) else type(leaf)


def _difference(example: Tree, name: str, other: Tree, other_name: str) -> str:
    """The first leaf in which two examples of one structure differ."""
    both = zip(*map(tree.leaves_of, (example, other)), tree.paths(example, ""), strict=True)
    ours, theirs, path = next(row for row in both if _kind(row[0]) != _kind(row[1]))
    return (
        f"{name}{path} is {tree.kind(ours)}, but {other_name}{path} is {tree.kind(theirs)}: what is put "
        "together needs one dtype, and one shape but for the first dimension; convert it beforehand"
    )


def is_whole(leaf: object) -> bool:
    """Whether a leaf belongs to its example as a whole: a class, a reward, a key, an id."""
    return isinstance(leaf, Tensor) and leaf.ndim == 0


def common_length(example: Tree, name: str, *, but_whole: bool = False) -> int:
    """The first dimension that all leaves share; ``but_whole``: all but those that belong to it as a whole."""
    leaves = tree.leaves_of(example)
    along = [leaf for leaf in leaves if not (but_whole and is_whole(leaf))]
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
