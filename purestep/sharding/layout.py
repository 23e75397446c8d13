"""Packs sharded leaves into rows, one for each rank, so that many leaves share one collective.

A leaf that is sharded over n ranks is a matrix of n rows: its entries along the sharded dimension,
padded with zeros. The rows of several leaves stand side by side in a bucket.
"""

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from purestep.axis.base import Axis
from purestep.axis.collectives import is_subaxis
from purestep.axis.process import ProcessAxis
from purestep.tree.shard import ShardSpec, ShardSpecs


def reduce_axis(shard_spec: ShardSpec | None, axis: Axis) -> Axis | None:
    """Returns the axis over which a leaf's gradient is summed, after its scatter; None for none.

    That is ``axis``, less the dimensions that the scatter over the leaf's subaxis has summed. It is
    ``axis`` itself if ``shard_spec`` is None, or if the leaf is sharded over another axis. All
    ranks call it together, since it may make a process group. Raises ``ValueError`` as
    ``MeshAxis.complement`` does.

    >>> from purestep import VmapAxis
    >>> dp, tp = VmapAxis(2), VmapAxis(2)
    >>> reduce_axis(ShardSpec(tp, (4,), 0), dp) == dp, reduce_axis(ShardSpec(dp, (4,), 0), dp)
    (True, None)
    """
    if shard_spec is None or not is_subaxis(shard_spec.axis, axis):
        return axis
    if shard_spec.axis == axis:
        return None
    return cast("ProcessAxis", axis).complement(shard_spec.axis)


def shards_over(shard_specs: ShardSpecs, axis: Axis) -> dict[int, ShardSpec]:
    """Returns the specs of the leaves that are sharded over the axis or a subaxis, by position."""
    # Leaves share few axes, and to compare two of thousands of ranks takes as long as a kernel.
    is_inside: dict[int, bool] = {}
    selected: dict[int, ShardSpec] = {}
    for index, shard_spec in enumerate(shard_specs):
        if shard_spec is None:
            continue
        key = id(shard_spec.axis)
        if key not in is_inside:
            is_inside[key] = is_subaxis(shard_spec.axis, axis)
        if is_inside[key]:
            selected[index] = shard_spec
    return selected


def reduce_axes(shard_specs: ShardSpecs, axis: Axis) -> list[Axis | None]:
    """Returns, for each spec, the axis over which its gradient is still to be summed, or None.

    All ranks call it together, as ``reduce_axis``. A leaf that is not sharded has the spec None.
    """
    cached: dict[int, Axis | None] = {}
    axes: list[Axis | None] = []
    for shard_spec in shard_specs:
        key = id(shard_spec and shard_spec.axis)
        if key not in cached:
            cached[key] = reduce_axis(shard_spec, axis)
        axes.append(cached[key])
    return axes


def collective_on_shard(op: str, x: Tensor, shard_spec: ShardSpec) -> Tensor:
    """Runs a collective along the dimension that a shard was cut along, under any transform.

    "all_gather" gathers a shard. "psum_scatter" sums full tensors, and returns this rank's shard.
    """
    size = shard_spec.axis.size
    if op == "all_gather":
        num_sent = 1
        num_received = size
    else:
        num_sent = size
        num_received = 1
    rows = pack_rows(x, shard_spec, num_sent)
    row_len = rows.shape[1]
    if row_len == 0:
        # No rank sends anything. Not ``rows.new_empty``: the result is the same on all ranks.
        received = torch.empty(0, dtype=rows.dtype, device=rows.device)
    else:
        received = shard_spec.axis.apply(op, rows)
    received = received.reshape(num_received, row_len)
    return unpack_rows(received, shard_spec)


def pack_rows(x: Tensor, shard_spec: ShardSpec, num_rows: int) -> Tensor:
    """Packs a shard into one row, or a full tensor into one row for each rank.

    Returns a matrix of ``num_rows`` rows: 1 for a shard, else the number of ranks. Zeros pad the
    shorter rows. A sparse COO tensor is made dense.
    """
    # Shards are padded behind their last entry, and all that are shorter come last.
    if x.is_sparse:
        x = x.to_dense()
    entries = x.movedim(shard_spec.dim, 0)
    length = shard_spec.shard_len * num_rows
    padded = pad_dim(entries, 0, length)
    return padded.reshape(num_rows, row_numel(shard_spec))


def unpack_rows(rows: Tensor, shard_spec: ShardSpec) -> Tensor:
    """Unpacks rows, contiguously: one gives the local shard, one for each rank the full tensor.

    Padding is dropped, but for a shard where ranks run one program.
    """
    dim = shard_spec.dim
    num_rows = len(rows)
    shape = shard_spec.shape
    if num_rows < shard_spec.axis.size:
        shape = shard_spec.local_shape
    other_dims = [*shape]
    del other_dims[dim]
    padded = rows.reshape(shard_spec.shard_len * num_rows, *other_dims)
    entries = padded[: shape[dim]].movedim(0, dim)
    return entries.contiguous()


def row_numel(shard_spec: ShardSpec) -> int:
    """Returns the number of elements in a row of ``pack_rows``: those of a padded shard."""
    numel = shard_spec.shard_len
    for dim, length in enumerate(shard_spec.shape):
        if dim != shard_spec.dim:
            numel *= length
    return numel


def pad_dim(x: Tensor, dim: int, length: int) -> Tensor:
    """Pads a dimension with zeros at its end, up to a length; returns x itself if it has that.

    ``dim`` must not be negative, and ``length`` not below that of x: torch would cut x.
    """
    num_missing = length - x.shape[dim]
    if num_missing == 0:
        return x
    # ``pad`` takes two numbers for each dimension, and the last dimension first.
    num_later_dims = x.ndim - 1 - dim
    widths = [0, 0] * num_later_dims
    widths += [0, num_missing]
    return functional.pad(x, widths)
