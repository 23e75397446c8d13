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
from collections.abc import Callable
from functools import partial
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
            raise TypeError(f"chain: part {position} is a {type(part).__name__}, not a Transform")
        if isinstance(part, Optimizer) and position < len(transforms) - 1:
            raise TypeError(
                f"chain: part {position} of {len(transforms)} is an Optimizer, which turns gradients "
                "into parameters; nothing can follow it, so put it last"
            )
    leading: tuple[Transform, ...] = transforms[:-1]
    last: Transform | Optimizer = transforms[-1]

    def init(params: Params) -> OptState:
        return tuple(part.init(params) for part in (*leading, last))

    def lead(
        grads: Tree, state: OptState, params: Params, grad_scale: Tensor | None
    ) -> tuple[Tree, tuple[OptState, ...], Tensor | None]:
        states: list[OptState] = []
        for part, old in zip(leading, _states(state, len(leading) + 1), strict=False):
            grads, new = with_grad_scale(part.update)(grads, old, params, grad_scale=grad_scale)
            states.append(new)
            grad_scale = None  # whoever reads the gradients first has divided them
        return grads, tuple(states), grad_scale

    def update(
        grads: Tree, state: OptState, params: Params, *, grad_scale: Tensor | None = None
    ) -> tuple[Tree, OptState]:
        updates, states, left = lead(grads, state, params, grad_scale)
        result, new = with_grad_scale(last.update)(updates, state[-1], params, grad_scale=left)
        return result, (*states, new)

    if isinstance(last, Transform):
        return cast("Last", cast("Any", Transform(init, update)))
    last_update_ = guarded(last)

    def update_(
        grads: Tree,
        state: OptState,
        params: Params,
        *,
        grad_scale: Tensor | None = None,
        applied: Tensor | None = None,
    ) -> tuple[Params, OptState]:
        updates, states, left = lead(grads, state, params, grad_scale)
        tree.overwrite(state[:-1], states, applied)
        params, new = last_update_(updates, state[-1], params, grad_scale=left, applied=applied)
        return params, (*state[:-1], new)

    return cast("Last", cast("Any", Optimizer(init, update, update_)))


def _states(state: OptState, count: int) -> tuple[OptState, ...]:
    if not isinstance(state, tuple) or len(state) != count:
        found = tree.describe(tree.flatten(state)[1])
        raise ValueError(
            f"this chain of {count} has a tuple of {count} states, but opt_state is {found}: take "
            "optimizer.init(params) of this very optimizer"
        )
    return state


def takes(function: Callable[..., Any], keyword: str) -> bool:
    """Whether the function takes this optional keyword."""
    if not hasattr(function, "__code__"):
        return keyword in inspect.signature(function).parameters
    # What ``inspect`` would say; but this, a compiler can trace.
    code = function.__code__
    return keyword in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def with_grad_scale(update: Callable[..., Any]) -> Callable[..., Any]:
    """``update`` with the keyword ``grad_scale``; one that has no use for it gets divided gradients."""
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
        if grad_scale is not None:
            grads = tree.map(lambda grad: (grad / grad_scale).to(grad.dtype), grads)
        return update(grads, state, params, **extra)

    return divided


def guarded(optimizer: Optimizer) -> Callable[..., tuple[Params, OptState]]:
    """The optimizer's ``update_`` with both keywords, whichever it takes itself.

    Without an ``update_``, what ``update`` gives is written over what it replaces. For an ``update_`` without
    ``applied``, the scalar is read on the host.
    """
    own = optimizer.update_
    if own is None:
        update = with_grad_scale(optimizer.update)

        def overwriting(
            grads: Tree, state: OptState, params: Params, *, applied: Tensor | None, **extra: Any
        ) -> Any:
            return tree.overwrite((params, state), update(grads, state, params, **extra), applied)

        return overwriting
    scaled = with_grad_scale(own)
    if takes(own, "applied"):
        return scaled

    def on_host(
        grads: Tree, state: OptState, params: Params, *, applied: Tensor | None, **extra: Any
    ) -> Any:
        wanted = applied is None or bool(applied)
        return scaled(grads, state, params, **extra) if wanted else (params, state)

    return on_host


def runs_kernels(*values: Tree) -> bool:
    """Whether kernels that work in place, and that no transform knows, may run on these tensors.

    The one rule for all optimizers: nobody transforms, records or compiles, and scalars can be read here
    without waiting for a device.
    """
    if torch.compiler.is_compiling() or not tree.untransformed(*values):
        return False
    leaves = (leaf for value in values for leaf in tree.leaves_of(value))
    return all(leaf.device.type == "cpu" for leaf in leaves if isinstance(leaf, Tensor))


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

    Where nobody transforms, ``update_`` does it in place: on the buffers that come in, with ``donate``, and
    else on one copy of them. Under a transform the old state is still needed, and the choice is a
    selection, never a multiplication, so that nothing non-finite passes through it.
    """
    update = with_grad_scale(optimizer.update)
    update_ = guarded(optimizer)
    copies = not donate and optimizer.update_ is not None

    def transit(
        grads: Tree,
        opt_state: OptState,
        params: Params,
        /,
        *,
        grad_scale: Tensor | None,
        applied: Tensor,
    ) -> tuple[Params, OptState]:
        compiling = torch.compiler.is_compiling()
        in_place = donate or (copies and not compiling)
        if not in_place or not tree.untransformed(grads, opt_state, params):
            moved = partial(update, grads, opt_state, params, grad_scale=grad_scale)
            selected = tree.select(applied, moved(), (params, opt_state))
            return cast("tuple[Params, OptState]", selected)
        if copies:
            params, opt_state = tree.map(torch.clone, (params, opt_state))
        elif not compiling:
            _check_buffers((params, opt_state))
        if compiling or applied.device.type != "cpu":
            return update_(grads, opt_state, params, grad_scale=grad_scale, applied=applied)
        # The host knows already whether the step is taken, so nothing has to be selected.
        if not applied:
            return params, opt_state
        return update_(grads, opt_state, params, grad_scale=grad_scale, applied=None)

    return transit


def _check_buffers(state: Tree) -> None:
    """Refuses a buffer that is given away twice: one of its owners would find the other's values."""
    owners: dict[int, int] = {}
    for position, leaf in enumerate(tree.leaves_of(state)):
        if isinstance(leaf, Tensor) and leaf.numel():
            first = owners.setdefault(leaf.data_ptr(), position)
            if first != position:
                names = tree.paths(state, "(params, opt_state)")
                raise ValueError(
                    f"donate=True needs a buffer for each leaf, but {names[first]} and "
                    f"{names[position]} share one: clone one of them, or tie them inside loss_fn"
                )
