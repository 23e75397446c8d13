"""The session of ranks of which each runs its own program, may differ from others, and may fail."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from traceback import format_exception_only
from typing import Any, Literal, Self

import torch
from torch import Tensor

from purestep import tree
from purestep.axis.base import RankError
from purestep.axis.process import ProcessAxis
from purestep.sharding.buckets import GradBuckets
from purestep.sharding.gather import params_for_loss
from purestep.sharding.layout import reduce_axes, shards_over
from purestep.sync import handshake
from purestep.sync.handshake import Status, TreeFingerprint
from purestep.sync.leaving import (
    GathersVaryError,
    KnownLaunches,
    LossGathers,
    OtherGatherError,
    RankLeftError,
    gather_axes,
    has_other_axes,
)
from purestep.tree.shard import ShardSpecs
from purestep.types import Gather, GradHook, GradSums, Params, TokenCounts, Tree

MICROBATCH_COUNT = (
    "the number of microbatches, each of which gathers params (add some of weight zero)"
)
EARLY_BUCKETS = (
    "the buckets that have left before a collective inside the loss "
    "(add 0 * w.sum() to it)"
)
GATHER_ORDER = (
    "what their losses gather "
    "(run the same units, or ps.unshard, in one order on all ranks)"
)
FAILED = -1
"""Sent in the place of a fingerprint, which is not negative."""


class MultiProgramSession:
    """Runs the update of ranks that each run a program, and may hold no microbatch, or fail.

    All ranks send two status messages: one before the backward passes, one after them. On the host,
    each is read at once, and a rank that fails makes the others raise. Where losses gather params,
    that takes a guard of ``LossGathers``. Without one, a rank whose loss fails raises alone.

    On a device, reading would wait for all that is queued. The first message is read with the
    second, or by ``max_microbatches`` if the ranks cannot meet on the host. The second one is read
    only if a rank holds no microbatch, or if the order of gathers is compared. A rank that fails
    between ``all_reduce_counts`` and ``all_reduce_grads`` raises alone.
    """

    def __init__(
        self,
        axis: ProcessAxis,
        gather: Gather,
        config: Mapping[str, str],
        known_launches: KnownLaunches | None = None,
    ) -> None:
        self.rank = axis.rank
        self._axis = axis
        self._gather = gather
        self._config = {
            "gather": gather,
            **config,
            "bucket_bytes": str(axis.bucket_bytes),
        }
        self._awaited: Literal["counts", "grads"] | None = "counts"
        """The message that the other ranks wait for."""
        self._buckets = GradBuckets(axis, {}, ())
        self._first: handshake.PendingStatus | None = None
        self._group_len = 0
        self._known_launches = known_launches
        self._gathers = LossGathers((), None, ())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: Any, error: BaseException | None, trace: Any) -> None:
        self._gathers.stop()
        if error is None or self._awaited is None:
            return
        if isinstance(error, KeyboardInterrupt):
            # It comes between any two instructions, also after a collective was noted and before it
            # was launched: what the others wait for is unknown. They see that the process ends.
            return
        if isinstance(error, RankLeftError):
            self._raise_why_ranks_left()
        texts: list[str] = []
        with suppress(BaseException):  # The first error is the one that is raised.
            texts = self._send_failure(error)
        if texts and all(OtherGatherError.__name__ in text for text in texts):
            self._gathers.forget()
            raise GathersVaryError from error
        for rank, text in enumerate(texts):
            if text and rank != self._axis.rank:
                error.add_note(f"rank {rank} of {self._axis} failed, too: {text}")

    def all_reduce_counts(
        self,
        counts: TokenCounts,
        params: Params,
        opt_state: Tree,
        num_microbatches: int,
    ) -> TokenCounts:
        """Returns the sum of all ranks' counts, and compares what the ranks are about to do.

        On the host, it raises ``ValueError`` if ranks differ in it, or if N overflows, and
        ``RankError`` if a rank has failed. On a device, ``max_microbatches`` or
        ``all_reduce_grads`` raises. There, N is float64 on a rank without microbatches. Unless
        ``gather`` is "step", logs of gathers start.

        Raises ``ValueError`` for tensors that autograd or a transform records. So it does for
        params on an accelerator if ranks are threads.
        """
        axis = self._axis
        if axis.shares_backward_thread:
            _check_backward_threads(axis, params)
        if not tree.can_write(params, opt_state, counts):
            raise _recorded(axis)
        fingerprints = self._fingerprint(params, opt_state, num_microbatches)
        fingerprint = handshake.hash64(*(f.hash for f in fingerprints.values()))
        if self._gather != "step":
            key = axis.global_ranks, self.rank, fingerprints["params"].hash
            axes = gather_axes(params, axis)
            launches = None if has_other_axes(params, axes) else self._known_launches
            self._gathers = LossGathers(axes, launches, key)
        self._group_len = num_microbatches
        message = handshake.encode_status(
            axis,
            group_len=self._group_len,
            fingerprint=fingerprint,
            counts=counts,
            knows_gathers=self._gathers.are_known,
        )
        self._all_reduce_message(message)
        self._first = handshake.PendingStatus(axis, message, fingerprints, fingerprint)
        has_float_weights = counts.num_tokens.is_floating_point()
        if axis.on_host:
            has_float_weights = self._first.read().num_float_weights > 0
        elif not self._group_len:
            has_float_weights = True
        self._await_grads()
        return handshake.counts_from(message, has_float_weights)

    def _fingerprint(
        self, params: Params, opt_state: Tree, num_microbatches: int
    ) -> dict[str, TreeFingerprint]:
        """Fingerprints what is compared between ranks, by its name in errors.

        That is the settings, and structure, dtypes and shapes of params and ``opt_state``, without
        the values of tensors. With ``gather="loss"``, it is also the number of microbatches. With a
        ``weight_fn``, only whether that is zero counts.
        """
        # Settings first: ranks that make different calls differ in all three.
        trees = {"settings": self._config, "params": params, "opt_state": opt_state}
        if self._gather == "loss":
            number = str(num_microbatches)
            # A rank with fewer than others repeats its last one, with weights of zero.
            if num_microbatches and self._config["weight_fn"] == "given":
                number = "one or more"
            trees[MICROBATCH_COUNT] = number
        fingerprints = {}
        for name, compared in trees.items():
            what, *_ = name.split(", ")  # The advice is said once.
            fingerprints[name] = handshake.fingerprint(what, compared)
        return fingerprints

    def params_for_loss(self, params: Params, shard_specs: ShardSpecs) -> Params:
        """Returns the params as the loss sees them: marked by ``pvary``, and perhaps gathered.

        If ``gather`` is "step", shards over the axis or a subaxis become full tensors; otherwise
        they stay. Shards over other axes become this rank's local tensors.

        From here on, buckets take a collective for one of the loss, and the backward pass may
        launch those that are full.
        """
        visible = params_for_loss(params, self._axis, self._gather)
        self._await_grads()
        return visible

    def grad_hook(self, params: Params, accum_dtype: torch.dtype | None) -> GradHook:
        """Makes buckets for gradients that the loss does not reduce; returns the hook to fill them.

        Sums are in ``accum_dtype``; if that is None, in the accumulation dtype of each leaf. All
        ranks call it together, since it may make a process group.
        """
        leaves, spec = tree.flatten(params)
        shard_specs: Any = tree.shard_specs(spec) or [None] * len(leaves)
        scatter_specs = {}
        if self._gather == "step":
            scatter_specs = shards_over(shard_specs, self._axis)
        axes: Any = dict(enumerate(reduce_axes(shard_specs, self._axis)))
        in_buckets = {}
        dtypes = []
        for index, leaf in enumerate(leaves):
            dtypes.append(accum_dtype or tree.accumulation_dtype(leaf.dtype))
            if index in scatter_specs or axes[index]:
                in_buckets[index] = leaf
        self._buckets = GradBuckets(self._axis, in_buckets, dtypes, scatter_specs, axes)
        return self._buckets.ready

    def max_microbatches(self, num_microbatches: int) -> int:
        """Returns the largest number of microbatches of any rank; all ranks call it together.

        On the host, it also sets up the guard of what losses gather. Raises what the first message
        shows, as ``_find_max_len`` does.
        """
        max_len = self._find_max_len(num_microbatches)
        if self._axis.on_host:
            assert self._first is not None
            num_knowing = self._first.read().num_knowing_gathers
            self._gathers.guard(max_len, all_know=num_knowing == self._axis.size)
        return max_len

    def _find_max_len(self, num_microbatches: int) -> int:
        """Returns the largest number of microbatches of any rank; all ranks call it together.

        The host has to know it before the first gather. If ranks compute on the host, the first
        message is read, which may raise. If it shows different numbers, ranks gather them.

        If ranks compute on a device, they gather their numbers and fingerprints. They do so on the
        host if the process group can, so that no host waits for what a device still computes. If
        fingerprints differ, or cannot be gathered on the host, the first message is read, too.
        """
        axis = self._axis
        if axis.on_host:
            assert self._first is not None
            status = self._first.read()
            # By Cauchy-Schwarz, as fingerprints are compared: equal on all ranks.
            if status.group_len**2 == axis.size * status.group_len_squared:
                return num_microbatches
            local = torch.tensor([num_microbatches], device="cpu")
            return int(axis.process_group.run("all_gather", local).max())
        assert self._first is not None
        device = axis.device
        if axis.has_host_backend:
            device = torch.device("cpu")
        else:
            self._first.read()
        fingerprint = self._first.fingerprint % handshake.max_fingerprint(axis)
        local = torch.tensor([num_microbatches, fingerprint], device=device)
        rows = axis.process_group.run("all_gather", local).view(axis.size, 2).tolist()
        if any(other != rows[0][1] for _, other in rows):
            self._first.read()  # It raises, and says who has failed, or differs.
        return int(max(number for number, _ in rows))

    def all_reduce_grads(
        self, sums: GradSums, params: Params, shard_specs: ShardSpecs
    ) -> GradSums:
        """Returns the sums of all ranks' results; ranks without microbatches take part with zeros.

        Raises ``ValueError`` if autograd records the sums, and ``RankLeftError`` or
        ``OtherGatherError`` as the guard of gathers does. On a device, it reads the message of
        ``all_reduce_counts`` if nothing has, and raises what that shows.

        It sends a second message. Where that is read, it raises ``RankError`` if a rank has failed,
        and ``ValueError`` if N overflows. ``ValueError`` also comes if ranks differ in aux, in what
        losses gather, or in the buckets that were launched early. So it does if losses return aux,
        and only some ranks have a microbatch. On a device, the message is read only if a rank holds
        no microbatch, or if the order of gathers is compared.
        """
        grads = tree.leaves(sums.grads)
        if tree.leaves_require_grad(grads):
            raise _recorded(self._axis)
        self._buckets.add_remaining(grads)
        num_early = self._buckets.num_early
        aux = handshake.fingerprint("LossOutput.aux", sums.aux)
        early = handshake.fingerprint(EARLY_BUCKETS, str(num_early))
        self._gathers.end()
        order = self._fingerprint_gathers()
        aux_hash = 0 if tree.is_empty(sums.aux) else aux.hash
        message = handshake.encode_status(
            self._axis,
            group_len=self._group_len,
            fingerprint=aux_hash + num_early + order.hash,
            counts=sums.counts,
            loss=sums.loss,
        )
        self._all_reduce_message(message)
        status = self._check_second(message, [aux, early, order])
        self._gathers.remember()

        has_float_weights = sums.counts.num_tokens.is_floating_point()
        has_float_weights = has_float_weights or not self._group_len
        if status is not None:
            has_float_weights = status.num_float_weights > 0
        loss = handshake.views_of(message)["loss"]
        return GradSums(
            self._reduced_grads(grads, params),
            loss.to(self._loss_dtype(sums.loss, status)),
            handshake.counts_from(message, has_float_weights),
            self._axis.apply_tree("psum", sums.aux),
        )

    def _check_second(
        self, message: Tensor, fingerprints: list[TreeFingerprint]
    ) -> Status | None:
        """Checks the second message, and returns its status; returns None if it need not be read.

        It reads the first message before, if that is still unread. On a device, the second one is
        read only if a rank holds no microbatch, or if ranks compare the order of gathers. On the
        host it always is.

        Raises as ``check_status`` does, or ``ValueError`` if a rank without microbatches lacks the
        aux of others. The last of ``fingerprints`` is that of the order.
        """
        axis = self._axis
        assert self._first is not None
        num_holding = int(self._first.read().num_holding)
        # Ranks without microbatches have no aux, whose structure the others share. An order in
        # which units gather is compared at once: gradients of one would be those of another.
        has_order = bool(fingerprints[-1].hash)
        if not axis.on_host and num_holding == axis.size and not has_order:
            return None
        compared = {}
        if self._group_len:
            compared = {fingerprint.name: fingerprint for fingerprint in fingerprints}
        status = Status(*message.tolist())
        handshake.check_status(
            axis, status, compared, num_ranks=num_holding, can_ask=True
        )
        if status.fingerprint > 0 and num_holding < axis.size:
            num_missing = axis.size - num_holding
            raise ValueError(
                f"the losses of {axis} return LossOutput.aux, which {num_missing} of its "
                f"{axis.size} ranks cannot, as they hold no microbatch: give each of them one "
                "whose weights are zero"
            )
        return status

    def _loss_dtype(self, loss: Tensor, status: Status | None) -> torch.dtype:
        """Returns the dtype of the summed loss: float64 if any rank's loss has it.

        Otherwise it is that of ``loss``; on a rank without microbatches, float32 if others have
        some. Without ``status``, it is that of ``loss``.
        """
        if status is None:
            return loss.dtype
        if status.num_float64_losses > 0:
            return torch.float64
        if status.num_holding > 0 and not self._group_len:
            return torch.float32
        return loss.dtype

    def _reduced_grads(self, grads: list[Tensor], params: Params) -> Tree:
        """Returns the tree of all ranks' sums from the buckets, in the memory order of params.

        Leaves in no bucket are those of ``grads``: the loss has reduced them.
        """
        leaves, spec = tree.flatten(params)
        totals = []
        for index, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
            total = self._buckets.sums.get(index, grad)
            totals.append(tree.match_strides(leaf, total))
        return tree.unflatten(spec, totals)

    def _fingerprint_gathers(self) -> TreeFingerprint:
        """Describes what losses gathered, in order; nothing if ``gather`` is not "loss".

        An empty description has the hash 0.
        """
        gathers = self._gathers.describe() if self._gather == "loss" else []
        return handshake.fingerprint_order(GATHER_ORDER, gathers)

    def _raise_why_ranks_left(self) -> None:
        """Raises ``RankError`` with the errors of ranks that left their losses, or ``ValueError``.

        The latter says in what the gathers differ. All ranks that got a ``RankLeftError`` call it.
        It ends their gathers, and sends the second message.
        """
        self._gathers.leave()
        order = self._fingerprint_gathers()
        message = handshake.encode_status(
            self._axis, group_len=self._group_len, fingerprint=order.hash
        )
        self._all_reduce_message(message)
        self._check_second(message, [order])

    def _await_grads(self) -> None:
        """Notes that other ranks now wait for this rank's second status message.

        From here on, buckets take a collective for one of the loss, after which none leaves early.
        """
        self._awaited = "grads"
        self._buckets.begin()

    def _all_reduce_message(self, message: Tensor) -> None:
        """Sums a message over all ranks in place, and waits for it and for the buckets.

        Before it launches the second message, it launches the buckets that are left. Between the
        launch of that message and the wait, it raises what the first message shows. It notes that
        other ranks wait for no message any more.
        """
        if self._awaited == "grads":
            self._buckets.launch()
        self._awaited = None
        wait = self._axis.launch(message)
        if self._first is not None:
            self._first.read()  # It raises before this rank waits for ranks that have left.
        self._buckets.wait()
        wait()

    def _send_failure(self, error: BaseException) -> list[str]:
        """Sends what the other ranks wait for, and that this one has failed.

        On the host, all ranks then exchange their errors. Returns these texts, "" for a rank
        without an error, or an empty list if they cannot be exchanged. On a device, it sends
        nothing after ``all_reduce_counts``. Among gathers, it sends nothing if other ranks cannot
        learn of it, or if the error is a ``RankError``.
        """
        axis = self._axis
        awaits_counts = self._awaited == "counts"
        if not awaits_counts:
            # On a device, the others read nothing until its process ends. After an error of the
            # backend, no other rank is left to meet.
            is_alone = not axis.on_host
            is_alone |= bool(self._gathers.axes) and isinstance(error, RankError)
            if is_alone or not self._gathers.leave():
                return []
        self._all_reduce_message(handshake.encode_failure(axis))
        if axis.on_host:
            text = format_exception_only(error)[0].strip()  # without its notes
            return [answer or "" for answer in axis.gather_object(text)]
        if awaits_counts and self._gather != "step" and axis.has_host_backend:
            # The others are at ``max_microbatches`` next.
            failure = torch.tensor([0, FAILED], device="cpu")
            axis.process_group.run("all_gather", failure)
        return []


def _check_backward_threads(axis: ProcessAxis, params: Params) -> None:
    """Raises ``ValueError`` if a param is not on the CPU; call it if the ranks are threads.

    On an accelerator, one thread runs the backward passes of all ranks, which would wait for each
    other. The error names ``axis``.
    """
    for leaf in tree.leaves(params):
        if leaf.device.type != "cpu":
            raise ValueError(
                f"{axis} runs ranks as threads, but params are on {leaf.device}, whose backward "
                "passes all run in one thread, where ranks would wait for each other for ever: "
                "take ps.VmapAxis, or a process for each rank with ps.MeshAxis"
            )


def _recorded(axis: ProcessAxis) -> ValueError:
    """Returns the error for a step that autograd or a transform would have to follow."""
    return ValueError(
        f"a step over {axis} is not recorded, but params, opt_state, weights or a microbatch "
        "require grad, or a transform of torch.func is active: call it on detached tensors, or "
        "differentiate through the step with ps.VmapAxis"
    )
