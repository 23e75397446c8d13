"""Several examples in one row, and the mask that keeps them apart."""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from purestep import tree
from purestep.data.cut import whole_leaves
from purestep.data.pack import PAD, Pad, lengths_of, longest_first, padded
from purestep.types import Tree


def pack_documents(
    examples: Sequence[Mapping[str, Tree]],
    *,
    row_tokens: int,
    pad: Pad = PAD,
    whole: Collection[str] = (),
) -> dict[str, Tree]:
    """Packs several examples into each row, in as few rows as best fit finds: one microbatch.

    If ``k`` divides the number of rows, ``split`` cuts it into ``k`` microbatches.

    Two leaves are added. ``positions`` count from 0 in each example. ``segments`` number the
    examples of a row from 1, with 0 for padding. Attend within a segment only, by ``segment_mask``,
    and take position embeddings by ``positions``. Then each token's loss is that of its example
    alone. Make labels before packing, so that no example's last token predicts the next example.

    Examples need one structure, as in ``pack``. Those of length 0 are left out, and get no segment.
    A leaf without dimensions, or named by ``whole``, comes as
    ``(rows, most segments of a row, ...)``, padded. Segment n of a row has its leaf at
    ``[row, n - 1]``.

    >>> examples = [{"tokens": torch.full((n,), n)} for n in (3, 2, 1)]
    >>> packed = pack_documents(examples, row_tokens=4)
    >>> packed["tokens"].tolist(), packed["segments"].tolist(), packed["positions"].tolist()
    ([[3, 3, 3, 1], [2, 2, 0, 0]], [[1, 1, 1, 2], [1, 1, 0, 0]], [[0, 1, 2, 0], [0, 1, 0, 0]])
    """
    if not examples:
        raise ValueError("pack_documents: no examples, so no rows")
    examples = [tree.mappings_to_dicts(example) for example in examples]
    for i, example in enumerate(examples):
        if not isinstance(example, Mapping) or {"positions", "segments"} & {*example}:
            found = (
                [*example] if isinstance(example, Mapping) else type(example).__name__
            )
            raise ValueError(
                f"pack_documents: examples[{i}] is {found}: documents are mappings, without "
                "'positions' and 'segments', which it adds: rename them"
            )
    lengths = lengths_of(examples, whole)
    rows = document_rows(lengths, row_tokens=row_tokens)
    # Without any token there is no row, but a row of the first example shows the fields.
    kept = rows or [[0]]
    first = examples[kept[0][0]]
    leaves = {i: tree.leaves(examples[i]) for row in kept for i in row}
    most = max(map(len, kept))
    own = []
    fields = zip(tree.paths(first, "example"), whole_leaves(first, whole), strict=True)
    for at, (path, is_whole) in enumerate(fields):
        join, length = (torch.stack, most) if is_whole else (torch.cat, row_tokens)
        joined = [join([leaves[i][at] for i in row]) for row in kept]
        own.append(padded(joined, length, pad, path))

    def marked(mark: Callable[[int, int], Tensor]) -> Tensor:
        marks = [
            torch.cat([mark(n, lengths[i]) for n, i in enumerate(row, 1)])
            for row in kept
        ]
        return padded(marks, row_tokens, 0, "").to(own[0].device)

    documents: dict[str, Tree] = {
        **tree.unflatten(tree.flatten(first)[1], own),
        "positions": marked(lambda _, length: torch.arange(length)),
        "segments": marked(lambda n, length: torch.full((length,), n)),
    }
    return documents if rows else tree.map(lambda leaf: leaf[:0], documents)


def document_rows(lengths: Sequence[int], *, row_tokens: int) -> list[list[int]]:
    """The numbers of the examples in each row: the longest first, each where it fits best.

    >>> document_rows([3, 2, 1], row_tokens=4)
    [[0, 2], [1]]
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for i in longest_first(lengths):
        if lengths[i] > row_tokens:
            raise ValueError(
                f"pack_documents: examples[{i}] has {lengths[i]} tokens, more than {row_tokens=}: "
                "raise it, or cut the example"
            )
        at = bisect_left(room, (lengths[i], -1))
        if at == len(room):
            room.append((row_tokens, len(rows)))
            rows.append([])
        left, row = room.pop(at)
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
    """Makes an attention mask, ``(rows, 1, length, length)``: tokens attend within their segment.

    Args:
        segments: those of ``pack_documents``, or an ``attention_mask`` of 1 and 0. Padding attends
            to padding.
        dtype: None makes a mask of bools. A dtype makes a mask to add to scores: 0 where a position
            may attend, elsewhere the lowest number. Eager attention of Hugging Face adds its mask,
            so it needs a dtype.
        causal: False lets a token attend to later positions too, as in an encoder.
        window: how many positions a token attends to, its own and those before it
            (``sliding_window``).

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
        raise ValueError(
            f"{window=} must be at least 1, a position's own, or None for no window"
        )
    length = segments.shape[-1]
    place = torch.arange(length, device=segments.device)
    back = place[:, None] - place
    near = (back >= (0 if causal else -length)) & (back.abs() < (window or length))
    mask = (segments[:, None, :, None] == segments[:, None, None, :]) & near
    if dtype is None:
        return mask
    added = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return added.masked_fill(~mask, torch.finfo(dtype).min)
