"""The sum over ranks of what their microbatches gave: gradients in buckets, and a row for the rest."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from purestep import tree
from purestep.agreement import (
    WIDTH,
    Agreement,
    Said,
    attempt,
    check_shared,
    fail,
    fingerprint,
    hear,
    row,
    says,
    tell,
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


class Compute(Protocol):
    """One rank's ``accumulate``, with its ``out`` and ``ready``: gradients, loss, and ``(Count, aux)``."""

    def __call__(
        self, *, out: Sequence[Tensor] | None, ready: Callable[[int], None] | None
    ) -> tuple[Tree, Tensor, Tree]: ...


def reduce(
    axis: Axis,
    agreement: Agreement,
    compute: Compute,
    params: Params = (),
    accum_dtype: torch.dtype | None = None,
) -> Sums:
    """What ``compute`` gives, summed over all ranks. Its gradients are like ``params``, in ``accum_dtype``.

    Ranks of one program, and programs under a transform, take the ``psum`` of what ``compute`` returns.
    Elsewhere it writes into buckets that travel while its backward pass still runs, and the rest follows
    in the last of them. Ranks without microbatches take part with zeros. One that fails in ``compute``
    says so there, and the step ends with its message on every rank; on a device, where hearing would
    wait, it raises alone, and its launcher ends the others.
    """
    if isinstance(axis, Ranks) and tree.eager(params, agreement.counted):
        return _reduce_in_buckets(axis, agreement, compute, params, accum_dtype)

    held = [rank.microbatches > 0 for rank in agreement.confirm()]
    if isinstance(axis, Ranks) and torch.compiler.is_dynamo_compiling():
        held = [agreement.microbatches > 0, True]  # nobody has heard of the others
    if any(held) and not all(held):
        raise ValueError(
            f"a rank of {axis} holds no microbatch, and under a transform or a compiler it cannot be told "
            "what the others' losses return: give it a microbatch whose weights are zero"
        )
    grads, loss, carried = psum(compute(out=None, ready=None), axis)
    return Sums(grads, loss, *(carried or _nothing(agreement)))


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
    grads, loss, carried = computed or ((), torch.zeros(()), ())
    counted, aux = carried or _nothing(agreement)

    said = says(
        error, agreement.microbatches, counted, fingerprint(aux), LOSS_DTYPES.index(loss.dtype)
    )
    rows, lost = attempt(
        lambda: buckets.finish(row(axis, said, counted, loss), FAREWELL if error else None)
    )
    if rows is None:
        raise error or lost or AssertionError

    heard = agreement.confirm()
    if axis.on_host or not all(rank.microbatches for rank in heard):
        heard = hear(rows.tolist())
        if any(rank.failed for rank in heard):
            fail(axis, heard, error)
        loss, aux = _like_the_others(axis, heard, loss, aux)
    return Sums(
        grads,
        total_loss(rows).to(loss.dtype),
        total_count(rows, said, heard if axis.on_host else None),
        psum(aux, axis),
    )


def _nothing(agreement: Agreement) -> tuple[Count, Tree]:
    """What a group without microbatches carries."""
    return no_count(agreement.counted.num_tokens.device), ()


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
        notes = tell(axis, pickle.dumps(layout) if axis.rank in prints else b"")
        if axis.rank not in prints:
            structure, kinds = pickle.loads(notes[first])
            zeros = [torch.zeros(shape, dtype=dtype, device=axis.device) for shape, dtype in kinds]
            aux = tree.unflatten(structure, zeros)
    return loss, aux
