"""Defines an optimizer as two pure functions, and an optional third that works in place.

    opt_state = optimizer.init(params)
    params, opt_state = optimizer.update(grads, opt_state, params)

A ``Transform`` turns gradients into updates, as in optax. A ``chain`` of transforms that ends in an
``Optimizer`` is an ``Optimizer``.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from types import FunctionType
from typing import (
    Any,
    Generic,
    NamedTuple,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
)

import torch
from torch import Tensor

from purestep import tree
from purestep.optim.schedules import (
    PARAMETERS_HINT,
    SCHEDULER_HINT,
    holds_parameters,
    is_scheduler,
)
from purestep.types import OptState, Params, StateT, Tree

Update: TypeAlias = Callable[[Tree, OptState, Params], tuple[Tree, OptState]]
"""``update(grads, state, params)`` returns updates or params, and the new state."""

UpdateInPlace: TypeAlias = Callable[
    [Tree, OptState, Params, Tensor | None], tuple[Tree, OptState]
]
"""``update_(grads, state, params, applied)`` does the same in place; see ``Optimizer``."""


class Init(Protocol):
    """Makes an optimizer's first state: a tree of tensors, with all leaves of later states.

    It shares no memory with the params.
    """

    def __call__(self, params: Params, /) -> OptState: ...


class Transform(NamedTuple):
    """Turns gradients into updates, which ``sgd`` subtracts from the params, by pure functions.

    ``init(params)`` makes the state. ``update(grads, state, params)`` returns the updates and the
    new state.

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
    """Turns gradients into new params by pure functions.

    ``init(params)`` makes the state. ``update(grads, opt_state, params)`` returns new params and
    state, by plain arithmetic that every transform and compiler follows; that of ``from_torch``
    raises ``ValueError`` there. Where optax returns updates to add, these are the params
    themselves.

    ``update_(grads, opt_state, params, applied)`` does the same in place, and is optional. It
    consumes gradients, state and params, and returns params and state in their own buffers. Where
    the bool scalar ``applied`` is False, both stay as they are, to the bit; None means True.

    A step calls ``update_`` only without a transform or compiler, and if params, state and
    gradients require no grad. So it may use any kernel. A hyperparameter, here or earlier in a
    chain, may still require grad: a kernel without a derivative cuts its gradient off.

    >>> import torch
    >>> step_down = Optimizer(
    ...     init=lambda params: (),
    ...     update=lambda grads, state, params: (tree.map(torch.sub, params, grads), state),
    ... )
    >>> step_down.update({"w": torch.tensor(4.0)}, (), {"w": torch.tensor(5.0)})
    ({'w': tensor(1.)}, ())
    """

    init: Callable[[Params], StateT]
    update: Callable[[Tree, StateT, Params], tuple[Params, StateT]]
    update_: UpdateInPlace | None = None

    def __getattr__(self, name: str) -> NoReturn:
        """Raises ``AttributeError``; for ``step`` and the like, it says what to call instead."""
        text = f"a ps.optim.Optimizer has no {name!r}"
        if name in ("step", "zero_grad", "param_groups", "add_param_group"):
            text += (
                ": ps.make_update_step(loss_fn, optimizer) makes the whole update. To keep a loop "
                "with an optimizer of torch.optim, take ps.make_backward"
            )
        raise AttributeError(text, name=name, obj=self)


Arguments = ParamSpec("Arguments")
ResultT = TypeVar("ResultT")

_TORCH_NAMES = {
    "lr": "learning_rate=",
    "betas": "b1= and b2=",
    "params": "optimizer.init(params)",
}


def explain_torch_names(
    make: Callable[Arguments, ResultT],
) -> Callable[Arguments, ResultT]:
    """Wraps a function to raise ``TypeError`` for the keywords ``lr``, ``betas`` and ``params``.

    They are names of ``torch.optim``, and the error says what stands for them here.

    >>> explain_torch_names(lambda learning_rate: learning_rate)(lr=0.1)
    Traceback (most recent call last):
    ...
    TypeError: lr= of torch.optim is learning_rate= here
    """

    @wraps(make)
    def make_or_raise(*args: Arguments.args, **kwargs: Arguments.kwargs) -> ResultT:
        for name, name_here in _TORCH_NAMES.items():
            if name in kwargs:
                text = f"{name}= of torch.optim is {name_here} here"
                if name == "lr" and args and holds_parameters(args[0]):
                    text += f", and an optimizer {PARAMETERS_HINT}"
                raise TypeError(text)
        return make(*args, **kwargs)

    return make_or_raise


TransformOrOptimizer = TypeVar("TransformOrOptimizer", bound=Transform | Optimizer)


def chain(
    *transforms: *tuple[*tuple[Transform, ...], TransformOrOptimizer],
) -> TransformOrOptimizer:
    """Applies transforms one after the other. An Optimizer may come last.

    Each part gets the updates of the one before it as its gradients, and the same params. The
    result is an Optimizer if the last part is one, else a Transform. The state is the tuple of the
    parts' states, and ``update`` raises ``ValueError`` for what is no tuple of this length. Raises
    ``ValueError`` without parts. Raises ``TypeError`` if a part is neither, or an Optimizer is not
    the last.

    >>> from purestep.optim import clip_by_global_norm, sgd
    >>> type(chain(clip_by_global_norm(1.0), sgd(0.1))).__name__
    'Optimizer'
    """
    if not transforms:
        raise ValueError("chain() needs at least one transform")
    _check_chain(transforms)
    parts = cast("tuple[Transform | Optimizer, ...]", transforms)

    def init(params: Params) -> OptState:
        return tuple(part.init(params) for part in parts)

    def chain_updates(updates: Sequence[Any]) -> Any:
        def update(grads: Tree, state: Any, params: Params, *applied: Any) -> Any:
            if not isinstance(state, tuple) or len(state) != len(updates):
                raise_mismatch(init, grads, state, params)
            new_states = []
            for part_update, part_state in zip(updates, state, strict=True):
                grads, new_state = part_update(grads, part_state, params, *applied)
                new_states.append(new_state)
            return grads, tuple(new_states)

        return update

    update = chain_updates([part.update for part in parts])
    update_ = chain_updates([update_in_place(part) for part in parts])
    use_short_names(init, update, update_)
    return type(transforms[-1])(init, update, update_)


def use_short_names(*functions: Any) -> tuple[Any, ...]:
    """Sets the ``__qualname__`` of functions to their ``__name__``, and returns them as a tuple.

    Errors then say ``update``, not ``chain.<locals>.update``.
    """
    for function in functions:
        function.__qualname__ = function.__name__
    return functions


def _check_chain(parts: Sequence[object]) -> None:
    """Raises TypeError unless all parts are Transforms; the last may be an Optimizer."""
    last = len(parts) - 1
    for position, part in enumerate(parts):
        if not isinstance(part, Transform | Optimizer):
            message = f"chain: part {position} must be a Transform or an Optimizer"
            check_optimizer(message, part)
        if isinstance(part, Optimizer) and position != last:
            raise TypeError(
                f"chain: part {position} of {len(parts)} is an Optimizer, which turns "
                "gradients into parameters; nothing can follow it, so put it last"
            )


def update_in_place(part: Transform | Optimizer) -> UpdateInPlace:
    """Returns ``update_`` of a part that has one, else a function that runs ``update_by_copy``."""
    if part.update_ is not None:
        return part.update_

    def update_(
        grads: Tree, state: OptState, params: Params, applied: Tensor | None
    ) -> tuple[Tree, OptState]:
        return update_by_copy(part, grads, state, params, applied)

    return update_


def update_by_copy(
    part: Transform | Optimizer,
    grads: Tree,
    state: OptState,
    params: Params,
    applied: Tensor | None,
) -> tuple[Tree, OptState]:
    """Runs ``update``, and copies the new state and an Optimizer's new params over the old ones.

    Returns the params, or a Transform's updates, and the state. The updates are not copied over the
    gradients. Where ``applied`` is False, ``update`` gets gradients of zero, and state and params
    keep their values; None means True. If autograd follows the values, nothing is written,
    and leaves that change are new tensors. For values that a transform follows, torch raises
    NotImplementedError. Raises ValueError if ``update`` changes containers, shapes or dtypes of
    what is copied.
    """
    if applied is not None:
        grads = mask_grads(grads, applied)
    is_transform = isinstance(part, Transform)
    old = (grads if is_transform else params, state)
    old_leaves = tree.leaves(old)
    results = part.update(grads, state, params)
    new_first, new_state = _clone_views_of(old_leaves, results)
    if is_transform:
        return new_first, tree.copy_(state, new_state, applied)
    written = tree.copy_(old, (new_first, new_state), applied)
    return cast("tuple[Params, OptState]", written)


def _clone_views_of(old_leaves: Sequence[Tensor], results: Tree) -> Tree:
    """Returns the results, with clones of those that share memory with an old leaf.

    A result that is the old leaf at the same position stays.

    An ``update`` that swaps two leaves of the state returns both: a copy over the first would
    change the second before it is read.
    """
    storages = {leaf.untyped_storage() for leaf in old_leaves}
    leaves, structure = tree.flatten(results)
    for position, leaf in enumerate(leaves):
        if leaf.untyped_storage() not in storages:
            continue
        is_unchanged = position < len(old_leaves) and leaf is old_leaves[position]
        if not is_unchanged:
            leaves[position] = leaf.clone()
    return tree.unflatten(structure, leaves)


def mask_grads(grads: Tree, applied: Tensor) -> Tree:
    """Returns the gradients if the scalar ``applied`` is True, else zeros, as new tensors.

    From zeros an optimizer computes finite values, unless it divides by them, as Adam does if
    ``eps`` is 0. Derivatives need finite values, whether these are selected or not: a selection
    sends zeros into the other branch, and zero times infinity is NaN.
    """
    return tree.map(lambda grad: torch.where(applied, grad, 0), grads)


def check_tensor_params(params: Params) -> None:
    """Raises TypeError unless all leaves of params are tensors, with a hint for modules."""
    _check_tensors(
        "params",
        params,
        hint="optimizer.init takes the tree of tensors that loss_fn takes. Of a module, take "
        "params, apply = ps.from_module(module)",
    )


def _check_tensors(name: str, values: Tree, hint: str) -> None:
    for position, leaf in enumerate(tree.leaves(values)):
        if not isinstance(leaf, Tensor):
            path = tree.paths(values, name)[position]
            raise TypeError(
                f"{path} is of type {type(leaf).__name__}, no tensor: {hint}"
            )


def check_optimizer(message: str, value: object) -> None:
    """Raises TypeError unless the value is an Optimizer, with a hint at how to make one of it.

    The error begins with ``message``.
    """
    if isinstance(value, Optimizer):
        return
    cls = value if isinstance(value, type) else type(value)
    raise TypeError(f"{message}, got {cls.__name__}: {_hint_for(cls)}")


def _hint_for(cls: type) -> str:
    """Returns the hint that says how to make an Optimizer of a value of this class."""
    if issubclass(cls, Transform):
        return "end the chain with one: ps.optim.chain(transform, ps.optim.sgd(lr))"
    if issubclass(cls, torch.optim.Optimizer):
        return f"its algorithm as pure functions is ps.optim.from_torch({cls.__name__}, lr=...)"
    if is_scheduler(cls):
        return f"it {SCHEDULER_HINT}"
    if issubclass(cls, FunctionType):
        return "call it with its settings first, as in ps.optim.adamw(lr)"
    return "a NamedTuple of init(params) and update(grads, opt_state, params)"


def raise_mismatch(
    init: Init, grads: Tree, state: OptState, params: Params
) -> NoReturn:
    """Raises the ValueError for arguments that do not fit an update.

    It says whether params are None, or the state, the gradients or a dtype does not fit. It
    calls ``init(params)`` to compare the state, and an error of that call goes through.
    """
    if params is None:
        raise ValueError(
            "this update reads the params: call update(grads, state, params)"
        )
    mismatch = state_mismatch(init, state, params)
    if mismatch is None:
        difference = tree.describe_mismatch(grads, params, "grads")
        mismatch = f"grads are not like params: {difference}"
        if difference is None:
            dtypes = {f"{leaf.dtype}" for leaf in tree.leaves((grads, params))}
            mismatch = (
                f"this optimizer takes real floating-point tensors, not all of {sorted(dtypes)}: "
                "make integers float, and write complex params as two real ones, by "
                "torch.view_as_real"
            )
    raise ValueError(mismatch)


def state_mismatch(init: Init, state: OptState, params: Params) -> str | None:
    """Describes how a state differs from ``init(params)``; returns None if it does not.

    It calls ``init(params)``, and an error of that call goes through. Containers, shapes and
    dtypes are compared. In every leaf, float64, float32, bfloat16 and float16 count as one
    dtype. If only the state has a ``Shard``, the text says that alone. So it does if only
    ``init(params)`` has one, and both states have one type and number of leaves.
    """
    expected = init(params)
    difference = tree.describe_mismatch(state, expected, "opt_state")
    if difference is None:
        return None
    spec = tree.flatten(state)[1]
    expected_spec = tree.flatten(expected)[1]
    is_sharded = bool(tree.shard_specs(spec))
    needs_shards = bool(tree.shard_specs(expected_spec))
    is_alike = spec.type is expected_spec.type
    is_alike = is_alike and spec.num_leaves == expected_spec.num_leaves
    if needs_shards and not is_sharded and is_alike:
        return "params are sharded, and opt_state is not: call optimizer.init after ps.shard"
    if is_sharded and not needs_shards:
        return "opt_state is sharded, and params are not: call optimizer.init(params) of these"
    return (
        "opt_state was not made by optimizer.init of these params: take optimizer.init(params) of "
        f"this very optimizer. {difference}; it is {tree.format_spec(spec):.200}, and "
        f"{tree.format_spec(expected_spec):.200} was expected"
    )


def reraise_with_hint(
    init: Init, state: OptState, params: Params, error: Exception
) -> None:
    """Raises a better error than ``error`` if the state has caused it.

    It is a ValueError for a state that differs from ``init(params)``, and else a TypeError for
    leaves of the state that are no tensors. Otherwise the function returns, and the caller raises
    ``error``.
    """
    mismatch: str | None = None
    # ``init`` may fail as well, and the first error matters more.
    with suppress(Exception):
        mismatch = state_mismatch(init, state, params)
    if mismatch:
        raise ValueError(mismatch) from error
    _check_tensors(
        "opt_state",
        state,
        hint="init and update return trees of tensors, such as torch.tensor(0) for a counter",
    )
