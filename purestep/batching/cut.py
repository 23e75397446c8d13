"""One batch to microbatches, and back."""

from __future__ import annotations

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
    leaves, structure = tree.flatten(batch)
    length = common_length(batch, "batch")
    if k < 1 or length % k:
        divisors = [d for d in range(1, length + 1) if length % d == 0]
        raise ValueError(
            f"split: a batch of {length} cannot be cut into {k=} equal microbatches; {length} is "
            f"divisible by {', '.join(str(d) for d in divisors)}"
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
    shapes = [[tuple(leaf.shape) for leaf in tree.leaves_of(part)] for part in microbatches]
    if any(other != shapes[0] for other in shapes):
        raise ValueError(
            f"merge: microbatches of one batch have the same shapes, but these have {shapes}"
        )
    return tree.map(lambda *leaves: rearrange(list(leaves), "k b ... -> (k b) ..."), *microbatches)


def common_length(example: Tree, name: str) -> int:
    """The first dimension that all leaves share."""
    leaves = tree.leaves_of(example)
    lengths = {leaf.shape[0] if isinstance(leaf, Tensor) and leaf.ndim else None for leaf in leaves}
    if len(lengths) != 1 or None in lengths:
        found = [
            f"{path} {tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__}"
            for path, leaf in zip(tree.paths(example, name), leaves, strict=True)
        ]
        raise ValueError(f"the leaves of {name} need one common first dimension, but are {found}")
    (length,) = lengths
    assert length is not None
    return length
