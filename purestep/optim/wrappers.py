"""Wraps optimizers, and adds a wider or slower copy of the params to their state."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from purestep import tree
from purestep.optim.arithmetic import Arithmetic, Number
from purestep.optim.base import (
    Optimizer,
    Transform,
    check_optimizer,
    check_tensor_params,
    raise_mismatch,
    update_in_place,
)
from purestep.optim.elementwise import Formula, Results, elementwise, flatten_alike
from purestep.types import OptState, Params, State, Tree


class MasterState(NamedTuple):
    """Holds the params, at least in float32, and the state of the inner optimizer.

    >>> import torch
    >>> from purestep.optim import sgd
    >>> master_weights(sgd(0.1)).init(torch.ones((), dtype=torch.bfloat16)).master
    tensor(1.)
    """

    master: Params
    inner: OptState


def master_weights(optimizer: Optimizer) -> Optimizer[State]:
    """Wraps an optimizer to update a copy of the params in float32 at least, and return it rounded.

        m ← optimizer(g, m),    θ ← m rounded to the dtype of θ

    The state is a ``MasterState``. Raises ``TypeError`` unless ``optimizer`` is an Optimizer.

    bfloat16 has eight significant bits, so it loses every step of less than 1/512 of a parameter.
    An update does not read the values of its ``params``: to change them, change
    ``opt_state.master``.

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
        master = copy_wide(params)
        return MasterState(master, optimizer.init(master))

    inner_update_ = update_in_place(optimizer)

    def widen_to_master(grads: Tree, opt_state: Any, params: Params) -> Tree:
        """Casts gradients to the dtypes of the master params.

        Raises ValueError unless the arguments fit together.
        """
        inputs = None
        if isinstance(opt_state, MasterState):
            inputs = flatten_alike(grads, params, opt_state.master)
        if inputs is None:
            raise_mismatch(init, grads, opt_state, params)
        grad_leaves, _, master = inputs.columns
        wide_grads = []
        for grad, param in zip(grad_leaves, master, strict=True):
            wide_grads.append(grad.to(param.dtype))
        return tree.unflatten(inputs.spec, wide_grads)

    def update(grads: Tree, opt_state: Any, params: Params) -> tuple[Params, OptState]:
        grads = widen_to_master(grads, opt_state, params)
        master, inner = optimizer.update(grads, opt_state.inner, opt_state.master)
        rounded = tree.map(
            lambda param, m: m.to(param.dtype, copy=True), params, master
        )
        return rounded, MasterState(master, inner)

    def update_(
        grads: Tree, opt_state: Any, params: Params, applied: Tensor | None
    ) -> tuple[Params, OptState]:
        grads = widen_to_master(grads, opt_state, params)
        master, inner = inner_update_(grads, opt_state.inner, opt_state.master, applied)
        params, _ = round_over_params_(master, (), params, applied)
        return params, MasterState(master, inner)

    return Optimizer(init, update, update_)


def replace_params(ops: Arithmetic, step: None) -> Formula:
    """Returns a formula that returns its first argument, new params instead of gradients."""

    def formula(replacements: Any, params: Any) -> Results:
        return (replacements,)

    return formula


round_over_params_ = update_in_place(elementwise(Optimizer, tuple, [], replace_params))
"""Writes a tree over the params, rounded to their dtypes."""


def copy_wide(params: Params) -> Params:
    """Copies the params to float32 at least, in new memory; detaches them outside of any transform.

    Raises TypeError unless their leaves are tensors.
    """
    check_tensor_params(params)
    detaches = tree.can_write()

    def copy(param: Tensor) -> Tensor:
        if detaches:
            param = param.detach()
        dtype = tree.accumulation_dtype(param.dtype)
        return param.to(dtype, copy=True)

    return tree.map(copy, params)


class EmaState(NamedTuple):
    """Holds the decaying mean of the params, in float32 at least, and the inner optimizer's state.

    >>> import torch
    >>> from purestep.optim import sgd
    >>> ema(sgd(0.1), 0.5).init(torch.tensor(1.0)).average
    tensor(1.)
    """

    average: Params
    inner: OptState


class AverageState(NamedTuple):
    """Holds the mean of the params alone: the state of the transform that updates it."""

    average: Params


def ema(optimizer: Optimizer, decay: float | Tensor) -> Optimizer[State]:
    """Adds a decaying mean of the params to the optimizer's state [Polyak and Juditsky, 1992].

        θ ← optimizer(g, θ),    a ← decay · a + (1 − decay) · θ

    The mean starts at the params, and moves at each update that is applied. So a skipped step, or
    one without tokens, leaves it. It shares no memory with params, and checkpoints hold it.
    Evaluate ``opt_state.average``, cast to the params' dtype if that is half precision. Raises
    ``TypeError`` unless ``optimizer`` is an Optimizer. Raises ``ValueError`` for a ``decay`` that
    is a number and not from 0 to 1.

    Put it around a chain, not into it: the mean is then ``opt_state.average``. Around
    ``master_weights`` it is the mean of the rounded params. Inside, it is that of the
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
        return EmaState(copy_wide(params), optimizer.init(params))

    def move_average(ops: Arithmetic, step: None, decay: Number) -> Formula:
        def formula(params: Any, _: Any, average: Any) -> Results:
            wide_params = ops.cast(params, average)
            average = ops.lerp(average, wide_params, 1 - decay)
            return params, average

        return formula

    averaging: Transform = elementwise(
        Transform, AverageState, [decay], move_average, reads_params=False
    )

    def average_after(
        inner_update: Callable[..., Any], update_average: Callable[..., Any]
    ) -> Any:
        def update(
            grads: Tree, opt_state: Any, params: Params, *applied: Any
        ) -> tuple[Params, OptState]:
            inputs = None
            if isinstance(opt_state, EmaState):
                inputs = flatten_alike(grads, params, opt_state.average)
            if inputs is None:
                raise_mismatch(init, grads, opt_state, params)
            params, inner = inner_update(grads, opt_state.inner, params, *applied)
            average_state = AverageState(opt_state.average)
            _, new_state = update_average(params, average_state, None, *applied)
            return params, EmaState(new_state.average, inner)

        return update

    return Optimizer(
        init,
        average_after(optimizer.update, averaging.update),
        average_after(update_in_place(optimizer), update_in_place(averaging)),
    )
