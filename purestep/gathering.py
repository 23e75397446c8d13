"""Where params in pieces are whole: for a step, for a microbatch, or where the loss itself makes them so.

    gather="step"        θ = gather(p)                     G = Σₘ ∇Lₘ(θ)     g = scatter(G)
    gather="microbatch"  for each m:  θ = gather(p)        g = Σₘ scatter(∇Lₘ(θ))
    gather="loss"                                          g = Σₘ ∇(Lₘ ∘ gather)(p)

p are the pieces that a rank keeps from step to step, and g their gradients. ``scatter`` is the transpose of ``gather``, and
linear: the three are one sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from purestep.axis import Axis, Ranks, pvary, within
from purestep.axis.whole import scattered, whole
from purestep.backward import GradientSums
from purestep.form import Flat, without_shards
from purestep.loss_gathers import LossGathers
from purestep.objective import check_untouched, versions_of
from purestep.pieces import Place
from purestep.types import Sums

Gather: TypeAlias = Literal["step", "microbatch", "loss"]


class Look(NamedTuple):
    """The params as a loss sees them, and where its gradients by them are added up."""

    params: Flat
    sums: GradientSums


class Gathering:
    """The params of one step: gathered, and their gradients scattered, by the laws, under any transform.

        with gathering as (params, sums):
            ...  # one microbatch, whose gradients are added to the sums
        gathering.gradients()

    Args:
        given: as the caller has them, with this rank's piece of each ``Shard``.
        axis: the step's own; None: nothing is gathered, and nobody else hears of them.
        gather: where pieces over the step's own axis, or a part of it, are made whole.
        dtypes: in which each leaf's gradients are summed; none where nobody differentiates.
        out: buffers to sum them in.
        ready: is told the position of a leaf whose sum in ``out`` is final, where that is known during the last pass.
    """

    def __init__(
        self,
        given: Flat,
        axis: Axis | None,
        gather: Gather,
        dtypes: Sequence[torch.dtype] = (),
        out: Sequence[Tensor | None] | None = None,
        ready: Callable[[int], None] | None = None,
    ) -> None:
        self.given, self._ready = given, ready
        self._axis, self._dtypes, self._out = axis, dtypes, out
        self._own: dict[int, Place] = {}
        if axis is not None:
            places = enumerate(given.form.spread)
            self._own = {at: place for at, place in places if place and within(place.axis, axis)}
        self._gathers = self._own if gather != "loss" else {}
        self.each_microbatch = gather == "microbatch" and bool(self._gathers)
        self.meets = bool(self._own)
        self.loss_gathers: LossGathers | None = None
        self._bare: Flat | None = None
        self._look: Look | None = None
        self._totals = GradientSums(given.leaves if dtypes else (), dtypes, out)

    @property
    def ready(self) -> Callable[[int], None] | None:
        """Who is told the position of a leaf whose sum is final, or whose gradient, where each microbatch is waited for."""
        return self._ready

    def __enter__(self) -> Look:
        if self._look is None:
            seen = self._seen()
            self._versions = versions_of(seen.leaves)
            sums = self._totals
            if self._gathers and self._dtypes:
                out = None if self.each_microbatch else self._out
                sums = GradientSums(seen.leaves, self._dtypes, out)
            self._look = Look(seen, sums)
        return self._look

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self.each_microbatch:
            self._end_microbatch(self._leave())

    def _seen(self) -> Flat:
        given, axis = self.given, self._axis
        if not given.form.spread:
            return given if axis is None else given._replace(leaves=pvary(given.leaves, axis))
        if self._bare is None:
            left = () if self._gathers else {place.axis for place in self._own.values()}
            self._bare = without_shards(given, left)
        wholes = self._wholes()
        leaves = [wholes.get(at, leaf) for at, leaf in enumerate(self._bare.leaves)]
        for at, leaf in enumerate(leaves):
            over = self._summed_over(at)
            leaves[at] = leaf if over is None else pvary(leaf, over)
        return self._bare._replace(leaves=leaves)

    def _wholes(self) -> Mapping[int, Tensor]:
        return {at: whole(self.given.leaves[at], place) for at, place in self._gathers.items()}

    def _summed_over(self, at: int) -> Axis | None:
        """The axis over which a leaf's gradient is summed, after it has been scattered."""
        if at not in self._own or self._axis is None:
            return self._axis
        inner = self._own[at].axis
        if inner == self._axis:
            return None
        return cast("Ranks", self._axis).across(inner)

    def _leave(self) -> GradientSums:
        """No loss looks at these any more. What it has been given for them."""
        assert self._look is not None
        (seen, sums), self._look = self._look, None
        check_untouched(seen.structure, seen.leaves, self._versions)
        return sums

    def _end_microbatch(self, sums: GradientSums) -> None:
        for at in range(len(sums.values)):
            grad = sums.taken(at)
            if grad is not None:
                self._totals.plus(at, self._scattered(at, grad))

    def _scattered(self, at: int, grad: Tensor) -> Tensor:
        if at not in self._gathers:
            return grad
        return scattered(grad.to(self._dtypes[at]), self._gathers[at])

    def gradients(self) -> list[Tensor]:
        """The sums of this rank's microbatches, which are then those of all ranks by ``alike`` and ``completed``."""
        sums = self._totals
        if not self.each_microbatch:
            with self:  # perhaps for the first time, where there is no microbatch
                sums = self._leave()
        return sums.filled()

    def alike(self, here: Sums) -> Sums:
        """All that is summed over the step's axis as it is: without the gradients of leaves in pieces."""
        if not self._own:
            return here
        return here._replace(grads=[here.grads[at] for at in self._others()])

    def completed(self, sums: Sums, here: Sums) -> Sums:
        """These sums over ranks, with the gradients that were left out."""
        if not (self._own and self._dtypes):
            return sums
        grads = dict(zip(self._others(), sums.grads, strict=True))
        for at in self._own:
            grad = here.grads[at] if self.each_microbatch else self._scattered(at, here.grads[at])
            over = self._summed_over(at)
            grads[at] = grad if over is None else over.apply("psum", grad)
        return sums._replace(grads=[grads[at] for at in range(len(grads))])

    def _others(self) -> list[int]:
        return [at for at in range(len(self._dtypes)) if at not in self._own]
