"""What a step asks of an axis, whose ranks hold the tokens of a batch."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class RankError(RuntimeError):
    """Another rank has failed, has died or runs another program, so this rank cannot go on.

    >>> import torch
    >>> from purestep import psum
    >>> from purestep.testing import ThreadAxis
    >>> axis = ThreadAxis(2)
    >>> def program(x):
    ...     try:
    ...         return psum(x, axis) if x > 1 else x
    ...     except RankError:
    ...         return "alone"
    >>> axis.map(program)([torch.tensor(1.0), torch.tensor(2.0)])
    [tensor(1.), 'alone']
    """


class Axis(Protocol):
    """The ranks over which a batch's tokens are spread.

    >>> from purestep import LocalAxis
    >>> axis: Axis = LocalAxis()
    >>> axis.size, axis.index
    (1, tensor(0))
    """

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def index(self) -> Tensor:
        """Which of them this is, as a scalar tensor."""

    @property
    def is_multi_program(self) -> bool:
        """Whether each rank runs its own program, as processes do; such axes are ``Ranks``."""

    @property
    def global_ranks(self) -> frozenset[int]:
        """The ranks it joins, numbered as in its world; empty where axes are not compared."""

    def apply(self, law: str, x: Tensor) -> Tensor:
        """Carries out psum, pvary, all_gather or psum_scatter of one tensor."""

    def apply_tree(self, law: str, x: Any) -> Any:
        """Carries out psum or pvary of every leaf: of floats and int64 alone."""
