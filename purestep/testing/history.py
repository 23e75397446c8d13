"""Draws the updates that come before the one a law is about."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from purestep.testing.draws import Draw
from purestep.testing.problem import Batch
from purestep.testing.trainer import Capabilities, Group
from purestep.testing.writing import (
    Layout,
    Part,
    draw_padding,
    lay_out_group,
    microbatches,
)

TOKENS = [
    ((1, 0), 1),
    ((0, 1), 1),
    ((-1, 0), 1),
    ((0, 2), -1),
    ((2, 0), 2),
    ((0, -1), 2),
]
"""x and y of single tokens. One feature at most is not zero, so that a prediction rounds once."""


class History(NamedTuple):
    """Holds the same earlier updates, as each of the two runs of a case makes them."""

    first: list[Group]
    second: list[Group]


def draw_batch(draw: Draw, capabilities: Capabilities, **limits: Any) -> Batch:
    """Draws the batch of a single microbatch; ``limits`` are keywords of ``microbatches``."""
    parts = [draw]
    batch, _ = microbatches(draw, capabilities, parts, **limits)
    return batch


def draw_updates(
    draw: Draw,
    capabilities: Capabilities,
    numbers: range,
    size: int = 1,
    *,
    keyed: bool = False,
) -> list[Group]:
    """Draws small updates on ``size`` ranks, as many as the draw chooses from ``numbers``.

    For a task with a model, their number is the first of ``numbers``. In each update all ranks have
    one microbatch, or all have two. With ``keyed``, batches have a "key" for each row.
    """
    if capabilities.task.model is not None:  # No polynomial: as few as possible.
        numbers = numbers[:1]
    limits = {"most_rows": 2, "most_length": 3, "keyed": keyed}
    updates: list[Group] = []
    for update_draw in draw.many(numbers):
        count = update_draw.one([1, 2])
        group = []
        for _ in range(size):
            share = []
            for _ in range(count):
                share.append(draw_batch(update_draw, capabilities, **limits))
            group.append(share)
        updates.append(group)
    return updates


def draw_joined_updates(
    draw: Draw,
    capabilities: Capabilities,
    size: int,
    *,
    by_rows: bool,
    is_uneven: bool,
    keyed: bool,
) -> History:
    """Draws up to five updates, on ``size`` ranks in the second run and on one rank in the first.

    Both runs count the same tokens. With ``keyed``, batches have a "key" for each row.

    If ``capabilities.is_bounded``, an update of one microbatch gets a copy of it. With ``by_rows``,
    the first run has both as rows of one microbatch. With ``is_uneven``, the second run on one rank
    cuts the microbatches of other updates into rows. It leaves those whole that have a row without
    weight. A task with a model gets no updates.

    Otherwise rounding in several updates has no bound, and gradients must have the same bits in
    both runs. So ``_draw_copies`` draws all updates. The microbatches of one are copies of one
    token or row, as many as a power of two.
    """
    if not capabilities.is_bounded:
        return _draw_copies(
            draw,
            capabilities,
            size,
            by_rows=by_rows,
            is_uneven=is_uneven,
            keyed=keyed,
        )
    first: list[Group] = []
    second = draw_updates(draw, capabilities, range(6), size, keyed=keyed)
    for number, group in enumerate(second):
        batches = [batch for share in group for batch in share]
        if len(batches) == 1:
            # Equal microbatches have equally many tokens: a mean of means is no mistake here.
            batches = batches * 2
            second[number] = [batches]
            first.append(_join_copies(batches, by_rows=by_rows))
            continue
        first.append([batches])
        if is_uneven and size == 1:
            second[number] = [_cut_into_rows(batches, capabilities)]
    return History(first, second)


def draw_padded_updates(draw: Draw, capabilities: Capabilities, size: int) -> History:
    """Draws up to five updates on ``size`` ranks, which the second run makes with padding added.

    Where rounding in several updates has no bound, they are those of the second run of
    ``_draw_copies``, before padding.
    """
    if capabilities.is_bounded:
        updates = draw_updates(draw, capabilities, range(6), size)
    else:
        updates = _draw_copies(
            draw, capabilities, size, by_rows=False, is_uneven=False, keyed=False
        ).second
    padded: list[Group] = []
    for group in updates:
        shares = []
        for share in group:
            shares.append([_pad_batch(draw, capabilities, batch) for batch in share])
        padded.append(shares)
    return History(updates, padded)


def _pad_batch(draw: Draw, capabilities: Capabilities, batch: Batch) -> Batch:
    """Returns a batch with rows, columns or both of weight 0 drawn into it."""
    task = capabilities.task
    num_rows, length = task.weights(batch).shape
    layout: Layout = [[Part(range(num_rows))]]
    layout = draw_padding(draw, layout, length, inside=not task.vocabulary, added=False)
    ((padded,),) = lay_out_group(batch, task, layout)
    return padded


def _cut_into_rows(batches: Sequence[Batch], capabilities: Capabilities) -> list[Batch]:
    """Cuts each batch into batches of one row, unless one of its rows has no weight.

    >>> from purestep.testing.trainer import Capabilities
    >>> batch = {"x": torch.ones(2, 1, 2), "y": torch.ones(2, 1), "w": torch.tensor([[1], [2]])}
    >>> [row["w"].tolist() for row in _cut_into_rows([batch], Capabilities())]
    [[[1]], [[2]]]
    """
    cut = []
    for batch in batches:
        weights = capabilities.task.weights(batch)
        if not weights.flatten(1).sum(1).all():
            cut.append(batch)
            continue
        for row in range(len(weights)):
            cut.append({key: x[row : row + 1] for key, x in batch.items()})
    return cut


def _draw_copies(
    draw: Draw,
    capabilities: Capabilities,
    size: int,
    *,
    by_rows: bool,
    is_uneven: bool,
    keyed: bool,
) -> History:
    """Draws up to five updates of two runs, whose microbatches are copies of one token.

    The first run has all copies on one rank: with ``by_rows`` as rows of one microbatch, else as
    microbatches. The second run has them as microbatches, as many on each of ``size`` ranks. With
    ``is_uneven`` and a ``size`` of 1, the last two of four copies are rows of one microbatch there.
    With ``keyed``, copies have a "key".

    The number of copies is a power of two, so there are no updates unless ``size`` is such a power.

    For a task with a model, they are copies of one row, in one update at most. As rows of one
    microbatch, these would have other bits than as microbatches, so ``by_rows`` is ignored. With a
    ``size`` of 1, both runs would be the same, so there are no updates.
    """
    first: list[Group] = []
    second: list[Group] = []
    has_model = capabilities.task.model is not None
    is_power_of_two = size & (size - 1) == 0
    if not is_power_of_two or (has_model and size == 1):
        return History(first, second)
    counts = [2, 4] if size == 1 else [1, 2]
    numbers = range(2) if has_model else range(6)
    for update_draw in draw.many(numbers):
        if has_model:
            token = draw_batch(
                update_draw, capabilities, most_rows=1, most_length=2, keyed=keyed
            )
        else:
            token = _draw_token(update_draw, capabilities, keyed=keyed)
        share = [token] * update_draw.one(counts)
        first.append(_join_copies(share * size, by_rows=by_rows and not has_model))
        if is_uneven and len(share) == 4:
            # Sums of copies round nowhere in this order: one, two, four.
            ((pair,),) = _join_copies(share[2:], by_rows=True)
            share = [*share[:2], pair]
        second.append([share] * size)
    return History(first, second)


def _draw_token(draw: Draw, capabilities: Capabilities, *, keyed: bool) -> Batch:
    """Draws a batch of one token, whose weight is 1; with ``keyed``, its "key" is 0."""
    x, y = draw.one(TOKENS)
    weight_dtypes = {"mask": torch.bool, "whole": torch.int64}
    token = {
        "x": torch.tensor([[x]], dtype=capabilities.dtype),
        "y": torch.tensor([[y]], dtype=capabilities.dtype),
        "w": torch.ones(
            1, 1, dtype=weight_dtypes.get(capabilities.weights, capabilities.dtype)
        ),
    }
    if keyed:
        token["key"] = torch.zeros(1, dtype=torch.int64)
    return token


def _join_copies(batches: Sequence[Batch], *, by_rows: bool) -> Group:
    """Puts equal microbatches on one rank: as they are, or with ``by_rows`` as rows of one."""
    if not by_rows:
        return [[*batches]]
    rows = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    return [[rows]]
