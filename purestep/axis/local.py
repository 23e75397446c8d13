"""The axis of a single rank."""

from __future__ import annotations

import torch
from torch import Tensor

from purestep.types import Tree


class LocalAxis:
    """One rank, which holds all tokens.

    >>> from purestep import psum
    >>> psum(torch.tensor(3), LocalAxis())
    tensor(3)
    """

    size = 1
    is_multi_program = False
    global_ranks: frozenset[int] = frozenset()

    @property
    def index(self) -> Tensor:
        """Always 0."""
        return torch.zeros((), dtype=torch.int64)

    def apply(self, law: str, x: Tensor) -> Tensor:
        """The law over a single rank."""
        if law == "all_gather":
            return x.unsqueeze(0)
        return x.squeeze(0) if law == "psum_scatter" else x

    def apply_tree(self, law: str, x: Tree) -> Tree:
        """psum or pvary of every leaf: with a single rank, the tree itself."""
        return x

    def __repr__(self) -> str:
        return "LocalAxis()"
