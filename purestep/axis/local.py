"""One rank, which holds all tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from purestep import tree
from purestep.axis.agreement import check_total
from purestep.axis.laws import LAWS
from purestep.axis.protocol import Gather
from purestep.axis.whole import whole
from purestep.types import Count, Sums, Tree


class LocalAxis:
    """One rank: all tokens are here.

    >>> from purestep import psum
    >>> psum(torch.tensor(3), LocalAxis())
    tensor(3)
    """

    size = 1
    own_programs = False
    members: frozenset[int] = frozenset()

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

    def session(self, gather: Gather, settings: Mapping[str, str]) -> Alone:
        """A session that does nothing."""
        return Alone()

    def __repr__(self) -> str:
        return "LocalAxis()"


class Alone:
    """The session of a single rank: every answer is its argument."""

    ready = None
    _sharded = False

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        pass

    def agree(self, here: Count, params: Tree, opt_state: Tree, microbatches: int) -> Count:
        """The count, refused where it overflows."""
        total = tree.number_at_hand(here.num_tokens)
        if total is not None and not 0 <= total < math.inf:
            check_total(total)
        return here

    def whole(self, params: Tree) -> Tree:
        """The params, of which a loss sees the pieces."""
        if not tree.spread(tree.flatten(params)[1]):
            return params
        self._sharded = True
        return whole(params, LocalAxis(), "step")

    def buffers(self, params: Tree, dtype: torch.dtype | None) -> None:
        """None: gradients may be anywhere."""

    def rounds(self, microbatches: int) -> int:
        """The number itself."""
        return microbatches

    def sum(self, sums: Sums, params: Tree) -> Sums:
        """The sums, with the structure of params: over one rank, a piece is the whole."""
        self.agree(sums.counted, params, (), 0)
        if self._sharded and sums.grads != ():
            structure, leaves = tree.flatten(params)[1], tree.leaves_of(sums.grads)
            return sums._replace(grads=tree.unflatten(structure, leaves))
        return sums
