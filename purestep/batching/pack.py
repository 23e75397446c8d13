"""Examples of uneven length to microbatches and ranks: the cut is free, so it is chosen for speed."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from purestep import tree
from purestep.batching.cut import common_length
from purestep.tokens import IGNORE_INDEX
from purestep.types import Microbatch, Tree

Example: TypeAlias = Tree
"""A tree of tensors whose first dimension is the example's length."""

Pad: TypeAlias = Mapping[str, float] | float
"""What fills up each leaf, by the last name on its path; or one number for all."""

PAD: Mapping[str, float] = {"tokens": 0, "labels": IGNORE_INDEX}


def pack(
    examples: Sequence[Example], *, max_tokens: int, multiple_of: int = 1, pad: Pad = PAD
) -> list[Microbatch]:
    """A group of examples as microbatches of nearly equal cost, with as little padding as there can be.

    Examples are sorted by length, longest first, and cut where rows times the longest of them would exceed
    ``max_tokens``: no cut into microbatches within that budget needs fewer. The budget is then lowered as
    far as their number allows, which makes them nearly equal.

    Args:
        examples: trees of tensors whose first dimension is the length.
        max_tokens: the most that a microbatch may hold, padding included.
        multiple_of: padded lengths are rounded up to a multiple of this.
        pad: what fills up each leaf, by its name, such that padding weighs nothing: -100 for labels.

    Returns:
        Microbatches, trees of ``(rows, length, ...)``, for one ``update_step``.

    >>> examples = [{"tokens": torch.ones(n, dtype=torch.int64)} for n in (3, 1, 2, 1)]
    >>> [m["tokens"].tolist() for m in pack(examples, max_tokens=4)]
    [[[1, 1, 1]], [[1, 1]], [[1], [1]]]
    """
    lengths = [common_length(example, f"examples[{i}]") for i, example in enumerate(examples)]
    parts = packing(lengths, max_tokens=max_tokens, multiple_of=multiple_of)
    return [
        stack([examples[i] for i in part], round_up(lengths[part[0]], multiple_of), pad)
        for part in parts
    ]


def packing(lengths: Sequence[int], *, max_tokens: int, multiple_of: int = 1) -> list[list[int]]:
    """Which examples ``pack`` puts into each microbatch, by their lengths alone.

    >>> packing([3, 1, 2, 1], max_tokens=4)
    [[0], [2], [1, 3]]
    """
    if max_tokens < 1 or multiple_of < 1:
        raise ValueError(f"pack: {max_tokens=} and {multiple_of=} must be at least 1")
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    costs = [max(1, round_up(lengths[i], multiple_of)) for i in order]
    if costs and costs[0] > max_tokens:
        raise ValueError(
            f"pack: examples[{order[0]}] has {lengths[order[0]]} tokens ({costs[0]} padded to a multiple of "
            f"{multiple_of}), more than {max_tokens=}: raise the budget, or cut the example"
        )
    fewest = len(_borders(costs, max_tokens))
    low, high = (costs[0] if costs else 1), max_tokens
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_borders(costs, middle)) <= fewest else (middle + 1, high)
    starts = _borders(costs, low)
    return [order[a:b] for a, b in zip(starts, [*starts, len(order)][1:], strict=True)]


def _borders(costs: Sequence[int], budget: int) -> list[int]:
    """Where each microbatch begins, when each is filled up to the budget. Costs descend."""
    starts, start = [], 0
    while start < len(costs):
        starts.append(start)
        start += budget // costs[start]
    return starts


def round_up(length: int, multiple_of: int) -> int:
    """The next multiple."""
    return -(-length // multiple_of) * multiple_of


def stack(examples: Sequence[Example], length: int, pad: Pad) -> Microbatch:
    """Examples as the rows of one tree, filled up to ``length``."""
    _, structure = tree.flatten(examples[0])
    names = tree.paths(examples[0], "example")
    fillings = [_filling(pad, name) for name in names]
    columns = zip(*(tree.leaves_of(example) for example in examples), strict=True)
    rows = [
        _pad_rows(leaves, length, filling)
        for leaves, filling in zip(columns, fillings, strict=True)
    ]
    return tree.unflatten(structure, rows)


def _pad_rows(leaves: Sequence[Tensor], length: int, filling: float) -> Tensor:
    rows = pad_sequence(list(leaves), batch_first=True, padding_value=filling)
    missing = length - rows.shape[1]
    if missing == 0:
        return rows
    more = rows.new_full((rows.shape[0], missing, *rows.shape[2:]), filling)
    return torch.cat([rows, more], 1)


def _filling(pad: Pad, path: str) -> float:
    if not isinstance(pad, Mapping):
        return pad
    for name, value in pad.items():
        if path.endswith((f"[{name!r}]", f".{name}")):
            return value
    raise ValueError(
        f"pack: no pad value for {path}: add it to pad={dict(pad)}, such that padding weighs nothing"
    )


def balance(
    examples: Sequence[Example], ranks: int, *, cost: Callable[[Example], float] | None = None
) -> list[list[Example]]:
    """Examples to ranks, so that the slowest rank has as little as possible more than the mean.

    The costliest first, each to the rank that has least so far; then, while it helps, an example of the
    slowest rank is moved or swapped away. The same on every rank that is given the same examples.

    Args:
        examples: trees of tensors whose first dimension is the length.
        ranks: how many ranks there are.
        cost: what an example costs; None: its length. Attention is quadratic in it.

    >>> parts = balance([torch.ones(n) for n in (5, 4, 3, 3, 3)], 2)
    >>> [[len(example) for example in part] for part in parts]
    [[5, 4], [3, 3, 3]]
    """
    if ranks < 1:
        raise ValueError(f"balance: {ranks=} must be at least 1")
    costs = [
        float(common_length(example, f"examples[{i}]") if cost is None else cost(example))
        for i, example in enumerate(examples)
    ]
    return [[examples[i] for i in part] for part in balancing(costs, ranks)]


def balancing(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Which examples ``balance`` gives to each rank, by their costs alone.

    >>> balancing([5, 4, 3, 3, 3], 2)
    [[0, 1], [2, 4, 3]]
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + costs[i], rank))
        parts[rank].append(i)
    while _improve(parts, costs):
        pass
    return parts


# Within a thousandth of the mean there is nothing left to gain that a step would notice.
_GOOD_ENOUGH = 1.001


def _improve(parts: list[list[int]], costs: Sequence[float]) -> bool:
    """Moves or swaps one example of the slowest rank away, if that makes the slower of the two faster."""
    loads = [sum(costs[i] for i in part) for part in parts]
    slow = max(range(len(parts)), key=loads.__getitem__)
    if loads[slow] * len(parts) <= sum(loads) * _GOOD_ENOUGH:
        return False
    for fast in sorted(range(len(parts)), key=loads.__getitem__):
        gap = loads[slow] - loads[fast]
        theirs = sorted((costs[j], j) for j in parts[fast])
        for i in parts[slow]:
            # Giving i and taking j changes the gap by twice their difference: best is half of it.
            at = bisect_left(theirs, (costs[i] - gap / 2, -1))
            takes = [*theirs[max(0, at - 1) : at + 1], (0.0, -1)]
            best, j = min(takes, key=lambda take: abs(gap - 2 * (costs[i] - take[0])))
            if (
                max(loads[slow] - costs[i] + best, loads[fast] + costs[i] - best)
                < loads[slow] - 1e-9 * gap
            ):
                parts[slow].remove(i)
                parts[fast].append(i)
                if j >= 0:
                    parts[fast].remove(j)
                    parts[slow].append(j)
                return True
    return False


def pack_documents(
    examples: Sequence[Mapping[str, Tensor]], *, row_tokens: int, pad: Pad = PAD
) -> dict[str, Tensor]:
    """Several examples in one row, with as few rows as best fit finds: a batch for ``split`` to cut.

    Beside the examples' own leaves, ``positions`` count from 0 in every example, and ``segments`` number the
    examples of a row from 1 (0 is padding). Attend only within a segment, as ``segment_mask`` says, and
    take position embeddings by ``positions``: then every token's loss is what it is alone, and the borders
    between segments are exact. Labels must be the example's own: its last token predicts nothing of the next.

    >>> examples = [{"tokens": torch.full((n,), n)} for n in (3, 2, 1)]
    >>> packed = pack_documents(examples, row_tokens=4)
    >>> packed["tokens"].tolist(), packed["segments"].tolist(), packed["positions"].tolist()
    ([[3, 3, 3, 1], [2, 2, 0, 0]], [[1, 1, 1, 2], [1, 1, 0, 0]], [[0, 1, 2, 0], [0, 1, 0, 0]])
    """
    if not examples:
        raise ValueError("pack_documents: no examples, so no rows")
    lengths = [common_length(example, f"examples[{i}]") for i, example in enumerate(examples)]
    rows = [
        tree.map(
            lambda *parts: torch.cat(parts),
            *(
                {
                    **examples[i],
                    "positions": torch.arange(lengths[i]),
                    "segments": torch.full((lengths[i],), segment),
                }
                for segment, i in enumerate(row, start=1)
            ),
        )
        for row in document_rows(lengths, row_tokens=row_tokens)
    ]
    pads = pad if isinstance(pad, Mapping) else dict.fromkeys(examples[0], pad)
    packed: dict[str, Tensor] = stack(rows, row_tokens, {**pads, "positions": 0, "segments": 0})
    return packed


def document_rows(lengths: Sequence[int], *, row_tokens: int) -> list[list[int]]:
    """Which examples ``pack_documents`` puts into each row: the longest first, each where it fits best.

    >>> document_rows([3, 2, 1], row_tokens=4)
    [[0, 2], [1]]
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > row_tokens:
            raise ValueError(
                f"pack_documents: examples[{i}] has {lengths[i]} tokens, more than {row_tokens=}: raise "
                "it, or cut the example"
            )
        at = bisect_left(room, (lengths[i], -1))
        left, row = room.pop(at) if at < len(room) else (row_tokens, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        if left > lengths[i]:
            insort(room, (left - lengths[i], row))
    return rows


def segment_mask(segments: Tensor) -> Tensor:
    """Which position may attend to which, ``(rows, 1, length, length)``: earlier ones of its own segment.

    >>> segment_mask(torch.tensor([[1, 1, 2]])).int().tolist()
    [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    length = segments.shape[-1]
    same = segments[:, None, :, None] == segments[:, None, None, :]
    return same & torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
