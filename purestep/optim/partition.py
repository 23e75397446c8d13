"""Different optimizers for different parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from purestep import tree
from purestep.optim.base import (
    Optimizer,
    Part,
    Transform,
    check_optimizer,
    check_params,
    raise_mismatch,
    update_in_place,
)
from purestep.types import OptState, Params, Tree

Mask: TypeAlias = Tree | Callable[[Params], Tree]
"""A tree of bools like the params, or a function that makes one from them."""

MOST = 8
"""Kinds of params of which a partition remembers the shares."""


class Share(NamedTuple):
    """What falls to one optimizer: its label, the positions of its leaves, and the tree of them."""

    label: str
    where: list[int]
    structure: tree.TreeSpec

    def of(self, leaves: Sequence[Any]) -> Tree:
        """The tree of its leaves, among all of them."""
        return tree.unflatten(
            self.structure, [leaves[position] for position in self.where]
        )


def partition(
    label_fn: Callable[[Params], Tree] | Tree, optimizers: Mapping[str, Part]
) -> Part:
    """Gives each parameter to the optimizer that its label names; or each gradient to a Transform.

    Each optimizer sees only its params, so its norms are those of their gradients. An empty tuple
    stands for the others, and for containers of others (None is a leaf to ``torch.vmap``). The
    state is a dict of their states, or a tuple for Transforms.

    Args:
        label_fn: ``label_fn(params)`` returns a tree of labels like the params, or a prefix of it,
            where a label stands for a subtree. Or such a tree itself. It may depend on names,
            shapes and dtypes, not on values: it is called once for params that agree in these. A
            compiler of the whole step traces it, so use ``tree.map`` and plain Python there, not
            optree's functions of paths.
        optimizers: a dict of optimizers, or of transforms, by label.

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
    kinds = {type(part) for part in optimizers.values()}
    kind: Any = Transform if kinds == {Transform} else Optimizer
    for label, part in optimizers.items() if kind is Optimizer else ():
        check_optimizer(f"partition: {label!r} must be an Optimizer", part)
    remembered: list[tuple[Any, list[Share]]] = []

    def shares_of(
        params: Params, leaves: list[Any], structure: tree.TreeSpec
    ) -> list[Share]:
        if not tree.is_plain_eager():
            return labelled(params, leaves, structure)
        asked = structure, [(leaf.shape, leaf.dtype) for leaf in leaves]
        for before, shares in remembered:
            if before == asked:
                return shares
        shares = labelled(params, leaves, structure)
        remembered[:] = [(asked, shares), *remembered[: MOST - 1]]
        return shares

    def labelled(
        params: Params, leaves: list[Any], structure: tree.TreeSpec
    ) -> list[Share]:
        each = tree.broadcast_prefix(
            label_fn(params) if callable(label_fn) else label_fn, params
        )
        for position, label in enumerate(each):
            if label not in optimizers:
                raise ValueError(
                    f"partition labels {tree.paths(params, 'params')[position]} {label!r}, but its "
                    f"optimizers are {', '.join(map(repr, optimizers))}"
                )
        found = []
        for label in optimizers:
            where = [position for position, other in enumerate(each) if other == label]
            if where:
                part = tree.subset(structure, leaves, {*where})
                found.append(Share(label, where, tree.flatten(part)[1]))
        return found

    def joined(shares: list[Share], states: list[OptState]) -> OptState:
        # States of Transforms may hold no tensors, and no compiler follows a dict without any.
        if kind is Transform:
            return tuple(states)
        return {share.label: state for share, state in zip(shares, states, strict=True)}

    def init(params: Params) -> OptState:
        check_params(params)
        leaves, structure = tree.flatten(params)
        shares = shares_of(params, leaves, structure)
        return joined(
            shares, [optimizers[share.label].init(share.of(leaves)) for share in shares]
        )

    def states_of(shares: list[Share], state: OptState) -> list[OptState] | None:
        if kind is Transform:
            return (
                [*state]
                if isinstance(state, tuple) and len(state) == len(shares)
                else None
            )
        fits = isinstance(state, dict) and state.keys() == {
            share.label for share in shares
        }
        return [state[share.label] for share in shares] if fits else None

    def apart(
        update_of: Any, grads: Tree, state: Any, params: Params, *applied: Any
    ) -> Any:
        ours, structure = tree.flatten(params)
        shares = shares_of(params, ours, structure)
        theirs, other = tree.flatten(grads)
        olds = states_of(shares, state)
        if olds is None or not tree.is_same_spec(other, structure):
            raise_mismatch(init, grads, state, params)
        new, states = [*ours], []
        for share, old in zip(shares, olds, strict=True):
            update = update_of[share.label]
            moved, after = update(share.of(theirs), old, share.of(ours), *applied)
            states.append(after)
            for position, leaf in zip(share.where, tree.leaves(moved), strict=True):
                new[position] = leaf
        return tree.unflatten(structure, new), joined(shares, states)

    pure = {label: part.update for label, part in optimizers.items()}
    writing = {label: update_in_place(part) for label, part in optimizers.items()}
    made: Part = kind(init, partial(apart, pure), partial(apart, writing))
    return made


def masked(mask: Mask, decayed: Part, others: Part) -> Part:
    """The first where the mask says so, and the other elsewhere."""

    def labels(params: Params) -> Tree:
        flags, structure = (
            mask(params) if callable(mask) else mask,
            tree.flatten(params)[1],
        )
        each = tree.broadcast_prefix(flags, params)
        if not all(isinstance(flag, bool) for flag in each):
            raise ValueError(
                "the weight-decay mask must be a tree of bools like the params, or a prefix of it, "
                f"{tree.format_spec(structure)}, but it is {flags}"
            )
        return tree.unflatten(structure, ["decay" if flag else "rest" for flag in each])

    return partition(labels, {"decay": decayed, "rest": others})
