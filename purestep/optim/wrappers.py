"""Optimizers around an optimizer, with a wider or slower copy of the params beside its state."""

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from purestep import tree
from purestep.optim.arithmetic import Arithmetic, Number
from purestep.optim.base import (
    Optimizer,
    Transform,
    check_optimizer,
    check_params,
    raise_mismatch,
    update_in_place,
)
from purestep.optim.elementwise import Formula, elementwise, flatten_alike
from purestep.types import OptState, Params, State, Tree


class MasterState(NamedTuple):
    """The params in float32, and the state of the inner optimizer.

    >>> import torch
    >>> from purestep.optim import sgd
    >>> master_weights(sgd(0.1)).init(torch.ones((), dtype=torch.bfloat16)).master
    tensor(1.)
    """

    master: Params
    inner: OptState


def master_weights(optimizer: Optimizer) -> Optimizer[State]:
    """Runs the optimizer on a float32 copy of the params, which are its rounded values.

        m ← optimizer(g, m),    θ ← m rounded to the dtype of θ

    bfloat16 has eight bits, so it loses every step of less than 1/256 of a parameter.

    Gradients by the initial params flow through ``init``, under the transforms of ``torch.func``.
    Where params only require grad, they stop there: differentiate ``opt_state.master``.

    >>> import torch
    >>> from purestep.optim import sgd
    >>> params = torch.ones((), dtype=torch.bfloat16)
    >>> for optimizer in (sgd(1.0), master_weights(sgd(1.0))):
    ...     moved, opt_state = params, optimizer.init(params)
    ...     for _ in range(8):
    ...         moved, opt_state = optimizer.update(torch.tensor(0.001), opt_state, moved)
    ...     print(moved)
    tensor(1., dtype=torch.bfloat16)
    tensor(0.9922, dtype=torch.bfloat16)
    """
    check_optimizer("master_weights wraps an Optimizer", optimizer)

    def init(params: Params) -> MasterState:
        master = wide_copy(params)
        return MasterState(master, optimizer.init(master))

    def wide_update(
        update: Any, grads: Tree, opt_state: Any, params: Params, *applied: Any
    ) -> tuple[Params, OptState]:
        """Updates the float32 copy."""
        if not isinstance(opt_state, MasterState) or not flatten_alike(
            grads, params, opt_state.master
        ):
            raise_mismatch(init, grads, opt_state, params)
        wide = tree.map(lambda grad, m: grad.to(m.dtype), grads, opt_state.master)
        moved: tuple[Params, OptState] = update(
            wide, opt_state.inner, opt_state.master, *applied
        )
        return moved

    def update(
        grads: Tree, opt_state: OptState, params: Params
    ) -> tuple[Params, OptState]:
        master, inner = wide_update(optimizer.update, grads, opt_state, params)
        rounded = tree.map(
            lambda param, m: m.to(param.dtype, copy=True), params, master
        )
        return rounded, MasterState(master, inner)

    def update_(
        grads: Tree, opt_state: OptState, params: Params, applied: Tensor | None
    ) -> tuple[Params, OptState]:
        master, inner = wide_update(
            update_in_place(optimizer), grads, opt_state, params, applied
        )
        assert rounding.update_ is not None
        params, _ = rounding.update_(master, (), params, applied)
        return params, MasterState(master, inner)

    return Optimizer(init, update, update_)


def replace_params(ops: Arithmetic, step: None) -> Formula:
    """Returns a formula whose new params are what stands in the place of the gradients."""
    return lambda replacements, params: (replacements,)


rounding: Optimizer = elementwise(Optimizer, tuple, [], replace_params)
"""Writes a tree over the params, rounded to their dtypes."""


def wide_copy(params: Params) -> Params:
    """The params in float32 at least, in other memory; detached where only autograd looks on."""
    check_params(params)
    differentiable = not tree.can_write()

    def copied(param: Tensor) -> Tensor:
        param = param if differentiable else param.detach()
        return param.to(tree.accumulation_dtype(param.dtype), copy=True)

    return tree.map(copied, params)


class EmaState(NamedTuple):
    """The mean of the params, at least in float32, and the state of the inner optimizer.

    >>> import torch
    >>> from purestep.optim import sgd
    >>> ema(sgd(0.1), 0.5).init(torch.tensor(1.0)).average
    tensor(1.)
    """

    average: Params
    inner: OptState


class AverageState(NamedTuple):
    """The mean alone, as the state of the transform that moves it."""

    average: Params


def ema(optimizer: Optimizer, decay: float | Tensor) -> Optimizer[State]:
    """Adds a decaying mean of the params to the optimizer's state [Polyak and Juditsky, 1992].

        θ ← optimizer(g, θ),    a ← decay · a + (1 − decay) · θ

    The mean starts at the params, and moves when they move. So a skipped step, or one without
    tokens, leaves it. It shares no memory with params, and checkpoints hold it. Evaluate
    ``opt_state.average``, cast to the params' dtype if that is half precision.

    Around ``master_weights`` it is the mean of the rounded params. Inside, it is that of the
    float32 params.

    >>> import torch
    >>> from purestep.optim import sgd
    >>> optimizer = ema(sgd(1.0), 0.5)
    >>> params = torch.tensor(0.0)
    >>> params, opt_state = optimizer.update(torch.tensor(-4.0), optimizer.init(params), params)
    >>> params, opt_state.average
    (tensor(4.), tensor(2.))
    """
    check_optimizer("ema wraps an Optimizer", optimizer)
    if not isinstance(decay, Tensor) and not 0 <= decay <= 1:
        raise ValueError(f"ema: {decay=} must be from 0 to 1, such as 0.999")

    def init(params: Params) -> EmaState:
        return EmaState(wide_copy(params), optimizer.init(params))

    def move_average(ops: Arithmetic, step: None, decay: Number) -> Formula:
        def formula(moved: Any, _: Any, average: Any) -> tuple[Any, Any]:
            return moved, ops.lerp(average, ops.cast(moved, average), 1 - decay)

        return formula

    averaging = elementwise(
        Transform, AverageState, [decay], move_average, reads_params=False
    )

    def average_after(
        update: Any,
        update_average: Any,
        grads: Tree,
        opt_state: Any,
        params: Params,
        *applied: Any,
    ) -> tuple[Params, OptState]:
        if not isinstance(opt_state, EmaState) or not flatten_alike(
            grads, params, opt_state.average
        ):
            raise_mismatch(init, grads, opt_state, params)
        moved, inner = update(grads, opt_state.inner, params, *applied)
        _, state = update_average(
            moved, AverageState(opt_state.average), None, *applied
        )
        return moved, EmaState(state.average, inner)

    return Optimizer(
        init,
        partial(average_after, optimizer.update, averaging.update),
        partial(average_after, update_in_place(optimizer), averaging.update_),
    )
