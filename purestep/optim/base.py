"""What an optimizer is: a NamedTuple of pure functions. The type is the design.

    opt_state = init(params)
    params, opt_state = update(grads, opt_state, params)

A ``Transform`` has optax's shape, ``update(grads, state, params) -> (updates, state)``; a ``chain`` of
transforms that ends in an ``Optimizer`` is an ``Optimizer``.

Two keywords are optional, and found by name in the function's signature; their meaning is that of
torch's fused kernels.

``grad_scale``
    The gradients are this many times too large. Whoever reads the gradients first, divides: in a
    multiplication that it does anyway, so no pass is spent. Functions without it get a divided tree.
``applied`` (of ``update_``)
    A bool scalar. Where it is False, ``update_`` leaves everything as it was, to the bit. For an
    ``update_`` without it, the step has to read the scalar on the host first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar, cast

import torch
from torch import Tensor

from purestep import tree
from purestep.compiler import Compiler, compiled
from purestep.optim.schedules import SCHEDULER_HINT, is_scheduler
from purestep.types import OptState, Params, Tree


class Init(Protocol):
    """``init(params) -> state``: a tree of tensors, in full from the start, cut off from params that require grad."""

    def __call__(self, params: Params, /) -> OptState: ...


class TransformUpdate(Protocol):
    """``update(grads, state, params) -> (updates, state)``."""

    def __call__(
        self, grads: Tree, state: OptState, params: Params, /, **extra: Any
    ) -> tuple[Tree, OptState]: ...


class OptimizerUpdate(Protocol):
    """``update(grads, opt_state, params) -> (params, opt_state)``."""

    def __call__(
        self, grads: Tree, opt_state: OptState, params: Params, /, **extra: Any
    ) -> tuple[Params, OptState]: ...


class Transform(NamedTuple):
    """Pure functions from gradients to updates. ``updates`` point the way of the gradients: uphill.

    ``update_``, where there is one, is the same to the bit in the buffers of gradients and state, both of
    which it consumes. It runs where kernels may. ``kernels`` and ``compiled`` are those of ``Optimizer``.

    >>> import torch
    >>> halve = Transform(
    ...     init=lambda params: (),
    ...     update=lambda grads, state, params: (tree.map(lambda g: g / 2, grads), state),
    ... )
    >>> halve.update({"w": torch.tensor(4.0)}, (), {"w": torch.tensor(0.0)})
    ({'w': tensor(2.)}, ())
    """

    init: Init
    update: Callable[..., tuple[Tree, OptState]]
    update_: Callable[..., tuple[Tree, OptState]] | None = None
    kernels: bool = False
    compiled: Callable[[bool | Compiler], Callable[..., tuple[Tree, OptState]]] | None = None


class Optimizer(NamedTuple):
    """Pure functions from gradients to new parameters.

    ``update_``, where there is one, is the same step done in place. It consumes all that it is given: state and
    parameters come back in the same buffers, and the gradients may hold anything. ``donate=True`` uses it.

    ``kernels`` says that ``update_`` runs kernels of its own, from which a compiler had better stay away.
    ``compiled(compile)``, where a part of ``update_`` cannot be compiled, is ``update_`` with its other parts compiled
    as ``compile=`` of a step says.

    >>> import torch
    >>> descend = Optimizer(
    ...     init=lambda params: (),
    ...     update=lambda grads, state, params: (tree.map(torch.sub, params, grads), state),
    ... )
    >>> descend.update({"w": torch.tensor(4.0)}, (), {"w": torch.tensor(5.0)})
    ({'w': tensor(1.)}, ())
    """

    init: Init
    update: Callable[..., tuple[Params, OptState]]
    update_: Callable[..., tuple[Params, OptState]] | None = None
    kernels: bool = False
    compiled: Callable[[bool | Compiler], Callable[..., tuple[Params, OptState]]] | None = None


def check_optimizer(wanted: str, value: object) -> None:
    """Refuses what is no Optimizer, and tells how to make one of it."""
    if not isinstance(value, Optimizer):
        kind = value if isinstance(value, type) else type(value)
        raise TypeError(f"{wanted}, got {kind.__name__}: {_way_out(kind)}")


def _way_out(kind: type) -> str:
    if issubclass(kind, Transform):
        return "end the chain with one: ps.optim.chain(transform, ps.optim.descend(lr))"
    if issubclass(kind, torch.optim.Optimizer):
        return f"its algorithm as pure functions is ps.optim.from_torch({kind.__name__}, lr=...)"
    if is_scheduler(kind):
        return f"it {SCHEDULER_HINT}"
    if issubclass(kind, FunctionType):
        return "call it with its settings first, as in ps.optim.adamw(lr)"
    return "a NamedTuple of init(params) and update(grads, opt_state, params)"


Last = TypeVar("Last", bound=Transform | Optimizer)


def chain(*transforms: *tuple[*tuple[Transform, ...], Last]) -> Last:
    """One after the other; the state is the tuple of their states. An Optimizer may only come last.

    >>> from purestep.optim import clip_by_global_norm, sgd
    >>> type(chain(clip_by_global_norm(1.0), sgd(0.1))).__name__
    'Optimizer'
    """
    if not transforms:
        raise ValueError("chain() needs at least one transform")
    for position, part in enumerate(transforms):
        if not isinstance(part, Transform | Optimizer):
            check_optimizer(f"chain: part {position} must be a Transform or an Optimizer", part)
        if isinstance(part, Optimizer) and position < len(transforms) - 1:
            raise TypeError(
                f"chain: part {position} of {len(transforms)} is an Optimizer, which turns gradients "
                "into parameters; nothing can follow it, so put it last"
            )
    parts = cast("tuple[Transform | Optimizer, ...]", transforms)

    def init(params: Params) -> OptState:
        return tuple(part.init(params) for part in parts)

    def states_of(grads: Tree, state: OptState, params: Params) -> tuple[OptState, ...]:
        if not isinstance(state, tuple) or len(state) != len(transforms):
            refuse(init, grads, state, params)
        return state

    def update(
        grads: Tree, state: OptState, params: Params, *, grad_scale: Tensor | None = None
    ) -> tuple[Tree, OptState]:
        states: list[OptState] = []
        for part, old in zip(parts, states_of(grads, state, params), strict=True):
            grads, new = with_grad_scale(part.update)(grads, old, params, grad_scale=grad_scale)
            states.append(new)
            grad_scale = None  # whoever reads the gradients first has divided them
        return grads, tuple(states)

    def in_turn(updates_: Sequence[Callable[..., Any]]) -> Callable[..., tuple[Tree, OptState]]:
        def update_(
            grads: Tree,
            state: OptState,
            params: Params,
            *,
            grad_scale: Tensor | None = None,
            applied: Tensor | None = None,
        ) -> tuple[Tree, OptState]:
            states: list[OptState] = []
            for part_, old in zip(updates_, states_of(grads, state, params), strict=True):
                grads, new = part_(grads, old, params, grad_scale=grad_scale, applied=applied)
                states.append(new)
                grad_scale = None
            return grads, tuple(states)

        return update_

    return composed(type(transforms[-1]), init, update, parts, in_turn)


def composed(
    kind: type[Last],
    init: Init,
    update: Callable[..., tuple[Tree, OptState]],
    parts: Sequence[Transform | Optimizer],
    combine: Callable[[Sequence[Callable[..., Any]]], Callable[..., tuple[Tree, OptState]]],
) -> Last:
    """An Optimizer or Transform made of parts, whose ``update_`` is ``combine`` of theirs.

    A compiler gets it whole, and part by part where one of the parts cannot be compiled.
    """

    def part_by_part(compile: bool | Compiler) -> Callable[..., tuple[Tree, OptState]]:
        return combine([compiled_(part, compile) for part in parts])

    return kind(
        init,
        update,
        combine([guarded(part) for part in parts]),
        all(part.kernels for part in parts),
        part_by_part if any(part.compiled for part in parts) else None,
    )


def compiled_(
    part: Transform | Optimizer, compile: bool | Compiler
) -> Callable[..., tuple[Tree, OptState]]:
    """The part's ``guarded`` ``update_``, compiled but for kernels."""
    if compile is False or part.kernels:
        return guarded(part)
    if part.compiled is None:
        return compiled(guarded(part), compile)
    return guarded(part._replace(update_=part.compiled(compile)))


def leaf_columns(
    init: Init, state_type: type, slots: Sequence[str], grads: Tree, state: Any, params: Params
) -> tuple[list[list[Tensor]], tree.Structure]:
    """The leaves of params, of gradients and of those fields of the state that are trees like them.

    Refuses what does not belong together: kernels would not ask, and plain arithmetic would broadcast or
    round.
    """
    if not isinstance(state, state_type):
        refuse(init, grads, state, params)
    ours, structure = tree.flatten(params)
    shapes = [leaf.shape for leaf in ours]
    columns = [ours]
    for value in (grads, *(getattr(state, slot) for slot in slots)):
        column, own = tree.flatten(value)
        if own != structure or [leaf.shape for leaf in column] != shapes:
            refuse(init, grads, state, params)
        columns.append(column)
    if any(leaf.dtype not in tree.SUM_DTYPES for column in columns[2:] for leaf in column):
        refuse(init, grads, state, params)
    if len(getattr(state, "decays", ())) not in (0, len(ours)):
        refuse(init, grads, state, params)
    return columns, structure


def refuse(init: Init, grads: Tree, state: OptState, params: Params) -> NoReturn:
    """Says which of them is not like the others."""
    raise ValueError(
        foreign(init, state, params)
        or f"grads are not like params: {tree.difference(grads, params, 'grads')}"
    )


def foreign(init: Init, state: OptState, params: Params) -> str | None:
    """In what a state is none that ``init`` makes of these params; None where it is one."""
    wanted = init(params)
    difference = tree.difference(state, wanted, "opt_state")
    if difference is None:
        return None
    found, expected = (tree.describe(tree.flatten(one)[1]) for one in (state, wanted))
    return (
        f"opt_state was not made by optimizer.init of these params: it is {found}, and {expected} was "
        f"expected; {difference}. Take optimizer.init(params) of this very optimizer"
    )


def takes(function: Callable[..., Any], keyword: str) -> bool:
    """Whether the function takes this optional keyword."""
    if not hasattr(function, "__code__"):
        return keyword in inspect.signature(function).parameters
    # What ``inspect`` would say; but this, a compiler can trace.
    code = function.__code__
    return keyword in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def with_grad_scale(update: Callable[..., Any], *, consumes: bool = False) -> Callable[..., Any]:
    """``update`` with the keyword ``grad_scale``; one that has no use for it gets divided gradients.

    Where it ``consumes`` them anyway, they are divided in their buffers.
    """
    if takes(update, "grad_scale"):
        return update

    def divided(
        grads: Tree,
        state: OptState,
        params: Params,
        *,
        grad_scale: Tensor | None = None,
        **extra: Any,
    ) -> Any:
        def divide(grad: Tensor, scale: Tensor) -> Any:
            # A count does not fit into half precision, and what it would be there divides no better.
            wide = tree.accumulation_dtype(grad.dtype)
            quotient = (grad.to(wide) / scale.to(wide)).to(grad.dtype)
            return tree.overwrite(grad, quotient, None) if consumes else quotient

        if grad_scale is not None:
            grads = tree.map(partial(divide, scale=grad_scale), grads)
        return update(grads, state, params, **extra)

    return divided


def guarded(part: Transform | Optimizer) -> Callable[..., tuple[Tree, OptState]]:
    """The part's ``update_`` with both keywords, whichever it takes itself.

    Without an ``update_``, what ``update`` gives is written over what it replaces. For an ``update_`` without
    ``applied``, the scalar is read on the host.
    """
    update, own = with_grad_scale(part.update, consumes=True), part.update_
    if own is None:

        def overwriting(
            grads: Tree, state: OptState, params: Params, *, applied: Tensor | None, **extra: Any
        ) -> tuple[Tree, OptState]:
            if applied is not None:
                grads = held_back(grads, applied)
            new, after = update(grads, state, params, **extra)
            if isinstance(part, Transform):
                return new, tree.overwrite(state, after, applied)
            written: tuple[Params, OptState] = tree.overwrite(
                (params, state), (new, after), applied
            )
            return written

        return overwriting
    scaled = with_grad_scale(own, consumes=True)
    if takes(own, "applied"):
        return scaled

    def on_host(
        grads: Tree, state: OptState, params: Params, *, applied: Tensor | None, **extra: Any
    ) -> Any:
        if applied is None or bool(applied):
            return scaled(grads, state, params, **extra)
        return (grads if isinstance(part, Transform) else params), state

    return on_host


def held_back(grads: Tree, applied: Tensor) -> Tree:
    """The gradients where the step is taken, and zeros where it is not.

    What is computed from them is finite then, whether it is chosen or not. A derivative needs that: a selection
    sends zeros into the branch that it does not choose, and zero times infinity is NaN.
    """
    return tree.map(lambda grad: torch.where(applied, grad, 0), grads)


def runs_kernels(*values: Tree, devices: Sequence[str] = ("cpu",)) -> bool:
    """Whether kernels that work in place, and that no transform knows, may run on these tensors.

    The one rule for all optimizers: nobody transforms, records or compiles, and the tensors are where the
    kernel is at home.
    """
    if not tree.eager(*values):
        return False
    places = {device for value in values for device in tree.devices(value)}
    return {device.type for device in places} <= {*devices}


def in_place(
    update: Callable[..., tuple[Tree, OptState]],
    columns_of: Callable[[Tree, OptState, Params], tuple[list[list[Tensor]], tree.Structure]],
    kernel: Callable[..., list[Tensor]],
    *captured: Tree,
) -> Callable[..., tuple[Tree, OptState]]:
    """The ``update_`` of a transform: its kernel where one may run, else ``update``.

    Args:
        update: the same in plain arithmetic.
        columns_of: from gradients, state and params, the leaves of those trees that the kernel reads and writes,
            found to fit, and their structure.
        kernel: ``kernel(state, grad_scale, *columns)`` returns the leaves of the updates.
        captured: tensors that the transform was made with, which somebody may differentiate.
    """

    def update_(
        grads: Tree,
        state: OptState,
        params: Params,
        *,
        grad_scale: Tensor | None = None,
        applied: Tensor | None = None,
    ) -> tuple[Tree, OptState]:
        columns, structure = columns_of(grads, state, params)
        if applied is None and runs_kernels(grads, state, params, captured):
            return tree.unflatten(structure, kernel(state, grad_scale, *columns)), state
        if applied is not None and not tree.untransformed(grads, state, params, captured):
            grads = held_back(grads, applied)
        updates, new = update(grads, state, params, grad_scale=grad_scale)
        return updates, tree.overwrite(state, new, applied)

    return update_
