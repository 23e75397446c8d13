"""What the ranks of an axis say to each other in one update.

    all_reduce_counts    the counts of all ranks, before any backward pass
    params_for_loss      the params as the loss sees them
    grad_hook            sums of gradients that leave while the backward pass runs
    all_reduce_grads     the sums of all ranks

``LocalSession``: there is one rank. ``SPMDSession``: all run one program. ``MultiProgramSession``:
each runs its own, so one may fail, disagree, or hold no microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from purestep import tree
from purestep.axis.base import Axis
from purestep.axis.local import LocalAxis
from purestep.axis.process import ProcessAxis
from purestep.sharding.gather import params_for_loss
from purestep.sharding.layout import collective_on_shard, reduce_axes, shards_over
from purestep.sync.leaving import KnownLaunches
from purestep.sync.multi_program import MultiProgramSession
from purestep.tree.shard import ShardSpecs
from purestep.types import Gather, GradHook, GradSums, Params, TokenCounts, Tree


class Session(Protocol):
    """Exchanges what ranks need in one update: ``with open_session(...) as session``.

    Every rank calls ``all_reduce_counts``, and ``grad_hook`` if gradients are to be summed. Then it
    calls ``max_microbatches`` unless params are gathered once a step, ``params_for_loss``, and
    ``all_reduce_grads``, in this order.

    On the host, an exception inside the ``with`` makes all other ranks raise: a ``RankError``,
    unless they have an error themselves. A ``KeyboardInterrupt`` does not: it ends its process.

    Where losses gather params, a rank whose loss fails may raise alone. So it is without
    ``known_launches``, and if params are sharded over a further axis, as in tensor parallelism.

    >>> from purestep import LocalAxis
    >>> counts = TokenCounts(torch.tensor(3), torch.tensor(1))
    >>> with open_session(LocalAxis(), "step", {}) as session:
    ...     total = session.all_reduce_counts(counts, {"w": torch.ones(2)}, (), 1)
    >>> total.num_tokens
    tensor(3)
    """

    rank: int

    def all_reduce_counts(
        self,
        counts: TokenCounts,
        params: Params,
        opt_state: Tree,
        num_microbatches: int,
    ) -> TokenCounts:
        """Returns the sum of all ranks' counts, and compares what the ranks are about to do.

        That is their settings, and dtypes, shapes and structure of params and ``opt_state``. With
        ``gather="loss"`` it is also how many microbatches they hold; with a ``weight_fn``, only
        whether they hold any. Ranks that run one program are not compared. ``counts`` and
        ``num_microbatches`` are those of this rank.

        On the host, it raises an error that names the ranks that differ. On a device, a later call
        raises an error, which cannot name them.
        """

    def params_for_loss(self, params: Params, shard_specs: ShardSpecs) -> Params:
        """Returns the params as the loss sees them; gathers shards only with ``gather="step"``.

        With another ``gather``, each microbatch or the loss itself gathers them. ``shard_specs``
        are those of params, here and below.
        """

    def grad_hook(
        self, params: Params, accum_dtype: torch.dtype | None
    ) -> GradHook | None:
        """Returns a function that takes each leaf's final sum, which may be reduced from then on.

        The call ``hook(index, total)``, with the position of the leaf, returns where the sum lies
        from then on. Sums are in ``accum_dtype``; None: in the accumulation dtype of each leaf.

        Returns None where sums stay where they are until ``all_reduce_grads``.
        """

    def max_microbatches(self, num_microbatches: int) -> int:
        """Returns how many microbatches the rank with the most of them has, as a collective.

        A step calls it unless ``gather`` is "step": each microbatch may then gather params, on all
        ranks together.
        """

    def all_reduce_grads(
        self, sums: GradSums, params: Params, shard_specs: ShardSpecs
    ) -> GradSums:
        """Returns the sums of all ranks' gradients, losses, counts and aux.

        ``sums.grads`` has one leaf for each leaf of params. With ``gather="step"``, a param that is
        sharded over the axis has its full gradient there; otherwise it has the shard. The result
        has this rank's shard of it.
        """


def open_session(
    axis: Axis,
    gather: Gather,
    config: Mapping[str, str],
    known_launches: KnownLaunches | None = None,
) -> AbstractContextManager[Session]:
    """Opens the session of one update as a context manager; ranks must have equal ``config``.

    ``config`` holds settings as texts by name. With ``gather="loss"`` it needs "weight_fn", which
    is "given" if there is one.

    In ``known_launches``, ranks note what each microbatch gathers, for later updates. Without it, a
    rank that fails among gathers raises alone. While a compiler traces, the ranks of every axis run
    one program.
    """
    if axis.is_multi_program and not torch.compiler.is_dynamo_compiling():
        process_axis = cast("ProcessAxis", axis)
        return MultiProgramSession(process_axis, gather, config, known_launches)
    if type(axis) is LocalAxis:  # A subclass may count what it reduces.
        return nullcontext(LocalSession(axis, gather))
    return nullcontext(SPMDSession(axis, gather))


@dataclass
class SPMDSession:
    """Runs the update of ranks that run one program: a single rank, simulated or compiled ones."""

    axis: Axis
    gather: Gather
    rank = 0

    def all_reduce_counts(
        self,
        counts: TokenCounts,
        params: Params,
        opt_state: Tree,
        num_microbatches: int,
    ) -> TokenCounts:
        """Returns the sum of all ranks' counts, by ``psum``, under any transform; compares nothing.

        Raises ``ValueError`` if this rank has no microbatch, in a compiled step over a
        ``ProcessAxis``.
        """
        if self.axis.is_multi_program and not num_microbatches:
            raise ValueError(
                f"a rank of {self.axis} holds no microbatch, and a compiled step is one program "
                "for all ranks: give it a microbatch whose weights are zero"
            )
        total: TokenCounts = self.axis.apply_tree("psum", counts)
        return total

    def params_for_loss(self, params: Params, shard_specs: ShardSpecs) -> Params:
        """Marks params by ``pvary``, a sharded one only over the other ranks of the axis.

        With ``gather="step"``, it gathers shards over the axis or a subaxis. Shards over other axes
        become this rank's local tensors.
        """
        return params_for_loss(params, self.axis, self.gather)

    def grad_hook(
        self, params: Params, accum_dtype: torch.dtype | None
    ) -> GradHook | None:
        """Returns None: sums stay where they are until ``all_reduce_grads``."""
        return None

    def max_microbatches(self, num_microbatches: int) -> int:
        """Returns ``num_microbatches``, which is the same on all ranks."""
        return num_microbatches

    def all_reduce_grads(
        self, sums: GradSums, params: Params, shard_specs: ShardSpecs
    ) -> GradSums:
        """Returns the sums of all ranks' results, under any transform.

        Loss, counts, aux and gradients of plain leaves are summed by ``psum``. With
        ``gather="step"``, the full gradient of a leaf that is sharded over the axis or a subaxis
        becomes this rank's shard of the sum. Any other gradient of a sharded leaf is a shard
        already. Either is summed over the other ranks of the axis, if there are any.
        """
        if not shard_specs:
            total: GradSums = self.axis.apply_tree("psum", sums)
            return total
        grads = self._reduce_sharded(tree.leaves(sums.grads), shard_specs)
        total = self.axis.apply_tree("psum", sums._replace(grads=()))
        _, spec = tree.flatten(params)
        return total._replace(grads=tree.unflatten(spec, grads))

    def _reduce_sharded(
        self, grads: list[Tensor], shard_specs: ShardSpecs
    ) -> list[Tensor]:
        """Sums each gradient over the ranks; of a sharded leaf, it returns this rank's shard.

        If ``gather`` is "step", full gradients of leaves sharded over the axis or a subaxis are
        scattered. Then each leaf is summed over the ranks over which it is still to be summed. The
        list ``grads`` is changed in place, and returned.
        """
        if self.gather == "step":
            for index, shard_spec in shards_over(shard_specs, self.axis).items():
                grads[index] = collective_on_shard(
                    "psum_scatter", grads[index], shard_spec
                )
        for index, axis in enumerate(reduce_axes(shard_specs, self.axis)):
            if axis is not None:
                grads[index] = axis.apply("psum", grads[index])
        return grads


class LocalSession(SPMDSession):
    """Runs the update of a single rank, which gathers and reduces nothing but sharded params.

    These may be sharded over another axis: the loss then sees this rank's shard.
    """

    def all_reduce_counts(
        self,
        counts: TokenCounts,
        params: Params,
        opt_state: Tree,
        num_microbatches: int,
    ) -> TokenCounts:
        """Returns the counts as they are, without any check."""
        return counts

    def params_for_loss(self, params: Params, shard_specs: ShardSpecs) -> Params:
        """Returns the params as they are, unless one is sharded: then as ``SPMDSession`` does."""
        if not shard_specs:
            return params
        return super().params_for_loss(params, shard_specs)

    def all_reduce_grads(
        self, sums: GradSums, params: Params, shard_specs: ShardSpecs
    ) -> GradSums:
        """Returns the sums as they are; with sharded params, as ``SPMDSession`` does."""
        if not shard_specs:
            return sums
        return super().all_reduce_grads(sums, params, shard_specs)
