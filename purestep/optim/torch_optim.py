"""Turns the algorithms of ``torch.optim`` into pure functions."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep import tree
from purestep.optim.base import (
    Optimizer,
    check_tensor_params,
    raise_mismatch,
    reraise_with_hint,
)
from purestep.optim.schedules import LearningRate, check_rate, evaluate_rate
from purestep.types import OptState, Params, State, Tree

PURE_NAMESAKES = {
    "AdamW": "adamw(lr)",
    "Adam": "adamw(lr, weight_decay=0)",
    "SGD": "sgd(lr)",
}
"""The calls that do the same by plain arithmetic."""

PURE_OPTIMIZERS = (
    "ps.optim.sgd, adamw or lion, a chain of transforms, or a ps.optim.Optimizer of "
    "your own"
)
"""Optimizers that are always plain arithmetic."""

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
"""Algorithms of ``torch.optim`` that update each element from its own gradient and state alone."""


class TorchState(NamedTuple):
    """Holds the number of steps, on the host, and torch's ``state`` of each parameter.

    >>> from_torch(torch.optim.RMSprop, lr=0.1).init({"w": torch.tensor(1.0)}).step
    tensor(0)
    """

    step: Tensor
    leaves: Tree


def from_torch(
    algorithm: type[torch.optim.Optimizer],
    lr: LearningRate | None = None,
    **settings: Any,
) -> Optimizer[State]:
    """Makes a pure optimizer of a ``torch.optim`` algorithm, with its bits and kernels.

    Each update passes the state to torch and takes it back, so torch keeps nothing. Gradients are
    cast to the params' dtype, as torch needs. Under ``vmap``, ``grad``, ``jvp`` or
    ``torch.compile``, or if an argument or a rate requires grad, an update raises ``ValueError``:
    torch's in-place steps have wrong derivatives there. Under ``torch.no_grad()``, ``update`` takes
    such arguments, but no ``lr`` that requires grad. ``init`` raises ``ValueError`` for such a
    rate, and for a ``Shard`` if the algorithm is not elementwise. It raises ``TypeError`` if the
    algorithm's state has more than tensors and None.

    Args:
        algorithm: the class, such as ``torch.optim.RMSprop``. One whose step takes a ``closure``
            without a default, or sparse gradients alone, raises ``TypeError``.
        lr: a number, a scalar tensor or a schedule; others raise ``TypeError``. None: the
            algorithm's default.
        settings: as the class takes them, ``foreach=`` and ``fused=`` included. Raises
            ``ValueError`` for ``differentiable=True``.

    >>> optimizer = from_torch(torch.optim.SGD, lr=0.25, momentum=0.9)
    >>> params = {"w": torch.tensor([1.0])}
    >>> opt_state = optimizer.init(params)
    >>> optimizer.update({"w": torch.tensor([2.0])}, opt_state, params)[0], params
    ({'w': tensor([0.5000])}, {'w': tensor([1.])})
    """
    check_algorithm(algorithm)
    if lr is not None:
        check_rate(lr)
    factory = OptimizerFactory(algorithm, lr, settings)
    check_not_differentiable(factory)

    def init(params: Params) -> TorchState:
        check_tensor_params(params)
        return init_state(factory, params)

    def update(
        grads: Tree, opt_state: OptState, params: Params
    ) -> tuple[Params, OptState]:
        # Some algorithms write to the gradients too: SGD looks ahead in them, with ``foreach``.
        grads = tree.map(
            lambda grad, param: grad.to(param.dtype, copy=True), grads, params
        )
        params, opt_state = tree.map(torch.clone, (params, opt_state))
        return update_(grads, opt_state, params, None)

    def update_(
        grads: Tree, opt_state: Any, params: Params, applied: Tensor | None
    ) -> tuple[Params, OptState]:
        if applied is not None and not applied:
            return params, opt_state
        if not isinstance(opt_state, TorchState):
            raise_mismatch(init, grads, opt_state, params)
        if not tree.is_plain_eager(grads, opt_state, params, lr):
            raise in_place_error(factory)
        leaves, structure = tree.flatten(tree.detach(params))
        optimizer = factory.make_optimizer(leaves, opt_state.step)
        try:
            states = structure.flatten_up_to(opt_state.leaves)
            grad_leaves = tree.leaves_matching(structure, grads)
            if settings.get("fused"):
                check_state_shapes(factory, leaves, states)
            step_in_place(
                optimizer,
                leaves,
                grad_leaves,
                states,
                is_first_step=not opt_state.step,
            )
        except Exception as error:
            reraise_with_hint(init, opt_state, params, error)
            raise
        opt_state.step.add_(1)
        return params, opt_state

    return Optimizer(init, update, update_)


def in_place_error(factory: OptimizerFactory) -> ValueError:
    """Returns the error for a transform, or for an argument that requires grad."""
    return ValueError(
        f"torch.optim.{factory.name} steps in place, which a transform (vmap, grad, jvp, "
        "torch.compile) cannot follow: its derivatives would be wrong without a word. "
        f"Take {factory.alternative}"
    )


def check_not_differentiable(factory: OptimizerFactory) -> None:
    """Raises ValueError if the settings have ``differentiable=True``."""
    if factory.settings.get("differentiable"):
        raise ValueError(
            "from_torch(differentiable=True): torch's in-place steps are not differentiated here. "
            f"Take {factory.alternative}"
        )


def check_algorithm(algorithm: Any) -> None:
    """Raises TypeError unless this is a class of ``torch.optim.Optimizer``.

    A class whose step has a parameter ``closure`` without a default raises, and so do
    ``SparseAdam`` and its subclasses. Other classes pass. For one whose state is not made of
    tensors, ``init`` raises; an error of its step without a closure passes through ``init``.
    """
    is_class = isinstance(algorithm, type)
    if not is_class or not issubclass(algorithm, torch.optim.Optimizer):
        raise TypeError(
            "from_torch takes a class, such as torch.optim.AdamW, got an instance of "
            f"{type(algorithm).__name__}: its settings follow as keywords"
        )
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


@dataclass(frozen=True)
class OptimizerFactory:
    """Makes ``torch.optim`` objects of one algorithm, one for each update."""

    algorithm: type[torch.optim.Optimizer]
    lr: LearningRate | None
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """Returns the name of the algorithm."""
        return self.algorithm.__name__

    @property
    def alternative(self) -> str:
        """Returns the text that names pure optimizers to take, for errors about derivatives."""
        if self.name in PURE_NAMESAKES:
            return f"ps.optim.{PURE_NAMESAKES[self.name]}, which is plain arithmetic"
        return PURE_OPTIMIZERS

    @property
    def is_elementwise(self) -> bool:
        """Returns whether the algorithm updates each element from its gradient and state alone.

        A shard of a parameter is then enough. False for classes from outside of torch.
        """
        is_torchs = self.algorithm.__module__.startswith("torch.optim.")
        return is_torchs and self.name in ELEMENTWISE

    def make_optimizer(
        self, leaves: list[Tensor], step: Tensor
    ) -> torch.optim.Optimizer:
        """Makes the ``torch.optim`` object of these leaves, with the learning rate of this step.

        The rate is a float, read on the host, unless ``fused`` or ``capturable`` is set. Without a
        rate, the algorithm's default holds. A rate that requires grad raises ValueError. If torch
        refuses leaves or settings by a ValueError, it is raised again with a hint. Other errors of
        torch pass.
        """
        settings = dict(self.settings)
        if self.lr is not None:
            lr = evaluate_rate(self.lr, step)
            # Of a schedule, only its result shows it.
            if isinstance(lr, Tensor) and lr.requires_grad:
                raise in_place_error(self)
            takes_tensor = settings.get("fused") or settings.get("capturable")
            settings["lr"] = lr if takes_tensor else float(lr)
        algorithm: Any = self.algorithm
        try:
            optimizer: torch.optim.Optimizer = algorithm(leaves, **settings)
        except ValueError as error:
            raise ValueError(
                f"torch.optim.{self.name}: {error} (parameters of different kinds go to different "
                "optimizers through ps.optim.partition)"
            ) from error
        return optimizer


def init_state(factory: OptimizerFactory, params: Params) -> TorchState:
    """Makes the first state: zeros for each tensor that torch's state has after a step.

    torch makes its state at the first step, so copies of the params take one, with gradients of
    zero. Raises ValueError if a leaf is a shard, unless the algorithm is elementwise. Raises
    TypeError if torch's state holds more than tensors and None.
    """
    leaves, structure = tree.flatten(params)
    if not factory.is_elementwise:
        check_no_shards(factory, structure)
    copies = [leaf.detach().clone() for leaf in leaves]
    step = torch.zeros((), dtype=torch.int64, device="cpu")
    optimizer = factory.make_optimizer(copies, step)
    for leaf in copies:
        leaf.grad = torch.zeros_like(leaf)
    optimizer.step()
    states = [zeros_like_state(factory, optimizer.state[leaf]) for leaf in copies]
    return TorchState(step, tree.unflatten(structure, states))


def check_no_shards(factory: OptimizerFactory, structure: tree.TreeSpec) -> None:
    """Raises ValueError if any leaf of the structure is a shard."""
    for shard_spec in tree.shard_specs(structure):
        if shard_spec:
            raise ValueError(
                f"{factory.name} may look at all of a parameter, and a Shard over "
                f"{shard_spec.axis} holds a piece of it: give it whole parameters, and the others "
                "by ps.optim.partition to an algorithm that works on each element, such as "
                f"{', '.join(ELEMENTWISE)}"
            )


def zeros_like_state(
    factory: OptimizerFactory, state: dict[str, Any]
) -> dict[str, Tensor | None]:
    """Returns zeros like the tensors of ``state``, torch's state of one parameter after a step.

    None stays. Raises TypeError unless each of its values is a tensor or None.
    """
    zeros: dict[str, Tensor | None] = {}
    for key, value in state.items():
        if value is None:
            zeros[key] = None
        elif isinstance(value, Tensor):
            zeros[key] = torch.zeros_like(value)
        else:
            raise TypeError(
                f"torch.optim.{factory.name} keeps {key!r} as {type(value).__name__}, but the "
                "state of a pure optimizer is tensors alone: write it as "
                "ps.optim.Optimizer(init, update)"
            )
    return zeros


def check_state_shapes(
    factory: OptimizerFactory, leaves: list[Tensor], states: list[Any]
) -> None:
    """Raises ValueError unless the state's tensors, but for scalars, have the params' shapes.

    Fused kernels do not compare shapes: they would read and write beyond the end.
    """
    for leaf, state in zip(leaves, states, strict=True):
        for value in tree.leaves(state):
            if value.ndim and value.shape != leaf.shape:
                raise ValueError(
                    f"torch.optim.{factory.name}: state and parameters differ in shape"
                )


def step_in_place(
    optimizer: torch.optim.Optimizer,
    leaves: list[Tensor],
    grads: list[Tensor],
    states: list[Any],
    *,
    is_first_step: bool,
) -> None:
    """Takes one step, which writes to leaves and states, and sets ``grad`` of leaves.

    ``leaves`` are the params of ``optimizer``, and ``states`` torch's state of each: a dict of
    tensors and None. Gradients are cast to the leaves' dtypes, and torch may write to those that
    need no cast. At the first step the old states are not read: torch makes them.
    """
    for leaf, grad, state in zip(leaves, grads, states, strict=True):
        leaf.grad = grad.to(leaf.dtype)
        # Before the first step torch expects no state, and makes it.
        if not is_first_step:
            optimizer.state[leaf].update(state)
    optimizer.step()
    for leaf, state in zip(leaves, states, strict=True):
        new_state = {key: optimizer.state[leaf][key] for key in state}
        tree.copy_(state, new_state, None)
