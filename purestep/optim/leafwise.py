"""Optimizers and transforms that are one rule for each leaf, and perhaps a kernel for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.optim.base import Part, Transform, check_params, over, refuse, written
from purestep.optim.schedules import LearningRate, rate_at
from purestep.types import OptState, Params, Tree

Columns: TypeAlias = Sequence[Sequence[Tensor]]
"""The leaves of several trees of one structure."""

OfLeaf: TypeAlias = Callable[..., tuple[Tensor, ...]]
"""``(grad, param, *slots) -> (new, *new_slots)`` of one leaf."""

WIDE = {torch.float32, torch.float64}
"""The dtypes in which gradients are read; narrower ones are widened first."""

SUMS = {*tree.SUM_DTYPES}
HOST = {(dtype, "cpu") for dtype in SUMS}
_KIND = attrgetter("dtype", "device")


def leafwise(
    kind: type[Part],
    state_type: type[Any],
    numbers: Sequence[LearningRate],
    rule: Callable[..., OfLeaf],
    kernel: Callable[[Any, Any, Any, Columns], Sequence[Tensor]] | None = None,
    *,
    home: set[tuple[torch.dtype, str]] = HOST,
    reads_params: bool = True,
) -> Part:
    """An Optimizer, or a Transform, whose update is one rule for each leaf.

    Gradients come in float32 at least.

    Args:
        kind: which of the two. What comes of a leaf is its new param or its update.
        state_type: the type of its state. A first field ``step`` counts the steps that are taken,
            and the others are trees like the params. ``tuple``: no state.
        numbers: what is the same for all leaves. A schedule is asked at each step.
        rule: ``rule(step, *numbers)`` gives the function of one leaf, ``(grad, param, *slots) ->
            (new, *new_slots)``, in plain arithmetic. The step counts from 1.
        kernel: ``kernel(step, numbers, applied, columns)`` is the same in place, where ``columns``
            are lists of grads, params and slots. It returns the list of what comes of the leaves.
        home: the dtypes and types of devices that the kernel is made for, on leaves without gaps.
            One for other devices than the host sees to ``applied``; for others it is None.
        reads_params: whether the rule needs them. Otherwise None stands for params as well.
    """
    fields: tuple[str, ...] = getattr(state_type, "_fields", ())
    counts = "step" in fields
    place = 0 if kind is Transform else 1
    settled = not any(callable(each) or isinstance(each, Tensor) for each in numbers)

    def init(params: Params) -> OptState:
        check_params(params)
        slots = [tree.zeros_like(params) for name in fields if name != "step"]
        return state_type(zero_step(params), *slots) if counts else state_type(*slots)

    def update(grads: Tree, state: OptState, params: Params) -> tuple[Tree, OptState]:
        columns, structures, step = taken(grads, state, params)
        given = [rate_at(each, step) for each in numbers]
        of_leaf = rule(step + 1 if counts else None, *given)
        rows = [of_leaf(*row) for row in zip(*columns, strict=True)]
        new, *slots = (
            tree.unflatten(structure, [row[number] for row in rows])
            for number, structure in enumerate([structures[place], *structures[2:]])
        )
        return new, state_type(step + 1, *slots) if counts else state_type(*slots)

    def update_(
        grads: Tree, state: OptState, params: Params, applied: Tensor | None
    ) -> tuple[Tree, OptState]:
        if applied is not None and applied.is_cpu:
            if not applied:
                return (params if place else grads), state
            applied = None
        columns, structures, step = taken(grads, state, params)
        given = numbers if settled else [rate_at(each, step) for each in numbers]
        # A rate may require grad, or a number of a transform before this one.
        if tree.any_requires_grad([*given, *columns[0]]):
            return over(kind(init, update), grads, state, params, applied)
        if counts:
            step.add_(1 if applied is None else applied)
        run = kernel if applied is None or home is not HOST else None
        if run and columns[0] and fits(home, [*chain.from_iterable(columns)]):
            new = run(step, given, applied, columns)
        else:
            of_leaf, rows = rule(step, *given), zip(*columns, strict=True)
            new = [
                run(step, given, applied, [[leaf] for leaf in row])[0]
                if run and fits(home, row)
                else by_rule(of_leaf, row, applied)
                for row in rows
            ]
        return (params if place else tree.unflatten(structures[0], new)), state

    def taken(grads: Tree, state: Any, params: Params) -> tuple[Columns, list[Any], Any]:
        own = grads if params is None and not reads_params else params
        known = isinstance(state, state_type) and len(state) == len(fields)
        found = alike(grads, own, *state[counts:]) if known else None
        if found is None:
            refuse(init, grads, state, params)
        columns, structures, dtypes = found
        if not dtypes <= WIDE:
            columns[0] = [widened(grad) for grad in columns[0]]
        return columns, structures, state[0] if counts else None

    def by_rule(of_leaf: OfLeaf, row: Sequence[Tensor], applied: Tensor | None) -> Tensor:
        new, *slots = of_leaf(*row)
        for old, slot in zip(row[2:], slots, strict=True):
            written(old, slot, applied)
        return written(row[1], new, applied) if place else new

    return kind(init, update, update_)


def alike(*trees: Tree) -> tuple[list[list[Tensor]], list[Any], set[torch.dtype]] | None:
    """The leaves, structures and dtypes of trees of one form; None where these are none.

    Kernels would not ask, and plain arithmetic would broadcast, or round to integers.
    """
    leaves, structure = tree.flatten(trees)
    structures, dtypes = structure.children(), {*map(attrgetter("dtype"), leaves)}
    count = structures[0].num_leaves
    if not dtypes <= SUMS:
        return None
    if not all(tree.is_same_structure(each, structures[0]) for each in structures[1:]):
        return None
    for leaf, other in zip(leaves, leaves[count:], strict=False):
        if leaf.shape != other.shape:
            return None
    columns = []
    for n in range(len(trees)):
        columns.append(leaves[count * n : count * (n + 1)])
    return columns, structures, dtypes


def fits(home: set[tuple[torch.dtype, str]], leaves: Sequence[Tensor]) -> bool:
    """Whether a kernel for this home may take these leaves."""
    for dtype, device in {*map(_KIND, leaves)}:
        if (dtype, device.type) not in home:
            return False
    return all(map(Tensor.is_contiguous, leaves))


def widened(grad: Tensor) -> Tensor:
    """A gradient in float32 at least, before it is squared: that leaves the range of float16."""
    return grad if grad.dtype in WIDE else grad.to(tree.accumulation_dtype(grad.dtype))


def zero_step(params: Params) -> Tensor:
    """A step counter at 0, where the params are."""
    leaves = tree.leaves_of(params)
    return torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else None)


def number(value: float | Tensor, x: Tensor) -> float | Tensor:
    """A number for all leaves, in the dtype of x: it must not promote a leaf that is a scalar."""
    return value.to(x.dtype) if isinstance(value, Tensor) else value


def multiply_add(x: Tensor, factor: float | Tensor, y: Tensor) -> Tensor:
    """x + factor · y with one rounding, as kernels do with their ``alpha``, in the dtype of x."""
    if isinstance(factor, Tensor):
        return torch.addcmul(x, y, factor.to(torch.promote_types(x.dtype, y.dtype))).to(x.dtype)
    return torch.add(x, y, alpha=factor).to(x.dtype)


def root(x: Tensor) -> Tensor:
    """√x with derivative 0 at 0, by selection: where no gradient ever came, none is made up.

    By way of float64, because torch's own float32 root is not correctly rounded where MKL takes it.
    What a compiler writes is the processor's root, which is.
    """
    positive = x > 0
    dtype = x.dtype if torch.compiler.is_dynamo_compiling() else torch.float64
    roots = torch.where(positive, x, 1).to(dtype).sqrt().to(x.dtype)
    return torch.where(positive, roots, 0)
