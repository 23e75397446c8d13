"""Draws the ways to write the same data: microbatches, ranks, order and padding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from purestep.testing.draws import Draw
from purestep.testing.problem import Batch, Linear, Problem, Task
from purestep.testing.trainer import Capabilities, Group

T = TypeVar("T")


@dataclass
class Row:
    """Holds the tokens of a row: their weights, and their values.

    A value is a number in a vocabulary, or x (of two features) and y.
    """

    weights: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Returns the sum of the weights."""
        return sum(self.weights)

    def append(self, weight: int, value: Any) -> None:
        """Adds a token at the end of the row."""
        self.weights.append(weight)
        self.values.append(value)

    def with_weights_of(self, other: Row) -> Row:
        """Returns a row with the weights and length of another; values repeat, or are left out."""
        values = itertools.cycle(self.values)
        row = Row()
        for weight in other.weights:
            row.append(weight, next(values))
        return row

    def padded(self, length: int, value: Any) -> Row:
        """Returns a row that is lengthened to ``length`` by tokens of this value and weight 0."""
        missing = length - len(self.weights)
        weights = self.weights + [0] * missing
        values = self.values + [value] * missing
        return Row(weights, values)


Rows: TypeAlias = list[Row]

KINDS = ("equal tokens", "unequal rows", "unequal tokens", "empty ones")
"""How microbatches of one batch can differ."""

WEIGHTS = [
    [1, 0, 2, 3],
    [1, 0, 3, 259],
]
"""Weights of tokens; 259 is no number of bfloat16."""

Value: TypeAlias = tuple[float, float, float]


def _scale_values(x_scale: float, y_scale: float) -> list[Value]:
    """Lists all triples x₁, x₂, y of integers from -2 to 2, scaled, with small ones first.

    Before scaling, they are sorted by the sum of their magnitudes. x₁ and x₂ are scaled by
    ``x_scale``, and y by ``y_scale``.
    """
    integers = range(-2, 3)
    values = list(itertools.product(integers, integers, integers))
    values.sort(key=lambda value: sum(abs(number) for number in value))
    scaled = []
    for x1, x2, y in values:
        value = (x1 * x_scale, x2 * x_scale, y * y_scale)
        scaled.append(value)
    return scaled


VALUES = _scale_values(1, 1)
WIDE = _scale_values(2, 8)
"""Larger numbers, which a clip of inputs or targets would change."""
FINE = _scale_values(0.1, 0.1)
"""Numbers that float32 rounds."""
EXACT = [value for value in VALUES if max(abs(value[0]), abs(value[1])) < 2]
"""Numbers whose sums of gradients bfloat16 holds."""


class Part(NamedTuple):
    """Selects a microbatch: rows and columns of a batch, by number.

    The number -1 stands for padding, which counts for nothing. Without ``columns`` it has all of
    them.
    """

    rows: Sequence[int]
    columns: Sequence[int] = ()

    def __str__(self) -> str:
        words = str(list(self.rows))
        if -1 in self.columns:
            words += f" with columns {list(self.columns)}"
        return words.replace("-1", "ignored")


Layout: TypeAlias = Sequence[Sequence[Part]]
"""The microbatches of each rank."""


def draw_padding(
    draw: Draw, layout: Layout, length: int, *, inside: bool, added: bool
) -> Layout:
    """Returns a layout with drawn padding: rows and columns inserted into its microbatches.

    Before, each microbatch has all ``length`` columns of the batch. Rows are inserted anywhere,
    columns anywhere if ``inside``, else at the end. With ``added`` it may insert microbatches
    in which nothing counts. Something is always padded, so there must be a microbatch.
    """
    columns = list(range(length))
    padded = []
    for share in layout:
        parts = []
        for part in share:
            new_rows = _insert_some(draw, part.rows, -1)
            new_columns = _insert_some(draw, columns, -1, inside=inside)
            parts.append(Part(new_rows, new_columns))
        padded.append(parts)
    if added:
        empty = Part([-1])
        padded = [_insert_some(draw, parts, empty) for parts in padded]
    if not any(_is_padded(part) for parts in padded for part in parts):
        parts = next(parts for parts in padded if parts)
        rows = parts[0].rows
        parts[0] = Part(rows, [*columns, -1])
    return padded


def _insert_some(
    draw: Draw, items: Sequence[T], new: T, *, inside: bool = True
) -> list[T]:
    """Returns the items with up to two new ones: anywhere if ``inside``, else at the end."""
    longer = list(items)
    for item_draw in draw.many(range(3)):
        end = len(longer)
        options = range(end, -1, -1) if inside else [end]  # The end is the simplest.
        longer.insert(item_draw.one(options), new)
    return longer


def _is_padded(part: Part) -> bool:
    return -1 in part.rows or -1 in part.columns


def lay_out_group(batch: Batch, task: Task, layout: Layout) -> Group:
    """Returns the microbatches of each rank, cut out of a batch; padding has ``task.ignored``."""
    group = []
    for share in layout:
        group.append([_write_part(batch, task, part) for part in share])
    return group


def _write_part(batch: Batch, task: Task, part: Part) -> Batch:
    microbatch = {}
    for key, x in batch.items():
        fill = task.ignored[key]
        rows = _select(x, 0, part.rows, fill)
        microbatch[key] = _select(rows, 1, part.columns, fill)
    return microbatch


def _select(x: Tensor, dim: int, numbers: Sequence[int], fill: float) -> Tensor:
    """Selects rows or columns by number; where the number is -1, puts ``fill``.

    Returns ``x`` itself without numbers, or if it has no dimension ``dim``.
    """
    if not numbers or dim >= x.ndim:
        return x
    index = torch.tensor(numbers)
    selected = x.index_select(dim, index.clamp(min=0))
    if -1 in numbers:
        ignored = (index < 0).nonzero().flatten()
        selected.index_fill_(dim, ignored, fill)
    return selected


def microbatches(
    draw: Draw,
    capabilities: Capabilities,
    parts: Sequence[Draw],
    difference: str = "",
    *,
    most_rows: int = 3,
    most_length: int = 12,
    keyed: bool = False,
) -> tuple[Batch, list[list[int]]]:
    """Draws a batch of small numbers, and the row numbers of each of its microbatches, in order.

    A microbatch has at most ``most_rows`` rows, or one more for "unequal rows", of at most
    ``most_length`` tokens. Tokens and, in a coarse dtype, rows may be added beyond that to fix
    sums. With a vocabulary, each row begins with one more token, of weight 0. Each of ``parts``
    draws the rows of one microbatch. Each has weight, but for "empty ones". ``difference`` says how
    they differ, one of ``KINDS``; any other text: in any way. ``keyed`` adds "key", the numbers of
    the rows.

    Most numbers are integers. Where the rows' weights may differ, their sum is often rounded up to
    a power of two. A division of integers by it is then exact. Other numbers may round: exact ones
    would hide the dtype in which a trainer computes.

    If ``capabilities.is_coarse``, there are few tokens, all with weight 1 or 0: ``most_rows`` and
    ``most_length`` are then 2, whatever is passed. The number of tokens with weight 1 is a power of
    two if ``len(parts)`` is.
    """
    if capabilities.is_coarse:
        most_rows = 2
        most_length = 2
    groups = _draw_rows(draw, capabilities, parts, most_rows, most_length)
    empty = _draw_empty(parts, difference)
    _fix_empty(capabilities, groups, empty)
    has_equal_rows = difference in ("equal tokens", "unequal rows")
    if difference == "equal tokens":
        _equalize_sizes(groups)
    if has_equal_rows:
        _equalize_weights(groups)
    sizes = [len(group) for group in groups]
    if difference == "unequal rows" and _are_equal(sizes):
        last = groups[-1]
        last.append(last[-1])
    if difference == "unequal rows" and capabilities.is_coarse:
        _round_up_rows(groups)
    rows = [row for group in groups for row in group]
    if not has_equal_rows and (draw.one([True, False]) or capabilities.is_coarse):
        _round_up_total(rows, capabilities)
    totals = [_total(group) for group in groups]
    if difference == "unequal tokens" and _are_equal(totals):
        # The sum of the weights may stay a power of two.
        added = sum(totals) if capabilities.is_coarse else 1
        _add_weight(rows[-1], capabilities, added)
    batch = _draw_batch(draw, capabilities, rows)
    if keyed:
        batch["key"] = torch.arange(len(rows))
    numbers = itertools.count()
    cut = [[next(numbers) for _ in group] for group in groups]
    return batch, cut


def _draw_rows(
    draw: Draw,
    capabilities: Capabilities,
    parts: Sequence[Draw],
    most_rows: int,
    most_length: int,
) -> list[Rows]:
    """Draws the rows of each part: 1 to ``most_rows``, each of 1 to ``most_length`` tokens."""
    weights = [1, 0]
    if not _has_mask(capabilities):
        weights = draw.one(WEIGHTS)
    values: Sequence[Any] = range(capabilities.task.vocabulary)
    if not values:
        # Of few values, some are alike.
        values = draw.one([VALUES, VALUES[:7], WIDE, FINE, VALUES[:2]])
        if capabilities.is_coarse:
            values = EXACT
    longest = draw.one([2, 1, 3, 12])
    lengths = range(1, min(most_length, longest) + 1)
    sizes = range(1, most_rows + 1)
    groups = []
    for part in parts:
        rows = []
        for row_draw in part.many(sizes):
            row = Row()
            for token_draw in row_draw.many(lengths):
                weight = token_draw.one(weights)
                row.append(weight, token_draw.one(values))
            rows.append(row)
        groups.append(rows)
    return groups


def _has_mask(capabilities: Capabilities) -> bool:
    has_ones = capabilities.weights == "mask" or capabilities.is_coarse
    return capabilities.task.vocabulary > 0 or has_ones


def _draw_empty(parts: Sequence[Draw], difference: str) -> list[bool]:
    """Draws which microbatches are empty: none, unless ``difference`` is "empty ones".

    Of two or more microbatches, some then are, but not all. A single one is empty or not, by draw.
    """
    if difference != "empty ones":
        return [False] * len(parts)
    empty = [part.one([False, True]) for part in parts]
    if _are_equal(empty):
        empty[-1] = not empty[-1]
    return empty


def _are_equal(values: Sequence[int]) -> bool:
    return len(set(values)) == 1


def _fix_empty(
    capabilities: Capabilities, groups: list[Rows], empty: Sequence[bool]
) -> None:
    """Takes all weight from empty microbatches, in place; the others get some if they have none."""
    for rows, is_empty in zip(groups, empty, strict=True):
        if is_empty:
            for row in rows:
                row.weights = [0] * len(row.weights)
        elif _total(rows) == 0:
            _add_weight(rows[0], capabilities, 1)


def _equalize_sizes(groups: list[Rows]) -> None:
    """Gives all microbatches as many rows as the first has: repeats some, or leaves some out."""
    size = len(groups[0])
    for i, rows in enumerate(groups):
        endless = itertools.cycle(rows)
        groups[i] = list(itertools.islice(endless, size))


def _round_up_rows(groups: list[Rows]) -> None:
    """Repeats the last row, in place, until the number of all rows is a power of two.

    If then all microbatches have equally many rows, one row of the first moves to the last.
    """
    sizes = [len(group) for group in groups]
    last = groups[-1]
    total = sum(sizes)
    for _ in range(next_power_of_two(total) - total):
        last.append(last[-1])
    sizes[-1] = len(last)
    if _are_equal(sizes):
        last.append(groups[0].pop())


def next_power_of_two(number: int) -> int:
    """Returns the least power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def _equalize_weights(groups: list[Rows]) -> None:
    """Replaces all rows, in place, by rows with the weights and the length of one row.

    That is the first microbatch's first row with weight; there must be one. Values repeat, or are
    left out.
    """
    counted = [row for row in groups[0] if row.total]
    pattern = counted[0]
    for i, rows in enumerate(groups):
        groups[i] = [row.with_weights_of(pattern) for row in rows]


def _total(rows: Rows) -> int:
    return sum(row.total for row in rows)


def _add_weight(row: Row, capabilities: Capabilities, amount: int) -> None:
    """Adds ``amount`` to the weight of a row, in place, at its first token with weight.

    If no token has weight, it takes the first one. If ``capabilities`` allow no weights but 0 and
    1, that token gets weight 1. Copies of it with weight 1 are added at the end of the row, for the
    rest of ``amount``.
    """
    counted = [i for i, weight in enumerate(row.weights) if weight]
    first = counted[0] if counted else 0
    if not _has_mask(capabilities):
        row.weights[first] += amount
        return
    num_tokens = amount
    if not counted:
        row.weights[first] = 1
        num_tokens -= 1
    row.weights += [1] * num_tokens
    row.values += [row.values[first]] * num_tokens


def _round_up_total(rows: Rows, capabilities: Capabilities) -> None:
    """Adds weights, in place, until their sum is a power of two.

    All rows with weight get equally much, and the last ones 1 more where a remainder is left. Where
    ``capabilities`` allow no weights but 0 and 1, that is more tokens. Without weight, nothing is
    added.
    """
    counted = [row for row in rows if row.total]
    if not counted:
        return
    counted.reverse()
    total = _total(rows)
    per_row, remainder = divmod(next_power_of_two(total) - total, len(counted))
    for i, row in enumerate(counted):
        amount = per_row + 1 if i < remainder else per_row
        _add_weight(row, capabilities, amount)


def _draw_batch(draw: Draw, capabilities: Capabilities, rows: Rows) -> Batch:
    """Returns rows as tensors "x", "y" and "w", or as text if the task has a vocabulary.

    Shorter rows end with padding. "x" and "y" have the trainer's dtype. Weights are bool for
    "mask", and integers for "whole". For "any" they have that dtype, and are divided by a drawn
    number unless it is coarse.
    """
    if capabilities.task.vocabulary:
        return _draw_text(draw, capabilities.task, rows)
    ignored = capabilities.task.ignored
    fill = (ignored["x"], ignored["x"], ignored["y"])
    weights, values = _stack_rows(rows, fill, capabilities.dtype)
    if capabilities.weights == "mask":
        weights = weights.bool()
    elif capabilities.weights == "any":
        divisor = 1 if capabilities.is_coarse else draw.one([1, 4, 16, 10])
        weights = weights.to(capabilities.dtype) / divisor
    return {
        "x": values[..., :2],
        "y": values[..., 2],
        "w": weights,
    }


def _draw_text(draw: Draw, task: Task, rows: Rows) -> Batch:
    """Returns rows as tokens, attention mask and labels; each gets a first token of weight 0.

    Labels are -100 where the weight is 0. If the task does not count the first label, a draw
    decides whether the first token has one.
    """
    texts = []
    for row in rows:
        # The first token of a row is predicted by none.
        text = Row()
        text.append(0, row.values[-1])
        text.weights += row.weights
        text.values += row.values
        texts.append(text)
    weights, values = _stack_rows(texts, -1, torch.int64)
    labels = torch.where(weights > 0, values, -100)
    batch = {
        "input_ids": values.clamp(min=0),
        "attention_mask": (values >= 0).to(torch.int64),
        "labels": labels,
    }
    # In text it has a label, too, which a task that shifts labels does not count.
    all_labels = labels.clone()
    all_labels[:, 0] = values[:, 0]
    labelled = {**batch, "labels": all_labels}
    shifts_labels = torch.equal(task.weights(labelled), task.weights(batch))
    if shifts_labels:
        return draw.one([labelled, batch])
    return batch


def _stack_rows(rows: Rows, fill: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Stacks the weights and the values of rows; shorter ones end with fills of weight 0."""
    length = max(len(row.weights) for row in rows)
    padded = [row.padded(length, fill) for row in rows]
    weights = torch.tensor([row.weights for row in padded])
    values = torch.tensor([row.values for row in padded], dtype=dtype)
    return weights, values


def draw_problem(
    draw: Draw, capabilities: Capabilities, *, dropout: float = 0.0
) -> Problem:
    """Draws a linear model of small integers, and SGD for it.

    The learning rate is drawn; momentum and weight decay are, too, if the trainer can have them,
    else they are 0. ``dropout`` is that of the linear model. A task with a model keeps it, without
    momentum or weight decay, and ``dropout`` is not read.
    """
    task = capabilities.task
    learning_rate = draw.one([0.25, 0.5, 0.0625, 0.1])
    if task.model is not None:
        return Problem(task, task.model, learning_rate)
    *weight, bias = draw.one(VALUES)
    model = Linear(weight, bias, capabilities.dtype, dropout)
    numbers = [0.0]
    if capabilities.momentum:
        numbers = [0.0, 0.5, 0.25, 0.9]
    return Problem(
        task,
        model,
        learning_rate,
        momentum=draw.one(numbers),
        weight_decay=draw.one(numbers),
    )
