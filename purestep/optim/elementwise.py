"""Optimizers and transforms that are one formula for each element, and perhaps a fused kernel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.optim.arithmetic import FOREACH, LEAF
from purestep.optim.base import (
    Part,
    Transform,
    check_params,
    raise_mismatch,
    update_by_copy,
)
from purestep.optim.schedules import LearningRate, rate_at
from purestep.tree import foreach
from purestep.types import OptState, Params, Tree

Columns: TypeAlias = Sequence[list[Tensor]]
"""The leaves of several trees of one structure: gradients, params, and each slot of the state."""

Formula: TypeAlias = Callable[..., Any]
"""``(grads, params, *slots) -> (updates or params, *slots)``, of leaves or of columns."""

Fused: TypeAlias = Callable[
    [Tensor, Sequence[Any], Tensor | None, Columns], list[Tensor]
]
"""``(step, hyperparams, applied, columns) -> params``: one kernel, which writes to the columns."""

WIDE = {torch.float32, torch.float64}
"""The dtypes in which gradients are read; narrower ones are widened first."""

SUMS = {*tree.FLOAT_DTYPES}

HOST_BYTES, DEVICE_BYTES = 2**15, 2**28
"""Formulas hold several columns: they take params of about this size at once."""


class Kind(NamedTuple):
    """The dtype of each column, the type of their device, and whether no tensor has gaps."""

    dtypes: tuple[torch.dtype, ...]
    device: str
    is_contiguous: bool


class Inputs(NamedTuple):
    """What an update takes, flattened and compared."""

    columns: list[list[Tensor]]
    structures: list[tree.TreeSpec]
    dtypes: set[torch.dtype]


def elementwise(
    cls: type[Part],
    state_type: type[Any],
    hyperparams: Sequence[LearningRate],
    rule: Callable[..., Formula],
    fused: Fused | None = None,
    *,
    supported: Collection[Kind] = (),
    reads_params: bool = True,
) -> Part:
    """Makes an Optimizer, or a Transform, whose update is one formula for each element.

    Gradients come in float32 at least.

    Args:
        cls: which of the two. The formula returns new params, or updates.
        state_type: the type of its state. A first field ``step`` counts the steps that are taken,
            and the others are trees like the params. ``tuple``: no state.
        hyperparams: the numbers for all leaves. A schedule is called at each step.
        rule: ``rule(ops, step, *hyperparams)`` returns the formula, written with the operations of
            ``ops``, an ``Arithmetic``. The step counts from 1.
        fused: the same as one kernel, in place. On the host ``applied`` is None. On a device the
            kernel leaves all values as they are where ``applied`` is False.
        supported: the kinds of columns that the kernel takes.
        reads_params: whether the formula needs them. Otherwise None stands for params as well.
    """
    fields: tuple[str, ...] = getattr(state_type, "_fields", ())
    num_counters = 1 if "step" in fields else 0
    is_transform = cls is Transform
    is_constant = not any(callable(x) or isinstance(x, Tensor) for x in hyperparams)

    def init(params: Params) -> OptState:
        check_params(params)
        slots = [tree.zeros_like(params) for name in fields if name != "step"]
        return (
            state_type(zero_step(params), *slots)
            if num_counters
            else state_type(*slots)
        )

    def update(grads: Tree, state: OptState, params: Params) -> tuple[Tree, OptState]:
        columns, structures, dtypes = flatten_inputs(grads, state, params)
        if not dtypes <= WIDE:
            columns[0] = [widened(grad) for grad in columns[0]]
        step: Any = state[0] if num_counters else None
        rates = [rate_at(rate, step) for rate in hyperparams]
        formula = rule(LEAF, step + 1 if num_counters else None, *rates)
        rows = [
            round_state(row, formula(*row), is_transform=is_transform)
            for row in zip(*columns, strict=True)
        ]
        results = structures[:1] if is_transform else structures[1:2]
        new, *slots = (
            tree.unflatten(structure, [row[position] for row in rows])
            for position, structure in enumerate([*results, *structures[2:]])
        )
        return new, state_type(step + 1, *slots) if num_counters else state_type(*slots)

    def update_(
        grads: Tree, state: OptState, params: Params, applied: Tensor | None
    ) -> tuple[Tree, OptState]:
        if applied is not None and applied.is_cpu:
            if not applied:
                return (grads if is_transform else params), state
            applied = None
        columns, structures, dtypes = flatten_inputs(grads, state, params)
        step: Any = state[0] if num_counters else None
        rates = (
            hyperparams
            if is_constant
            else [rate_at(rate, step) for rate in hyperparams]
        )
        # A rate may require grad, or a number of a transform before this one.
        if tree.leaves_require_grad([*rates, *columns[0]]):
            return update_by_copy(cls(init, update), grads, state, params, applied)
        if num_counters:
            step.add_(1 if applied is None else applied)
        updates = [*columns[0]]
        for positions, kind, group in split_by_kind(columns, dtypes):
            if fused is not None and kind in supported:
                values = fused(step, rates, applied, group)
            else:
                formula = rule(FOREACH, step, *rates)
                values = write_by_formula(
                    formula, group, applied, is_transform=is_transform
                )
            if is_transform:
                for position, value in zip(positions, values, strict=True):
                    updates[position] = value
        return (
            tree.unflatten(structures[0], updates) if is_transform else params
        ), state

    def flatten_inputs(grads: Tree, state: Any, params: Params) -> Inputs:
        like_params = grads if params is None and not reads_params else params
        is_state = isinstance(state, state_type) and len(state) == len(fields)
        slots = state[num_counters:] if is_state else ()
        inputs = flatten_alike(grads, like_params, *slots) if is_state else None
        if inputs is None:
            raise_mismatch(init, grads, state, params)
        return inputs

    init.__qualname__, update.__qualname__ = "init", "update"  # as errors name them
    return cls(init, update, update_)


def flatten_alike(*trees: Tree) -> Inputs | None:
    """Flattens trees of one structure and of equal shapes; None where they differ.

    Kernels do not compare shapes, and plain arithmetic would broadcast, or round to integers.
    """
    leaves, structure = tree.flatten(trees)
    structures, dtypes = structure.children(), {*map(attrgetter("dtype"), leaves)}
    count = structures[0].num_leaves
    if not dtypes <= SUMS:
        return None
    for other in structures[1:]:
        if not tree.is_same_spec(other, structures[0]):
            return None
    for leaf, other in zip(leaves, leaves[count:], strict=False):
        if leaf.shape != other.shape:
            return None
    columns = []
    for n in range(len(trees)):
        columns.append(leaves[count * n : count * (n + 1)])
    return Inputs(columns, structures, dtypes)


def split_by_kind(
    columns: list[list[Tensor]], dtypes: set[torch.dtype]
) -> list[tuple[Sequence[int], Kind, Columns]]:
    """Groups rows by kind, widens gradients, and returns the positions of each group's rows."""
    devices = {
        *map(attrgetter("device"), columns[0])
    }  # at each step: attrgetter is the fastest
    is_uniform = len(dtypes) == len(devices) == 1 and dtypes <= WIDE
    if is_uniform and all(map(Tensor.is_contiguous, chain(*columns))):
        kind = Kind((*dtypes,) * len(columns), devices.pop().type, is_contiguous=True)
        return [(range(len(columns[0])), kind, columns)]
    groups: dict[Any, list[int]] = {}
    for position, row in enumerate(zip(*columns, strict=True)):
        layout = [(leaf.dtype, leaf.is_contiguous()) for leaf in row]
        groups.setdefault((row[0].device, *layout), []).append(position)
    result: list[tuple[Sequence[int], Kind, Columns]] = []
    for positions in groups.values():
        group = [[column[position] for position in positions] for column in columns]
        # An expanded gradient, as of x.sum(), has one memory for all elements.
        group[0] = [
            grad.clone() if 0 in grad.stride() else grad for grad in widen_grads(group)
        ]
        first_row = [column[0] for column in group]
        is_contiguous = all(map(Tensor.is_contiguous, first_row))
        group_dtypes = tuple(leaf.dtype for leaf in first_row)
        kind = Kind(group_dtypes, first_row[0].device.type, is_contiguous)
        result.append((positions, kind, group))
    return result


def round_state(
    row: Sequence[Tensor], results: Sequence[Tensor], *, is_transform: bool
) -> list[Tensor]:
    """Rounds what the formula returns to the dtypes of params and state."""
    first = results[0] if is_transform else results[0].to(row[1].dtype)
    return [
        first,
        *(new.to(old.dtype) for new, old in zip(results[1:], row[2:], strict=True)),
    ]


def write_by_formula(
    formula: Formula, columns: Columns, applied: Tensor | None, *, is_transform: bool
) -> list[Tensor]:
    """Writes what the formula returns over params and slots where ``applied`` holds.

    Returns the column of updates, or of params.
    """
    results: list[Tensor] = []
    for grads, params, *slots in split_by_size(columns):
        old = slots if is_transform else [params, *slots]
        writable = old if applied is None else clone_wide(old)
        returned = (
            formula(grads, params, *writable)
            if is_transform
            else formula(grads, *writable)
        )
        new = returned[1:] if is_transform else returned
        if applied is None:
            for old_column, new_column in zip(old, new, strict=True):
                if new_column is not old_column:
                    foreach.copy_(old_column, new_column)
        elif old:
            foreach.where_([*chain(*old)], [*chain(*new)], applied)
        results += returned[0] if is_transform else params
    return results


def clone_wide(columns: Columns) -> list[list[Tensor]]:
    """Clones the columns to which a formula may write, which are not in half precision."""
    wide = [column for column in columns if column[0].dtype in WIDE]
    clones = iter(foreach.clone([*chain(*wide)]))
    return [
        [next(clones) for _ in column] if column[0].dtype in WIDE else column
        for column in columns
    ]


def split_by_size(columns: Columns) -> Iterator[Columns]:
    """Yields successive rows whose params have few bytes together, at least one row at a time."""
    params = columns[1]
    budget = HOST_BYTES if params[0].is_cpu else DEVICE_BYTES
    start, size = 0, 0
    for end, leaf in enumerate(params):
        size += leaf.nbytes
        if size > budget and end > start:
            yield [column[start:end] for column in columns]
            start, size = end, leaf.nbytes
    yield [column[start:] for column in columns]


def widen_grads(columns: Columns) -> list[Tensor]:
    """Casts gradients to float32 at least, by one call if another column has the dtype."""
    grads, *others = columns
    if grads[0].dtype in WIDE:
        return grads
    for column in others:
        if column[0].dtype in WIDE:
            return foreach.cast(grads, column)
    return [widened(grad) for grad in grads]


def widened(grad: Tensor) -> Tensor:
    """Returns a gradient in float32 at least: its square leaves the range of float16."""
    return grad if grad.dtype in WIDE else grad.to(tree.accumulation_dtype(grad.dtype))


def zero_step(params: Params) -> Tensor:
    """Returns a step counter at 0, where the params are."""
    leaves = tree.leaves(params)
    if not leaves:
        return torch.zeros((), dtype=torch.int64)
    # Made of a leaf, so that under vmap each member has its own, as after a step.
    step: Tensor = leaves[0].new_zeros((), dtype=torch.int64)
    return step
