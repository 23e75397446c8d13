"""How rows can be written: cuts into microbatches, shares of ranks, and weights."""

import itertools
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

from hypothesis import strategies as st
from torch import Tensor

Cut: TypeAlias = list[list[int]]
"""Which rows each microbatch holds, in order."""

T = TypeVar("T")


@st.composite
def cuts(draw: st.DrawFn, rows: int, most: int = 5, *, empty: bool = True) -> Cut:
    """Any cut of so many rows into microbatches, in order: uneven, with empty ones if ``empty``.

    >>> from hypothesis import find
    >>> find(cuts(3), lambda cut: len(cut) == 2 and len(cut[0]) == 2)
    [[0, 1], [2]]
    """
    if empty:
        bounds = draw(st.lists(st.integers(0, rows), max_size=most - 1))
    else:
        ends = draw(st.lists(st.booleans(), min_size=rows - 1, max_size=rows - 1))
        # From the last row on, so that leaving out a row before leaves the cut as it is.
        bounds = [rows - 1 - row for row, end in enumerate(ends) if end][: most - 1]
    return [list(range(a, b)) for a, b in itertools.pairwise([0, *sorted(bounds), rows])]


@st.composite
def ranks(draw: st.DrawFn, cut: Sequence[T], most: int = 4) -> list[list[T]]:
    """Any way to share the microbatches of a cut over ranks; some may hold none.

    >>> from hypothesis import find
    >>> find(ranks([[0], [1], [2]]), lambda shares: len(shares) == 2 and len(shares[1]) == 2)
    [[[0]], [[1], [2]]]
    """
    size = draw(st.integers(1, most))
    owners = draw(st.lists(st.integers(0, size - 1), min_size=len(cut), max_size=len(cut)))
    return [
        [part for part, owner in zip(cut, owners, strict=True) if owner == rank]
        for rank in range(size)
    ]


@st.composite
def weights(draw: st.DrawFn, rows: int, length: int, *, mask: bool) -> list[list[int]]:
    """A weight for each token, many of them 0, whose sum is a power of two: dividing never rounds.

    >>> from hypothesis import find
    >>> find(weights(1, 3, mask=True), lambda drawn: drawn[0][0] > 0 and drawn[0][2] > 0)
    [[1, 0, 1]]
    """
    number = st.sampled_from([0, 1] if mask else [0, 0, 1, 1, 2, 3])
    flat = draw(st.lists(number, min_size=rows * length, max_size=rows * length))
    if not any(flat):
        flat[draw(st.integers(0, len(flat) - 1))] = 1
    total = sum(flat)
    below = 1 << (total.bit_length() - 1)
    if mask:
        for place in [at for at, weight in enumerate(flat) if weight][below:]:
            flat[place] = 0
    elif total > below:
        flat[draw(st.integers(0, len(flat) - 1))] += 2 * below - total
    return [flat[start : start + length] for start in range(0, len(flat), length)]


def taken(batch: dict[str, Tensor], rows: Sequence[int]) -> dict[str, Tensor]:
    """These rows of it."""
    return {key: value[list(rows)] for key, value in batch.items()}
