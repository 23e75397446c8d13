"""Examples that know their own number, their lengths, and every way to put a few into parts."""

from collections.abc import Iterator

import torch
from hypothesis import strategies as st
from torch import Tensor

SMALL = st.lists(st.integers(0, 9), max_size=6)


def examples_of(lengths: list[int]) -> list[dict[str, Tensor]]:
    """Examples that know their own number."""
    numbers = [torch.full((length,), number) for number, length in enumerate(lengths)]
    return [{"tokens": each, "labels": each.clone()} for each in numbers]


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to put these into parts."""
    if not items:
        yield []
        return
    for parts in partitions(items[1:]):
        yield [[items[0]], *parts]
        for i in range(len(parts)):
            yield [*parts[:i], [items[0], *parts[i]], *parts[i + 1 :]]
