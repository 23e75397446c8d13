"""How the same data can be written: strategies of Hypothesis for cuts, ranks, order, padding.

A failing case shrinks to one that is easy to read: few rows, one microbatch, small whole numbers.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from hypothesis import strategies as st

from purestep.testing.problem import REGRESSION, Batch, Linear, Problem, Task
from purestep.testing.trainer import Abilities

Cut: TypeAlias = list[list[int]]
"""Which rows each microbatch holds, in order."""

Weights: TypeAlias = Literal["mask", "whole", "any"]
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
def ranks(
    draw: st.DrawFn, cut: Sequence[T], most: int = 4, *, uneven: bool = True
) -> list[list[T]]:
    """Any way to share the microbatches of a cut over ranks; ``uneven``: ranks may hold none.

    >>> from hypothesis import find
    >>> find(ranks([[0], [1], [2]]), lambda shares: len(shares) == 2 and len(shares[1]) == 2)
    [[[0]], [[1], [2]]]
    """
    sizes = [size for size in range(1, most + 1) if uneven or len(cut) % size == 0]
    size = draw(st.sampled_from(sizes))
    owners: Sequence[int] = [at * size // len(cut) for at in range(len(cut))]
    if uneven:
        owners = draw(st.lists(st.integers(0, size - 1), min_size=len(cut), max_size=len(cut)))
    return [
        [part for part, owner in zip(cut, owners, strict=True) if owner == rank]
        for rank in range(size)
    ]


@st.composite
def orders(draw: st.DrawFn, cut: Cut) -> Cut:
    """The microbatches in any order, and the rows of each.

    >>> from hypothesis import find
    >>> find(orders([[0, 1], [2]]), lambda cut: cut[0] == [2] and cut[1][0] == 1)
    [[2], [1, 0]]
    """
    return [draw(st.permutations(part)) for part in draw(st.permutations(cut))]


class Padding(NamedTuple):
    """What is added and counts for nothing: rows, columns, and microbatches after this one."""

    rows: int
    columns: int
    microbatches: int


@st.composite
def padding(draw: st.DrawFn, most: int = 2) -> Padding:
    """Any padding of a microbatch.

    >>> from hypothesis import find
    >>> find(padding(), lambda added: added.columns > 0)
    Padding(rows=0, columns=1, microbatches=0)
    """
    return Padding(draw(st.integers(0, most)), draw(st.integers(0, most)), draw(st.integers(0, 1)))


@st.composite
def weights(
    draw: st.DrawFn, rows: int, length: int, kind: Weights = "whole", *, exact: bool = True
) -> list[list[float]]:
    """A weight for each token, many of them 0; ``exact``: their sum is a power of two.

    Dividing by a power of two never rounds. "mask" draws 0 and 1, "whole" whole numbers, and "any"
    such numbers divided by a power of two. At least one is not 0.

    >>> from hypothesis import find
    >>> find(weights(1, 3, "mask"), lambda drawn: drawn[0][0] > 0 and drawn[0][2] > 0)
    [[1, 0, 1]]
    """
    row = st.lists(st.sampled_from(_values(kind)), min_size=length, max_size=length)
    drawn = draw(st.lists(row, min_size=rows, max_size=rows))
    return draw(_adjusted(drawn, kind, exact=exact))


def _values(kind: Weights) -> list[int]:
    return [0, 1] if kind == "mask" else [0, 0, 1, 1, 2, 3]


@st.composite
def _adjusted(
    draw: st.DrawFn, rows: list[list[int]], kind: Weights, *, exact: bool
) -> list[list[float]]:
    """The same weights, at least one of them not 0; ``exact``: their sum is a power of two."""
    length = len(rows[0])
    flat: list[float] = [weight for row in rows for weight in row]
    if not any(flat):
        flat[draw(st.integers(0, len(flat) - 1))] = 1
    total = int(sum(flat))
    if exact and kind == "mask":
        for place in [at for at, weight in enumerate(flat) if weight][_power_below(total) :]:
            flat[place] = 0
    elif exact and total > _power_below(total):
        flat[draw(st.integers(0, len(flat) - 1))] += 2 * _power_below(total) - total
    if kind == "any":
        divisor = draw(st.sampled_from([1, 4, 16]))
        flat = [weight / divisor for weight in flat]
    return [flat[start : start + length] for start in range(0, len(flat), length)]


def _power_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)


@st.composite
def exact_batches(
    draw: st.DrawFn,
    task: Task = REGRESSION,
    *,
    kind: Weights = "whole",
    exact: bool = True,
    dtype: torch.dtype = torch.float64,
    least_rows: int = 1,
    most_rows: int = 5,
    most_length: int = 3,
    keyed: bool = False,
) -> Batch:
    """Rows of small integers; ``exact``: the weights' sum is a power of two, so nothing rounds.

    >>> from hypothesis import find
    >>> int(find(exact_batches(), lambda batch: batch["w"].sum() > 2)["w"].sum())
    4
    """
    least = 2 if task.vocabulary else 1
    length = draw(st.integers(least, max(least, most_length)))

    def each(values: st.SearchStrategy[Any], size: int) -> st.SearchStrategy[list[Any]]:
        return st.lists(values, min_size=size, max_size=size)

    # Row by row, so that a failure shrinks by leaving rows out.
    if task.vocabulary:
        parts = (
            each(st.integers(0, 1), length - 1),
            each(st.integers(0, task.vocabulary - 1), length),
        )
        rows = draw(st.lists(st.tuples(*parts), min_size=least_rows, max_size=most_rows))
        mask, ids = ([*each] for each in zip(*rows, strict=True))
        counted = torch.tensor(draw(_adjusted(mask, "mask", exact=exact)), dtype=torch.bool)
        tokens = torch.tensor(ids)
        labels = torch.where(torch.nn.functional.pad(counted, (1, 0)), tokens, -100)
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    else:
        integer = st.integers(-2, 2)
        columns = (
            each(st.sampled_from(_values(kind)), length),
            each(st.tuples(integer, integer), length),
            each(integer, length),
        )
        rows = draw(st.lists(st.tuples(*columns), min_size=least_rows, max_size=most_rows))
        w, x, y = ([*each] for each in zip(*rows, strict=True))
        drawn = torch.tensor(draw(_adjusted(w, kind, exact=exact)))
        weight_dtype = {"mask": torch.bool, "whole": torch.int64, "any": dtype}[kind]
        batch = {
            "x": torch.tensor(x).to(dtype),
            "y": torch.tensor(y).to(dtype),
            "w": drawn.to(weight_dtype),
        }
    return {**batch, "key": torch.arange(len(rows))} if keyed else batch


@st.composite
def problems(draw: st.DrawFn, abilities: Abilities, *, dropout: float = 0.0) -> Problem:
    """A model of small integers, and SGD with or without momentum and weight decay."""
    rate = draw(st.sampled_from([0.25, 0.5]))
    model = abilities.task.model
    if model is not None:
        return Problem(abilities.task, model, rate)
    integer = st.integers(-2, 2)
    model = Linear([draw(integer), draw(integer)], draw(integer), abilities.dtype, dropout)
    numbers = st.sampled_from([0.0, 0.5]) if abilities.momentum else st.just(0.0)
    momentum, decay = draw(numbers), draw(numbers)
    return Problem(abilities.task, model, rate, momentum, decay)


def taken(batch: Batch, rows: Sequence[int]) -> Batch:
    """These rows of it."""
    return {key: value[list(rows)] for key, value in batch.items()}


def padded(batch: Batch, more: Padding, ignored: Mapping[str, float]) -> Batch:
    """The batch with rows and columns that count for nothing."""

    def larger(key: str, x: torch.Tensor) -> torch.Tensor:
        shape = [x.shape[0] + more.rows, *x.shape[1:]]
        if x.ndim > 1:
            shape[1] += more.columns
        out = x.new_full(shape, ignored[key])
        out[tuple(slice(size) for size in x.shape)] = x
        return out

    return {key: larger(key, value) for key, value in batch.items()}


def ignored_like(batch: Batch, ignored: Mapping[str, float]) -> Batch:
    """A batch of this shape in which nothing counts."""
    return {key: torch.full_like(value, ignored[key]) for key, value in batch.items()}


@st.composite
def padded_group(
    draw: st.DrawFn, parts: Sequence[Batch], names: Sequence[str], task: Task, *, added: bool = True
) -> tuple[list[Batch], str]:
    """These microbatches with any padding, and how, in words; ``added``: empty ones, too."""
    group, words = [], []
    for part, name in zip(parts, names, strict=True):
        more = draw(padding())
        more = more if added else more._replace(microbatches=0)
        group.append(padded(part, more, task.ignored))
        group += [ignored_like(group[-1], task.ignored)] * more.microbatches
        words.append(name + _said(more))
    return group, f"rows {' | '.join(words)}" if words else "nothing"


def _said(more: Padding) -> str:
    added = [f"{count} {what}" for what, count in more._asdict().items() if count]
    return f" (padded by {', '.join(added)})" if added else ""


@st.composite
def regrouped(
    draw: st.DrawFn,
    batch: Batch,
    task: Task = REGRESSION,
    *,
    most_ranks: int = 1,
    uneven: bool = True,
) -> tuple[list[list[Batch]], str]:
    """The rows of a batch as any group: cut, in any order, over ranks, padded; and how, in words.

    >>> from hypothesis import find
    >>> batch = {"x": torch.zeros(3, 1, 2), "y": torch.zeros(3, 1), "w": torch.ones(3, 1)}
    >>> group, how = find(regrouped(batch, most_ranks=2), lambda drawn: len(drawn[0]) == 2)
    >>> how
    'rows [0, 1, 2] on rank 0, nothing on rank 1'
    """
    inside = draw(st.permutations(range(len(next(iter(batch.values()))))))
    cut = [[inside[at] for at in part] for part in draw(cuts(len(inside), empty=False))]
    groups, words = [], []
    shares = draw(ranks(cut, most_ranks, uneven=uneven))
    for rank, share in enumerate(shares):
        parts = [taken(batch, rows) for rows in share]
        group, how = draw(padded_group(parts, [str(rows) for rows in share], task, added=uneven))
        groups.append(group)
        words.append(how + (f" on rank {rank}" if len(shares) > 1 else ""))
    return groups, ", ".join(words)
