"""Packs examples of uneven length into microbatches.

The update does not depend on how its tokens are cut into microbatches, so the cut is chosen for
speed.
"""

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
from purestep.data.examples import (
    Example,
    check_same_fields,
    is_named,
    mask_per_example_leaves,
    measure_length,
)
from purestep.types import Microbatch

Pad: TypeAlias = Mapping[str, float] | float
"""The value of padding in each leaf, by the last name on its path; or one number for all."""

DEFAULT_PAD: Mapping[str, float] = {
    "tokens": 0,
    "input_ids": 0,
    "attention_mask": 0,
    "position_ids": 0,
    "key": 0,
    "token_type_ids": 0,
    "decoder_input_ids": 0,
    "decoder_attention_mask": 0,
    "labels": IGNORE_INDEX,
}


def pack(
    examples: Sequence[Example],
    *,
    max_tokens: int,
    multiple_of: int = 1,
    pad: Pad = DEFAULT_PAD,
    per_example: Collection[str] = (),
) -> list[Microbatch]:
    """Packs examples into few microbatches, with little padding.

    Examples are sorted by length, longest first. A microbatch ends where rows times the longest row
    would exceed ``max_tokens``. No cut within this budget needs fewer microbatches. The budget is
    then lowered as far as this number allows, so the largest microbatch is as small as possible.

    Examples of length 0 hold no tokens and are left out. All others need one structure. In each
    leaf they need one dtype, and one shape except for the length.

    A leaf without a length is stacked, one for each row. It has no dimensions (a class, a reward, a
    key, an id), or ``per_example`` names it (an image). An example of length 0 with one of these
    raises ``ValueError``, since its class would be missing from the update.

    Examples that do not fit together raise ``ValueError``, and so does a ``max_tokens`` or
    ``multiple_of`` below 1. One dict in place of the list raises ``TypeError``.

    Args:
        examples: trees of tensors. The first dimension of a leaf is the length, or it has no
            dimension.
        max_tokens: the largest number of tokens in a microbatch, padding included. An example that
            is longer, once padded, raises ``ValueError``.
        multiple_of: padded lengths are multiples of this.
        pad: the padding value of each leaf, by name. Padding must weigh nothing: -100 for labels. A
            single number pads every leaf, the labels too. The default has usual names, such as
            "tokens", "input_ids" and "labels"; a mapping of yours replaces it. A leaf that has a
            length, but no value here, raises ``ValueError``, and so does a value that its dtype
            cannot hold.
        per_example: names of leaves that have dimensions, but no length. A name that no leaf has
            raises ``ValueError``.

    Returns:
        Microbatches for one ``update_step``: trees of ``(rows, length, ...)``, and of
        ``(rows, ...)`` for leaves without a length. Mappings that optree takes for leaves become
        dicts. Without tokens the list is empty.

    >>> examples = [{"tokens": torch.ones(n, dtype=torch.int64)} for n in (3, 1, 2, 1)]
    >>> [m["tokens"].tolist() for m in pack(examples, max_tokens=4)]
    [[[1, 1, 1]], [[1, 1]], [[1], [1]]]
    >>> reviews = [{"tokens": torch.ones(n), "labels": torch.tensor(n)} for n in (2, 1)]
    >>> [(m["tokens"].tolist(), m["labels"].tolist()) for m in pack(reviews, max_tokens=4)]
    [([[1.0, 1.0], [1.0, 0.0]], [2, 1])]
    """
    if isinstance(examples, Mapping):
        raise TypeError(
            "pack takes a list of examples, got one dict: ps.split cuts a batch"
        )
    examples = [tree.mappings_to_dicts(example) for example in examples]
    lengths = measure_lengths(examples, per_example)
    microbatches = []
    for indices in pack_indices(
        lengths, max_tokens=max_tokens, multiple_of=multiple_of
    ):
        rows = [examples[i] for i in indices]
        longest = lengths[indices[0]]
        padded_length = _round_up(longest, multiple_of)
        microbatches.append(stack_examples(rows, padded_length, pad, per_example))
    return microbatches


def pack_indices(
    lengths: Sequence[int], *, max_tokens: int, multiple_of: int = 1
) -> list[list[int]]:
    """Assigns examples to microbatches by their lengths alone, as ``pack`` does: returns indices.

    Of each microbatch, the longest example comes first. Its length, rounded up to a multiple of
    ``multiple_of``, times the number of rows is at most ``max_tokens``. Examples of length 0 are
    left out.

    Raises ``ValueError`` for an example longer than ``max_tokens`` once padded, and for a
    ``max_tokens`` or ``multiple_of`` below 1.

    >>> pack_indices([3, 1, 2, 0, 1], max_tokens=4)
    [[0], [2], [1, 4]]
    >>> pack_indices([], max_tokens=1)
    []
    """
    if max_tokens < 1 or multiple_of < 1:
        raise ValueError(f"pack: {max_tokens=} and {multiple_of=} must be at least 1")
    order = sort_longest_first(lengths)
    if not order:
        return []
    costs = [_round_up(lengths[i], multiple_of) for i in order]
    if costs[0] > max_tokens:
        raise ValueError(
            f"pack: examples[{order[0]}] has {lengths[order[0]]} tokens ({costs[0]} padded to a "
            f"multiple of {multiple_of}), more than {max_tokens=}: increase max_tokens, or "
            "truncate the example"
        )
    fewest = len(_find_starts(costs, max_tokens))
    # A smaller budget never needs fewer microbatches, so bisection finds the smallest one that
    # still needs no more.
    budgets = range(costs[0], max_tokens + 1)
    smallest = bisect_left(
        budgets, True, key=lambda budget: len(_find_starts(costs, budget)) <= fewest
    )
    starts = _find_starts(costs, budgets[smallest])
    return [order[start:end] for start, end in pairwise([*starts, len(order)])]


def sort_longest_first(lengths: Sequence[int]) -> list[int]:
    """Returns the indices of the examples that have tokens, the longest first.

    Examples of one length keep their order.
    """
    with_tokens = [i for i, length in enumerate(lengths) if length]
    return sorted(with_tokens, key=lambda i: -lengths[i])


def _find_starts(costs: Sequence[int], budget: int) -> list[int]:
    """Returns where each microbatch begins if each takes as many rows as fit into ``budget``.

    Each row costs as much as the first of its microbatch. ``costs`` must descend, and none may
    exceed ``budget``.
    """
    starts = []
    start = 0
    while start < len(costs):
        starts.append(start)
        start += budget // costs[start]
    return starts


def _round_up(length: int, multiple_of: int) -> int:
    """Rounds a length up to a multiple of ``multiple_of``."""
    return -(-length // multiple_of) * multiple_of


def measure_lengths(
    examples: Sequence[Example], per_example: Collection[str]
) -> list[int]:
    """Returns the length of each example, in order.

    Raises ``ValueError`` unless those with tokens have equal fields, and for an example of length 0
    with a leaf that has no length. Raises as ``mask_per_example_leaves`` and ``measure_length`` do,
    too.
    """
    lengths = []
    with_tokens = {}
    for i, example in enumerate(examples):
        name = f"examples[{i}]"
        mask = mask_per_example_leaves(example, per_example)
        length = measure_length(example, name, mask)
        lengths.append(length)
        # Empty examples are not compared: the dtype of torch.tensor([]) is float32.
        if length:
            with_tokens[name] = example
        elif any(mask):
            path = tree.paths(example, name)[mask.index(True)]
            raise ValueError(
                f"{name} has length 0, but {path} belongs to it as a whole, and would be missing "
                "from the update: leave the example out, or give it a token"
            )
    check_same_fields(with_tokens, per_example)
    return lengths


def stack_examples(
    examples: Sequence[Example],
    length: int,
    pad: Pad,
    per_example: Collection[str] = (),
) -> Microbatch:
    """Stacks examples as the rows of one tree, and pads them to ``length``.

    Leaves without dimensions, and those that ``per_example`` names, are not padded. Mappings become
    dicts. An example that is longer than ``length``, or differs from the first in more than its
    length, raises ``ValueError``. So does any other leaf without a value in ``pad``, or with one
    that its dtype cannot hold. There must be at least one example.

    >>> stack_examples([torch.tensor([1, 2]), torch.tensor([3])], length=3, pad=0)
    tensor([[1, 2, 0],
            [3, 0, 0]])
    """
    examples = [tree.mappings_to_dicts(example) for example in examples]
    by_name = {f"examples[{i}]": example for i, example in enumerate(examples)}
    check_same_fields(by_name, per_example)
    first = examples[0]
    _, spec = tree.flatten(first)
    mask = mask_per_example_leaves(first, per_example)
    paths = tree.paths(first, "example")
    rows = [tree.leaves_matching(spec, example) for example in examples]
    leaves = []
    for i, column in enumerate(zip(*rows, strict=True)):
        if mask[i]:
            leaves.append(torch.stack(column))
        else:
            leaves.append(stack_padded(column, length, pad, paths[i]))
    return tree.unflatten(spec, leaves)


def stack_padded(tensors: Sequence[Tensor], length: int, pad: Pad, path: str) -> Tensor:
    """Stacks tensors, each padded to ``length`` at the end of dimension 0.

    The padding is the value that ``pad`` has for ``path``. Raises ``ValueError`` for a longer
    tensor, and as ``_find_pad_value`` does.
    """
    first = tensors[0]
    value = _find_pad_value(pad, path, first.dtype)
    trailing = [0, 0] * (first.ndim - 1)
    rows = []
    for tensor in tensors:
        if len(tensor) > length:
            raise ValueError(
                f"{path} of length {len(tensor)} is longer than {length=}: cut it, or raise length"
            )
        padding = [*trailing, 0, length - len(tensor)]
        rows.append(functional.pad(tensor, padding, value=value))
    return torch.stack(rows)


def _find_pad_value(pad: Pad, path: str, dtype: torch.dtype) -> float:
    """Returns the padding value for a path: ``pad``, or the first value in it by a name that fits.

    A name fits by ``is_named``. Raises ``ValueError`` if there
    is none, or if the dtype cannot hold the value.
    """
    value: float
    if isinstance(pad, Mapping):
        values = [value for name, value in pad.items() if is_named(path, name)]
        if not values:
            raise ValueError(
                f"no pad value for {path}: pass pad= with a value for each leaf that has a length, "
                'also for labels, as pad={"ids": 0, "labels": -100} does'
            )
        value = values[0]
    else:
        value = pad
    stored = torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype).item()
    is_number = dtype.is_floating_point or dtype.is_complex
    if is_number and dtype.itemsize > 1:
        # Rounding is as harmless as anywhere, but not overflow to infinity.
        fits = cmath.isfinite(stored) or not cmath.isfinite(value)
    else:
        # Integers and bools would hold another value; floats of 8 bits may round far away.
        fits = stored == value
    if not fits:
        raise ValueError(
            f"{path} would be padded with {value}, which {dtype} cannot hold: convert the leaf, or "
            "choose in pad= a value that it holds and that weighs nothing"
        )
    return value
