"""Packs several examples into one row, and masks attention between them."""

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from purestep import tree
from purestep.data.examples import mask_per_example_leaves
from purestep.data.pack import (
    DEFAULT_PAD,
    Pad,
    measure_lengths,
    sort_longest_first,
    stack_padded,
)
from purestep.types import Tree


def pack_documents(
    examples: Sequence[Mapping[str, Tree]],
    *,
    row_tokens: int,
    pad: Pad = DEFAULT_PAD,
    per_example: Collection[str] = (),
) -> dict[str, Tree]:
    """Packs several examples into each row, in as few rows as best fit finds: one microbatch.

    If ``k`` divides the number of rows, ``split`` cuts it into ``k`` microbatches.

    Two leaves are added. ``positions`` count from 0 in each example. ``segments`` number the
    examples of a row from 1, with 0 for padding. Attend within a segment only, by ``segment_mask``,
    and take position embeddings by ``positions``. Then each token's loss is that of its example
    alone. Make labels before packing, so that no example's last token predicts the next example.

    Examples are mappings without these two names. Those that are not empty need one structure, and
    in each leaf one dtype and one shape except for the length. ``pad`` gives the value of each
    leaf's padding, by name, as in ``pack``. Examples of length 0 are left out, and get no segment;
    if all are, the leaves have no rows.

    Raises ``ValueError`` without examples, and for examples that do not fit together. An example
    longer than ``row_tokens`` raises it too, and one of length 0 with a leaf that has no length. So
    does a leaf without a value in ``pad``.

    A leaf without dimensions, or named by ``per_example``, comes as
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
        _check_document(example, f"examples[{i}]")
    lengths = measure_lengths(examples, per_example)
    rows = pack_document_indices(lengths, row_tokens=row_tokens)
    if rows:
        return _join_rows(examples, lengths, rows, row_tokens, pad, per_example)
    # Without any token there is no row, but a row of the first example shows the fields.
    documents = _join_rows(examples, lengths, [[0]], row_tokens, pad, per_example)
    return {
        name: tree.map(lambda leaf: leaf[:0], field)
        for name, field in documents.items()
    }


def _check_document(example: Tree, name: str) -> None:
    """Raises ``ValueError`` unless an example is a mapping without "positions" and "segments"."""
    if not isinstance(example, Mapping):
        described: object = type(example).__name__
    elif "positions" in example or "segments" in example:
        described = [*example]
    else:
        return
    raise ValueError(
        f"pack_documents: {name} is {described}: documents are mappings, without "
        "'positions' and 'segments', which it adds: rename them"
    )


def _join_rows(
    examples: Sequence[Mapping[str, Tree]],
    lengths: Sequence[int],
    rows: Sequence[Sequence[int]],
    row_tokens: int,
    pad: Pad,
    per_example: Collection[str],
) -> dict[str, Tree]:
    """Joins the examples whose indices each row lists, and stacks the padded rows.

    Returns the fields of the examples, with "positions" and "segments" added. Leaves without a
    length are stacked, and padded to the most examples of a row.
    """
    first = examples[rows[0][0]]
    _, spec = tree.flatten(first)
    mask = mask_per_example_leaves(first, per_example)
    max_segments = max(len(row) for row in rows)
    leaves = {i: tree.leaves(examples[i]) for row in rows for i in row}
    fields = []
    for field, path in enumerate(tree.paths(first, "example")):
        columns = [[leaves[i][field] for i in row] for row in rows]
        if mask[field]:
            stacked = [torch.stack(column) for column in columns]
            fields.append(stack_padded(stacked, max_segments, pad, path))
        else:
            joined = [torch.cat(column) for column in columns]
            fields.append(stack_padded(joined, row_tokens, pad, path))
    positions = []
    segments = []
    for row in rows:
        ranges = []
        numbers = []
        for number, i in enumerate(row, 1):
            ranges.append(torch.arange(lengths[i], device="cpu"))
            numbers.append(torch.full((lengths[i],), number, device="cpu"))
        positions.append(torch.cat(ranges))
        segments.append(torch.cat(numbers))
    device = fields[0].device
    return {
        **tree.unflatten(spec, fields),
        "positions": stack_padded(positions, row_tokens, 0, "").to(device),
        "segments": stack_padded(segments, row_tokens, 0, "").to(device),
    }


def pack_document_indices(
    lengths: Sequence[int], *, row_tokens: int
) -> list[list[int]]:
    """Assigns examples to rows by their lengths alone, as ``pack_documents`` does.

    The longest comes first. Each goes to the row where it leaves the fewest tokens free. Returns
    the indices of the examples in each row: none of length 0. A length above ``row_tokens`` raises
    ``ValueError``.

    >>> pack_document_indices([3, 2, 1], row_tokens=4)
    [[0, 2], [1]]
    """
    rows: list[list[int]] = []
    # The free tokens and the index of each row that is not full, in ascending order.
    free: list[tuple[int, int]] = []
    for i in sort_longest_first(lengths):
        length = lengths[i]
        if length > row_tokens:
            raise ValueError(
                f"pack_documents: examples[{i}] has {length} tokens, more than {row_tokens=}: "
                "increase row_tokens, or truncate the example"
            )
        best = bisect_left(free, (length, -1))
        if best == len(free):
            # A new row has more free tokens than all others, so the order stays.
            free.append((row_tokens, len(rows)))
            rows.append([])
        free_tokens, row = free.pop(best)
        rows[row].append(i)
        if free_tokens > length:
            insort(free, (free_tokens - length, row))
    return rows


def segment_mask(
    segments: Tensor,
    dtype: torch.dtype | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """Makes an attention mask, ``(rows, 1, length, length)``: tokens attend within their segment.

    Token i of a row may attend to token j where ``mask[row, 0, i, j]`` is True, or 0 if there is a
    ``dtype``. Raises ``TypeError`` for a ``dtype`` that is not of floating point, and
    ``ValueError`` for a ``window`` below 1.

    Args:
        segments: those of ``pack_documents``, or an ``attention_mask`` of 1 and 0:
            ``(rows, length)``. Padding attends to padding.
        dtype: None makes a mask of bools. A floating point dtype makes a mask to add to scores: 0
            where a position may attend, elsewhere the lowest number. Eager attention of Hugging
            Face adds its mask, so it needs a dtype.
        causal: False lets a token attend to later positions too, as in an encoder.
        window: how many positions a token attends to, its own and those before it
            (``sliding_window``). Without ``causal``, as many after it as before.

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
    positions = torch.arange(length, device=segments.device)
    distance = positions[:, None] - positions
    allowed = distance.abs() < (window or length)
    if causal:
        allowed = allowed & (distance >= 0)
    same_segment = segments[:, None, :, None] == segments[:, None, None, :]
    mask = same_segment & allowed
    if dtype is None:
        return mask
    scores = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return scores.masked_fill(~mask, torch.finfo(dtype).min)
