"""Examples of uneven length to microbatches: the cut is free, so it is chosen for speed."""

import cmath
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from purestep import tree
from purestep.counts import IGNORE_INDEX
from purestep.data.cut import check_alike, common_length, is_called, whole_leaves
from purestep.types import Microbatch, Tree

# A tree of tensors whose first dimension is the example's length. Leaves without a dimension, and
# those that ``whole=`` names, belong to the example as a whole: a class, a key, an id, an image.
Example: TypeAlias = Tree

# The value of padding in each leaf, by the last name on its path; or one number for all.
Pad: TypeAlias = Mapping[str, float] | float

PAD: Mapping[str, float] = {
    **dict.fromkeys(
        ["tokens", "input_ids", "attention_mask", "position_ids", "key"], 0
    ),
    **dict.fromkeys(
        ["token_type_ids", "decoder_input_ids", "decoder_attention_mask"], 0
    ),
    "labels": IGNORE_INDEX,
}


def pack(
    examples: Sequence[Example],
    *,
    max_tokens: int,
    multiple_of: int = 1,
    pad: Pad = PAD,
    whole: Collection[str] = (),
) -> list[Microbatch]:
    """Packs examples into few microbatches, with little padding.

    Examples are sorted by length, longest first. A microbatch ends where rows times the longest row
    would exceed ``max_tokens``. No cut within this budget needs fewer microbatches. The budget is
    then lowered as far as this number allows, so the largest microbatch is as small as possible.

    Examples of length 0 hold no tokens and are left out. All others need one structure. In each
    leaf they need one dtype, and one shape except for the length.

    A leaf without a length is stacked, one for each row. It has no dimensions (a class, a reward, a
    key, an id), or ``whole`` names it (an image). An example of length 0 with such a leaf is
    refused, since its class would be missing from the update.

    Args:
        examples: trees of tensors. The first dimension of a leaf is the length, or it has no
            dimension.
        max_tokens: the largest number of tokens in a microbatch, padding included.
        multiple_of: padded lengths are multiples of this.
        pad: the padding value of each leaf, by name. Padding must weigh nothing: -100 for labels. A
            single number pads every leaf, the labels too.
        whole: names of leaves that have dimensions, but no length.

    Returns:
        Microbatches for one ``update_step``: trees of ``(rows, length, ...)``, and of
        ``(rows, ...)`` for leaves without a length.

    >>> examples = [{"tokens": torch.ones(n, dtype=torch.int64)} for n in (3, 1, 2, 1)]
    >>> [m["tokens"].tolist() for m in pack(examples, max_tokens=4)]
    [[[1, 1, 1]], [[1, 1]], [[1], [1]]]
    >>> reviews = [{"tokens": torch.ones(n), "labels": torch.tensor(n)} for n in (2, 1)]
    >>> [(m["tokens"].tolist(), m["labels"].tolist()) for m in pack(reviews, max_tokens=4)]
    [([[1.0, 1.0], [1.0, 0.0]], [2, 1])]
    """
    examples = [tree.mappings_to_dicts(example) for example in examples]
    lengths = lengths_of(examples, whole)
    parts = packing(lengths, max_tokens=max_tokens, multiple_of=multiple_of)
    return [
        stack(
            [examples[i] for i in part],
            _round_up(lengths[part[0]], multiple_of),
            pad,
            whole,
        )
        for part in parts
    ]


def packing(
    lengths: Sequence[int], *, max_tokens: int, multiple_of: int = 1
) -> list[list[int]]:
    """The numbers of the examples in each microbatch of ``pack``, from their lengths alone.

    >>> packing([3, 1, 2, 0, 1], max_tokens=4)
    [[0], [2], [1, 4]]
    >>> packing([], max_tokens=1)
    []
    """
    if max_tokens < 1 or multiple_of < 1:
        raise ValueError(f"pack: {max_tokens=} and {multiple_of=} must be at least 1")
    order = longest_first(lengths)
    costs = [_round_up(lengths[i], multiple_of) for i in order]
    if costs and costs[0] > max_tokens:
        raise ValueError(
            f"pack: examples[{order[0]}] has {lengths[order[0]]} tokens ({costs[0]} padded to a "
            f"multiple of {multiple_of}), more than {max_tokens=}: raise it, or cut the example"
        )
    fewest = len(_starts(costs, max_tokens))
    budgets = range(costs[0] if costs else 1, max_tokens + 1)
    least = bisect_left(
        budgets, True, key=lambda budget: len(_starts(costs, budget)) <= fewest
    )
    return [
        order[a:b] for a, b in pairwise([*_starts(costs, budgets[least]), len(order)])
    ]


def longest_first(lengths: Sequence[int]) -> list[int]:
    """The numbers of the examples that hold any token."""
    return sorted(
        (i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i]
    )


def _starts(costs: Sequence[int], budget: int) -> list[int]:
    """Where each microbatch begins, when each is filled up to the budget. Costs descend."""
    starts, start = [], 0
    while start < len(costs):
        starts.append(start)
        start += budget // costs[start]
    return starts


def _round_up(length: int, multiple_of: int) -> int:
    return -(-length // multiple_of) * multiple_of


def lengths_of(examples: Sequence[Example], whole: Collection[str]) -> list[int]:
    """The length of each example. Examples that hold tokens and are not alike are refused."""
    full, lengths = {}, []
    for i, example in enumerate(examples):
        name, flags = f"examples[{i}]", whole_leaves(example, whole)
        lengths.append(common_length(example, name, flags))
        # An empty leaf may have any dtype: that of torch.tensor([]) is float32.
        if lengths[i]:
            full[name] = example
        elif True in flags:
            raise ValueError(
                f"{name} has length 0, but {tree.paths(example, name)[flags.index(True)]} belongs "
                "to it as a whole, and would be missing from the update: leave the example out, or "
                "give it a token"
            )
    check_alike(full, whole)
    return lengths


def stack(
    examples: Sequence[Example], length: int, pad: Pad, whole: Collection[str] = ()
) -> Microbatch:
    """Examples that are alike as the rows of one tree, padded to ``length`` where they have one.

    >>> stack([torch.tensor([1, 2]), torch.tensor([3])], length=3, pad=0)
    tensor([[1, 2, 0],
            [3, 0, 0]])
    """
    examples = [tree.mappings_to_dicts(example) for example in examples]
    check_alike(
        {f"examples[{i}]": example for i, example in enumerate(examples)}, whole
    )
    structure = tree.flatten(examples[0])[1]
    columns = [tree.leaves_matching(structure, example) for example in examples]
    paths, flags = tree.paths(examples[0], "example"), whole_leaves(examples[0], whole)
    rows = [
        torch.stack(column) if is_whole else padded(column, length, pad, path)
        for path, is_whole, column in zip(
            paths, flags, zip(*columns, strict=True), strict=True
        )
    ]
    return tree.unflatten(structure, rows)


def padded(leaves: Sequence[Tensor], length: int, pad: Pad, path: str) -> Tensor:
    """The leaves of one path as rows of one length."""
    filling = _filling(pad, path, leaves[0].dtype)
    trailing = [0, 0] * (leaves[0].ndim - 1)
    rows = [
        functional.pad(x, [*trailing, 0, length - len(x)], value=filling)
        for x in leaves
    ]
    return torch.stack(rows)


def _filling(pad: Pad, path: str, dtype: torch.dtype) -> float:
    """The value of padding at this path, refused where its leaf would hold another value."""
    if isinstance(pad, Mapping):
        values = [value for name, value in pad.items() if is_called(path, name)]
        if not values:
            raise ValueError(f"no pad value for {path}: add it to pad={dict(pad)}")
        pad = values[0]
    held = torch.tensor(pad, dtype=torch.float64).to(dtype).item()
    rounds = (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1
    if not (cmath.isfinite(held) or not cmath.isfinite(pad) if rounds else held == pad):
        raise ValueError(
            f"{path} would be padded with {pad}, which {dtype} cannot hold: convert the leaf, or "
            "choose in pad= a value that it holds and that weighs nothing"
        )
    return pad
