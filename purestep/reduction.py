"""The sum over ranks of what their microbatches gave: gradients in buckets, and a row for the rest."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from purestep import tree
from purestep.agreement import (
    WIDTH,
    Agreement,
    Said,
    all_manage,
    attempt,
    check_shared,
    check_total_at_hand,
    check_totals,
    exchange,
    fail,
    failed_row,
    hear,
    meet_anyway,
    row_of,
    says,
    total_count,
    total_loss,
)
from purestep.axis import Axis, Ranks, psum
from purestep.axis.buckets import Buckets, Packed, packed, summed
from purestep.fingerprint import fingerprint
from purestep.grads import sum_dtypes
from purestep.tokens import count_of
from purestep.types import Params, Sums, Tree

LOSS_DTYPES = [torch.float32, torch.float64]
"""Those in which losses are summed."""


class Compute(Protocol):
    """One rank's ``accumulate``, with its ``out`` and ``ready``."""

    def __call__(
        self, *, out: Sequence[Tensor] | None, ready: Callable[[int], None] | None
    ) -> Sums: ...


def reduce(
    axis: Axis,
    agreement: Agreement,
    compute: Compute,
    params: Params = (),
    accum_dtype: torch.dtype | None = None,
) -> Sums:
    """What ``compute`` gives, summed over all ranks. Its gradients are like ``params``, in ``accum_dtype``.

    Ranks of one program take the ``psum`` of what ``compute`` returns, and so do ranks under a transform, who
    tell each other first what has become of it. Elsewhere it writes into buckets that travel while its backward
    pass still runs, and the rest follows in the last of them. Ranks without microbatches take part with zeros.
    One that fails in ``compute`` says so, and the step ends with its message on every rank; on a device, where
    hearing would wait, it raises alone, and its launcher ends the others.
    """
    compiling = torch.compiler.is_dynamo_compiling()
    if isinstance(axis, Ranks) and not (agreement.recorded or compiling):
        return _reduce_in_buckets(axis, agreement, compute, params, accum_dtype)

    held = [rank.microbatches > 0 for rank in agreement.confirm()]
    if isinstance(axis, Ranks) and compiling:
        held = [agreement.microbatches > 0, True]  # nobody has heard of the others
    if any(held) and not all(held):
        raise ValueError(
            f"a rank of {axis} holds no microbatch, and under a transform or a compiler it cannot be told "
            "what the others' losses return: give it a microbatch whose weights are zero"
        )
    if isinstance(axis, Ranks) and not compiling:
        return _reduce_returned(axis, agreement, compute)
    sums: Sums = psum(compute(out=None, ready=None), axis)
    check_total_at_hand(sums.counted)
    return sums


def _reduce_returned(axis: Ranks, agreement: Agreement, compute: Compute) -> Sums:
    """The sum of what ``compute`` returns, where it has returned the like on every rank."""

    def bring() -> _Brought:
        here = compute(out=None, ready=None)
        said = _says(agreement, here)
        return _Brought(here, said, row_of(axis, said, count_of([], axis.device)), packed(here))

    brought, errors = attempt(bring)
    meet = partial(axis.where.meet, "all_gather")
    _, brought, _, _ = _tell(axis, agreement, brought, errors, meet)
    sums: Sums = summed(brought.packed, axis)
    return sums


def _reduce_in_buckets(
    axis: Ranks,
    agreement: Agreement,
    compute: Compute,
    params: Params,
    accum_dtype: torch.dtype | None,
) -> Sums:
    leaves, structure = tree.flatten(params)
    buckets = Buckets(axis, leaves, sum_dtypes(leaves, accum_dtype), WIDTH)

    def bring() -> _Brought:
        here = compute(out=buckets.sums, ready=buckets.ready)
        said = _says(agreement, here)
        return _Brought(here, said, row_of(axis, said, here.counted, here.loss), packed(here.aux))

    brought, errors = attempt(bring)
    rows, brought, dtype, heard = _tell(axis, agreement, brought, errors, buckets.finish)
    if axis.on_host:
        check_totals(rows)
    return Sums(
        tree.unflatten(structure, buckets.sums),
        total_loss(rows).to(dtype),
        total_count(rows, brought.said, heard if axis.on_host else None),
        summed(brought.packed, axis),
    )


class _Brought(NamedTuple):
    """All that a rank computes before it meets the others: whatever raises, raises here."""

    here: Sums
    said: Said
    row: Tensor
    packed: Packed


def _says(agreement: Agreement, here: Sums) -> Said:
    dtype = LOSS_DTYPES.index(here.loss.dtype)
    return says(agreement.microbatches, here.counted, fingerprint(here.aux), dtype)


def _tell(
    axis: Ranks,
    agreement: Agreement,
    brought: _Brought | None,
    errors: list[BaseException],
    send: Callable[[Tensor], Tensor],
) -> tuple[Tensor, _Brought, torch.dtype, list[Said]]:
    """All ranks' rows; this rank's part and the loss's dtype, in the form that all share; what all said.

    Raises where one has failed.
    """
    if errors and not axis.on_host:
        raise errors.pop()
    row = brought.row if brought else failed_row(axis)
    rows = meet_anyway(errors, lambda: send(row))
    heard = agreement.confirm()
    if axis.on_host or not all(rank.microbatches for rank in heard):
        heard = hear(rows.cpu())
        fail([rank for rank, said in enumerate(heard) if said.failed], axis, errors)
        assert brought is not None
        return rows, *_like_the_others(axis, heard, brought), heard
    assert brought is not None
    return rows, brought, brought.here.loss.dtype, heard


def _like_the_others(
    axis: Ranks, heard: list[Said], brought: _Brought
) -> tuple[_Brought, torch.dtype]:
    """What a rank without microbatches brings, as zeros in the form that the others have; and the loss's dtype."""
    loss, aux = brought.here.loss, brought.here.aux
    prints = {rank: said.fingerprints[0] for rank, said in enumerate(heard) if said.microbatches}
    check_shared(axis, "LossTerms.aux", aux, prints)
    dtypes = {rank: heard[rank].fingerprints[1] for rank in prints}
    check_shared(axis, "the loss", str(loss.dtype), dtypes)
    if len(prints) in (0, len(heard)):
        return brought, loss.dtype
    first = min(prints)
    if prints[first] != fingerprint(()):
        note, errors = attempt(lambda: _layout(aux) if axis.rank in prints else b"")
        note = exchange(axis, note or b"")[first]
        if not note:
            raise ValueError(
                f"a rank of {axis} holds no microbatch, and cannot be told what LossTerms.aux is like: make it "
                "of containers that can be pickled, whose classes stand at the top of a module"
            ) from (errors.pop() if errors else None)
        zeros = all_manage(axis, lambda: None if axis.rank in prints else _zeros(axis, note))
        brought = brought._replace(packed=zeros or brought.packed)
    return brought, LOSS_DTYPES[heard[first].fingerprints[1]]


def _layout(aux: Tree) -> bytes:
    """What aux is like, without its values."""
    leaves, structure = tree.flatten(aux)
    return pickle.dumps((structure, [(tuple(leaf.shape), leaf.dtype) for leaf in leaves]))


def _zeros(axis: Ranks, layout: bytes) -> Packed:
    """Zeros that are like it."""
    structure, kinds = pickle.loads(layout)
    zeros = [torch.zeros(shape, dtype=dtype, device=axis.device) for shape, dtype in kinds]
    return packed(tree.unflatten(structure, zeros))
