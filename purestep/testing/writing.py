"""How the same data can be written: microbatches, ranks, order and padding, from choices."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from purestep.testing.draws import Draw
from purestep.testing.problem import Batch, Linear, Problem, Task
from purestep.testing.trainer import Abilities, Group

T = TypeVar("T")
Row: TypeAlias = list[tuple[int, Any]]
"""The weight of each token, and its number in a vocabulary, or its x and y."""

KINDS = ("equal tokens", "unequal rows", "unequal tokens", "empty ones")
"""How microbatches of one batch can differ."""

VALUES = sorted(
    itertools.product(range(-2, 3), repeat=3), key=lambda v: (sum(map(abs, v)), v)
)
"""Three small numbers, the simplest first."""
# Larger ones, which a clip of inputs or targets would change; and those that float32 rounds.
WIDE = [(2 * x, 2 * other, 8 * y) for x, other, y in VALUES]
FINE = [(x / 10, other / 10, y / 10) for x, other, y in VALUES]


class Part(NamedTuple):
    """A microbatch: rows and columns of a batch, by number. What counts for nothing has -1."""

    rows: Sequence[int]
    columns: Sequence[int] = ()

    def __str__(self) -> str:
        columns = f" with columns {[*self.columns]}" if -1 in self.columns else ""
        return f"{[*self.rows]}{columns}".replace("-1", "ignored")


Layout: TypeAlias = Sequence[Sequence[Part]]
"""The microbatches of each rank."""


def padded(
    draw: Draw, layout: Layout, length: int, *, inside: bool, added: bool
) -> Layout:
    """Padding of microbatches on ranks: rows and columns, ``inside`` or at the end alone.

    With ``added`` there are also microbatches in which nothing counts. Something is always padded.
    """

    def longer(numbers: Sequence[T], more: T, inside: bool = True) -> list[T]:
        new = list(numbers)
        for each in draw.many(range(3)):
            new.insert(
                each.one(range(len(new), -1 if inside else len(new) - 1, -1)), more
            )
        return new

    columns = [*range(length)]

    new = [
        [Part(longer(p.rows, -1), longer(columns, -1, inside)) for p in s]
        for s in layout
    ]
    new = [longer(share, Part([-1])) for share in new] if added else new
    if not any(-1 in (*part.rows, *part.columns) for share in new for part in share):
        share = next(share for share in new if share)
        share[0] = share[0]._replace(columns=[*columns, -1])
    return new


def written(batch: Batch, task: Task, layout: Layout) -> Group:
    """The microbatches of each rank."""

    def chosen(key: str, x: Tensor, dim: int, numbers: Sequence[int]) -> Tensor:
        if not numbers or dim >= x.ndim:
            return x
        at = torch.tensor(numbers)
        nothing = (at < 0).nonzero().flatten()
        return x.index_select(dim, at.clamp(min=0)).index_fill_(
            dim, nothing, task.ignored[key]
        )

    def part(rows: Sequence[int], columns: Sequence[int]) -> Batch:
        return {
            key: chosen(key, chosen(key, x, 0, rows), 1, columns)
            for key, x in batch.items()
        }

    return [[part(*each) for each in share] for share in layout]


def _total(rows: Sequence[Row]) -> int:
    return sum(weight for row in rows for weight, _ in row)


def _raise(row: Row, weights: str) -> None:
    """Adds 1 to what counts in a row."""
    place = next((place for place, (weight, _) in enumerate(row) if weight), 0)
    weight, value = row[place]
    if weight and weights == "mask":
        row.append((1, value))
    else:
        row[place] = (weight + 1, value)


def microbatches(
    draw: Draw,
    abilities: Abilities,
    parts: Sequence[Draw],
    kind: str = "",
    *,
    most_rows: int = 3,
    most_length: int = 12,
    keyed: bool = False,
) -> tuple[Batch, list[list[int]]]:
    """A batch of small numbers, and the rows of each of its microbatches, which all count.

    ``kind`` says how they differ, one of ``KINDS``; empty: in any way. Most numbers are integers;
    in half of the batches the weights' sum is a power of two, so that nothing rounds. Such numbers
    hide in which dtype a trainer computes.
    """
    task = abilities.task
    weights = "mask" if task.vocabulary else abilities.weights
    numbers = [1, 0] if weights == "mask" else draw.one([[1, 0, 2, 3], [1, 0, 3, 259]])
    # Of few values, some are alike.
    values: Any = range(task.vocabulary) or draw.one(
        [VALUES, VALUES[:7], WIDE, FINE, VALUES[:2]]
    )
    lengths = range(1, min(most_length, draw.one([2, 1, 3, 12])) + 1)

    def row(draw: Draw) -> Row:
        return [(each.one(numbers), each.one(values)) for each in draw.many(lengths)]

    groups = [
        [row(each) for each in part.many(range(1, most_rows + 1))] for part in parts
    ]
    empty = [kind == "empty ones" and part.one([False, True]) for part in parts]
    if kind == "empty ones" and len({*empty}) == 1:
        empty[-1] = not empty[-1]
    for rows, nothing in zip(groups, empty, strict=True):
        if nothing:
            rows[:] = [[(0, value) for _, value in tokens] for tokens in rows]
        elif not _total(rows):
            _raise(rows[0], weights)
    if alike := kind in ("equal tokens", "unequal rows"):
        pattern = next(tokens for tokens in groups[0] if _total([tokens]))
        for rows in groups:
            number = len(groups[0]) if kind == "equal tokens" else len(rows)
            rows[:] = [_like(pattern, rows[at % len(rows)]) for at in range(number)]
    if kind == "unequal rows" and len({*map(len, groups)}) == 1:
        groups[-1].append(groups[-1][-1])
    every = [tokens for rows in groups for tokens in rows]
    if not alike and draw.one([True, False]):
        counted, total = [tokens for tokens in every if _total([tokens])], _total(every)
        for at in range((1 << (total - 1).bit_length()) - total):
            _raise(counted[-1 - at % len(counted)], weights)
    if kind == "unequal tokens" and len({*map(_total, groups)}) == 1:
        _raise(every[-1], weights)
    batch = _batch(draw, abilities, every)
    keys = {"key": torch.arange(len(every))} if keyed else {}
    row_numbers = itertools.count()
    return batch | keys, [[next(row_numbers) for _ in rows] for rows in groups]


def _like(pattern: Row, row: Row) -> Row:
    """A row with the weights of another."""
    return [(weight, row[at % len(row)][1]) for at, (weight, _) in enumerate(pattern)]


def _batch(draw: Draw, abilities: Abilities, rows: Sequence[Row]) -> Batch:
    """Rows as tensors; shorter ones are padded."""
    task, weights, longest = abilities.task, abilities.weights, max(map(len, rows))
    if task.vocabulary:
        # The first token of a row is predicted by none.
        longest, rows = longest + 1, [[(0, row[-1][1]), *row] for row in rows]
    fill: Any = -1 if task.vocabulary else (*[task.ignored["x"]] * 2, task.ignored["y"])
    wide = [row + [(0, fill)] * (longest - len(row)) for row in rows]
    w = torch.tensor([[weight for weight, _ in row] for row in wide])
    kind = torch.int64 if task.vocabulary else abilities.dtype
    values = torch.tensor([[value for _, value in row] for row in wide], dtype=kind)
    if task.vocabulary:
        labels, mask = torch.where(w > 0, values, -100), (values >= 0).to(torch.int64)
        batch = {
            "input_ids": values.clamp(min=0),
            "attention_mask": mask,
            "labels": labels,
        }
        # In text it has a label, too, which a task that shifts labels does not count.
        text = batch | {"labels": torch.cat([values[:, :1], labels[:, 1:]], 1)}
        alike = torch.equal(task.weights(text), task.weights(batch))
        return draw.one([text, batch]) if alike else batch
    if weights != "whole":
        w = (
            w.bool()
            if weights == "mask"
            else w.to(abilities.dtype) / draw.one([1, 4, 16, 10])
        )
    return {"x": values[..., :2], "y": values[..., 2], "w": w}


def problem_of(draw: Draw, abilities: Abilities, *, dropout: float = 0.0) -> Problem:
    """A model of small integers, and SGD with or without momentum and weight decay."""
    rate, model = draw.one([0.25, 0.5, 0.0625, 0.1]), abilities.task.model
    if model is not None:
        return Problem(abilities.task, model, rate)
    *weight, bias = draw.one(VALUES)
    model = Linear(weight, bias, abilities.dtype, dropout)
    numbers = [0.0, 0.5, 0.25, 0.9] if abilities.momentum else [0.0]
    return Problem(abilities.task, model, rate, draw.one(numbers), draw.one(numbers))
