"""The gather of ranks that run programs of their own: in packets, beside buckets, while they compute.

What is sent, and in which order, is the same on every rank, whatever a rank holds and whatever goes wrong there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from purestep.axis import Axis, Ranks
from purestep.axis.buckets import Buckets, laid_out_like, packed, summed
from purestep.axis.packets import Scatters, gathered, packets
from purestep.axis.queue import Queue
from purestep.backward import GradientSums
from purestep.form import Flat
from purestep.gathering import Gather, Gathering
from purestep.loss_gathers import LossGathers

PACKET_BYTES, MOST = 2**22, 2
"""The size of packets, and how many of gradients are under way at once: what one holds is freed when the second behind it leaves."""


class RanksGathering(Gathering):
    """The params of one step, where nothing is recorded.

    It is made before anything is sent, so that a rank without memory for buffers can say so. After ``begin``, no other collective
    runs over the axes but where the loss calls it. ``launch`` sends whatever others still wait for, whether this rank has
    gone through as many microbatches as they, through none, or has failed. When ``wait`` returns, the sums are those of all ranks.
    """

    def __init__(
        self, given: Flat, axis: Ranks, gather: Gather, dtypes: Sequence[torch.dtype] = ()
    ) -> None:
        super().__init__(given, axis, gather, dtypes)
        (device,) = given.form.devices
        self._packets = packets(self._gathers, given.form.dtypes, device, PACKET_BYTES)
        self._rounds: Callable[[], int] = int
        self._gathered, self._done = False, 0
        self.loss_gathers = LossGathers() if gather == "loss" and self.meets else None
        groups: dict[Any, dict[int, Tensor]] = {}
        for at, leaf in enumerate(given.leaves if dtypes else ()):
            if at not in self._gathers and (over := self._summed_over(at)) is not None:
                groups.setdefault(over, {})[at] = leaf
        self._buckets = [Buckets(over, leaves, dtypes) for over, leaves in groups.items()]
        buffers = {at: total for bucket in self._buckets for at, total in bucket.sums.items()}
        self._out = [buffers.get(at) for at in range(len(dtypes))]
        self._totals = GradientSums(given.leaves if dtypes else (), dtypes, self._out)
        travelling = packets(self._gathers, dtypes, device, PACKET_BYTES) if dtypes else ()
        self._scatters = Scatters(travelling, self._totals.add_)
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
            # What asks for it holds what holds this.
            rounds, self._rounds = self._rounds(), int
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
