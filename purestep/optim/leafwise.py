"""Optimizers and transforms that are one formula for each leaf, and a kernel for all leaves where one may run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.form import Flat, Form, Kind, flat, once
from purestep.optim.base import (
    KEYWORDS,
    Init,
    Last,
    OnLeaves,
    Transform,
    Update,
    refuse,
    selected,
    written,
)
from purestep.pieces import Spread
from purestep.torch_internals import foreach_clone
from purestep.types import OptState, Params, Tree

Columns: TypeAlias = list[list[Tensor]]
"""The leaves of the gradients, of the params, and of each part of the state that is a tree like them."""

Numbers: TypeAlias = Sequence[float | Tensor | None]
"""What is the same for all leaves of a step."""

WIDE = {torch.float32, torch.float64}
"""The dtypes in which gradients are read; narrower ones are widened first."""

Norm: TypeAlias = Callable[[], Tensor]
"""‖g‖₂ of all gradients, asked for by those who need it."""


def leafwise(
    kind: type[Last],
    init: Init,
    state_type: type,
    slots: Sequence[str],
    numbers: Callable[[Any, Norm, Tensor | None], Numbers],
    formula: Callable[[Any, Any], Callable[..., tuple[Tensor, ...]]],
    kernel: Callable[..., list[Tensor]] | None = None,
    *,
    unfit: Callable[[Any, Columns, Collection[torch.dtype]], Collection[int]] = (
        lambda numbers, columns, dtypes: ()
    ),
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
        numbers: ``numbers(step, norm, grad_scale)``: what is the same for all leaves, from the steps that have been taken
            (None where nothing counts them). ``norm()`` is that of all gradients, on whatever ranks their pieces are.
        formula: ``formula(numbers, step)``, with the step counted from 1, gives the function of one leaf,
            ``(grad, param, *slots) -> (new, *new_slots)``, in plain arithmetic, for any transform.
        kernel: ``kernel(numbers, step, grads, params, *slots)``, with a list of leaves for each, is the same in place. To
            the gradients it may write, an Optimizer's only to divide them. It returns what comes of the leaves.
        unfit: ``unfit(numbers, columns, dtypes)``: the positions of leaves for which the kernel is not made. ``dtypes`` are
            those of all leaves in the columns.
        devices: where the kernel is at home. One that is at home on others than the host takes the keyword ``applied``.
        reads_params: whether the formula needs them. Otherwise None stands for params as well.
    """
    place = 0 if kind is Transform else 1
    """The column that is replaced."""

    def update(
        grads: Tree, state: Any, params: Params, *, grad_scale: Tensor | None = None
    ) -> tuple[Tree, OptState]:
        theirs, old, ours, places = belonging(grads, state, params)
        columns, step, given = prepared(places, theirs.leaves, old.leaves, ours.leaves, grad_scale)
        step = None if step is None else step + 1
        if places.at_home and not recorded(columns[0], old.form, ours.form, given):
            read = 1 if kind is Transform else 0 if grad_scale is None else None
            columns = [
                column if number == read or not column else [*foreach_clone(column)]
                for number, column in enumerate(columns)
            ]
            new = in_place(places, columns, given, step, None)
        else:
            of_leaf = formula(given, step)
            rows = [of_leaf(*row) for row in zip(*columns, strict=True)]
            new, *columns[2:] = ([row[n] for row in rows] for n in range(1 + len(slots)))
        leaves = [*old.leaves]
        for span, column in zip(places.slots, columns[2:], strict=True):
            leaves[span] = column
        if places.step is not None:
            leaves[places.step] = step
        return ours.tree(new), old.tree(leaves)

    def update_(
        grads: Tree, state: Any, params: Params, **how: Tensor | None
    ) -> tuple[Tree, OptState]:
        theirs, old, ours, places = belonging(grads, state, params)
        new, after = of_leaves(places, theirs.leaves, old, ours, **how)
        return ours.tree(new), old.tree(after)

    def on_leaves(given: Update | None, params: Form, state: Form) -> OnLeaves | None:
        places = places_of(params, state) if given is update_ else None
        return None if places is None else partial(of_leaves, places)

    def of_leaves(
        places: Places,
        grads: list[Tensor],
        state: Flat,
        params: Flat,
        *,
        grad_scale: Tensor | None = None,
        applied: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        columns, step, given = prepared(places, grads, state.leaves, params.leaves, grad_scale)
        if recorded(columns[0], state.form, params.form, given):
            how = {"grad_scale": grad_scale, "applied": applied}
            trees = params.tree(grads), state.tree(), params.tree()
            new, after = selected(kind, update, *trees, **how)
            return tree.leaves_of(new), tree.leaves_of(after)
        if step is not None:
            step.add_(1 if applied is None else applied)
        return in_place(places, columns, given, step, applied), state.leaves

    def belonging(grads: Tree, state: Any, params: Params) -> tuple[Flat, Flat, Flat, Places]:
        params = grads if params is None and not reads_params else params
        theirs, old, ours = flat(grads), flat(state), flat(params)
        places = places_of(ours.form, old.form)
        if places is None or not _alike(theirs.form, ours.form):
            refuse(init, grads, state, params)
        return theirs, old, ours, places

    def places_of(params: Form, state: Form) -> Places | None:
        return _places(state_type, tuple(slots), tuple(devices) if kernel else (), params, state)

    def prepared(
        places: Places,
        grads: list[Tensor],
        state: list[Tensor],
        params: list[Tensor],
        grad_scale: Tensor | None,
    ) -> tuple[Columns, Tensor | None, Numbers]:
        if not {grad.dtype for grad in grads} <= WIDE:
            grads = [*map(widened, grads)]
        step = None if places.step is None else state[places.step]
        columns = [grads, params, *(state[span] for span in places.slots)]
        norm = partial(tree.norm_of, grads, places.spread)
        return columns, step, numbers(step, norm, grad_scale)

    def in_place(
        places: Places,
        columns: Columns,
        given: Numbers,
        step: Tensor | None,
        applied: Tensor | None,
    ) -> list[Tensor]:
        held = applied is None or "cuda" in devices
        if not (kernel and held and columns[0] and places.at_home):
            return by_formula(columns, given, step, applied)
        how = {} if applied is None else {"applied": applied}
        apart = unfit(given, columns, places.dtypes | {grad.dtype for grad in columns[0]})
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

    return kind(init, update, update_, kernel is not None, None, KEYWORDS, on_leaves)


class Places(NamedTuple):
    """Where the step counter and the columns of a state lie among its leaves, and whether the kernel is at home there.

    ``dtypes`` are those of the params and of the columns, ``spread`` tells over what the params are spread.
    """

    step: int | None
    slots: tuple[slice, ...]
    dtypes: frozenset[torch.dtype]
    at_home: bool
    spread: Spread


@once
def _places(
    state_type: type, slots: tuple[str, ...], devices: tuple[str, ...], params: Form, state: Form
) -> Places | None:
    """None where params and state do not belong together: kernels would not ask, and plain arithmetic would broadcast."""
    fields = getattr(state_type, "_fields", ())
    if not issubclass(state.structure.type or object, state_type):
        return None
    children = state.structure.children()
    starts = [0, *accumulate(child.num_leaves for child in children)]
    spans = {name: slice(*ends) for name, ends in zip(fields, pairwise(starts), strict=False)}
    dtypes = {*params.dtypes}
    for name, child in zip(fields, children, strict=False):
        if name not in slots:
            continue
        column = state.kinds[spans[name]]
        found = {kind[1] for kind in column if len(kind) > 1}
        if not (
            child == params.structure
            and _shapes(column) == _shapes(params.kinds)
            and found <= {*tree.SUM_DTYPES}
        ):
            return None
        dtypes |= found
    at_home = {device.type for device in params.devices | state.devices} <= {*devices}
    return Places(
        spans["step"].start if "step" in spans else None,
        tuple([spans[slot] for slot in slots]),
        frozenset(dtypes),
        at_home and not torch.compiler.is_dynamo_compiling(),
        params.spread,
    )


def belongs(
    state_type: type, slots: Sequence[str], grads: Tree, state: Any, params: Params
) -> bool:
    """Whether gradients and the slots of a state are trees like the params."""
    theirs, old, ours = (flat(one).form for one in (grads, state, params))
    return _alike(theirs, ours) and _places(state_type, tuple(slots), (), ours, old) is not None


@once
def _alike(grads: Form, params: Form) -> bool:
    return grads.structure == params.structure and _shapes(grads.kinds) == _shapes(params.kinds)


def _shapes(kinds: Sequence[Kind]) -> list[Any]:
    """The shape of each tensor; of what is none, None."""
    return [kind[-1] if len(kind) > 1 else None for kind in kinds]


def recorded(grads: list[Tensor], state: Form, params: Form, given: Numbers) -> bool:
    """Whether somebody transforms or differentiates, so that nothing may be written over."""
    return (
        not tree.untransformed()
        or state.requires_grad
        or params.requires_grad
        or tree.any_requires_grad(grads)
        or any(isinstance(number, Tensor) and number.requires_grad for number in given)
    )


def widened(grad: Tensor) -> Tensor:
    """A gradient in float32 at least, before it is scaled or squared: both leave the range of float16."""
    return grad if grad.dtype in WIDE else grad.to(tree.accumulation_dtype(grad.dtype))


def chosen(columns: Columns, positions: Collection[int]) -> Columns:
    """The columns of some of the leaves."""
    return [[column[position] for position in positions] for column in columns]
