"""The algorithms of ``torch.optim`` as pure functions."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep import tree
from purestep.optim.base import (
    Optimizer,
    check_params,
    raise_mismatch,
    reraise_with_hint,
)
from purestep.optim.schedules import LearningRate, check_rate, rate_at
from purestep.types import OptState, Params, State, Tree

PURE = {"AdamW": "adamw(lr)", "Adam": "adamw(lr, weight_decay=0)", "SGD": "sgd(lr)"}
"""Namesakes whose arithmetic is plain."""

ANY = "ps.optim.sgd, adamw or lion, a chain of transforms, or an ps.optim.Optimizer of your own"
"""What is always plain arithmetic."""

ELEMENTWISE = (
    "Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD"
)
"""Those of ``torch.optim`` that look at no more of a parameter than one element."""


class TorchState(NamedTuple):
    """The number of steps, on the host, and torch's ``state`` of each parameter.

    >>> from_torch(torch.optim.RMSprop, lr=0.1).init({"w": torch.tensor(1.0)}).step
    tensor(0)
    """

    step: Tensor
    leaves: Tree


def check_algorithm(algorithm: type[torch.optim.Optimizer]) -> None:
    """Refuses an algorithm that needs more than dense gradients."""
    closure = inspect.signature(algorithm.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"torch.optim.{algorithm.__name__} computes the loss again in each step, by a closure, "
            "and a pure update has only its gradients: take ps.optim.adamw, or call it by hand"
        )
    if issubclass(algorithm, torch.optim.SparseAdam):
        raise TypeError(
            "torch.optim.SparseAdam takes sparse gradients alone, and a step makes them dense to "
            "add them up: take ps.optim.adamw, or from_torch(torch.optim.Adam)"
        )


def from_torch(
    algorithm: type[torch.optim.Optimizer],
    lr: LearningRate | None = None,
    **settings: Any,
) -> Optimizer[State]:
    """Makes a pure optimizer of a ``torch.optim`` algorithm, with its bits and kernels.

    The algorithm must step without a closure. Each update passes the state to torch and takes it
    back, so torch keeps nothing. Gradients are cast to the params' dtype, as torch needs. Under
    ``vmap``, ``grad``, ``jvp`` or ``torch.compile`` an update is refused, because torch's in-place
    steps have wrong derivatives there.

    Args:
        algorithm: the class, such as ``torch.optim.RMSprop``.
        lr: a number, a scalar tensor or a schedule. None: the algorithm's default.
        settings: as the class takes them, ``foreach=`` and ``fused=`` included.

    >>> optimizer = from_torch(torch.optim.SGD, lr=0.25, momentum=0.9)
    >>> params = {"w": torch.tensor([1.0])}
    >>> opt_state = optimizer.init(params)
    >>> optimizer.update({"w": torch.tensor([2.0])}, opt_state, params)[0], params
    ({'w': tensor([0.5000])}, {'w': tensor([1.])})
    """
    if not (
        isinstance(algorithm, type) and issubclass(algorithm, torch.optim.Optimizer)
    ):
        raise TypeError(
            f"from_torch takes a class, such as torch.optim.AdamW, got {type(algorithm).__name__}: "
            "its settings follow as keywords"
        )
    if lr is not None:
        check_rate(lr)
    check_algorithm(algorithm)
    name = algorithm.__name__
    plain = f"ps.optim.{PURE[name]}, which is plain arithmetic" if name in PURE else ANY
    if settings.get("differentiable"):
        raise ValueError(
            "from_torch(differentiable=True): torch's in-place steps are not differentiated here; "
            f"Take {plain}"
        )
    as_tensor = settings.get("fused") or settings.get("capturable")
    elementwise = name in ELEMENTWISE and algorithm.__module__.startswith(
        "torch.optim."
    )

    def built(leaves: list[Tensor], step: Tensor) -> torch.optim.Optimizer:
        rate = None if lr is None else rate_at(lr, step)
        rates = {} if rate is None else {"lr": rate if as_tensor else float(rate)}
        make: Any = algorithm
        try:
            made: torch.optim.Optimizer = make(leaves, **rates, **settings)
        except ValueError as error:
            raise ValueError(
                f"torch.optim.{name}: {error} (parameters of different kinds go to different "
                "optimizers through ps.optim.partition)"
            ) from error
        return made

    def init(params: Params) -> TorchState:
        check_params(params)
        # torch makes its state at the first step: one with zeros tells what there is to keep.
        leaves, structure = tree.flatten(params)
        axes = (
            []
            if elementwise
            else [place.axis for place in tree.shard_specs(structure) if place]
        )
        if axes:
            raise ValueError(
                f"{name} may look at all of a parameter, and a Shard over {axes[0]} holds a piece "
                "of it: give it whole parameters, and the others by ps.optim.partition to an "
                f"algorithm that works on each element, such as {ELEMENTWISE}"
            )
        own = [leaf.detach().clone() for leaf in leaves]
        step = torch.zeros((), dtype=torch.int64)
        optimizer = built(own, step)
        for leaf in own:
            leaf.grad = torch.zeros_like(leaf)
        optimizer.step()
        states = [
            {key: zeros(key, x) for key, x in optimizer.state[leaf].items()}
            for leaf in own
        ]
        return TorchState(step, tree.unflatten(structure, states))

    def zeros(key: str, value: Any) -> Tensor | None:
        if value is None or isinstance(value, Tensor):
            return None if value is None else torch.zeros_like(value)
        raise TypeError(
            f"torch.optim.{name} keeps {key!r} as {type(value).__name__}, but the state of a pure "
            "optimizer is tensors alone: write it as ps.optim.Optimizer(init, update)"
        )

    def update(
        grads: Tree, opt_state: OptState, params: Params
    ) -> tuple[Params, OptState]:
        # Some algorithms write to the gradients too: SGD looks ahead in them, with ``foreach``.
        own = tree.map(
            lambda grad, param: grad.to(param.dtype, copy=True), grads, params
        )
        params, opt_state = tree.map(torch.clone, (params, opt_state))
        return update_(own, opt_state, params, None)

    def update_(
        grads: Tree, opt_state: Any, params: Params, applied: Tensor | None
    ) -> tuple[Params, OptState]:
        if applied is not None and not applied:
            return params, opt_state
        if not isinstance(opt_state, TorchState):
            raise_mismatch(init, grads, opt_state, params)
        if not tree.is_plain_eager(grads, opt_state, params, lr):
            raise ValueError(
                f"torch.optim.{name} steps in place, which a transform (vmap, grad, jvp, "
                "torch.compile) cannot follow: its derivatives would be wrong without a word. "
                f"Take {plain}"
            )
        own, structure = tree.flatten(tree.detach(params))
        optimizer = built(own, opt_state.step)
        try:
            states = structure.flatten_up_to(opt_state.leaves)
            theirs = tree.leaves_matching(structure, grads)
            for leaf, grad, state in zip(own, theirs, states, strict=True):
                kept = tree.leaves(state)
                # Fused kernels do not look: they would read and write beyond the end.
                if settings.get("fused") and any(
                    x.ndim and x.shape != leaf.shape for x in kept
                ):
                    raise ValueError(
                        f"torch.optim.{name}: state and parameters differ in shape"
                    )
                leaf.grad = grad.to(leaf.dtype)
                if opt_state.step:
                    optimizer.state[leaf].update(state)
            optimizer.step()
            for leaf, state in zip(own, states, strict=True):
                tree.copy_(
                    state, {key: optimizer.state[leaf][key] for key in state}, None
                )
        except Exception as error:
            reraise_with_hint(init, opt_state, params, error)
            raise
        opt_state.step.add_(1)
        return params, opt_state

    return Optimizer(init, update, update_)
