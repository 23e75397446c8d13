"""What a step asks of an axis: the laws of its collectives, and a session for each update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from purestep.types import Count, Ready, Sums, Tree

Gather: TypeAlias = Literal["step", "microbatch", "loss"]
"""Where sharded params are gathered: once a step, once a microbatch, or by the loss itself."""


class RankError(RuntimeError):
    """Another rank has failed, has died or runs another program, so this rank cannot go on.

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


class Session(Protocol):
    """One update, as the ranks of an axis talk about it: ``with axis.session(...) as ranks``.

    Call ``agree``, then ``buckets`` if gradients are to be summed, then ``sum``, on every rank in
    this order. An exception inside the ``with`` reaches all ranks.

    >>> from purestep import LocalAxis
    >>> one = Count(torch.tensor(3), torch.tensor(1))
    >>> with LocalAxis().session("step", {}) as ranks:
    ...     total = ranks.agree(one, {"w": torch.ones(2)}, (), microbatches=1)
    >>> total.num_tokens
    tensor(3)
    """

    rank: int

    def __enter__(self) -> Session: ...

    def __exit__(
        self, kind: Any, error: BaseException | None, trace: Any, /
    ) -> None: ...

    def buckets(self, params: Tree, dtype: torch.dtype | None) -> Ready | None:
        """What takes each leaf's final sum, once, so that it travels while others are computed.

        None where sums stay where they are. ``dtype`` is that of the sums.
        """

    def agree(
        self, here: Count, params: Tree, opt_state: Tree, microbatches: int
    ) -> Count:
        """N of all ranks, before any backward pass; or an error that names the ranks that differ.

        ``here`` counts this rank's tokens, ``microbatches`` is how many microbatches it holds.
        """

    def whole(self, params: Tree) -> Tree:
        """The params as a loss sees them, gathered where ``gather`` says."""

    def rounds(self, microbatches: int) -> int:
        """The largest number of microbatches of any rank, where each one gathers params."""

    def sum(self, sums: Sums, params: Tree) -> Sums:
        """The sums of all ranks; of a sharded leaf, this rank's piece.

        The leaves of ``sums.grads`` are those of params, one by one. With ``gather="step"``, the
        gradient of a leaf that is sharded over the axis is whole; with the others, it is the piece.
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
    def own_programs(self) -> bool:
        """Whether each rank runs its own program, as processes do; such axes are ``Ranks``."""

    @property
    def members(self) -> frozenset[int]:
        """The ranks it joins, numbered as in its world; empty where axes are not compared."""

    def apply(self, law: str, x: Tensor) -> Tensor:
        """Carries out psum, pvary, all_gather or psum_scatter of one tensor."""

    def apply_tree(self, law: str, x: Any) -> Any:
        """Carries out psum or pvary of every leaf: of floats and int64 alone."""

    def session(self, gather: Gather, settings: Mapping[str, str]) -> Session:
        """Begins an update, in which ranks compare their ``settings``."""
