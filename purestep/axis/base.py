"""The protocol of an axis, whose ranks hold the tokens of a batch."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class RankError(RuntimeError):
    """Reports that another rank has failed, has died or runs another program.

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
    """Runs collectives over the ranks that share the tokens of a batch.

    >>> from purestep import LocalAxis
    >>> axis: Axis = LocalAxis()
    >>> axis.size, axis.index
    (1, tensor(0))
    """

    @property
    def size(self) -> int:
        """Returns the number of ranks."""

    @property
    def index(self) -> Tensor:
        """Returns the index of this rank, from 0 to size - 1, as a scalar tensor."""

    @property
    def is_multi_program(self) -> bool:
        """Returns whether each rank runs its own program, as the ranks of a ``ProcessAxis`` do."""

    @property
    def global_ranks(self) -> frozenset[int]:
        """Returns the ranks of the axis, by their numbers in the world; empty if unknown."""

    def apply(self, op: str, x: Tensor) -> Tensor:
        """Runs the collective ``op`` on one tensor, and returns the result of this rank.

        ``op`` is "psum", "pvary", "all_gather" or "psum_scatter". all_gather adds a dimension 0
        over the ranks. psum_scatter needs this dimension in ``x``, and removes it.
        """

    def apply_tree(self, op: str, x: Any) -> Any:
        """Runs ``op``, "psum" or "pvary", on every leaf, and returns the tree of the results.

        psum takes floats, complex numbers and int64: cast bools and other integers before.
        """
