"""The sum over ranks of what their microbatches gave: gradients in buckets, and a row for the rest."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.agreement import (
    WIDTH,
    Agreement,
    Said,
    attempt,
    check_shared,
    exchange,
    fail,
    fingerprint,
    hear,
    row,
    says,
    total_count,
    total_loss,
)
from purestep.axis import Axis, Ranks, psum
from purestep.axis.buckets import Buckets
from purestep.grads import sum_dtypes
from purestep.tokens import Count, no_count
from purestep.types import Params, Tree

LOSS_DTYPES = [torch.float32, torch.float64]
"""Those in which losses are summed."""

FAREWELL = 10.0
"""Seconds for which a rank that has failed waits for the others, to tell them why."""


class Sums(NamedTuple):
    """What the tokens of a group gave, on one rank or on all."""

    grads: Tree
    loss: Tensor
    counted: Count
    aux: Tree


Computed: TypeAlias = tuple[Tree, Tensor, Tree]
"""Gradients, loss, and ``(Count, aux)``, which is empty where there is no microbatch."""


class Compute(Protocol):
    """One rank's ``accumulate``, with its ``out`` and ``ready``."""

    def __call__(
        self, *, out: Sequence[Tensor] | None, ready: Callable[[int], None] | None
    ) -> Computed: ...


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
    if isinstance(axis, Ranks) and tree.eager(params, agreement.counted):
        return _reduce_in_buckets(axis, agreement, compute, params, accum_dtype)

    compiling = torch.compiler.is_dynamo_compiling()
    held = [rank.microbatches > 0 for rank in agreement.confirm()]
    if isinstance(axis, Ranks) and compiling:
        held = [agreement.microbatches > 0, True]  # nobody has heard of the others
    if any(held) and not all(held):
        raise ValueError(
            f"a rank of {axis} holds no microbatch, and under a transform or a compiler it cannot be told "
            "what the others' losses return: give it a microbatch whose weights are zero"
        )
    if isinstance(axis, Ranks) and not compiling:
        here = _computed_everywhere(axis, agreement, compute)
    else:
        here = _here(agreement, compute(out=None, ready=None))
    sums: Sums = psum(here, axis)
    return sums


def _computed_everywhere(axis: Ranks, agreement: Agreement, compute: Compute) -> Sums:
    """What ``compute`` gives, where it has given the like on every rank."""
    computed, error = attempt(lambda: compute(out=None, ready=None))
    if error is not None and not axis.on_host:
        raise error
    here = _here(agreement, computed)
    said = _says(agreement, error, here)
    rows = axis.where.meet("all_gather", row(axis, said, no_count(axis.device)))
    _hear(axis, agreement, rows, error, here)
    return here


def _reduce_in_buckets(
    axis: Ranks,
    agreement: Agreement,
    compute: Compute,
    params: Params,
    accum_dtype: torch.dtype | None,
) -> Sums:
    leaves = tree.leaves_of(params)
    buckets = Buckets(axis, leaves, sum_dtypes(leaves, accum_dtype), WIDTH)
    computed, error = attempt(lambda: compute(out=buckets.sums, ready=buckets.ready))
    if error is not None and not axis.on_host:
        raise error
    here = _here(agreement, computed)
    said = _says(agreement, error, here)
    counts = row(axis, said, here.counted, here.loss)
    rows, lost = attempt(lambda: buckets.finish(counts, FAREWELL if error else None))
    if rows is None:
        raise error or lost or AssertionError

    heard, loss, aux = _hear(axis, agreement, rows, error, here)
    return Sums(
        here.grads,
        total_loss(rows).to(loss.dtype),
        total_count(rows, said, heard if axis.on_host else None),
        psum(aux, axis),
    )


def _here(agreement: Agreement, computed: Computed | None) -> Sums:
    """What this rank gives: nothing, where it has failed."""
    grads, loss, carried = computed or ((), torch.zeros((), dtype=LOSS_DTYPES[0]), ())
    counted, aux = carried or (no_count(agreement.counted.num_tokens.device), ())
    return Sums(grads, loss, counted, aux)


def _says(agreement: Agreement, error: Exception | None, here: Sums) -> Said:
    dtype = LOSS_DTYPES.index(here.loss.dtype)
    return says(error, agreement.microbatches, here.counted, fingerprint(here.aux), dtype)


def _hear(
    axis: Ranks, agreement: Agreement, rows: Tensor, error: Exception | None, here: Sums
) -> tuple[list[Said], Tensor, Tree]:
    """What all ranks said, and the loss and aux in the form that they share. Raises where one has failed."""
    loss, aux = here.loss, here.aux
    heard = agreement.confirm()
    if axis.on_host or not all(rank.microbatches for rank in heard):
        heard = hear(rows.tolist())
        if any(rank.failed for rank in heard):
            fail(axis, heard, error)
        loss, aux = _like_the_others(axis, heard, loss, aux)
    return heard, loss, aux


def _like_the_others(
    axis: Ranks, heard: list[Said], loss: Tensor, aux: Tree
) -> tuple[Tensor, Tree]:
    """The loss and aux of a rank without microbatches, as zeros in the form that the others have."""
    prints = {rank: said.fingerprints[0] for rank, said in enumerate(heard) if said.microbatches}
    check_shared(axis, "LossTerms.aux", aux, prints)
    dtypes = {rank: heard[rank].fingerprints[1] for rank in prints}
    check_shared(axis, "the loss", str(loss.dtype), dtypes)
    if len(prints) in (0, len(heard)):
        return loss, aux
    first = min(prints)
    loss = loss.to(LOSS_DTYPES[heard[first].fingerprints[1]])
    if prints[first] != fingerprint(()):
        leaves, structure = tree.flatten(aux)
        layout = structure, [(tuple(leaf.shape), leaf.dtype) for leaf in leaves]
        note, error = attempt(lambda: pickle.dumps(layout) if axis.rank in prints else b"")
        note = exchange(axis, note or b"")[first]
        if not note:
            raise ValueError(
                f"a rank of {axis} holds no microbatch, and cannot be told what LossTerms.aux is like: make it "
                "of containers that can be pickled, whose classes stand at the top of a module"
            ) from error
        if axis.rank not in prints:
            structure, kinds = pickle.loads(note)
            zeros = [torch.zeros(shape, dtype=dtype, device=axis.device) for shape, dtype in kinds]
            aux = tree.unflatten(structure, zeros)
    return loss, aux
