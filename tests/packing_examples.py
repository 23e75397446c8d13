"""Makes examples that hold their own number, and lists all partitions of a few."""

from collections.abc import Iterator

import torch
from hypothesis import strategies as st
from torch import Tensor

SMALL_LENGTHS = st.lists(st.integers(0, 9), max_size=6)


def make_examples(lengths: list[int]) -> list[dict[str, Tensor]]:
    """Makes examples of these lengths, filled with their own number."""
    examples = []
    for number, length in enumerate(lengths):
        tokens = torch.full((length,), number)
        examples.append({"tokens": tokens, "labels": tokens.clone()})
    return examples


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Yields every partition of the items into parts that are not empty."""
    if not items:
        yield []
        return
    first = items[0]
    for parts in partitions(items[1:]):
        yield [[first], *parts]
        for i, part in enumerate(parts):
            before = parts[:i]
            after = parts[i + 1 :]
            yield [*before, [first, *part], *after]
