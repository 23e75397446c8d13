"""The axis of a single rank."""

from __future__ import annotations

import torch
from torch import Tensor

from purestep.types import Tree


class LocalAxis:
    """Stands for a single rank, which holds all tokens.

    >>> from purestep import psum
    >>> psum(torch.tensor(3), LocalAxis())
    tensor(3)
    """

    size = 1
    is_multi_program = False
    global_ranks: frozenset[int] = frozenset()

    @property
    def index(self) -> Tensor:
        """Returns 0, as a scalar tensor."""
        return torch.zeros((), dtype=torch.int64, device="cpu")

    def apply(self, op: str, x: Tensor) -> Tensor:
        """Returns ``x``; all_gather adds a dimension 0 of size 1, and psum_scatter removes it."""
        if op == "all_gather":
            return x.unsqueeze(0)
        if op == "psum_scatter":
            return x.squeeze(0)
        return x

    def apply_tree(self, op: str, x: Tree) -> Tree:
        """Returns the tree itself, which is psum and pvary over a single rank."""
        return x

    def __repr__(self) -> str:
        return "LocalAxis()"
