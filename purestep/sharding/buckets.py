"""Buckets of leaves of one dtype, each of which takes one collective. The last leaf comes first.

The backward pass computes the gradient of the last leaf first. Every leaf is contiguous in its
bucket, whatever its strides on any rank. A bucket is a matrix: of one row, which ranks sum or
gather; or of one row for each rank, whose sums are scattered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from purestep.axis.process import ProcessAxis, Wait
from purestep.sharding.layout import pack_rows, row_numel, unpack_rows
from purestep.tree.shard import ShardSpec

FIRST_BYTES = 2**20
"""The size of the first bucket of gradients: small, so that it is launched early."""


class _BucketKey(NamedTuple):
    """Holds the properties that the leaves of a bucket share, and the rows of its memory.

    There is one row for each rank if the leaves are scattered, else one.
    """

    dtype: torch.dtype
    device: torch.device
    reduce_axis: ProcessAxis | None
    scatter_axis: ProcessAxis | None
    num_rows: int


@dataclass
class _Bucket:
    """Holds leaves that travel together: by a scatter or gather, by a sum, or by both in turn.

    They lie side by side in ``memory``.
    """

    key: _BucketKey
    row_len: int = 0
    offsets: dict[int, int] = field(default_factory=dict)
    """The column where each leaf begins, by the position of the leaf."""
    pending: set[int] = field(default_factory=set)
    """The leaves that have not been added yet."""
    wait: Wait | None = None

    @cached_property
    def memory(self) -> Tensor:
        """Returns the rows, allocated at the first use, without values.

        They have a column at least, because backends take no empty tensors.
        """
        return torch.empty(
            self.key.num_rows,
            max(self.row_len, 1),
            dtype=self.key.dtype,
            device=self.key.device,
        )

    def columns(self, index: int, length: int) -> Tensor:
        """Returns a view of the columns of the leaf at position ``index``: ``length`` of them."""
        start = self.offsets[index]
        return self.memory[:, start : start + length]

    def launch(self, op: str) -> None:
        """Launches ``op`` over ``scatter_axis``; without one, does what ``launch_sum`` does.

        ``op`` is "all_gather" or "psum_scatter". The axis logs it before, and a listener of its log
        may raise.
        """
        if self.key.scatter_axis is not None:
            self.key.scatter_axis.log_launch(op, self.memory)
            self.wait = self.key.scatter_axis.launch(self.memory, op)
        else:
            self.launch_sum()

    def launch_sum(self) -> None:
        """Launches the sum of the first row over ``reduce_axis``, if it has one, in place."""
        if self.key.reduce_axis is not None:
            self.wait = self.key.reduce_axis.launch(self.memory[0])

    def receive_shards(self) -> None:
        """Waits for a launched scatter or gather, and takes its result as the memory.

        Does nothing if none is pending. Must not be called once the sum is launched.
        """
        if self.key.scatter_axis is None or self.wait is None:
            return
        received = self.wait()
        self.memory = received.view(-1, max(self.row_len, 1))
        self.wait = None


class GradBuckets:
    """Sums gradients over ranks, in buckets of leaves, while a backward pass runs.

    ``leaves`` are the params whose gradients go into buckets, by position. Only their sizes and
    devices are read. ``dtypes`` are those of the sums, by position. ``axis`` sets the size of
    buckets by its ``bucket_bytes``.

    ``ready(index, total)`` adds the final sum of a leaf, and launches the buckets that are full.
    ``add_remaining`` adds the other leaves, and ``launch`` launches the other buckets. After
    ``wait``, ``sums`` holds the sums of all ranks, by position.

    All ranks launch their buckets in one order. Once the loss itself has run a collective over one
    of the axes, no bucket is launched before ``launch``, since ranks might mix them up. The same
    holds if a backend does not count collectives.

    Leaves in ``scatter_specs`` are summed and scattered. ``reduce_axes`` holds, by position, the
    axes over which leaves are summed, after the scatter if there is one. A leaf without an axis
    there has no such sum. If ``reduce_axes`` is None, all leaves are summed over ``axis``.
    """

    op = "psum_scatter"
    first_bytes: float = FIRST_BYTES

    def __init__(
        self,
        axis: ProcessAxis,
        leaves: Mapping[int, Tensor],
        dtypes: Sequence[torch.dtype],
        scatter_specs: Mapping[int, ShardSpec] | None = None,
        reduce_axes: Mapping[int, ProcessAxis] | None = None,
    ) -> None:
        self.sums: dict[int, Tensor] = {}
        self._axis = axis
        self._scatter_specs = scatter_specs or {}
        self._bucket_of: dict[int, _Bucket] = {}
        self._buckets: list[_Bucket] = []
        self._num_launched = 0
        newest: dict[_BucketKey, _Bucket] = {}
        for index in reversed([*leaves]):
            reduce_axis: ProcessAxis | None = axis
            if reduce_axes is not None:
                reduce_axis = reduce_axes.get(index)
            self._assign(newest, index, leaves[index], dtypes[index], reduce_axis)
        # A bucket is complete when its lowest position is, which is the last one to be ready.
        self._buckets.sort(key=lambda bucket: -min(bucket.offsets))
        self._axes = {axis}
        for bucket in self._buckets:
            if bucket.key.reduce_axis is not None:
                self._axes.add(bucket.key.reduce_axis)
            if bucket.key.scatter_axis is not None:
                self._axes.add(bucket.key.scatter_axis)
        self.begin()

    def _assign(
        self,
        newest: dict[_BucketKey, _Bucket],
        index: int,
        leaf: Tensor,
        dtype: torch.dtype,
        reduce_axis: ProcessAxis | None,
    ) -> None:
        """Assigns a leaf to the newest bucket of its kind, or to a new one if it does not fit.

        ``newest`` is updated. A bucket has at most ``bucket_bytes`` of the axis, and the first of
        all at most ``first_bytes``. A leaf that is scattered or gathered counts with the rows of
        all ranks. A larger leaf is alone in its bucket.
        """
        shard_spec = self._scatter_specs.get(index)
        scatter_axis = None
        num_ranks = 1
        row_len = leaf.numel()
        if shard_spec is not None:
            scatter_axis = shard_spec.axis
            num_ranks = scatter_axis.size
            row_len = row_numel(shard_spec)
        key = _BucketKey(
            dtype=dtype,
            device=leaf.device,
            reduce_axis=reduce_axis,
            scatter_axis=scatter_axis,
            num_rows=1 if self.op == "all_gather" else num_ranks,
        )
        bucket = newest.get(key)
        max_bytes: float = self._axis.bucket_bytes
        if not self._buckets or bucket is self._buckets[0]:
            max_bytes = min(max_bytes, self.first_bytes)
        max_len = max_bytes / (num_ranks * dtype.itemsize)
        if bucket is None or bucket.row_len + row_len > max_len:
            bucket = _Bucket(key)
            newest[key] = bucket
            self._buckets.append(bucket)
        self._bucket_of[index] = bucket
        bucket.offsets[index] = bucket.row_len
        bucket.row_len += row_len
        bucket.pending.add(index)

    def begin(self) -> None:
        """Notes how many collectives have begun on each axis.

        It is called before the loss runs, and after a bucket is launched early. If that number has
        changed when a bucket is full, the loss has run a collective.
        """
        self._num_collectives = self._count_collectives()

    def _count_collectives(self) -> list[int | None]:
        """Returns, for each axis, how many collectives have begun; None if that is not counted."""
        return [axis.num_collectives for axis in self._axes]

    @property
    def num_early(self) -> int:
        """Returns how many buckets were launched before a collective of the loss; 0 without one.

        Read it before ``launch``, whose collectives would count as the loss's. The number must be
        equal on all ranks, which compare it.
        """
        if self._num_collectives == self._count_collectives():
            return 0
        return self._num_launched

    def ready(self, index: int, total: Tensor) -> Tensor:
        """Adds the final sum of a leaf, launches full buckets, and returns where the sum lies now.

        That is a view of its bucket. A sum that is scattered is not kept: an expanded zero of its
        shape, without memory, stands for it. A leaf without a bucket keeps its sum. Raises
        RuntimeError if a leaf is added twice.
        """
        bucket = self._bucket_of.get(index)
        if bucket is None:
            return total
        if index not in bucket.pending:
            raise RuntimeError(
                f"a param of shape {tuple(total.shape)} is given a gradient twice in one backward "
                "pass, by a torch.autograd.Function that runs one itself: return the gradient from "
                "the Function's backward instead"
            )
        stored = self._add(index, total)
        self._launch_full()
        return stored

    def _add(self, index: int, total: Tensor) -> Tensor:
        """Copies the sum of a leaf into its bucket; stores in ``sums`` and returns a view of it.

        A leaf in ``scatter_specs`` is packed into a row for each rank; to be gathered, into one
        row. It has no view: expanded zeros of its shape are returned, and ``sums`` stays. The leaf
        is no longer pending in the bucket.
        """
        bucket = self._bucket_of[index]
        bucket.pending.discard(index)
        shard_spec = self._scatter_specs.get(index)
        if shard_spec is None:
            if total.is_sparse:
                total = total.to_dense()
            rows = bucket.columns(index, total.numel())
            view = rows[0].view(total.shape)
            view.copy_(total)
            self.sums[index] = view
            return view
        rows = bucket.columns(index, row_numel(shard_spec))
        packed = pack_rows(total, shard_spec, bucket.key.num_rows)
        rows.copy_(packed)
        return rows.new_zeros(()).expand(total.shape)

    def add_remaining(self, sums: Sequence[Tensor]) -> None:
        """Adds the sums of all leaves that have not been added yet, and launches nothing."""
        for index, bucket in self._bucket_of.items():
            if index in bucket.pending:
                self._add(index, sums[index])

    def launch(self) -> None:
        """Launches all buckets that are left, in order.

        For a leaf that has not been added, as after a failure, it sends uninitialized memory: so
        the other ranks do not wait.
        """
        while self._num_launched < len(self._buckets):
            self._launch_next()

    def _launch_full(self) -> None:
        """Launches full buckets in order, up to the first that is not full.

        A bucket is full once the sums of all its leaves have been added. None is launched if the
        loss has run a collective over one of the axes, or if an axis does not count collectives.
        ``launch`` launches the others.
        """
        while self._num_launched < len(self._buckets):
            if self._buckets[self._num_launched].pending:
                return
            num_collectives = self._count_collectives()
            if None in num_collectives or num_collectives != self._num_collectives:
                return
            self._launch_next()
            self.begin()

    def _launch_next(self) -> None:
        self._buckets[self._num_launched].launch(self.op)
        self._num_launched += 1
        if self._num_launched > 2:
            # So that few buckets at a time hold rows for all ranks.
            self._buckets[self._num_launched - 3].receive_shards()

    def wait(self) -> None:
        """Waits for all buckets that have been launched, and completes ``sums``.

        Scattered and gathered leaves come into ``sums`` here. Scattered buckets are summed over
        their ``reduce_axis`` here, if they have one.
        """
        launched = self._buckets[: self._num_launched]
        for bucket in launched:
            bucket.receive_shards()
            if bucket.key.scatter_axis is not None:
                bucket.launch_sum()
        for bucket in launched:
            if bucket.wait is not None:
                bucket.wait()
            for index in bucket.offsets:
                shard_spec = self._scatter_specs.get(index)
                if shard_spec is not None:
                    rows = bucket.columns(index, row_numel(shard_spec))
                    self.sums[index] = unpack_rows(rows, shard_spec)

    def run_remaining(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """Adds and launches all that is left, waits, and returns the sums of all ranks, in order.

        Of a scattered leaf, that is this rank's shard. Leaves without a bucket keep their sums.
        """
        self.add_remaining(sums)
        self.launch()
        self.wait()
        return [self.sums.get(index, local) for index, local in enumerate(sums)]


class _ShardBuckets(GradBuckets):
    """Gathers shards: after ``wait``, ``sums`` holds full tensors.

    The first bucket is not smaller than others, because nothing is computed meanwhile.
    """

    op = "all_gather"
    first_bytes = math.inf


class _FullBuckets(GradBuckets):
    """Sums and scatters full gradients that a backward pass has computed, before it goes on.

    The first bucket is not smaller than others, because nothing is computed meanwhile.
    """

    first_bytes = math.inf


def all_gather_in_buckets(
    shards: Sequence[Tensor], shard_specs: Sequence[ShardSpec]
) -> list[Tensor]:
    """Gathers the full tensor of each shard over the axis of its spec, in few collectives.

    Returns the full tensors in order. Call it where autograd records nothing: the collectives have
    no derivative here.
    """
    return _run_in_buckets(_ShardBuckets, shards, shard_specs)


def reduce_scatter_in_buckets(
    full_grads: Sequence[Tensor], shard_specs: Sequence[ShardSpec]
) -> list[Tensor]:
    """Sums full tensors, each over the axis of its spec, and returns this rank's shards.

    It takes few collectives, which have no derivative here: call it where autograd records
    nothing. No two shards share memory: a step adds to them in place.
    """
    shards = _run_in_buckets(_FullBuckets, full_grads, shard_specs)
    return [shard.clone() for shard in shards]


def _run_in_buckets(
    bucket_class: type[GradBuckets],
    tensors: Sequence[Tensor],
    shard_specs: Sequence[ShardSpec],
) -> list[Tensor]:
    """Gathers or scatters all tensors by one class of buckets, and returns the results in order."""
    if not tensors:
        return []
    buckets = bucket_class(
        axis=shard_specs[0].axis,
        leaves=dict(enumerate(tensors)),
        dtypes=[tensor.dtype for tensor in tensors],
        scatter_specs=dict(enumerate(shard_specs)),
        reduce_axes={},
    )
    return buckets.run_remaining(tensors)
