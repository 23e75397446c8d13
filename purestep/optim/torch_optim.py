"""The algorithms of ``torch.optim`` as pure functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep import tree
from purestep.optim.base import Optimizer, foreign, refuse
from purestep.optim.schedules import LearningRate, check_rate, rate_at
from purestep.pieces import Spread, spread
from purestep.types import OptState, Params, Tree

PURE = {"AdamW": "adamw(lr)", "Adam": "adamw(lr, weight_decay=0)", "SGD": "sgd(lr)"}
"""Namesakes whose arithmetic is plain."""

ELEMENTWISE = [
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]
"""Those of ``torch.optim`` that look at no more of a parameter than one element."""


class TorchState(NamedTuple):
    """Steps taken, on the host, and for each parameter what ``torch.optim`` keeps in its ``state``.

    >>> from_torch(torch.optim.RMSprop, lr=0.1).init({"w": torch.tensor(1.0)}).step
    tensor(0)
    """

    step: Tensor
    leaves: Tree


def from_torch(
    algorithm: type[torch.optim.Optimizer], lr: LearningRate | None = None, **settings: Any
) -> Optimizer:
    """Any ``torch.optim`` algorithm that steps without a closure, with its own bits and kernels.

    Each update hands torch the state, and takes it back: nothing is kept in between. The gradients are
    cast to the parameters' dtype, as torch wants them. Under ``vmap``, ``grad``, ``jvp`` or ``torch.compile`` an
    update is refused, since torch's in-place steps give wrong derivatives there without a word.

    Args:
        algorithm: the class, such as ``torch.optim.RMSprop``.
        lr: a number, a scalar tensor or a schedule; None: the algorithm's default.
        settings: as the class takes them, ``foreach=`` and ``fused=`` included.

    >>> optimizer = from_torch(torch.optim.SGD, lr=0.25, momentum=0.9)
    >>> params = {"w": torch.tensor([1.0])}
    >>> opt_state = optimizer.init(params)
    >>> optimizer.update({"w": torch.tensor([2.0])}, opt_state, params)[0], params
    ({'w': tensor([0.5000])}, {'w': tensor([1.])})
    """
    if not (isinstance(algorithm, type) and issubclass(algorithm, torch.optim.Optimizer)):
        raise TypeError(
            f"from_torch takes a class, such as torch.optim.AdamW, got {type(algorithm).__name__}: "
            "its settings follow as keywords"
        )
    if lr is not None:
        check_rate(lr)
    if settings.get("differentiable"):
        raise ValueError(
            "from_torch(differentiable=True): torch's in-place steps are not differentiated here; "
            + _way_out(algorithm)
        )
    name = algorithm.__name__

    def built(leaves: list[Tensor], rate: float | Tensor | None) -> torch.optim.Optimizer:
        rates = {} if rate is None else {"lr": rate}
        make: Any = algorithm
        try:
            made: torch.optim.Optimizer = make(leaves, **rates, **settings)
        except ValueError as error:
            raise ValueError(
                f"torch.optim.{name}: {error} (parameters of different kinds go to different optimizers "
                "through ps.optim.partition)"
            ) from error
        return made

    def rate_of(step: Tensor) -> float | Tensor | None:
        rate = None if lr is None else rate_at(lr, step)
        as_tensor = settings.get("fused") or settings.get("capturable")
        return rate if rate is None or as_tensor else float(rate)

    def check_whole(spread: Spread) -> None:
        known = algorithm.__module__.startswith("torch.optim.") and name in ELEMENTWISE
        if spread and not known:
            axis = next(place.axis for place in spread if place)
            raise ValueError(
                f"{name} may look at all of a parameter, and a Shard over {axis} holds a piece of it: give it whole "
                "parameters, and the others by ps.optim.partition to an algorithm that works on each element, such as "
                + ", ".join(ELEMENTWISE)
            )

    def init(params: Params) -> TorchState:
        # torch makes its state at the first step: one with zeros tells what there is to keep.
        leaves, structure = tree.flatten(params)
        check_whole(spread(structure))
        own = [leaf.detach().clone() for leaf in leaves]
        step = torch.zeros((), dtype=torch.int64)
        optimizer = built(own, rate_of(step))
        for leaf in own:
            leaf.grad = torch.zeros_like(leaf)
        optimizer.step()
        states = [
            {key: _zeros(name, key, value) for key, value in optimizer.state[leaf].items()}
            for leaf in own
        ]
        return TorchState(step, tree.unflatten(structure, states))

    def update(grads: Tree, opt_state: OptState, params: Params) -> tuple[Params, OptState]:
        # Some algorithms write to the gradients too: SGD looks ahead in them, with ``foreach``.
        own = tree.map(lambda grad, param: grad.to(param.dtype, copy=True), grads, params)
        params, opt_state = tree.map(torch.clone, (params, opt_state))
        return update_(own, opt_state, params)

    def update_(grads: Tree, opt_state: Any, params: Params) -> tuple[Params, OptState]:
        if not isinstance(opt_state, TorchState):
            refuse(init, grads, opt_state, params)
        if not tree.eager(grads, opt_state, params, lr):
            raise ValueError(
                f"torch.optim.{name} steps in place, which a transform (vmap, grad, jvp, torch.compile) cannot "
                "follow: its derivatives would be wrong without a word. " + _way_out(algorithm)
            )
        (ours, theirs), structure = tree.columns(params, grads)
        own = [leaf.detach() for leaf in ours]
        optimizer = built(own, rate_of(opt_state.step))
        try:
            step(optimizer, own, theirs, structure, opt_state)
        except Exception as error:
            if mismatch := foreign(init, opt_state, params):
                raise ValueError(mismatch) from error
            raise
        return params, opt_state

    def step(
        optimizer: torch.optim.Optimizer,
        own: list[Tensor],
        grads: list[Tensor],
        structure: tree.Structure,
        opt_state: TorchState,
    ) -> None:
        states = tree.flatten_up_to(structure, opt_state.leaves)
        if settings.get("fused") and not _fit(own, states):
            # These kernels do not look: they would read and write beyond the end.
            raise ValueError(f"torch.optim.{name}: state and parameters differ in shape")
        first = not opt_state.step
        for leaf, grad, state in zip(own, grads, states, strict=True):
            leaf.grad = grad.to(leaf.dtype)
            if not first:
                optimizer.state[leaf].update(state)
        optimizer.step()
        for leaf, state in zip(own, states, strict=True):
            tree.overwrite(state, {key: optimizer.state[leaf][key] for key in state}, None)
        opt_state.step.add_(1)

    return Optimizer(init, update, update_, kernels=True, compiled=lambda _: update_)


def _fit(leaves: list[Tensor], states: list[Tree]) -> bool:
    """Whether what is kept for a parameter is as large as it, or a single number."""
    return all(
        not kept.ndim or kept.shape == leaf.shape
        for leaf, state in zip(leaves, states, strict=True)
        for kept in tree.leaves_of(state)
    )


def _zeros(name: str, key: str, value: Any) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return None if value is None else torch.zeros_like(value)
    raise TypeError(
        f"torch.optim.{name} keeps {key!r} as {type(value).__name__}, but the state of a pure optimizer is "
        "tensors alone: write it as ps.optim.Optimizer(init, update)"
    )


def _way_out(algorithm: type) -> str:
    native = PURE.get(algorithm.__name__)
    if native:
        return f"Take ps.optim.{native}, which is plain arithmetic"
    return (
        "Take ps.optim.sgd, adamw or lion, a chain of transforms, or an ps.optim.Optimizer of your own, in "
        "plain arithmetic"
    )
