"""Makes optimizers and transforms of one formula for each element, and perhaps a fused kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.optim.arithmetic import FOREACH, LEAF
from purestep.optim.base import (
    Transform,
    TransformOrOptimizer,
    check_tensor_params,
    raise_mismatch,
    update_by_copy,
    use_short_names,
)
from purestep.optim.schedules import LearningRate, evaluate_rate
from purestep.tree import foreach
from purestep.tree.attributes import get_device, get_dtype, get_shape
from purestep.types import OptState, Params, Tree

Columns: TypeAlias = Sequence[list[Tensor]]
"""The leaves of several trees of one structure: gradients, params, and each slot of the state."""

Results: TypeAlias = tuple[Any, ...]
"""``(updates or params, *slots)``, of leaves or of columns."""

Formula: TypeAlias = Callable[..., Results]
"""``(grads, params, *slots) -> (updates or params, *slots)``, differentiable or in place."""

WIDE_DTYPES = {torch.float32, torch.float64}
"""The dtypes in which gradients are read; narrower ones are widened first."""

SUPPORTED_DTYPES = {*tree.FLOAT_DTYPES}

HOST_BYTES = 2**15
DEVICE_BYTES = 2**28
"""Formulas hold several columns: they take params of about this size at once."""


class Layout(NamedTuple):
    """Holds each column's dtype, the type of device, and whether all tensors are contiguous."""

    dtypes: tuple[torch.dtype, ...]
    device: str
    is_contiguous: bool


class FusedKernel(NamedTuple):
    """Describes a fused kernel of torch's, which writes to params and slots.

    It takes params, gradients and slots, in this order. ``state_steps``, ``lr``, ``weight_decay``
    and ``found_inf`` are keywords.
    """

    function: Callable[..., None]
    constants: dict[str, Any]
    """Its other keyword arguments."""
    layouts: Collection[Layout]
    """The layouts of columns that it takes."""


class Inputs(NamedTuple):
    """Holds the arguments of an update: flattened, and equal in structure and shapes.

    A column has the leaves of one argument: the gradients, the params, or one tree of the state.
    A row has the leaves at one position of all columns. ``leaves`` joins the columns, and
    ``dtypes`` are those of all leaves. ``spec`` is that of the gradients.
    """

    trees: Sequence[Tree]
    leaves: list[Tensor]
    columns: list[list[Tensor]]
    spec: tree.TreeSpec
    dtypes: frozenset[torch.dtype]


class Group(NamedTuple):
    """Holds the columns of some rows, which have one layout, and their positions among all rows.

    A row has the leaves at one position of all columns.
    """

    positions: Sequence[int]
    layout: Layout
    columns: Columns


def elementwise(
    cls: type[TransformOrOptimizer],
    state_type: type[Any],
    hyperparams: Sequence[LearningRate],
    rule: Callable[..., Formula],
    fused: FusedKernel | None = None,
    *,
    reads_params: bool = True,
) -> TransformOrOptimizer:
    """Makes an Optimizer, or a Transform, whose update is one formula for each element.

    ``formula(grads, params, *slots)`` returns new params or updates, and the new slots, which are
    the trees of the state. It gets gradients in float32 at least. An update raises ``ValueError``
    unless its arguments fit together, and ``TypeError`` where a gradient or param is no tensor.
    ``update_`` checks nothing where ``applied`` is False on the host.

    Args:
        cls: ``Optimizer`` or ``Transform``. The formula returns new params, or updates.
        state_type: the type of its state. A first field ``step`` counts the steps that are taken,
            and the others are trees like the params. ``tuple``: no state.
        hyperparams: the numbers for all leaves. A schedule is called with the steps taken before;
            without a field ``step``, the update raises ``TypeError``.
        rule: ``rule(ops, step, *hyperparams)`` returns the formula, written with the operations of
            ``ops``, an ``Arithmetic``. The step counts from 1; None without a field ``step``.
        fused: a kernel for the formula of an Optimizer, whose two hyperparameters are the learning
            rate and the weight decay. ``update_`` runs it on the rows whose layout it takes, if
            there is a field ``step``, unless a hyperparameter or gradient requires grad.
        reads_params: whether the formula needs params. If not, ``update`` takes None for them, too:
            the formula then gets gradients in their place.
    """
    fields = StateFields(state_type, reads_params)
    is_transform = cls is Transform
    has_schedule = any(callable(value) for value in hyperparams)

    def init(params: Params) -> OptState:
        return fields.init_state(params)

    def update(grads: Tree, state: Any, params: Params) -> tuple[Tree, OptState]:
        inputs, step = fields.flatten_inputs(grads, state, params)
        rates = evaluate_rates(hyperparams, step) if has_schedule else hyperparams
        next_step = None if step is None else step + 1
        new, *slots = apply_by_leaf(
            rule(LEAF, next_step, *rates), inputs, is_transform=is_transform
        )
        return new, fields.make_state(next_step, slots)

    def update_(
        grads: Tree, state: Any, params: Params, applied: Tensor | None
    ) -> tuple[Tree, OptState]:
        if applied is not None and applied.is_cpu:
            unchanged = grads if is_transform else params, state
            return update_(grads, state, params, None) if applied else unchanged
        inputs, step = fields.flatten_inputs(grads, state, params)
        rates = evaluate_rates(hyperparams, step) if has_schedule else hyperparams
        # A rate may require grad, or a hyperparameter of an earlier transform in a chain.
        if tree.leaves_require_grad([*rates, *inputs.columns[0]]):
            return update_by_copy(cls(init, update), grads, state, params, applied)
        if step is not None:
            step.add_(1 if applied is None else applied)
        updates = [*inputs.columns[0]] if is_transform else None
        for group in split_by_layout(inputs):
            if step is not None and fused is not None and group.layout in fused.layouts:
                run_fused(fused, step, rates, applied, group.columns)
            else:
                write_group(rule(FOREACH, step, *rates), group, applied, updates)
        if updates is None:
            return params, state
        return tree.unflatten(inputs.spec, updates), state

    return cls(*use_short_names(init, update, update_))


def evaluate_rates(
    hyperparams: Sequence[LearningRate], step: Tensor | None
) -> list[float | Tensor]:
    """Returns hyperparameters in order, with the rate of this step in place of a schedule.

    ``step`` is how many steps came before; None raises TypeError, also without a schedule.
    """
    if step is None:
        raise TypeError(
            "a schedule stands where a number is needed: this transform counts no steps"
        )
    return [evaluate_rate(value, step) for value in hyperparams]


class StateFields:
    """Makes and reads states of one type.

    A state may have a ``step``. Its other fields are slots: trees like the params.
    """

    def __init__(self, state_type: type[Any], reads_params: bool) -> None:
        self.state_type = state_type
        self.reads_params = reads_params
        self.names: tuple[str, ...] = getattr(state_type, "_fields", ())
        self.slot_names = [name for name in self.names if name != "step"]
        self.has_step = "step" in self.names

    def init_state(self, params: Params) -> OptState:
        """Returns the state before the first step: zeros in each slot, and step 0 if it has a step.

        The zeros are trees like the params, in their accumulation dtypes: in float32 at least for
        floating-point params. Raises TypeError unless the leaves of params are tensors.
        """
        check_tensor_params(params)
        step = make_step_counter(params) if self.has_step else None
        slots = [tree.zeros_like(params) for _ in self.slot_names]
        return self.make_state(step, slots)

    def make_state(self, step: Tensor | None, slots: Sequence[Tree]) -> OptState:
        """Returns a state of these slots, and of ``step`` if states have a step."""
        if self.has_step:
            return self.state_type(step, *slots)
        return self.state_type(*slots)

    def flatten_inputs(
        self, grads: Tree, state: Any, params: Params
    ) -> tuple[Inputs, Tensor | None]:
        """Flattens the arguments of an update; returns also the step counter, or None without one.

        The columns are gradients, params and slots. Raises ValueError unless the arguments fit
        together, and TypeError where a gradient or param is no tensor. Where params are not read,
        they may be None, and the gradients stand for them.
        """
        like_params = grads if params is None and not self.reads_params else params
        # Any tuple is an instance of ``tuple``, the type of an empty state.
        if not isinstance(state, self.state_type) or len(state) != len(self.names):
            raise_mismatch(self.init_state, grads, state, like_params)
        step, *slots = state if self.has_step else (None, *state)
        is_scalar = isinstance(step, Tensor) and step.ndim == 0
        if self.has_step and not is_scalar:
            raise_mismatch(self.init_state, grads, state, like_params)
        inputs = flatten_alike(grads, like_params, *slots)
        if inputs is None:
            raise_mismatch(self.init_state, grads, state, like_params)
        return inputs, step


def flatten_alike(*trees: Tree) -> Inputs | None:
    """Returns the flattened trees; None if structures or shapes differ, or a dtype is unsupported.

    The supported ones are the floating-point dtypes of params. Kernels do not compare shapes, and
    plain arithmetic would broadcast, or round to integers.
    """
    first, spec = tree.flatten(trees[0])
    columns = [first]
    leaves = [*first]
    for other in trees[1:]:
        column = tree.tensors_matching(spec, other)
        if column is None:
            return None
        columns.append(column)
        leaves += column
    # By a map, at each step, and into no set, which a trace fills leaf by leaf.
    dtypes = frozenset(map(get_dtype, leaves))
    if not dtypes <= SUPPORTED_DTYPES:
        return None
    shapes = [*map(get_shape, leaves)]  # as above
    if shapes != shapes[: len(first)] * len(trees):
        return None
    return Inputs(trees, leaves, columns, spec, dtypes)


def apply_by_leaf(
    formula: Formula, inputs: Inputs, *, is_transform: bool
) -> list[Tree]:
    """Applies a formula to each row of leaves, by plain operations, and writes to no leaf.

    Gradients are widened to float32 at least. Returns a list: the tree of updates or new params,
    then a tree for each slot of the state. New params and slots have the dtypes of the old ones.
    """
    grads, *others = inputs.columns
    if not inputs.dtypes <= WIDE_DTYPES:
        grads = [tree.widen(grad) for grad in grads]
    rows = []
    for row in zip(grads, *others, strict=True):
        results = formula(*row)
        rows.append(round_results(results, row, is_transform=is_transform))
    grads_tree, params_tree, *slot_trees = inputs.trees
    first_tree = grads_tree if is_transform else params_tree
    trees = []
    for position, like in enumerate([first_tree, *slot_trees]):
        column = [row[position] for row in rows]
        by_key = tree.unflatten(inputs.spec, column)
        # A dict and an ``OrderedDict``, whose keys have other orders, are equal in structure.
        _, spec = tree.flatten(like)
        leaves = tree.tensors_matching(spec, by_key) or []
        trees.append(tree.unflatten(spec, leaves))
    return trees


def round_results(
    results: Results, row: Sequence[Tensor], *, is_transform: bool
) -> list[Tensor]:
    """Rounds the results of a formula to the dtypes of params and slots in the row.

    The row has a gradient, a param and slots. A Transform's first result is an update: it keeps its
    dtype.
    """
    first, *new_slots = results
    _, params, *slots = row
    if not is_transform:
        first = first.to(params.dtype)
    rounded = [first]
    for new, old in zip(new_slots, slots, strict=True):
        rounded.append(new.to(old.dtype))
    return rounded


def write_group(
    formula: Formula,
    group: Group,
    applied: Tensor | None,
    updates: list[Tensor] | None,
) -> None:
    """Applies a formula to a group of rows in place.

    The formula of an Optimizer writes to params and slots; then ``updates`` is None. That of a
    Transform writes to slots, and its updates go into the list ``updates``, at the positions of the
    rows, whatever ``applied`` is. Where ``applied`` is False, params and slots keep their values;
    None means True.
    """
    if updates is None:
        update_params_(formula, group.columns, applied)
        return
    group_updates = compute_updates_(formula, group.columns, applied)
    for position, update in zip(group.positions, group_updates, strict=True):
        updates[position] = update


def update_params_(formula: Formula, columns: Columns, applied: Tensor | None) -> None:
    """Writes the results of an Optimizer's formula over params and slots.

    The columns are gradients, params and slots. If the bool scalar ``applied`` is False, params and
    slots keep their values, to the bit; None means True.
    """
    for grads, *old in split_by_size(columns):
        writable = old
        if applied is not None:
            # A formula casts params to a wider dtype of its slots before it writes.
            is_wide = [column[0].dtype in WIDE_DTYPES for column in old]
            first = 0 if is_wide[0] or not all(is_wide[1:]) else 1
            writable = [*old[:first], *clone_columns(old[first:])]
        copy_where(old, formula(grads, *writable), applied)


def compute_updates_(
    formula: Formula, columns: Columns, applied: Tensor | None
) -> list[Tensor]:
    """Returns the updates of a Transform's formula, and writes its new slots over the old ones.

    The columns are gradients, params and slots. The updates may lie in the memory of the gradients.
    Where ``applied`` is False, the slots stay as they are; None means True.
    """
    updates: list[Tensor] = []
    for grads, params, *slots in split_by_size(columns):
        writable = slots if applied is None else clone_columns(slots)
        new_updates, *new_slots = formula(grads, params, *writable)
        copy_where(slots, new_slots, applied)
        updates += new_updates
    return updates


def copy_where(old: Columns, new: Columns, applied: Tensor | None) -> None:
    """Copies new columns over old ones where the bool scalar ``applied`` is True; None: always.

    If ``applied`` is None, a new column may be the old one itself. If it is a tensor on CUDA, no
    new column may share memory with an old one: both would become 0.
    """
    if applied is not None:
        if old:
            foreach.where_(join_columns(old), join_columns(new), applied)
        return
    for old_column, new_column in zip(old, new, strict=True):
        if new_column is not old_column:
            foreach.copy_(old_column, new_column)


def run_fused(
    kernel: FusedKernel,
    step: Tensor,
    hyperparams: Sequence[Any],
    applied: Tensor | None,
    columns: Columns,
) -> None:
    """Runs a fused kernel, which writes to params and slots; ``step`` already counts this step.

    The columns are gradients, params and slots. ``hyperparams`` are the learning rate and the
    weight decay. On the host ``applied`` must be None. On a device all values stay as they are
    where ``applied`` is False; None means True.
    """
    rate, decay = hyperparams
    grads, params, *slots = columns
    if step.is_cpu:
        rate = float(rate)
    else:
        # On the host the kernel reads both as numbers; elsewhere it takes float32 alone.
        step = step.to(torch.float32)
        if isinstance(rate, Tensor):
            rate = rate.to(torch.float32)
    wide_params = params
    if params[0].dtype != slots[0][0].dtype:
        wide_params = foreach.cast(params, slots[0])
    kernel.function(
        wide_params,
        grads,
        *slots,
        **kernel.constants,
        state_steps=[step] * len(params),
        lr=rate,
        weight_decay=float(decay),
        found_inf=None if applied is None else (~applied).to(torch.float32),
    )
    # Where the step is not applied, rounding restores the bits of the params.
    if wide_params is not params:
        foreach.copy_(params, wide_params)


def split_by_layout(inputs: Inputs) -> list[Group]:
    """Returns groups of the rows that agree in device and layout; no rows give no groups.

    Their gradients are widened to float32 at least, and cloned if they are expanded.
    """
    columns = inputs.columns
    # Maps over all leaves, at each step, are faster than comprehensions.
    devices = frozenset(map(get_device, columns[0]))
    is_uniform = len(inputs.dtypes) == len(devices) == 1
    is_wide = inputs.dtypes <= WIDE_DTYPES
    # Usual trees are one group.
    if is_uniform and is_wide and all(map(Tensor.is_contiguous, inputs.leaves)):
        (dtype,) = inputs.dtypes
        (device,) = devices
        layout = Layout((dtype,) * len(columns), device.type, is_contiguous=True)
        return [Group(range(len(columns[0])), layout, columns)]
    rows_by_key: dict[Any, list[int]] = defaultdict(list)
    for position, row in enumerate(zip(*columns, strict=True)):
        formats = [(leaf.dtype, leaf.is_contiguous()) for leaf in row]
        key = (row[0].device, *formats)
        rows_by_key[key].append(position)
    return [make_group(columns, positions) for positions in rows_by_key.values()]


def make_group(columns: Columns, positions: Sequence[int]) -> Group:
    """Makes a group of the rows at these positions, which must have equal layouts.

    Gradients are widened to float32 at least, and cloned if they are expanded.
    """
    group = []
    for column in columns:
        group.append([column[position] for position in positions])
    grads, *others = group
    group[0] = clone_expanded(widen_grads(grads, others))
    first_row = [column[0] for column in group]
    layout = Layout(
        dtypes=tuple(leaf.dtype for leaf in first_row),
        device=first_row[0].device.type,
        is_contiguous=all(leaf.is_contiguous() for leaf in first_row),
    )
    return Group(positions, layout, group)


def clone_expanded(grads: list[Tensor]) -> list[Tensor]:
    """Clones expanded gradients, whose elements share memory, and returns others as they are.

    The gradient of ``x.sum()`` is an expanded one.
    """
    return [grad.clone() if 0 in grad.stride() else grad for grad in grads]


def clone_columns(columns: Columns) -> list[list[Tensor]]:
    """Returns clones of columns, to which a formula may write."""
    # One call for all columns: on a device each call is a launch.
    clones = iter(foreach.clone(join_columns(columns)))
    return [[next(clones) for _ in column] for column in columns]


def join_columns(columns: Columns) -> list[Tensor]:
    """Joins columns, one after the other, to one list of leaves."""
    return [leaf for column in columns for leaf in column]


def split_by_size(columns: Columns) -> Iterator[Columns]:
    """Splits columns into groups of successive rows, and yields the columns of each group.

    The second column holds the params. Those of a group have at most ``HOST_BYTES`` on the host,
    ``DEVICE_BYTES`` on a device. A row with a larger param is a group alone. There must be a row.
    """
    params = columns[1]
    max_bytes = HOST_BYTES if params[0].is_cpu else DEVICE_BYTES
    start = 0
    num_bytes = 0
    for end, leaf in enumerate(params):
        num_bytes += leaf.nbytes
        if num_bytes > max_bytes and end > start:
            yield [column[start:end] for column in columns]
            start = end
            num_bytes = leaf.nbytes
    yield [column[start:] for column in columns]


def widen_grads(grads: list[Tensor], others: Columns) -> list[Tensor]:
    """Casts a column of gradients, which share a dtype, to float32 at least.

    Gradients in float32 or float64 are returned as they are. ``others`` are params and slots.
    Narrower gradients get the dtype of the first of these columns that is in float32 or float64.
    Without such a column, they get float32.
    """
    if grads[0].dtype in WIDE_DTYPES:
        return grads
    for column in others:
        if column[0].dtype in WIDE_DTYPES:
            return foreach.cast(grads, column)
    return [tree.widen(grad) for grad in grads]


def make_step_counter(params: Params) -> Tensor:
    """Returns a step counter: 0 in int64, on the first leaf's device; without any, on the host."""
    leaves = tree.leaves(params)
    if not leaves:
        return torch.zeros((), dtype=torch.int64, device="cpu")
    # Made of a leaf, so that under vmap each member has its own, as after a step.
    step: Tensor = leaves[0].new_zeros((), dtype=torch.int64)
    return step
