"""Optimizers and transforms that are one formula for each leaf, and a kernel for all leaves where one may run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import Any, TypeAlias

from torch import Tensor

from purestep import tree
from purestep.optim.base import (
    KEYWORDS,
    Init,
    Last,
    Transform,
    refuse,
    selected,
    written,
)
from purestep.torch_internals import foreach_clone
from purestep.types import OptState, Params, Tree

Columns: TypeAlias = list[list[Tensor]]
"""The leaves of the gradients, of the params, and of each part of the state that is a tree like them."""

Numbers: TypeAlias = Sequence[float | Tensor | None]
"""What is the same for all leaves of a step."""


def leafwise(
    kind: type[Last],
    init: Init,
    state_type: type,
    slots: Sequence[str],
    numbers: Callable[[Any, list[Tensor], Tensor | None], Numbers],
    formula: Callable[[Any, Any], Callable[..., tuple[Tensor, ...]]],
    kernel: Callable[..., list[Tensor]] | None = None,
    *,
    unfit: Callable[[Any, Columns], Collection[int]] = lambda numbers, columns: (),
    devices: Collection[str] = ("cpu",),
    reads_params: bool = True,
) -> Last:
    """An Optimizer, or a Transform, whose update is one formula for each leaf.

    Gradients come in float32 at least.

    Args:
        kind: which of the two. What comes of a leaf is its new param or its update.
        init: makes the state.
        state_type: its type. Where it has a field ``step``, that counts the steps that are taken.
        slots: those of its fields that are trees like the params.
        numbers: ``numbers(state, grads, grad_scale)``, from the leaves of the gradients: what is the same for all.
        formula: ``formula(numbers, step)``, with the step counted from 1, gives the function of one leaf,
            ``(grad, param, *slots) -> (new, *new_slots)``, in plain arithmetic, for any transform.
        kernel: ``kernel(numbers, step, grads, params, *slots)``, with a list of leaves for each, is the same in place. To
            the gradients it may write, an Optimizer's only to divide them. It returns what comes of the leaves.
        unfit: ``unfit(numbers, columns)``: the positions of leaves for which the kernel is not made.
        devices: where the kernel is at home. One that is at home on others than the host takes the keyword ``applied``.
        reads_params: whether the formula needs them. Otherwise None stands for params as well.
    """
    counts = "step" in getattr(state_type, "_fields", ())
    place = 0 if kind is Transform else 1
    """The column that is replaced."""

    def update(
        grads: Tree, state: Any, params: Params, *, grad_scale: Tensor | None = None
    ) -> tuple[Tree, OptState]:
        columns, structure, given = prepared(grads, state, params, grad_scale)
        step = state.step + 1 if counts else None
        if kernel and tree.eager() and not recorded(columns, given) and at_home(columns):
            read = 1 if kind is Transform else 0 if grad_scale is None else None
            columns = [
                column if number == read or not column else [*foreach_clone(column)]
                for number, column in enumerate(columns)
            ]
            new = in_place(columns, given, step, None)
        else:
            of_leaf = formula(given, step)
            rows = [of_leaf(*row) for row in zip(*columns, strict=True)]
            new, *columns[2:] = ([row[n] for row in rows] for n in range(1 + len(slots)))
        fields = {
            slot: tree.unflatten(structure, column)
            for slot, column in zip(slots, columns[2:], strict=True)
        }
        fields |= {"step": step} if counts else {}
        return tree.unflatten(structure, new), state._replace(**fields) if fields else state

    def update_(
        grads: Tree,
        state: Any,
        params: Params,
        *,
        grad_scale: Tensor | None = None,
        applied: Tensor | None = None,
    ) -> tuple[Tree, OptState]:
        columns, structure, given = prepared(grads, state, params, grad_scale)
        if recorded(columns, given):
            return selected(
                kind, update, grads, state, params, grad_scale=grad_scale, applied=applied
            )
        step = state.step.add_(1 if applied is None else applied) if counts else None
        return tree.unflatten(structure, in_place(columns, given, step, applied)), state

    def prepared(
        grads: Tree, state: Any, params: Params, grad_scale: Tensor | None
    ) -> tuple[Columns, tree.Structure, Numbers]:
        params = grads if params is None and not reads_params else params
        columns, structure = leaf_columns(init, state_type, slots, grads, state, params)
        if any(dtype.itemsize < 4 for dtype in {grad.dtype for grad in columns[0]}):
            columns[0] = [*map(widened, columns[0])]
        return columns, structure, numbers(state, columns[0], grad_scale)

    def in_place(
        columns: Columns, given: Numbers, step: Tensor | None, applied: Tensor | None
    ) -> list[Tensor]:
        held = applied is None or "cuda" in devices
        if not (kernel and columns[0] and held and tree.eager() and at_home(columns)):
            return by_formula(columns, given, step, applied)
        how = {} if applied is None else {"applied": applied}
        apart = unfit(given, columns)
        if not apart:
            return kernel(given, step, *columns, **how)
        fit = [position for position in range(len(columns[0])) if position not in apart]
        if fit:
            kernel(given, step, *chosen(columns, fit), **how)
        by_formula(chosen(columns, apart), given, step, applied)
        return columns[place]

    def by_formula(
        columns: Columns, given: Numbers, step: Tensor | None, applied: Tensor | None
    ) -> list[Tensor]:
        of_leaf, results = formula(given, step), []
        for row in zip(*columns, strict=True):
            new, *kept = of_leaf(*row)
            for old, value in zip(row[2:], kept, strict=True):
                written(old, value, applied)
            results.append(new if kind is Transform else written(row[1], new, applied))
        return results

    def at_home(columns: Columns) -> bool:
        if False not in [leaf.is_cpu for leaf in chain(*columns)]:
            return "cpu" in devices
        return {leaf.device.type for leaf in chain(*columns)} <= {*devices}

    return kind(init, update, update_, kernel is not None, None, KEYWORDS)


def leaf_columns(
    init: Init, state_type: type, slots: Sequence[str], grads: Tree, state: Any, params: Params
) -> tuple[Columns, tree.Structure]:
    """The columns, and the structure of each.

    Refuses what does not belong together: kernels would not ask, and plain arithmetic would broadcast or round.
    """
    if not isinstance(state, state_type):
        refuse(init, grads, state, params)
    trees = [grads, params, *(getattr(state, slot) for slot in slots)]
    columns, (structure, *others) = zip(*map(tree.flatten, trees), strict=True)
    first, *rest = columns
    # One pair at a time: of thousands of shapes in a list, the garbage collector would see each.
    if not (
        all(other == structure for other in others)
        and all(
            one.shape == other.shape
            for column in rest
            for one, other in zip(first, column, strict=True)
        )
        and {leaf.dtype for leaf in chain(*columns[2:])} <= {*tree.SUM_DTYPES}
    ):
        refuse(init, grads, state, params)
    return [*columns], structure


def recorded(columns: Columns, given: Numbers) -> bool:
    """Whether somebody transforms or differentiates, so that nothing may be written over."""
    return (
        not tree.untransformed()
        or True in [leaf.requires_grad for leaf in chain(*columns)]
        or any(isinstance(number, Tensor) and number.requires_grad for number in given)
    )


def widened(grad: Tensor) -> Tensor:
    """A gradient in float32 at least, before it is scaled or squared: both leave the range of float16."""
    return grad if grad.dtype.itemsize >= 4 else grad.to(tree.accumulation_dtype(grad.dtype))


def chosen(columns: Columns, positions: Collection[int]) -> Columns:
    """The columns of some of the leaves."""
    return [[column[position] for position in positions] for column in columns]
