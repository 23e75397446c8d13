"""What goes into the differentiation of one microbatch, and what comes out of it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from purestep import tree
from purestep.types import GradHook, Microbatch, TokenCounts, Tree


class MicrobatchInputs(NamedTuple):
    """One microbatch, and the params at which its part of the objective is differentiated.

    ``divisors`` of None leave plain sums, ``weights`` of None come from the loss. ``check``:
    whether to look for recomputation with other parameters.
    """

    leaves: list[Tensor]
    structure: tree.TreeSpec
    microbatch: Microbatch
    weights: Tensor | None
    divisors: TokenCounts | None
    check: bool = False


class MicrobatchResult(NamedTuple):
    """The results beside gradients, and whether the loss depends on any of the leaves."""

    loss: Tensor
    weights: Tensor
    aux: Tree
    reached: bool


class GradAccumulator(NamedTuple):
    """The sum of each leaf's gradients so far, None before the first, and the dtype of each."""

    values: list[Tensor | None]
    dtypes: list[torch.dtype]


class GradFn(Protocol):
    """Adds the gradients of one microbatch to the sums."""

    def __call__(
        self, inputs: MicrobatchInputs, sums: GradAccumulator, ready: GradHook | None, /
    ) -> MicrobatchResult: ...
