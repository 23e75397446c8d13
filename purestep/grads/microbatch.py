"""One microbatch: what its differentiation takes, what it returns, and where gradients add up."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from purestep import tree
from purestep.types import GradHook, Microbatch, TokenCounts, Tree


class MicrobatchInputs(NamedTuple):
    """Holds one microbatch, and the params at which its part of the loss is differentiated.

    ``weights`` are None if the loss returns them, ``denominators`` None for plain sums.
    ``needs_checks`` asks for checks of the loss.
    """

    leaves: list[Tensor]
    spec: tree.TreeSpec
    microbatch: Microbatch
    data: list[Any]
    """The leaves of the microbatch."""
    weights: Tensor | None
    """None: the loss returns them."""
    denominators: TokenCounts | None
    """None: the results are plain sums."""
    needs_checks: bool = False
    """Whether to look for recomputation with other parameters, and for likely mistakes."""


class MicrobatchResult(NamedTuple):
    """Holds a microbatch's loss, weights and aux, and whether the loss depends on params.

    ``depends_on_params`` is False only where no param gets a gradient of the loss, or no loss runs.
    It may be True for a loss that reaches no param if an earlier microbatch has reached one, or if
    the backend cannot know.
    """

    loss: Tensor
    weights: Tensor
    aux: Tree
    depends_on_params: bool


class GradAccumulator(NamedTuple):
    """Holds each leaf's sum of gradients so far, None before the first, and its dtype."""

    values: list[Tensor | None]
    dtypes: list[torch.dtype]


class GradFn(Protocol):
    """Adds the gradients of one microbatch to the accumulator, and returns its other results.

    It may call ``on_grad_ready`` with the index and the final sum of a leaf, and keeps the tensor
    that this returns. Sums for which it does not are left to the caller.
    """

    def __call__(
        self,
        inputs: MicrobatchInputs,
        accumulator: GradAccumulator,
        on_grad_ready: GradHook | None,
        /,
    ) -> MicrobatchResult: ...
