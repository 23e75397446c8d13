"""From examples to groups of microbatches."""

from __future__ import annotations

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
    lengths = {
        path: leaf.shape[0] if isinstance(leaf, Tensor) and leaf.ndim else None
        for path, leaf in zip(tree.paths(batch, "batch"), leaves, strict=True)
    }
    if len(set(lengths.values())) != 1 or None in lengths.values():
        raise ValueError(f"split: the leaves need one common first dimension, but have {lengths}")
    length = next(length for length in lengths.values() if length is not None)
    if k < 1 or length % k:
        divisors = [d for d in range(1, length + 1) if length % d == 0]
        raise ValueError(
            f"split: a batch of {length} cannot be cut into {k=} equal microbatches; {length} is "
            f"divisible by {', '.join(str(d) for d in divisors)}"
        )
    pieces = [rearrange(leaf, "(k b) ... -> k b ...", k=k) for leaf in leaves]
    return [tree.unflatten(structure, [piece[i] for piece in pieces]) for i in range(k)]
