"""An optimizer is a NamedTuple of pure functions.

    opt_state = optimizer.init(params)
    params, opt_state = optimizer.update(grads, opt_state, params)

A ``Transform`` turns gradients into updates, as in optax: ``update(grads, state, params) -> (updates, state)``. A
``chain`` of transforms that ends in an ``Optimizer`` is an ``Optimizer``.

``update_`` is the same step in place, and optional: all have ``update``. Two keywords are optional, too. Their meaning
is that of torch's fused kernels. A function gets those that the field ``takes`` names:

``grad_scale``
    The gradients are this many times too large. The first function that reads them divides them, in a
    multiplication that it does anyway, so this costs no pass. A function that does not take it gets divided gradients.
``applied`` (of ``update_``)
    A bool scalar. Where it is False, ``update_`` leaves params and state as they were, to the bit. An ``update_`` that
    takes it has to see for itself whether it may write: under a transform, or where leaves require grad, it returns
    fresh tensors. An ``update_`` that does not take it is only called where it may write, after the host has read
    the scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice
from types import FunctionType
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from purestep import tree
from purestep.compiler import Compiler, compiled
from purestep.form import Flat, Form, forms_within
from purestep.optim.schedules import SCHEDULER_HINT, is_scheduler
from purestep.types import OptState, Params, Tree

Update: TypeAlias = Callable[..., tuple[Tree, OptState]]
"""``update(grads, state, params)``, with the keywords that it takes, gives updates or params, and the new state."""

OnLeaves: TypeAlias = Callable[..., tuple[list[Tensor], list[Tensor]]]
"""``update_`` of what has been flattened: the leaves of the gradients, and the state and the params as ``Flat``."""

KEYWORDS = ("grad_scale", "applied")
"""All that an update can take."""


class Init(Protocol):
    """``init(params) -> state``: a tree of tensors, in full from the start, cut off from params that require grad."""

    def __call__(self, params: Params, /) -> OptState: ...


class Transform(NamedTuple):
    """Pure functions from gradients to updates, which point the way of the gradients: uphill.

    ``update_`` does the same in the buffers of gradients and state, both of which it consumes, and gives updates in
    memory that is not the state's. The other fields are those of ``Optimizer``.

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
    update_: Update | None = None
    kernels: bool = False
    compiled: Callable[[bool | Compiler], Update] | None = None
    takes: Collection[str] = ()
    on_leaves: Callable[[Update | None, Form, Form], OnLeaves | None] | None = None


class Optimizer(NamedTuple):
    """Pure functions from gradients to new parameters.

    ``update_`` consumes all that it is given: state and parameters come back in the same buffers, and the gradients
    may hold anything. ``donate=True`` uses it.

    ``kernels`` says that ``update_`` runs kernels of its own, from which a compiler had better stay away.
    ``compiled(compile)``, where a part of ``update_`` cannot be compiled, is ``update_`` with its other parts compiled
    as ``compile=`` of a step says.
    ``takes`` names the optional keywords, ``"grad_scale"`` and ``"applied"``. What it does not name is never passed:
    that is right and only slower.
    ``on_leaves(update_, params, state)``, from the forms of params and state, is the same ``update_`` of lists of leaves, with
    all keywords. It gives None where these do not belong together, and where ``update_`` was replaced.

    >>> import torch
    >>> descend = Optimizer(
    ...     init=lambda params: (),
    ...     update=lambda grads, state, params: (tree.map(torch.sub, params, grads), state),
    ... )
    >>> descend.update({"w": torch.tensor(4.0)}, (), {"w": torch.tensor(5.0)})
    ({'w': tensor(1.)}, ())
    """

    init: Init
    update: Update
    update_: Update | None = None
    kernels: bool = False
    compiled: Callable[[bool | Compiler], Update] | None = None
    takes: Collection[str] = ()
    on_leaves: Callable[[Update | None, Form, Form], OnLeaves | None] | None = None


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

    def in_turn(updates: Sequence[Update], in_place: bool) -> Update:
        def update(
            grads: Tree, state: OptState, params: Params, **how: Any
        ) -> tuple[Tree, OptState]:
            if not isinstance(state, tuple) or len(state) != len(parts):
                refuse(init, grads, state, params)
            states: list[OptState] = []
            for part, old in zip(updates, state, strict=True):
                grads, new = part(grads, old, params, **how)
                states.append(new)
                how = {**how, "grad_scale": None}  # The first part has divided the gradients.
            return grads, tuple(states)

        return update

    def on_leaves(params: Form, state: Form) -> OnLeaves | None:
        inner = forms_within(state)
        if not issubclass(state.structure.type or object, tuple) or len(inner) != len(parts):
            return None
        found = [on_leaves_of(part, params, form) for part, form in zip(parts, inner, strict=True)]
        each = [at for at in found if at is not None]
        return partial(in_their_turn, each, inner) if len(each) == len(parts) else None

    def in_their_turn(
        each: Sequence[OnLeaves],
        inner: Sequence[Form],
        grads: list[Tensor],
        state: Flat,
        params: Flat,
        **how: Any,
    ) -> tuple[list[Tensor], list[Tensor]]:
        rest, after = iter(state.leaves), list[Tensor]()
        structures = state.structure.children()
        for update, form, structure in zip(each, inner, structures, strict=True):
            old = Flat([*islice(rest, len(form.kinds))], structure, form)
            grads, new = update(grads, old, params, **how)
            after += new
            how = {**how, "grad_scale": None}
        return grads, after

    return composed(type(transforms[-1]), init, parts, in_turn, on_leaves)


def composed(
    kind: type[Last],
    init: Init,
    parts: Collection[Transform | Optimizer],
    combine: Callable[[Sequence[Update], bool], Update],
    on_leaves: Callable[[Form, Form], OnLeaves | None] = lambda params, state: None,
) -> Last:
    """An Optimizer or Transform made of parts: ``combine(updates, in_place)`` makes one update of theirs.

    A compiler gets ``update_`` whole, and part by part where one of the parts cannot be compiled.
    """
    update = combine([with_grad_scale(part.update, part.takes) for part in parts], False)

    def made(updates_: Sequence[Update]) -> Update:
        in_place = combine(updates_, True)

        def update_(
            grads: Tree, state: OptState, params: Params, **how: Any
        ) -> tuple[Tree, OptState]:
            if not tree.untransformed(grads, state, params):
                return selected(kind, update, grads, state, params, **how)
            return in_place(grads, state, params, **how)

        return update_

    def part_by_part(compile: bool | Compiler) -> Update:
        return made([compiled_(part, compile) for part in parts])

    update_ = made([guarded(part) for part in parts])

    def own_on_leaves(given: Update | None, params: Form, state: Form) -> OnLeaves | None:
        return on_leaves(params, state) if given is update_ else None

    return kind(
        init,
        update,
        update_,
        all(part.kernels for part in parts),
        part_by_part if any(part.compiled for part in parts) else None,
        KEYWORDS,
        own_on_leaves,
    )


def on_leaves_of(part: Transform | Optimizer, params: Form, state: Form) -> OnLeaves | None:
    """The part's ``update_`` of lists of leaves, where it has one for these forms."""
    return None if part.on_leaves is None else part.on_leaves(part.update_, params, state)


def compiled_(part: Transform | Optimizer, compile: bool | Compiler) -> Update:
    """The part's ``guarded`` ``update_``, compiled but for kernels."""
    if compile is False or part.kernels:
        return guarded(part)
    if part.compiled is None:
        return compiled(guarded(part), compile)
    return guarded(part._replace(update_=part.compiled(compile)))


def with_grad_scale(update: Update, takes: Collection[str], *, consumes: bool = False) -> Update:
    """``update`` with the keyword ``grad_scale``; one that does not take it gets divided gradients.

    Where it ``consumes`` them anyway, they are divided in their buffers.
    """
    if "grad_scale" in takes:
        return update

    def of_quotients(
        grads: Tree,
        state: OptState,
        params: Params,
        *,
        grad_scale: Tensor | None = None,
        **how: Any,
    ) -> tuple[Tree, OptState]:
        def divide(grad: Tensor, scale: Tensor) -> Any:
            # A count does not fit into half precision, and what it would be there divides no better.
            wide = tree.accumulation_dtype(grad.dtype)
            quotient = (grad.to(wide) / scale.to(wide)).to(grad.dtype)
            return written(grad, quotient, None) if consumes else quotient

        if grad_scale is not None:
            grads = tree.map(partial(divide, scale=grad_scale), grads)
        return update(grads, state, params, **how)

    return of_quotients


def guarded(part: Transform | Optimizer) -> Update:
    """The part's ``update_`` with both keywords, whichever it takes itself.

    Without an ``update_``, what ``update`` gives is written over what it replaces. For an ``update_`` that does not take
    ``applied``, the scalar is read on the host.
    """
    kind = type(part)
    pure = with_grad_scale(part.update, part.takes)
    update = with_grad_scale(part.update_ or part.update, part.takes, consumes=True)
    if part.update_ is not None and "applied" in part.takes:
        return update

    def update_(
        grads: Tree,
        state: OptState,
        params: Params,
        *,
        grad_scale: Tensor | None = None,
        applied: Tensor | None = None,
    ) -> tuple[Tree, OptState]:
        if not tree.untransformed(grads, state, params):
            return selected(
                kind, pure, grads, state, params, grad_scale=grad_scale, applied=applied
            )
        if part.update_ is not None:
            if applied is None or bool(applied):
                return update(grads, state, params, grad_scale=grad_scale)
            return (grads if kind is Transform else params), state
        if applied is not None:
            grads = held_back(grads, applied)
        new, after = update(grads, state, params, grad_scale=grad_scale)
        if kind is Transform:
            return new, tree.overwrite(state, after, applied)
        moved: tuple[Params, OptState] = tree.overwrite((params, state), (new, after), applied)
        return moved

    return update_


def selected(
    kind: type[Last],
    update: Update,
    grads: Tree,
    state: OptState,
    params: Params,
    *,
    grad_scale: Tensor | None = None,
    applied: Tensor | None = None,
) -> tuple[Tree, OptState]:
    """What ``update`` gives where ``applied`` holds (None: always), and the old values where it does not; in fresh tensors.

    A step that the host knows not to be taken is never computed. Otherwise the choice is a selection, never a
    multiplication, of what was computed from finite gradients, so that nothing non-finite passes through it or
    through its derivative.
    """
    if applied is None:
        return update(grads, state, params, grad_scale=grad_scale)
    old = state if kind is Transform else (params, state)
    known = tree.at_hand(applied)
    if known is not None and not known.any():
        new = tree.map(torch.clone, old)
    else:
        if known is None or not known.all():
            grads = held_back(grads, applied)
        moved = partial(update, grads, state, params, grad_scale=grad_scale)
        if kind is Transform:
            grads, after = moved()
            new = tree.select(applied, after, old)
        else:
            new = tree.select(applied, moved(), old)
    return (grads, new) if kind is Transform else cast("tuple[Params, OptState]", new)


def held_back(grads: Tree, applied: Tensor) -> Tree:
    """The gradients where the step is taken, and zeros where it is not.

    What is computed from them is finite then, whether it is chosen or not. A derivative needs that: a selection
    sends zeros into the branch that it does not choose, and zero times infinity is NaN.
    """
    return tree.map(lambda grad: torch.where(applied, grad, 0), grads)


def written(old: Tensor, new: Tensor, applied: Tensor | None) -> Tensor:
    """``new`` written over ``old`` where ``applied`` holds (None: always); a fresh tensor where ``new`` is recorded."""
    if applied is not None:
        new = torch.where(applied, new, old)
    return new.to(old.dtype) if new.requires_grad else old.copy_(new)


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
