"""An optimizer is two pure functions, and perhaps a third that does the same in place.

    opt_state = optimizer.init(params)
    params, opt_state = optimizer.update(grads, opt_state, params)

A ``Transform`` turns gradients into updates, as in optax. A ``chain`` of transforms that ends in an
``Optimizer`` is an ``Optimizer``.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import (
    Any,
    Generic,
    NamedTuple,
    NoReturn,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
)

import torch
from torch import Tensor

from purestep import tree
from purestep.optim.schedules import SCHEDULER_HINT, is_scheduler
from purestep.types import OptState, Params, StateT, Tree

Update: TypeAlias = Callable[[Tree, OptState, Params], tuple[Tree, OptState]]
"""``update(grads, state, params)`` gives updates or params, and the new state."""

UpdateInPlace: TypeAlias = Callable[
    [Tree, OptState, Params, Tensor | None], tuple[Tree, OptState]
]
"""``update_(grads, state, params, applied)`` is the same in place; see ``Optimizer``."""


class Init(Protocol):
    """``init(params) -> state``: a tree of tensors, complete, detached from params."""

    def __call__(self, params: Params, /) -> OptState: ...


class Transform(NamedTuple):
    """Pure functions from gradients to updates, which have the sign of the gradients.

    ``update_(grads, state, params, applied)`` does the same in place, as in an ``Optimizer``. Its
    updates may use the memory of the gradients, but not that of the state. Where ``applied`` is
    False, the state stays, and the updates may be anything.

    >>> import torch
    >>> halve = Transform(
    ...     init=lambda params: (),
    ...     update=lambda grads, state, params: (tree.map(lambda g: g / 2, grads), state),
    ... )
    >>> halve.update({"w": torch.tensor(4.0)}, (), {"w": torch.tensor(0.0)})
    ({'w': tensor(2.)}, ())
    """

    init: Init
    update: Update
    update_: UpdateInPlace | None = None


class Optimizer(NamedTuple, Generic[StateT]):
    """Pure functions from gradients to new params.

    ``update(grads, opt_state, params)`` is plain arithmetic on tensors, for every transform and
    compiler.

    ``update_(grads, opt_state, params, applied)`` does the same in place, and is optional. It
    consumes gradients, state and params, and returns state and params in their own buffers. Where
    the bool scalar ``applied`` is False, both stay as they are, to the bit; None means True. It
    runs only without a transform, compiler or autograd, so it may use any kernel.

    >>> import torch
    >>> descend = Optimizer(
    ...     init=lambda params: (),
    ...     update=lambda grads, state, params: (tree.map(torch.sub, params, grads), state),
    ... )
    >>> descend.update({"w": torch.tensor(4.0)}, (), {"w": torch.tensor(5.0)})
    ({'w': tensor(1.)}, ())
    """

    init: Callable[[Params], StateT]
    update: Callable[[Tree, StateT, Params], tuple[Params, StateT]]
    update_: UpdateInPlace | None = None


Part = TypeVar("Part", bound=Transform | Optimizer)


def chain(*transforms: *tuple[*tuple[Transform, ...], Part]) -> Part:
    """Applies transforms one after the other. An Optimizer may come last.

    The state is the tuple of their states.

    >>> from purestep.optim import clip_by_global_norm, sgd
    >>> type(chain(clip_by_global_norm(1.0), sgd(0.1))).__name__
    'Optimizer'
    """
    if not transforms:
        raise ValueError("chain() needs at least one transform")
    for position, part in enumerate(transforms):
        if not isinstance(part, Transform | Optimizer):
            check_optimizer(
                f"chain: part {position} must be a Transform or an Optimizer", part
            )
        if isinstance(part, Optimizer) and position < len(transforms) - 1:
            raise TypeError(
                f"chain: part {position} of {len(transforms)} is an Optimizer, which turns "
                "gradients into parameters; nothing can follow it, so put it last"
            )
    parts = cast("tuple[Transform | Optimizer, ...]", transforms)

    def init(params: Params) -> OptState:
        return tuple(part.init(params) for part in parts)

    def in_turn(
        updates: Any, grads: Tree, state: Any, params: Params, *applied: Any
    ) -> Any:
        if not isinstance(state, tuple) or len(state) != len(parts):
            raise_mismatch(init, grads, state, params)
        states = []
        for update, old in zip(updates, state, strict=True):
            grads, new = update(grads, old, params, *applied)
            states.append(new)
        return grads, tuple(states)

    in_turn.__qualname__ = "update"  # as errors name it
    return type(transforms[-1])(
        init,
        partial(in_turn, [part.update for part in parts]),
        partial(in_turn, [update_in_place(part) for part in parts]),
    )


def update_in_place(part: Transform | Optimizer) -> UpdateInPlace:
    """``update_`` of the part, or its ``update`` written over what it replaces."""
    return part.update_ or partial(update_by_copy, part)


def update_by_copy(
    part: Transform | Optimizer,
    grads: Tree,
    state: OptState,
    params: Params,
    applied: Any,
) -> tuple[Tree, OptState]:
    """What ``update`` gives, written over what it replaces; fresh tensors where it is recorded."""
    if applied is not None:
        grads = mask_grads(grads, applied)
    old = (grads if isinstance(part, Transform) else params, state)
    held = {leaf.untyped_storage() for leaf in tree.leaves(old)}
    before = [id(leaf) for leaf in tree.leaves(old)]
    leaves, structure = tree.flatten(part.update(grads, state, params))
    # What lies in the memory of the old tree would be written over before it is read.
    apart = [
        leaf.clone()
        if leaf.untyped_storage() in held and before[at : at + 1] != [id(leaf)]
        else leaf
        for at, leaf in enumerate(leaves)
    ]
    new, after = tree.unflatten(structure, apart)
    if isinstance(part, Transform):
        return new, tree.copy_(state, after, applied)
    return cast("tuple[Params, OptState]", tree.copy_(old, (new, after), applied))


def mask_grads(grads: Tree, applied: Tensor) -> Tree:
    """The gradients where the step is taken, and zeros where it is not.

    What is computed from them is finite then, whether it is chosen or not. A derivative needs that:
    a selection sends zeros into the other branch, and zero times infinity is NaN.
    """
    return tree.map(lambda grad: torch.where(applied, grad, 0), grads)


def check_params(params: Params) -> None:
    """Refuses what is no tree of tensors, where an optimizer is the first to see it."""
    way_out = "optimizer.init takes the tree of tensors that loss_fn takes. Of a module, take "
    _check_tensors("params", params, way_out + "params, apply = ps.from_module(module)")


def _check_tensors(name: str, of: Tree, way_out: str) -> None:
    for position, leaf in enumerate(tree.leaves(of)):
        if not isinstance(leaf, Tensor):
            path = tree.paths(of, name)[position]
            raise TypeError(
                f"{path} is of type {type(leaf).__name__}, no tensor: {way_out}"
            )


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


def raise_mismatch(
    init: Init, grads: Tree, state: OptState, params: Params
) -> NoReturn:
    """Says which of them is not like the others."""
    if params is None:
        raise ValueError(
            "this update reads the params: call update(grads, state, params)"
        )
    raise ValueError(
        state_mismatch(init, state, params)
        or f"grads are not like params: {tree.describe_mismatch(grads, params, 'grads')}"
    )


def state_mismatch(init: Init, state: OptState, params: Params) -> str | None:
    """In what a state is none that ``init`` makes of these params; None where it is one."""
    wanted = init(params)
    difference = tree.describe_mismatch(state, wanted, "opt_state")
    if difference is None:
        return None
    found, expected = (
        tree.format_spec(tree.flatten(one)[1]) for one in (state, wanted)
    )
    return (
        "opt_state was not made by optimizer.init of these params: take optimizer.init(params) of "
        f"this very optimizer. {difference}; it is {found:.200}, and {expected:.200} was expected"
    )


def reraise_with_hint(
    init: Init, state: OptState, params: Params, error: Exception
) -> None:
    """Raises a better error where the state is none of this optimizer's, or holds no tensors."""
    mismatch: str | None = None
    with suppress(Exception):  # What went wrong first is what matters.
        mismatch = state_mismatch(init, state, params)
    if mismatch:
        raise ValueError(mismatch) from error
    way_out = (
        "init and update return trees of tensors, such as torch.tensor(0) for a counter"
    )
    _check_tensors("opt_state", state, way_out)
