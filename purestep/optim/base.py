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

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from purestep import tree
from purestep.types import OptState, Params, Tree


class Init(Protocol):
    """``init(params) -> state``: a tree of tensors, in full from the start, cut off from autograd."""

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


class Optimizer(NamedTuple):
    """Pure functions from gradients to new parameters.

    ``update_``, where there is one, is the same step done in place: it consumes the state and the
    parameters it is given, and returns them. ``donate=True`` uses it.

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


Last = TypeVar("Last", Transform, Optimizer)


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
            raise TypeError(f"chain: part {position} is a {type(part).__name__}, not a Transform")
        if isinstance(part, Optimizer) and part is not transforms[-1]:
            raise TypeError(
                f"chain: part {position} of {len(transforms)} is an Optimizer, which turns gradients "
                "into parameters; nothing can follow it, so put it last"
            )
    parts: tuple[Transform | Optimizer, ...] = transforms
    first, *rest = parts

    def init(params: Params) -> OptState:
        return tuple(part.init(params) for part in parts)

    def update(
        grads: Tree, state: OptState, params: Params, *, grad_scale: Tensor | None = None
    ) -> tuple[Tree, OptState]:
        result, new = with_grad_scale(first.update)(grads, state[0], params, grad_scale=grad_scale)
        states = [new]
        for part, old in zip(rest, state[1:], strict=True):
            result, new = part.update(result, old, params)
            states.append(new)
        return result, tuple(states)

    is_optimizer = isinstance(transforms[-1], Optimizer)
    whole = Optimizer(init, update, in_place(update)) if is_optimizer else Transform(init, update)
    return cast("Last", whole)


def takes(function: Callable[..., Any], keyword: str) -> bool:
    """Whether the function takes this optional keyword."""
    return keyword in inspect.signature(function).parameters


def with_grad_scale(update: Callable[..., Any]) -> Callable[..., Any]:
    """``update`` with the keyword ``grad_scale``; one that has no use for it gets divided gradients."""
    if takes(update, "grad_scale"):
        return update

    @functools.wraps(update)
    def divided(
        grads: Tree, state: OptState, params: Params, *, grad_scale: Tensor | None, **extra: Any
    ) -> Any:
        if grad_scale is not None:
            grads = tree.map(lambda grad: grad / grad_scale, grads)
        return update(grads, state, params, **extra)

    return divided


class Transition(Protocol):
    """The optimizer's update where ``applied`` holds, and the identity where it does not."""

    def __call__(
        self,
        grads: Tree,
        opt_state: OptState,
        params: Params,
        /,
        *,
        grad_scale: Tensor | None,
        applied: Tensor,
    ) -> tuple[Params, OptState]: ...


def transition(optimizer: Optimizer, *, donate: bool) -> Transition:
    """The optimizer's update where ``applied`` holds, and the identity, to the bit, where it does not.

    The choice is a selection, never a multiplication, so that nothing non-finite passes through it. With
    ``donate`` the state that comes in is overwritten; under a transform, or where autograd records, it is
    still needed, and donation is not made use of.
    """
    update = with_grad_scale(optimizer.update)
    update_ = optimizer.update_ or in_place(optimizer.update)
    update_ = with_applied(with_grad_scale(update_))

    def pure(
        grads: Tree,
        opt_state: OptState,
        params: Params,
        /,
        *,
        grad_scale: Tensor | None,
        applied: Tensor,
    ) -> tuple[Params, OptState]:
        state = (params, opt_state)
        return cast(
            "tuple[Params, OptState]",
            tree.select(applied, update(grads, opt_state, params, grad_scale=grad_scale), state),
        )

    def consuming(
        grads: Tree,
        opt_state: OptState,
        params: Params,
        /,
        *,
        grad_scale: Tensor | None,
        applied: Tensor,
    ) -> tuple[Params, OptState]:
        in_use = _is_recorded((grads, opt_state, params))
        return (pure if in_use else update_)(
            grads, opt_state, params, grad_scale=grad_scale, applied=applied
        )

    return consuming if donate else pure


def _is_recorded(values: Tree) -> bool:
    return torch._C._are_functorch_transforms_active() or any(
        leaf.requires_grad for leaf in tree.leaves_of(values)
    )


def with_applied(update_: Callable[..., Any]) -> Callable[..., Any]:
    """``update_`` with the keyword ``applied``; for one without it, the scalar is read on the host."""
    if takes(update_, "applied"):
        return update_

    def guarded(
        grads: Tree, state: OptState, params: Params, *, applied: Tensor, **extra: Any
    ) -> Any:
        return update_(grads, state, params, **extra) if bool(applied) else (params, state)

    return guarded


def in_place(update: Callable[..., tuple[Params, OptState]]) -> Callable[..., Any]:
    """``update_`` of an ``update``: the same values, written over the ones they replace."""

    def update_(
        grads: Tree,
        opt_state: OptState,
        params: Params,
        *,
        grad_scale: Tensor | None = None,
        applied: Tensor | None = None,
    ) -> tuple[Params, OptState]:
        old = (params, opt_state)
        new = with_grad_scale(update)(grads, opt_state, params, grad_scale=grad_scale)
        if applied is not None:
            new = tree.select(applied, new, old)
        return cast("tuple[Params, OptState]", tree.map(Tensor.copy_, old, new))

    return update_
