"""Params that are spread over the step's own axis: gathered once when it begins, their gradients scattered once when it ends.

In between a rank holds whole params and the whole sums of its gradients; what it keeps from step to step, and what the
optimizer moves, are pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.axis import Axis, pvary
from purestep.axis.buckets import laid_out_like
from purestep.conversation import Gradients, OneProgram, OwnPrograms
from purestep.form import Flat, flat, seen_by_loss
from purestep.shard import scattered, whole
from purestep.types import Count, Sums


def gathered(params: Flat, axis: Axis) -> Flat:
    """The params as the loss of a step over this axis sees them: whole, or a piece over another axis."""
    spread = params.form.spread
    if not spread:
        return params._replace(leaves=pvary(params.leaves, axis))
    seen = seen_by_loss(params)
    leaves = [
        whole(leaf, place) if place is not None and place.axis == axis else pvary(other, axis)
        for leaf, other, place in zip(params.leaves, seen.leaves, spread, strict=True)
    ]
    return flat(seen.tree(leaves))


class OverPieces:
    """A conversation in which gradients of leaves that are spread over its own axis are scattered, all others summed."""

    def __init__(self, ranks: OneProgram | OwnPrograms, params: Flat, axis: Axis) -> None:
        places = enumerate(params.form.spread)
        self._own = {at: place for at, place in places if place and place.axis == axis}
        self._others = [at for at in range(len(params.leaves)) if at not in self._own]
        self._ranks, self._params = ranks, params.leaves
        self.out: list[Tensor] | None = None
        self.ready: Callable[[int], None] | None = None

    def agree(self, counted: Count, *, gradients: Gradients, **how: Any) -> Count:
        """The sum of all ranks' counts."""
        leaves, dtypes = gradients
        others = [leaves[at] for at in self._others], [dtypes[at] for at in self._others]
        total = self._ranks.agree(counted, gradients=others, **how)
        out, ready = self._ranks.out, self._ranks.ready
        if out is not None and ready is not None:
            position = {at: number for number, at in enumerate(self._others)}
            self.out = [
                out[position[at]] if at in position else self._buffer(at, dtype)
                for at, dtype in enumerate(dtypes)
            ]
            self.ready = lambda at: ready(position[at]) if at in position else None
        return total

    def _buffer(self, at: int, dtype: torch.dtype) -> Tensor:
        like = self._params[at]
        return torch.empty(self._own[at].shape, dtype=dtype, device=like.device)

    def sum(self, here: Sums) -> Sums:
        """The sum of what all ranks have computed; of leaves in pieces, this rank's piece of it."""
        grads: list[Any] = here.grads
        self.out = None
        # Only now is it known that all ranks have come so far.
        sums = self._ranks.sum(here._replace(grads=[grads[at] for at in self._others]))
        for at, total in zip(self._others, sums.grads, strict=True):
            grads[at] = total
        for at, place in self._own.items():
            piece = scattered(grads[at], place)
            grads[at] = laid_out_like(self._params[at], piece) if tree.eager(piece) else piece
        return sums._replace(grads=grads)


Conversation: TypeAlias = OneProgram | OwnPrograms | OverPieces
