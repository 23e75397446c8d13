"""The session of real ranks: messages, buckets and failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from traceback import format_exception_only
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from purestep import tree
from purestep.axis import agreement
from purestep.axis.buckets import Buckets, laid_out_like
from purestep.axis.protocol import Gather
from purestep.axis.rows import sharded, sum_axes
from purestep.axis.whole import whole
from purestep.types import Count, Ready, Sums, Tree

if TYPE_CHECKING:
    from purestep.axis.ranks import Ranks


GATHERS = (
    "the number of microbatches, each of which gathers params (add some of weight zero)"
)
FAILED = -1
"""In the place of a fingerprint, which is not negative."""
EARLY = "the buckets that have left before a collective inside the loss (add 0 * w.sum() to it)"


class OwnPrograms:
    """The session of ranks that run their own programs: one may hold nothing, disagree, or fail.

    The host reads each message at once. On a device, where it would wait, nothing is read before
    all work is queued: the first message is read at the second, and a rank that fails between
    ``agree`` and ``sum`` raises alone.
    """

    def __init__(
        self, axis: Ranks, gather: Gather, settings: Mapping[str, str]
    ) -> None:
        self._axis, self._gather, self.rank = axis, gather, axis.rank
        self._settings = {
            "gather": gather,
            **settings,
            "bucket_bytes": str(axis.bucket_bytes),
        }
        self._next: Literal["agree", "sum"] | None = "agree"
        self._buckets = Buckets(axis, {}, ())
        self._first: Callable[[], agreement.Answer] = lambda: agreement.Answer(*[0] * 6)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and self._next is not None:
            with suppress(BaseException):  # The first error is the one that is raised.
                self._fail(error)

    def agree(
        self, here: Count, params: Tree, opt_state: Tree, microbatches: int
    ) -> Count:
        """The sum of all ranks' counts, where all are about to do the same."""
        axis = self._axis
        if axis.shares_backward_thread:
            _check_backward_threads(axis, params)
        if not tree.untransformed(params, opt_state, here):
            raise _recorded(axis)
        trees = {"params": params, "opt_state": opt_state, "settings": self._settings}
        if self._gather == "loss":
            trees[GATHERS] = {"microbatches": str(microbatches)}
        compared = {name: agreement.described(name, x) for name, x in trees.items()}
        self._gathers = self._gather != "step" and bool(
            sharded(compared["params"].places, axis)
        )
        number = agreement.digest(*(each.number for each in compared.values()))
        self._number = number
        self._holds = microbatches > 0
        sent = self._meet(agreement.message(axis, self._holds, number, here))
        read = agreement.read_later(sent)
        self._first = cache(
            lambda: agreement.hear(axis, read(), axis.size, compared, ask=axis.on_host)
        )
        floating = here.num_tokens.is_floating_point() or not self._holds
        if axis.on_host:
            floating = self._first().floating > 0
        self._begin()
        return agreement.total_of(sent, floating)

    def buckets(self, params: Tree, dtype: torch.dtype | None) -> Ready | None:
        """Buckets for all leaves but those whose gradients are pieces of the sum already."""
        leaves, structure = tree.flatten(params)
        places: Any = tree.spread(structure) or [None] * len(leaves)
        apart = sharded(places, self._axis) if self._gather == "step" else {}
        over: Any = dict(enumerate(sum_axes(places, self._axis)))
        mine = {at: leaf for at, leaf in enumerate(leaves) if at in apart or over[at]}
        dtypes = [dtype or tree.accumulation_dtype(leaf.dtype) for leaf in leaves]
        self._buckets = Buckets(self._axis, mine, dtypes, apart, over)
        return self._buckets.ready

    def whole(self, params: Tree) -> Tree:
        """The params as a loss sees them; from here on, buckets leave when they are full."""
        wholes = whole(params, self._axis, self._gather)
        self._begin()
        return wholes

    def _begin(self) -> None:
        """From here on, ranks wait for the second message."""
        self._next = "sum"
        self._buckets.begin()

    def rounds(self, microbatches: int) -> int:
        """The largest number of microbatches of any rank.

        The host has to know it before the first gather. Beside a device, ranks meet on the host if
        the process group can, so that no host waits for what a device still computes.
        """
        axis = self._axis
        if axis.on_host:
            mine = torch.tensor([microbatches])
            return int(axis.where.meet("all_gather", mine).max())
        if not axis.meets_on_host:
            self._first()
        mine = torch.tensor(
            [microbatches, self._number % 2**62], device=self._rounds_device
        )
        numbers = axis.where.meet("all_gather", mine).view(axis.size, 2).tolist()
        if any(number != numbers[0][1] for _, number in numbers):
            self._first()  # which says who has failed, or differs
        return int(max(count for count, _ in numbers))

    @property
    def _rounds_device(self) -> torch.device:
        return torch.device("cpu") if self._axis.meets_on_host else self._axis.device

    def sum(self, sums: Sums, params: Tree) -> Sums:
        """The sums of all ranks; those without microbatches take part with zeros."""
        axis, dtype, holds = self._axis, sums.loss.dtype, self._holds
        grads, (leaves, structure) = tree.leaves_of(sums.grads), tree.flatten(params)
        if tree.any_requires_grad(grads):
            raise _recorded(axis)
        aux = agreement.described("LossTerms.aux", sums.aux)
        number, compared = (
            0 if tree.is_empty(sums.aux) else aux.number,
            {"LossTerms.aux": aux},
        )
        self._buckets.fill(grads)
        early = self._buckets.early
        compared[EARLY] = agreement.described(EARLY, str(early))
        sent = self._meet(
            agreement.message(axis, holds, number + early, sums.counted, sums.loss)
        )
        floating = sums.counted.num_tokens.is_floating_point() or not holds
        holders = self._first().holders
        if axis.on_host or holders < axis.size:
            mine = compared if holds else {}
            answer = agreement.hear(axis, sent.tolist(), holders, mine, ask=True)
            if answer.numbered and holders < axis.size:
                raise ValueError(
                    f"the losses of {axis} return LossTerms.aux, which {axis.size - holders} of "
                    f"its {axis.size} ranks cannot, as they hold no microbatch: give each of them "
                    "one whose weights are zero"
                )
            floating = answer.floating > 0
            if answer.double or (holders and not holds):
                dtype = torch.float64 if answer.double else torch.float32
        counted = agreement.total_of(sent, floating)
        loss, aux_sum = sent[-1].to(dtype), axis.apply_tree("psum", sums.aux)
        found = [self._buckets.sums.get(at, grad) for at, grad in enumerate(grads)]
        ordered = [*map(laid_out_like, leaves, found)]
        return Sums(tree.unflatten(structure, ordered), loss, counted, aux_sum)

    def _meet(self, sent: Tensor) -> Tensor:
        """The sum of all ranks' messages, behind the buckets that have not left."""
        if self._next == "sum":
            self._buckets.launch()
        self._next = None
        wait = self._axis.launch(sent)
        self._first()  # before it waits for ranks that may have left
        self._buckets.wait()
        wait()
        return sent

    def _fail(self, error: BaseException) -> None:
        """Sends what the other ranks wait for, and that this one has failed."""
        axis = self._axis
        if self._next == "sum" and (self._gathers or not axis.on_host):
            return  # The others wait for its loss, or read nothing, until its process ends.
        begins = self._next == "agree"
        self._meet(agreement.message(axis, failed=True))
        if (
            begins
            and self._gather == "microbatch"
            and axis.meets_on_host
            and not axis.on_host
        ):
            axis.where.meet(
                "all_gather", torch.tensor([0, FAILED])
            )  # where others are next
        if axis.on_host:
            axis.gather_object(
                format_exception_only(error)[0].strip()
            )  # without its notes


def _check_backward_threads(axis: Ranks, params: Tree) -> None:
    for leaf in tree.leaves_of(params):
        if leaf.device.type != "cpu":
            raise ValueError(
                f"{axis} runs ranks as threads, but params are on {leaf.device}, whose backward "
                "passes all run in one thread, where ranks would wait for each other for ever: "
                "take ps.VmapAxis, or a process for each rank with ps.MeshAxis"
            )


def _recorded(axis: Ranks) -> ValueError:
    return ValueError(
        f"a step over {axis} is not recorded, but params, opt_state, weights or a microbatch "
        "require grad, or a transform of torch.func is active: call it on detached tensors, or "
        "differentiate through the step with ps.VmapAxis"
    )
