"""Draws two runs that must agree: one group written in two ways, or with an interruption."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from purestep.testing.case import Act, Case, Run
from purestep.testing.draws import Draw
from purestep.testing.history import (
    History,
    draw_joined_updates,
    draw_padded_updates,
    draw_updates,
)
from purestep.testing.problem import Batch, Task
from purestep.testing.trainer import Capabilities, Group, Resumable
from purestep.testing.writing import (
    Layout,
    Part,
    draw_padding,
    draw_problem,
    lay_out_group,
    microbatches,
)

Change: TypeAlias = Literal[
    "cut", "ranks", "order", "padding", "all", "look", "setting"
]
"""How the second run differs: "look" also observes, "setting" is another way of the trainer's."""


Cut: TypeAlias = Sequence[Sequence[int]]
"""The rows of each microbatch."""


def draw_pair(
    draw: Draw,
    trainer: Any,
    change: Change,
    part: str = "",
    dropout: float = 0.0,
) -> Case:
    """Draws a case: one group of rows written in two ways, which differ in ``change``.

    "all" is "cut", "ranks", "order" and "padding" at once. With "look" the second run also looks at
    the trainer, and restarts it if it can. "setting" needs a trainer with two settings or more, of
    which each run has one.

    Before the group, both runs may make updates that count the same tokens. With "cut", "ranks" or
    "all", the first run makes these on one rank; with "padding", the second run pads them. In a
    coarse dtype, runs with such updates leave out the group, whose numbers would no longer be
    exact.

    ``part`` names the part of the law. One of ``KINDS`` says how the microbatches differ; with
    "bits" there are no restarts. If ``dropout`` is above 0, a drawn model has it, and the group's
    batches have "key".
    """
    capabilities = trainer.capabilities
    keyed = dropout > 0
    parts, size = _draw_sizes(draw, capabilities, change)
    problem = draw_problem(draw, capabilities, dropout=dropout)
    batch, rows = microbatches(draw, capabilities, parts, part, keyed=keyed)
    layout = _spread_over_ranks(rows, parts, size, uneven=capabilities.uneven_ranks)
    num_rows, length = capabilities.task.weights(batch).shape
    first = _first_layout(layout, rows, change)
    second = layout
    if change == "order":
        second = _shuffle(draw, layout)
    if change == "all":
        order = draw.order(range(num_rows))
        second = _renumber_rows(layout, order)
    if change in ("padding", "all"):
        inside = not keyed and not capabilities.task.vocabulary
        second = draw_padding(
            draw, second, length, inside=inside, added=capabilities.uneven_ranks
        )
    history = _draw_history(draw, capabilities, change, part, size, keyed=keyed)
    first_run = _write_run(batch, capabilities.task, first, history.first)
    second_run = _write_run(batch, capabilities.task, second, history.second)
    differs = history.first is not history.second
    if capabilities.is_coarse and history.first:
        # Later numbers are not exact: copies of one token have the same bits in both runs.
        labels = ("copies of a token", "as many, cut")
        if not differs:
            labels = ("these updates", "the same updates")
        first_run = first_run._replace(acts=history.first, label=labels[0])
        second_run = second_run._replace(acts=history.second, label=labels[1])
    if differs and history.first:
        where = _describe_first_updates(change, size)
        label = f"{first_run.label}, after the same updates {where}"
        first_run = first_run._replace(label=label)
    if change == "look":
        second_run = _with_looks(second_run, trainer, part)
    elif change == "setting":
        names = draw.order(trainer.settings)
        first_run = _in_setting(first_run, names[0])
        second_run = _in_setting(second_run, names[1])
    return Case(problem, first_run, second_run, part=part)


def _describe_first_updates(change: Change, size: int) -> str:
    """Says how the first run makes earlier updates, where the second run makes them otherwise."""
    if change == "padding":
        return "without padding"
    return "on one rank" if size > 1 else "with microbatches joined"


def _draw_history(
    draw: Draw,
    capabilities: Capabilities,
    change: Change,
    part: str,
    size: int,
    *,
    keyed: bool,
) -> History:
    """Draws up to five earlier updates, as each of the two runs makes them.

    For "cut", "ranks" and "all", the first run makes them on one rank, and the second on ``size``
    ranks. For other changes, both runs make the same ones, on ``size`` ranks; for "padding", the
    second run adds padding to them. For a task with a model, it draws one update at most.
    ``keyed`` is as in ``draw_updates``; "padding" ignores it.

    In a coarse dtype, numbers after an update are no longer exact. There "cut", "ranks" and "all"
    may have a history only in the parts "" and "equal tokens"; of other changes only "look" may
    have one.
    """
    if capabilities.is_coarse and change != "look":
        can_copy = change in ("cut", "ranks", "all") and part in ("", "equal tokens")
        if not can_copy or draw.one([False, True]):
            return History([], [])
    if change in ("cut", "ranks", "all"):
        # The other parts of T1 do not blame a mean of means for unequal tokens.
        return draw_joined_updates(
            draw,
            capabilities,
            size,
            by_rows=change != "ranks",
            is_uneven=change == "all" or part == "unequal tokens",
            keyed=keyed,
        )
    if change == "padding" and capabilities.task.model is None:
        return draw_padded_updates(draw, capabilities, size)
    updates = draw_updates(draw, capabilities, range(6), size, keyed=keyed)
    return History(updates, updates)


def _write_run(
    batch: Batch, task: Task, layout: Layout, updates: Sequence[Group]
) -> Run:
    """Returns a run of the updates and, as the last one, the batch in this layout."""
    last = lay_out_group(batch, task, layout)
    return Run(
        acts=[*updates, last],
        label=_describe_layout(layout),
        ranks=len(layout),
    )


def _draw_sizes(
    draw: Draw, capabilities: Capabilities, change: Change
) -> tuple[list[Draw], int]:
    """Draws the numbers of microbatches and ranks; returns a draw for each microbatch, and ranks.

    There are up to 9 microbatches; in a coarse dtype 1, 2, 4 or 8. Unless the change is "padding",
    there are at least 2. Ranks are 1 for "cut", and at least 2 for "ranks". Unless ranks may be
    uneven, the number of microbatches is a multiple of that of ranks.
    """
    sizes = range(1, capabilities.ranks + 1)
    if change == "cut":
        sizes = range(1, 2)
    elif change == "ranks":
        sizes = range(2, capabilities.ranks + 1)
    fewest = 1 if change == "padding" else 2
    fitting: dict[int, list[int]] = {}
    counts_in_all = [1, 2, 4, 8] if capabilities.is_coarse else range(1, 10)
    for count in counts_in_all:
        if count < fewest:
            continue
        if capabilities.uneven_ranks:
            fitting[count] = list(sizes)
        else:
            fitting[count] = [size for size in sizes if count % size == 0]
    counts = [count for count, fits in fitting.items() if fits]
    parts = draw.many(counts)
    size = draw.one(fitting[len(parts)])
    return parts, size


def _spread_over_ranks(
    rows: Cut, parts: Sequence[Draw], size: int, *, uneven: bool
) -> Layout:
    """Puts each microbatch on a rank: on any if ``uneven``, else as many on each, in order."""
    layout: list[list[Part]] = [[] for _ in range(size)]
    for i, numbers in enumerate(rows):
        rank = i * size // len(rows)
        if uneven:
            rank = parts[i].one(range(size))
        layout[rank].append(Part(numbers))
    return layout


def _first_layout(layout: Layout, rows: Cut, change: Change) -> Layout:
    """Returns the first run's layout, by ``change``.

    For "cut" and "all" it is one microbatch of all rows. For "ranks" it is one rank with all
    microbatches, and otherwise it is ``layout``.
    """
    if change in ("cut", "all"):
        all_rows = [row for numbers in rows for row in numbers]
        return [[Part(all_rows)]]
    if change == "ranks":
        return [[Part(numbers) for numbers in rows]]
    return layout


def _shuffle(draw: Draw, layout: Layout) -> Layout:
    """Returns the layout with ranks, microbatches and rows reordered.

    If nothing has moved, all of it is reversed.
    """
    shuffled = []
    for share in draw.order(layout):
        parts = []
        for part in draw.order(share):
            rows = draw.order(part.rows)
            parts.append(Part(rows))
        shuffled.append(parts)
    return _reverse(layout) if shuffled == layout else shuffled


def _reverse(layout: Layout) -> Layout:
    backwards = []
    for share in reversed(layout):
        parts = []
        for part in reversed(share):
            rows = part.rows[::-1]
            parts.append(Part(rows))
        backwards.append(parts)
    return backwards


def _renumber_rows(layout: Layout, order: Sequence[int]) -> Layout:
    renumbered = []
    for share in layout:
        parts = []
        for part in share:
            rows = [order[row] for row in part.rows]
            parts.append(Part(rows))
        renumbered.append(parts)
    return renumbered


def _describe_layout(layout: Layout) -> str:
    words = []
    for rank, share in enumerate(layout):
        parts = " | ".join(str(part) for part in share)
        text = f"rows {parts}" if share else "nothing"
        words.append(f"{text} on rank {rank}" if len(layout) > 1 else text)
    return "; ".join(words)


def _with_looks(run: Run, trainer: Any, part: str) -> Run:
    """Returns a run that also looks at the trainer, before the first act and after each.

    After each look but the first, the trainer restarts if it can. The part "bits" has no restarts.
    """
    between: list[Act] = ["look"]
    # Bits after a restart are T16's.
    if part != "bits" and isinstance(trainer, Resumable):
        between.append("restart")
    acts: list[Act] = ["look"]
    for act in run.acts:
        acts += [act, *between]
    return run._replace(acts=acts, label="the same again, and looked at")


def _in_setting(run: Run, name: str) -> Run:
    return run._replace(label=f"{run.label} in the setting {name!r}", setting=name)


class _Interruption(NamedTuple):
    """Holds an act that makes no difference, and words for it."""

    act: Act
    label: str


def draw_interrupted(
    draw: Draw,
    trainer: Any,
    act: Literal["restart", "save"] | None = None,
    dropout: float = 0.0,
) -> Case:
    """Draws a case: updates, and the same ones with an interruption that makes no difference.

    The interruption is ``act``. If that is None, it is an update without tokens. For a trainer with
    ``skips_nonfinite``, and a task without a vocabulary, it may also be one with gradients that are
    not finite. It comes once or twice: before, between or after the updates. If ``dropout`` is
    above 0, batches have "key", and the linear model has dropout. The model of a task stays as it
    is.

    The case's ``reports`` name what ``agree`` compares besides params and averages. With ``act``
    that is the evaluation. Without it these are all reports, or none if an interruption comes last.
    """
    capabilities = trainer.capabilities
    keyed = dropout > 0
    sizes = range(1, capabilities.ranks + 1)
    size = draw.one(sizes)
    counts = range(1, 7)
    updates = draw_updates(draw, capabilities, counts, size, keyed=keyed)
    batch = updates[0][0][0]
    can_skip = capabilities.skips_nonfinite and "y" in batch
    if act == "restart":
        interruption = _Interruption(act, "saved and put back")
    elif act == "save":
        interruption = _Interruption(act, "saved")
    elif can_skip and draw.one([False, True]):
        spoilt = _draw_nonfinite_batch(draw, capabilities, batch, keyed=keyed)
        interruption = _draw_nonfinite_update(draw, batch, spoilt, size)
    else:
        interruption = _draw_empty_update(draw, capabilities, batch, size)
    end = len(updates)
    options = range(end, -1, -1)  # The end is the simplest.
    indices = []
    for index_draw in draw.many(range(1, 3)):
        indices.append(index_draw.one(options))
    indices.sort()
    acts: list[Act] = list(updates)
    for index in reversed(indices):
        acts.insert(index, interruption.act)
    numbers = " and ".join(str(index + 1) for index in indices)
    reports = Case.reports
    if act is not None:
        # A trainer that has just loaded a state need not report the update before.
        reports = ("evaluation",)
    elif end in indices:
        # The last update of the second run is the one that changes nothing.
        reports = ()
    return Case(
        problem=draw_problem(draw, capabilities, dropout=dropout),
        first=Run(updates, "one run", size),
        second=Run(acts, f"{interruption.label} before update {numbers}", size),
        reports=reports,
    )


def _draw_nonfinite_batch(
    draw: Draw, capabilities: Capabilities, batch: Batch, *, keyed: bool
) -> Batch:
    """Draws a microbatch of which gradients are not finite, by one token that counts.

    Its target is NaN or infinite, and so are all gradients. Or, in float64, it is finite, but so
    large that the gradient of the first weight overflows, where that of the bias does not. With
    ``keyed`` no target is large and finite, since the element that makes it overflow may be
    dropped.
    """
    token = tuple(batch["w"].nonzero()[0])
    targets = batch["y"].clone()
    inputs = batch["x"].clone()
    bad_targets = [math.nan, math.inf]
    if capabilities.dtype == torch.float64 and not keyed:
        # A trainer in float32 may compute in float64, where this does not overflow.
        bad_targets.append(torch.finfo(targets.dtype).max / 4)
    bad_target = draw.one(bad_targets)
    targets[token] = bad_target
    if math.isfinite(bad_target):
        inputs[(*token, 0)] = 2.0**30
    return {**batch, "x": inputs, "y": targets}


def _draw_nonfinite_update(
    draw: Draw, batch: Batch, spoilt: Batch, size: int
) -> _Interruption:
    """Draws an update that a trainer has to skip: ``spoilt`` is among the microbatches of one rank.

    Each rank has ``batch`` once or twice; on one rank, ``spoilt`` replaces the first or the last.
    """
    spoilt_rank = draw.one(range(size))
    others = draw.one([[], [batch]])
    # At the end, gradients of the microbatches before are there when the trainer skips.
    comes_last = draw.one([False, True])
    group = []
    for rank in range(size):
        one = spoilt if rank == spoilt_rank else batch
        group.append([*others, one] if comes_last else [one, *others])
    label = f"with gradients that are not finite on rank {spoilt_rank} of {size}"
    return _Interruption(group, label)


def _draw_empty_update(
    draw: Draw, capabilities: Capabilities, batch: Batch, size: int
) -> _Interruption:
    """Draws an update in which each rank has from 0 to 2 microbatches, all without tokens.

    Each is a row of padding, as long as those of ``batch``. Unless ranks may be uneven, all ranks
    have the same number.
    """
    counts = [draw.one(range(3)) for _ in range(size)]
    if not capabilities.uneven_ranks:
        counts = [counts[0]] * size
    empty = Part([-1])
    layout = [[empty] * count for count in counts]
    group = lay_out_group(batch, capabilities.task, layout)
    label = f"with {counts} microbatches without tokens on the ranks"
    return _Interruption(group, label)
