"""Different optimizers for different parameters."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from purestep import tree
from purestep.form import Form, flat
from purestep.optim.base import (
    Last,
    Optimizer,
    Transform,
    Update,
    check_optimizer,
    composed,
    refuse,
)
from purestep.torch_internals import is_watched
from purestep.types import OptState, Params, Tree

Mask: TypeAlias = Tree | Callable[[Params], Tree]
"""A tree of bools like the params, or a function that makes one from them."""

MOST = 8
"""Forms of params of which a partition remembers the parts."""


class Part(NamedTuple):
    """The label of an optimizer, the positions of its leaves, and the structure of the tree of them, where remembered."""

    label: str
    where: list[int]
    structure: tree.Structure = None


def partition(label_fn: Callable[[Params], Tree] | Tree, optimizers: Mapping[str, Last]) -> Last:
    """Each parameter to the optimizer that its label names. Or each gradient to a Transform, where all are Transforms.

    Each optimizer sees the tree of its own parameters, with an empty tuple where others, or containers of others,
    are: a norm taken there (``clip_by_global_norm``) is that of its own gradients. The state is a dict of their states,
    and a tuple of those of Transforms.
    (Not None, which is a leaf to ``torch.vmap``.)

    Args:
        label_fn: ``label_fn(params)`` gives a tree of labels like the params, or a prefix of it, where a label
            stands for a whole subtree; or such a tree. It may look at names, shapes and dtypes, not at values, since it
            is asked once for params that agree in these. A compiler of the whole step traces it: ``tree.map`` and
            plain Python are followed, optree's own functions of paths are not.
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
    kinds = {type(part) for part in optimizers.values()}
    kind: Any = Transform if kinds == {Transform} else Optimizer
    for label, part in optimizers.items() if kind is Optimizer else ():
        check_optimizer(f"partition: {label!r} must be an Optimizer", part)
    remembered: dict[Form, list[Part]] = {}

    def parts_of(params: Params) -> list[Part]:
        leaves, structure, form = flat(params)
        if not (isinstance(form, Hashable) and tree.eager()) or is_watched():
            return labelled(params)
        parts = remembered.get(form)
        if parts is None:
            parts = [
                part._replace(structure=tree.flatten(only(part, leaves, structure))[1])
                for part in labelled(params)
            ]
            if len(remembered) >= MOST:
                remembered.clear()
            remembered[form] = parts
        return parts

    def labelled(params: Params) -> list[Part]:
        each = tree.broadcast_prefix(label_fn(params) if callable(label_fn) else label_fn, params)
        for position, label in enumerate(each):
            if label not in optimizers:
                raise ValueError(
                    f"partition labels {tree.paths(params, 'params')[position]} {label!r}, but its "
                    f"optimizers are {', '.join(map(repr, optimizers))}"
                )
        wheres = {
            label: [position for position, other in enumerate(each) if other == label]
            for label in optimizers
        }
        return [Part(label, where) for label, where in wheres.items() if where]

    def only(part: Part, leaves: Sequence[Any], structure: tree.Structure) -> Tree:
        if part.structure is None:
            return tree.part(structure, leaves, part.where)
        return tree.unflatten(part.structure, [leaves[position] for position in part.where])

    def init(params: Params) -> OptState:
        leaves, structure = tree.flatten(params)
        parts = parts_of(params)
        return joined(
            parts,
            [optimizers[part.label].init(only(part, leaves, structure)) for part in parts],
        )

    def joined(parts: list[Part], states: list[OptState]) -> OptState:
        # States of Transforms may hold no tensors, and no compiler follows a dict without any.
        if kind is Transform:
            return tuple(states)
        return {part.label: state for part, state in zip(parts, states, strict=True)}

    def states_of(parts: list[Part], state: OptState) -> list[OptState] | None:
        if kind is Transform:
            fits = isinstance(state, tuple) and len(state) == len(parts)
            return [*state] if fits else None
        fits = isinstance(state, dict) and state.keys() == {part.label for part in parts}
        return [state[part.label] for part in parts] if fits else None

    def apart(updates: Sequence[Update], in_place: bool) -> Update:
        update_of = dict(zip(optimizers, updates, strict=True))

        def update(
            grads: Tree, state: OptState, params: Params, **how: Any
        ) -> tuple[Tree, OptState]:
            parts = parts_of(params)
            olds = states_of(parts, state)
            theirs, other = tree.flatten(grads)
            ours, structure = tree.flatten(params)
            if olds is None or other != structure:
                refuse(init, grads, state, params)
            new, states = [*ours], []
            for part, old in zip(parts, olds, strict=True):
                gradient, own = (only(part, leaves, structure) for leaves in (theirs, ours))
                moved, after = update_of[part.label](gradient, old, own, **how)
                states.append(after)
                for position, leaf in zip(part.where, tree.leaves_of(moved), strict=True):
                    new[position] = leaf
            return tree.unflatten(structure, new), joined(parts, states)

        return update

    made: Last = composed(kind, init, [*optimizers.values()], apart)
    return made


def masked(mask: Mask | None, decayed: Last, others: Last) -> Last:
    """The first where the mask says so, and the other elsewhere; without a mask, the first alone."""
    if mask is None:
        return decayed

    def labels(params: Params) -> Tree:
        flags, structure = mask(params) if callable(mask) else mask, tree.flatten(params)[1]
        try:
            each = tree.broadcast_prefix(flags, params)
        except ValueError:
            each = [None]
        if not all(isinstance(flag, bool) for flag in each):
            raise ValueError(
                "the weight-decay mask must be a tree of bools like the params, or a prefix of it, "
                f"{tree.describe(structure)}, but it is {flags}"
            )
        return tree.unflatten(structure, ["decay" if flag else "rest" for flag in each])

    return partition(labels, {"decay": decayed, "rest": others})
