"""Different optimizers for different parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from purestep import tree
from purestep.optim.base import (
    Optimizer,
    check_optimizer,
    composed,
    refuse,
    with_grad_scale,
)
from purestep.types import OptState, Params, Tree


def partition(
    label_fn: Callable[[Params], Tree] | Tree, optimizers: Mapping[str, Optimizer]
) -> Optimizer:
    """Each parameter to the optimizer that its label names.

    Each optimizer sees the tree of its own parameters, with an empty tuple where others, or containers of others,
    are: a norm taken there (``clip_by_global_norm``) is that of its own gradients. The state is a dict of their states.
    (Not None, which is a leaf to ``torch.vmap``.)

    Args:
        label_fn: ``label_fn(params)`` gives a tree of labels like the params, or a prefix of it, where a label
            stands for a whole subtree; or such a tree. It may look at names, shapes and dtypes, not at values. A
            compiler of the whole step traces it: ``tree.map`` and plain Python are followed, optree's own functions
            of paths are not.
        optimizers: by label.

    >>> import torch
    >>> from purestep.optim import adamw, from_torch
    >>> optimizer = partition(
    ...     lambda params: tree.map(lambda p: "matrix" if p.ndim == 2 else "rest", params),
    ...     {"matrix": from_torch(torch.optim.Muon, lr=0.02), "rest": adamw(1e-3)},
    ... )
    >>> params = {"b": torch.zeros(2), "w": torch.eye(2)}
    >>> params, _ = optimizer.update(params, optimizer.init(params), params)
    >>> params["w"].diag() < 1
    tensor([True, True])
    """
    for label, optimizer in optimizers.items():
        check_optimizer(f"partition: {label!r} must be an Optimizer", optimizer)

    def places(params: Params) -> Iterator[tuple[str, list[int]]]:
        labels = label_fn(params) if callable(label_fn) else label_fn
        each = tree.broadcast_prefix(labels, params)
        for position, label in enumerate(each):
            if label not in optimizers:
                raise ValueError(
                    f"partition labels {tree.paths(params, 'params')[position]} {label!r}, but its "
                    f"optimizers are {', '.join(map(repr, optimizers))}"
                )
        for label in optimizers:
            where = [position for position, other in enumerate(each) if other == label]
            if where:
                yield label, where

    def only(where: list[int], whole: Tree) -> Tree:
        leaves, structure = tree.flatten(whole)
        return tree.part(structure, leaves, where)

    def init(params: Params) -> OptState:
        return {
            label: optimizers[label].init(only(where, params)) for label, where in places(params)
        }

    def each(updates: Sequence[Callable[..., Any]]) -> Callable[..., tuple[Params, OptState]]:
        by_label = dict(zip(optimizers, updates, strict=True))

        def step(
            grads: Tree, opt_state: OptState, params: Params, **extra: Any
        ) -> tuple[Params, OptState]:
            parts = list(places(params))
            if not isinstance(opt_state, dict) or set(opt_state) != {label for label, _ in parts}:
                refuse(init, grads, opt_state, params)
            new, structure = tree.flatten(params)
            states = {}
            for label, where in parts:
                moved, states[label] = by_label[label](
                    only(where, grads), opt_state[label], only(where, params), **extra
                )
                for position, leaf in zip(where, tree.leaves_of(moved), strict=True):
                    new[position] = leaf
            return tree.unflatten(structure, new), states

        return step

    def update(
        grads: Tree, opt_state: OptState, params: Params, *, grad_scale: Tensor | None = None
    ) -> tuple[Params, OptState]:
        return pure(grads, opt_state, params, grad_scale=grad_scale)

    def each_(updates_: Sequence[Callable[..., Any]]) -> Callable[..., tuple[Params, OptState]]:
        step = each(updates_)

        def update_(
            grads: Tree,
            opt_state: OptState,
            params: Params,
            *,
            grad_scale: Tensor | None = None,
            applied: Tensor | None = None,
        ) -> tuple[Params, OptState]:
            return step(grads, opt_state, params, grad_scale=grad_scale, applied=applied)

        return update_

    pure = each([with_grad_scale(optimizer.update) for optimizer in optimizers.values()])
    return composed(Optimizer, init, update, [*optimizers.values()], each_)
