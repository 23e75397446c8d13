"""Where params in pieces are whole: for a step, for a microbatch, or where the loss itself makes them so.

    gather="step"        θ = gather(p)                     G = Σₘ ∇Lₘ(θ)     g = scatter(G)
    gather="microbatch"  for each m:  θ = gather(p)        g = Σₘ scatter(∇Lₘ(θ))
    gather="loss"                                          g = Σₘ ∇(Lₘ ∘ gather)(p)

p are the pieces that a rank keeps from step to step, and g their gradients. ``scatter`` is the transpose of ``gather``, and
linear: the three are one sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from purestep.axis import Axis, Ranks, pvary, within
from purestep.axis.buckets import Buckets, laid_out_like, packed, summed
from purestep.axis.packets import Scatters, gathered, packets
from purestep.axis.queue import Queue
from purestep.axis.whole import scattered, whole
from purestep.backward import GradientSums
from purestep.form import Flat, without_shards
from purestep.objective import check_untouched, versions_of
from purestep.pieces import Place
from purestep.regather import Regather
from purestep.types import Sums

Gather: TypeAlias = Literal["step", "microbatch", "loss"]

MOST = 3
"""Packets of gradients that are under way at once; what one holds is freed when the third behind it leaves."""


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
        across: Axis = self._axis.across(inner)  # type: ignore[attr-defined]
        return across

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


class RanksGathering(Gathering):
    """The same in packets and buckets, which are under way while ranks compute: where these run programs of their own, and nothing is recorded.

    It is made before anything is sent, so that a rank without memory for buffers can say so. After ``begin``, no other collective
    runs over the axes but where the loss calls it. ``launch`` sends whatever others still wait for, whether this rank has
    gone through as many microbatches as they, through none, or has failed. When ``wait`` returns, the sums are those of all ranks.
    """

    def __init__(
        self, given: Flat, axis: Ranks, gather: Gather, dtypes: Sequence[torch.dtype] = ()
    ) -> None:
        super().__init__(given, axis, gather, dtypes)
        (device,) = given.form.devices
        self._packets = packets(self._gathers, given.form.dtypes, device)
        self._rounds: Callable[[], int] = int
        self._gathered, self._done = False, 0
        self._regather = Regather() if gather == "loss" and self.meets and dtypes else None
        groups: dict[Any, dict[int, Tensor]] = {}
        for at, leaf in enumerate(given.leaves if dtypes else ()):
            if at not in self._gathers and (over := self._summed_over(at)) is not None:
                groups.setdefault(over, {})[at] = leaf
        self._buckets = [Buckets(over, leaves, dtypes) for over, leaves in groups.items()]
        buffers = {at: total for bucket in self._buckets for at, total in bucket.sums.items()}
        self._out = [buffers.get(at) for at in range(len(dtypes))]
        self._totals = GradientSums(given.leaves if dtypes else (), dtypes, self._out)
        self._scatters = Scatters(
            packets(self._gathers, dtypes, device) if dtypes else (), self._totals.add_
        )
        loads = [load for bucket in self._buckets for load in bucket.loads]
        if self.each_microbatch:
            self._queue, self._microbatch = Queue(loads), Queue(self._scatters.loads(), MOST)
        else:
            most = MOST if self._gathers else None
            self._queue = self._microbatch = Queue([*loads, *self._scatters.loads()], most)

    @property
    def ready(self) -> Callable[[int], None]:
        """Sends what is complete."""
        return self._announced

    def begin(self, rounds: Callable[[], int]) -> None:
        """``rounds`` tells how many microbatches the rank has that has most of them."""
        self._rounds = rounds
        self._queue.begin()

    def launch(self) -> None:
        """Sends all that has not been sent yet."""
        if self.each_microbatch:
            rounds = self._rounds()
            while self._done < rounds:
                if not self._gathered:
                    self._wholes()
                self._end_round()
        elif self._gathers and not self._gathered:
            self._wholes()
        self._queue.launch()

    def wait(self) -> None:
        """Waits for all of it."""
        self._queue.wait()
        for bucket in self._buckets:
            bucket.settle()
        groups: dict[Axis, list[int]] = {}
        for at in self._gathers if self._dtypes else ():
            if (over := self._summed_over(at)) is not None:
                groups.setdefault(over, []).append(at)
        for over, members in groups.items():
            assert isinstance(over, Ranks)
            totals = summed(packed([self._totals.final(at) for at in members]), over)
            for at, total in zip(members, totals, strict=True):
                self._totals.values[at] = total

    def of_all_ranks(self) -> list[Tensor]:
        """The gradients, each in its leaf's order in memory."""
        sums = {at: total for bucket in self._buckets for at, total in bucket.sums.items()}
        for at in range(len(self._dtypes)):
            if at not in sums:
                sums[at] = laid_out_like(self.given.leaves[at], self._totals.final(at))
        return [sums[at] for at in range(len(sums))]

    def gradients(self) -> list[Tensor]:
        """None that anybody need send: they are on their way."""
        if self.each_microbatch or self._look is None:
            sums = self._totals
        else:
            sums = self._leave()
            for at in self._gathers if self._dtypes else ():
                if (grad := sums.taken(at)) is not None:
                    self._scatters.give(at, grad)
        for at, place in enumerate(self._out or ()):
            if place is not None:
                sums.final(at)
        return []

    def _wholes(self) -> Mapping[int, Tensor]:
        self._gathered = True
        wholes = gathered(self._packets, self.given.leaves)
        self._microbatch.begin()
        return wholes

    def __enter__(self) -> Look:
        if self._regather is not None:
            self._regather.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        if self._regather is not None:
            self._regather.__exit__(*error)
        super().__exit__(*error)

    def _announced(self, at: int) -> None:
        """The sum of a leaf is final, of this microbatch or of all of them."""
        assert self._look is not None
        if at in self._gathers and (grad := self._look.sums.taken(at)) is not None:
            self._scatters.give(at, grad)
        self._microbatch.ready(at)

    def _end_microbatch(self, sums: GradientSums) -> None:
        for at in range(len(sums.values)):
            if (grad := sums.taken(at)) is None:
                continue
            if at in self._gathers:
                self._scatters.give(at, grad)
            else:
                self._totals.add_(at, grad)
        self._end_round()

    def _end_round(self) -> None:
        self._microbatch.launch()
        self._microbatch.wait()
        self._gathered, self._done = False, self._done + 1
