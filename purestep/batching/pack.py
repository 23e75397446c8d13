"""Examples of uneven length to microbatches and ranks: the cut is free, so it is chosen for speed."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from purestep import tree
from purestep.batching.cut import alike, common_length, is_called, whole_leaves
from purestep.types import Microbatch, Tree
from purestep.weights import IGNORE_INDEX

Example: TypeAlias = Tree
"""A tree of tensors whose first dimension is the example's length.

Those without a dimension, and those that a call names as ``whole``, belong to the example as a whole: a class, a reward,
a key, an id, an image.
"""

Pad: TypeAlias = Mapping[str, float] | float
"""What fills up each leaf, by the last name on its path; or one number for all."""

PAD: Mapping[str, float] = {
    "tokens": 0,
    "input_ids": 0,
    "attention_mask": 0,
    "position_ids": 0,
    "token_type_ids": 0,
    "decoder_input_ids": 0,
    "decoder_attention_mask": 0,
    "labels": IGNORE_INDEX,
    "key": 0,
}


def pack(
    examples: Sequence[Example],
    *,
    max_tokens: int,
    multiple_of: int = 1,
    pad: Pad = PAD,
    whole: Collection[str] = (),
) -> list[Microbatch]:
    """A group of examples as microbatches: as few as the budget allows, with little padding.

    Examples are sorted by length, longest first, and cut where rows times the longest of them would exceed
    ``max_tokens``: no way to put them into microbatches within that budget needs fewer. The budget is then
    lowered as far as their number allows, so that the largest of them is as small as it can be.

    Examples of length 0 hold no tokens and are left out. The others must be alike: of one structure, and in
    each leaf of one dtype, and of one shape but for the length.

    What belongs to an example as a whole, a tensor without a dimension (a class, a reward, a key, an id) or one that
    ``whole`` names (an image), is stacked, one for each row. Where an example has such leaves and length 0, it is refused, for
    it may be a token: left out, its class would be missing from the update.

    Args:
        examples: trees of tensors whose first dimension is the length, or that have no dimension.
        max_tokens: the most that a microbatch may hold, padding included.
        multiple_of: padded lengths are rounded up to a multiple of this.
        pad: what fills up each leaf, by its name, such that padding weighs nothing: -100 for labels. One
            number stands for every leaf, the labels too.
        whole: names of leaves that have dimensions, but belong to their example as a whole.

    Returns:
        Microbatches, trees of ``(rows, length, ...)``, and ``(rows, ...)`` of what belongs to an example as a whole, for
        one ``update_step``.

    >>> examples = [{"tokens": torch.ones(n, dtype=torch.int64)} for n in (3, 1, 2, 1)]
    >>> [m["tokens"].tolist() for m in pack(examples, max_tokens=4)]
    [[[1, 1, 1]], [[1, 1]], [[1], [1]]]
    >>> reviews = [{"tokens": torch.ones(n), "labels": torch.tensor(n)} for n in (2, 1)]
    >>> [(m["tokens"].tolist(), m["labels"].tolist()) for m in pack(reviews, max_tokens=4)]
    [([[1.0, 1.0], [1.0, 0.0]], [2, 1])]
    """
    examples = [tree.plain(example) for example in examples]
    lengths = _lengths(examples, whole)
    parts = packing(lengths, max_tokens=max_tokens, multiple_of=multiple_of)
    return [
        stack([examples[i] for i in part], round_up(lengths[part[0]], multiple_of), pad, whole)
        for part in parts
    ]


def packing(lengths: Sequence[int], *, max_tokens: int, multiple_of: int = 1) -> list[list[int]]:
    """Which examples ``pack`` puts into each microbatch, by their lengths alone.

    >>> packing([3, 1, 2, 0, 1], max_tokens=4)
    [[0], [2], [1, 4]]
    """
    if max_tokens < 1 or multiple_of < 1:
        raise ValueError(f"pack: {max_tokens=} and {multiple_of=} must be at least 1")
    order = _longest_first(lengths)
    costs = [round_up(lengths[i], multiple_of) for i in order]
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


def _lengths(examples: Sequence[Example], whole: Collection[str]) -> list[int]:
    """How long each example is; refused where those that hold anything are not alike."""
    names = [f"examples[{i}]" for i in range(len(examples))]
    lengths = [_length(example, name, whole) for example, name in zip(examples, names, strict=True)]
    # An empty leaf says nothing: the dtype of torch.tensor([]) is float32, whatever the others are.
    full = [i for i, length in enumerate(lengths) if length]
    alike([examples[i] for i in full], [names[i] for i in full], whole)
    return lengths


def _length(example: Example, name: str, whole: Collection[str]) -> int:
    """How long it is; refused where that is 0, and it is a token all the same."""
    flags = whole_leaves(example, whole)
    length = common_length(example, name, flags)
    if length == 0 and True in flags:
        path = tree.paths(example, name)[flags.index(True)]
        leaf = tree.leaves_of(example)[flags.index(True)]
        raise ValueError(
            f"{name} has length 0, but {path}, {tree.kind(leaf)}, belongs to it as a whole, and would be "
            "missing from the update: leave the example out, or give it a token, as one that begins every "
            "example"
        )
    return length


def _longest_first(lengths: Sequence[int]) -> list[int]:
    """Those that hold anything."""
    return sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])


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


def stack(
    examples: Sequence[Example], length: int, pad: Pad, whole: Collection[str] = ()
) -> Microbatch:
    """Examples that are alike as the rows of one tree, filled up to ``length`` where they have one."""
    examples = [tree.plain(example) for example in examples]
    columns, structure = alike(examples, [f"examples[{i}]" for i in range(len(examples))], whole)
    paths, flags = tree.paths(examples[0], "example"), whole_leaves(examples[0], whole)
    rows = []
    for path, is_whole, column in zip(paths, flags, columns, strict=True):
        if is_whole:
            rows.append(torch.stack(column))
            continue
        filling = _filling(pad, path)
        _check_held(filling, path, column[0].dtype)
        rows.append(_pad_rows(column, length, filling))
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
        if is_called(path, name):
            return value
    raise ValueError(
        f"no pad value for {path}: add it to pad={dict(pad)}, such that padding weighs nothing"
    )


def _check_held(filling: float, path: str, dtype: torch.dtype) -> None:
    """Refuses a filling that would turn into a different value, which might weigh something."""
    if dtype == torch.bool:
        held = filling in (0, 1)
    elif dtype.is_floating_point or dtype.is_complex:
        held = not math.isfinite(filling) or abs(filling) <= torch.finfo(dtype).max
        if dtype.itemsize == 1:
            held = torch.tensor(filling).to(dtype).double().item() == filling
    else:
        limits = torch.iinfo(dtype)
        # It travels as a float64.
        held = limits.min <= filling <= limits.max and filling == int(float(filling))
    if not held:
        raise ValueError(
            f"{path} would be padded with {filling}, which {dtype} cannot hold: convert the leaf, or choose in "
            "pad= a value that it can hold and that weighs nothing"
        )


def balance(
    examples: Sequence[Example],
    ranks: int,
    *,
    cost: Callable[[Example], float] | None = None,
    whole: Collection[str] = (),
) -> list[list[Example]]:
    """Examples to ranks, so that the slowest rank has little more than the mean.

    The costliest first, each to the rank that has least so far. Then examples of the slowest rank are moved or
    swapped away, until it is within a thousandth of the mean, or no exchange helps, or many were tried. The
    slowest rank then has at most 4/3 of what the best assignment would give its slowest, and less than one
    example more than the mean. The same on every rank that is given the same examples.

    Args:
        examples: trees of tensors whose first dimension is the length, or that have no dimension.
        ranks: how many ranks there are.
        cost: what an example costs, at least 0; None: its length. Attention is quadratic in it.
        whole: as in ``pack``.

    Returns:
        The examples of each rank, in the order in which they came.

    >>> parts = balance([torch.ones(n) for n in (5, 4, 3, 3, 3)], 2)
    >>> [[len(example) for example in part] for part in parts]
    [[5, 4], [3, 3, 3]]
    """

    def length(i: int, example: Example) -> int:
        example = tree.plain(example)
        return common_length(example, f"examples[{i}]", whole_leaves(example, whole))

    costs = [
        float(length(i, example) if cost is None else cost(example))
        for i, example in enumerate(examples)
    ]
    return [[examples[i] for i in part] for part in balancing(costs, ranks)]


def balancing(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Which examples ``balance`` gives to each rank, by their costs alone.

    >>> balancing([5, 4, 3, 3, 3], 2)
    [[0, 1], [2, 3, 4]]
    """
    if ranks < 1:
        raise ValueError(f"balance: {ranks=} must be at least 1")
    for i, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise ValueError(
                f"balance: examples[{i}] costs {cost}; a cost is finite and at least 0"
            )
    parts = _greedy(costs, ranks)
    _improve(parts, _GOOD_ENOUGH * sum(costs) / ranks)
    return [sorted(i for _, i in part) for part in parts]


_Item: TypeAlias = tuple[float, int]
"""A cost, and the number of the example that has it, or of the rank."""


def _greedy(costs: Sequence[float], ranks: int) -> list[list[_Item]]:
    """The costliest first, each to the rank that has least so far; each rank's sorted by cost."""
    loads = [(0.0, rank) for rank in range(ranks)]
    parts: list[list[_Item]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + costs[i], rank))
        parts[rank].append((costs[i], i))
    return [sorted(part) for part in parts]


# Within a thousandth of the mean there is nothing left to gain that a step would notice; and the tries are
# bounded so that they take less than a second however many ranks there are.
_GOOD_ENOUGH = 1.001
_TRIES = 250_000


def _improve(parts: list[list[_Item]], enough: float) -> None:
    """Exchanges examples of the slowest rank with a faster one's, while that makes the slower of the two faster."""
    loads = sorted((sum(cost for cost, _ in part), rank) for rank, part in enumerate(parts))
    tries = _TRIES
    while loads[-1][0] > enough and tries > 0:
        slow_load, slow = loads[-1]
        for fast_load, fast in islice(loads, len(loads) - 1):
            tries -= len(parts[slow])
            exchange = _exchange(parts[slow], parts[fast], slow_load - fast_load)
            if exchange or tries <= 0:
                break
        if not exchange:
            break
        give, take = exchange
        parts[slow].remove(give)
        insort(parts[fast], give)
        if take is not None:
            parts[fast].remove(take)
            insort(parts[slow], take)
        del loads[-1], loads[bisect_left(loads, (fast_load, fast))]
        for rank in (slow, fast):
            insort(loads, (sum(cost for cost, _ in parts[rank]), rank))


def _exchange(
    slow: list[_Item], fast: list[_Item], gap: float
) -> tuple[_Item, _Item | None] | None:
    """What to give away, and what to take for it, so that the two come closest; None where nothing brings them closer."""
    least, best = gap * (1 - 1e-9), None
    for give in slow:
        # To give one and take another changes the gap by twice their difference: best is half of the gap.
        at = bisect_left(fast, (give[0] - gap / 2, -1))
        for take in (*fast[max(0, at - 1) : at + 1], None):
            left = abs(gap - 2 * (give[0] - (take[0] if take else 0)))
            if left < least:
                least, best = left, (give, take)
    return best


def pack_documents(
    examples: Sequence[Mapping[str, Tree]],
    *,
    row_tokens: int,
    pad: Pad = PAD,
    whole: Collection[str] = (),
) -> dict[str, Tree]:
    """Several examples in one row, in as few rows as best fit finds: one microbatch.

    Where ``k`` divides the number of rows, ``split`` cuts it into ``k``.

    Beside the examples' own leaves, ``positions`` count from 0 in every example, and ``segments`` number the
    examples of a row from 1 (0 is padding). Attend only within a segment, as ``segment_mask`` says, and
    take position embeddings by ``positions``: then every token's loss is what it is alone, and the borders
    between segments are exact. Labels must be the example's own: its last token predicts nothing of the next.

    Examples are alike as in ``pack``; those of length 0 are left out, and have no segment. What belongs to an
    example as a whole, being without a dimension or named by ``whole``, comes as ``(rows, most segments of a row, ...)``: that
    of segment n at ``[row, n - 1]``, filled up by ``pad``.

    >>> examples = [{"tokens": torch.full((n,), n)} for n in (3, 2, 1)]
    >>> packed = pack_documents(examples, row_tokens=4)
    >>> packed["tokens"].tolist(), packed["segments"].tolist(), packed["positions"].tolist()
    ([[3, 3, 3, 1], [2, 2, 0, 0]], [[1, 1, 1, 2], [1, 1, 0, 0]], [[0, 1, 2, 0], [0, 1, 0, 0]])
    """
    if not examples:
        raise ValueError("pack_documents: no examples, so no rows")
    examples = [tree.plain(example) for example in examples]
    for i, example in enumerate(examples):
        _check_document(example, f"examples[{i}]")
    lengths = _lengths(examples, whole)
    flags = whole_leaves(examples[0], whole)
    device = tree.leaves_of(examples[0])[0].device
    rows = document_rows(lengths, row_tokens=row_tokens)

    def filled(of: Callable[[int, int], Tensor]) -> Tensor:
        joined = [torch.cat([of(i, n) for n, i in enumerate(row, start=1)]) for row in kept]
        return _pad_rows(joined, row_tokens, 0)

    # Examples without tokens make no row, but a row of theirs shows its fields.
    kept = rows or [[0]]
    most = max(map(len, kept))
    joined = [_joined([examples[i] for i in row], flags) for row in kept]
    leaves, structure = tree.flatten(stack(joined, row_tokens, pad))
    leaves = [leaf[:, :most] if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]
    stacked: dict[str, Tree] = tree.unflatten(structure, leaves)
    packed = {
        **stacked,
        "positions": filled(lambda i, n: torch.arange(lengths[i], device=device)),
        "segments": filled(lambda i, n: torch.full((lengths[i],), n, device=device)),
    }
    documents: dict[str, Tree] = tree.map(lambda leaf: leaf[: len(rows)], packed)
    return documents


def _joined(parts: Sequence[Example], whole: Sequence[bool]) -> Example:
    """The examples of one row, each leaf one after the other."""
    columns = zip(*map(tree.leaves_of, parts), strict=True)
    leaves = [
        torch.stack(column) if is_whole else torch.cat(column)
        for column, is_whole in zip(columns, whole, strict=True)
    ]
    return tree.unflatten(tree.flatten(parts[0])[1], leaves)


def _check_document(example: Any, name: str) -> None:
    if not isinstance(example, Mapping):
        raise TypeError(
            f"pack_documents: {name} is {type(example).__name__}: documents are mappings by name, beside whose "
            "leaves positions and segments are put"
        )
    for key in ("positions", "segments"):
        if key in example:
            raise ValueError(
                f"pack_documents puts {key!r} into what it returns, but {name} has {key!r} of its own: rename "
                "it, or leave it out"
            )


def document_rows(lengths: Sequence[int], *, row_tokens: int) -> list[list[int]]:
    """Which examples ``pack_documents`` puts into each row: the longest first, each where it fits best.

    >>> document_rows([3, 2, 1], row_tokens=4)
    [[0, 2], [1]]
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for i in _longest_first(lengths):
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


def segment_mask(
    segments: Tensor,
    dtype: torch.dtype | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """Which position may attend to which, ``(rows, 1, length, length)``: earlier ones of its own segment.

    Args:
        segments: those of ``pack_documents``, or an ``attention_mask`` of 1 and 0: padding attends to padding.
        dtype: for a mask to be added to scores, 0 where a position may attend and the lowest number elsewhere. Attention
            that adds its mask, as that of Hugging Face does under ``attn_implementation="eager"``, would take True for 1.
        causal: False: later ones, too, as an encoder attends.
        window: only the last so many positions, its own included (``sliding_window`` of Hugging Face).

    >>> segment_mask(torch.tensor([[1, 1, 2]])).int().tolist()
    [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    >>> segment_mask(torch.tensor([[1, 2]]), torch.float16).tolist()
    [[[[0.0, -65504.0], [-65504.0, 0.0]]]]
    >>> segment_mask(torch.tensor([[1, 1, 1]]), window=2).int().tolist()
    [[[[1, 0, 0], [1, 1, 0], [0, 1, 1]]]]
    """
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(
            f"{dtype=} must be the floating point dtype of the scores, or None for a mask of bools"
        )
    if window is not None and window < 1:
        raise ValueError(f"{window=} must be at least 1, a position's own, or None for no window")
    place = torch.arange(segments.shape[-1], device=segments.device)
    back = place[:, None] - place
    mask = segments[:, None, :, None] == segments[:, None, None, :]
    if causal:
        mask = mask & (back >= 0)
    if window is not None:
        mask = mask & (back.abs() < window)
    if dtype is None:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(
        ~mask, torch.finfo(dtype).min
    )
