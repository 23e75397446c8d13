"""The decaying mean of the parameters, which often evaluates better than they do."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep import tree
from purestep.optim.base import Optimizer, check_optimizer, in_place, refuse, written
from purestep.optim.leafwise import alike, number
from purestep.optim.master import wide_copy
from purestep.types import OptState, Params, State, Tree


class EmaState(NamedTuple):
    """The mean of the params, in float32 at least, and the state of the optimizer that moves them.

    >>> from purestep.optim import sgd
    >>> ema(sgd(0.1), 0.5).init(torch.tensor(1.0)).average
    tensor(1.)
    """

    average: Params
    inner: OptState


def ema(optimizer: Optimizer, decay: float | Tensor) -> Optimizer[State]:
    """The optimizer, with a decaying mean of the params in its state [Polyak and Juditsky, 1992].

        θ ← optimizer(g, θ),    a ← decay · a + (1 − decay) · θ

    The mean starts at the params. It moves when they move, so never by a step that is skipped or
    has no tokens. It shares no memory with them, also where the state is donated, and goes into a
    checkpoint with the rest. ``opt_state.average`` is what to evaluate, cast to the params' dtype
    where that is half precision.

    Around ``master_weights`` it is the mean of the rounded params; inside, of the float32 ones.

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

    def averaged(update: Any, grads: Tree, opt_state: Any, params: Params, *applied: Any) -> Any:
        if not isinstance(opt_state, EmaState) or not alike(grads, params, opt_state.average):
            refuse(init, grads, opt_state, params)
        moved, inner = update(grads, opt_state.inner, params, *applied)

        def nearer(mean: Tensor, param: Tensor) -> Tensor:
            new = torch.lerp(mean, param.to(mean.dtype), number(1 - decay, mean))
            return written(mean, new, *applied) if applied else new

        return moved, EmaState(tree.map(nearer, opt_state.average, moved), inner)

    return Optimizer(
        init, partial(averaged, optimizer.update), partial(averaged, in_place(optimizer))
    )
