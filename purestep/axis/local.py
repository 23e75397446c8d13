"""One rank, which holds all tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from purestep.axis.laws import LAWS
from purestep.types import Tree


class LocalAxis:
    """One rank: all tokens are here.

    >>> from purestep import psum
    >>> psum(torch.tensor(3), LocalAxis())
    tensor(3)
    """

    size = 1

    @property
    def index(self) -> Tensor:
        """Always 0."""
        return torch.zeros((), dtype=torch.int64)

    def apply(self, law: str, x: Tensor) -> Tensor:
        """The law over a single rank."""
        return LAWS[law].alone(x)

    def apply_tree(self, law: str, x: Tree) -> Tree:
        """psum or pvary of every leaf: with a single rank, the tree itself."""
        return x

    def __repr__(self) -> str:
        return "LocalAxis()"
