"""Gives different optimizers to different parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

from purestep import tree
from purestep.optim.base import (
    Optimizer,
    Transform,
    TransformOrOptimizer,
    check_optimizer,
    check_tensor_params,
    raise_mismatch,
    update_in_place,
    use_short_names,
)
from purestep.types import OptState, Params, Tree

Mask: TypeAlias = Tree | Callable[[Params], Tree]
"""A tree of bools like the params, or a function that makes one from them."""

CACHE_SIZE = 8
"""Structures of params whose shares a partition remembers."""


class Share(NamedTuple):
    """Holds which params one optimizer has: its label, the positions of its leaves, their tree."""

    label: str
    positions: list[int]
    spec: tree.TreeSpec

    def select(self, leaves: Sequence[Any]) -> Tree:
        """Selects the share's leaves from those of all params, and returns them as its tree."""
        selected = [leaves[position] for position in self.positions]
        return tree.unflatten(self.spec, selected)

    def fill_in(self, leaves: list[Any], subtree: Tree) -> None:
        """Writes the leaves of ``subtree``, the share's tree, into ``leaves``, at its positions."""
        share_leaves = tree.leaves(subtree)
        for position, leaf in zip(self.positions, share_leaves, strict=True):
            leaves[position] = leaf


def partition(
    transforms: Mapping[str, TransformOrOptimizer],
    param_labels: Callable[[Params], Tree] | Tree,
) -> TransformOrOptimizer:
    """Gives each parameter to the optimizer that its label names; or each gradient to a Transform.

    The result is an Optimizer, or a Transform if all parts are Transforms. Raises ``TypeError``
    unless all are of one kind.

    Each optimizer sees only its params, so its norms are those of their gradients. An empty tuple
    stands for each other param, and for a container that has none of its params. It is not None,
    which ``torch.vmap`` takes for a leaf.

    The state of an Optimizer is a dict of its parts' states by label. That of a Transform is a
    tuple of its parts' states. A label that no parameter has is left out.

    ``init`` and ``update`` raise ``ValueError`` for a label that is not among ``transforms``, and
    for labels that are no prefix of the params. So does ``update`` for gradients in other
    containers than the params, or a state without one part for each label. The parts check all
    else.

    Args:
        transforms: a dict of optimizers, or of transforms, by label.
        param_labels: ``param_labels(params)`` returns a tree of labels like the params, or a prefix
            of it, where a label stands for a subtree. Or such a tree itself. The function may
            depend on names, shapes and dtypes, not on values: its labels are kept for params that
            agree in these. A compiler of the whole step traces it, so use ``tree.map`` and plain
            Python there, not optree's functions of paths.

    >>> import torch
    >>> from purestep.optim import adamw, from_torch
    >>> optimizer = partition(
    ...     {"matrix": from_torch(torch.optim.Muon, lr=0.02), "rest": adamw(1e-3)},
    ...     lambda params: tree.map(lambda p: "matrix" if p.ndim == 2 else "rest", params),
    ... )
    >>> params = {"b": torch.zeros(2), "w": torch.eye(2)}
    >>> params, _ = optimizer.update(params, optimizer.init(params), params)
    >>> params["w"].diag() < 1
    tensor([True, True])
    """
    cls = _find_class(transforms)
    is_transform = cls is Transform
    cache = ShareCache(param_labels, transforms)

    def init(params: Params) -> OptState:
        check_tensor_params(params)
        leaves, spec = tree.flatten(params)
        shares = cache.find_shares(params, leaves, spec)
        states = []
        for share in shares:
            share_params = share.select(leaves)
            states.append(transforms[share.label].init(share_params))
        return join_states(shares, states, is_transform=is_transform)

    def route_updates(updates: Mapping[str, Any]) -> Any:
        def update(grads: Tree, state: Any, params: Params, *applied: Any) -> Any:
            leaves, spec = tree.flatten(params)
            shares = cache.find_shares(params, leaves, spec)
            grad_leaves, grads_spec = tree.flatten(grads)
            old_states = split_state(shares, state, is_transform=is_transform)
            is_alike = tree.is_same_spec(grads_spec, spec)
            if old_states is None or not is_alike:
                raise_mismatch(init, grads, state, params)
            new_leaves = [*leaves]
            new_states = []
            for share, old_state in zip(shares, old_states, strict=True):
                share_grads = share.select(grad_leaves)
                share_params = share.select(leaves)
                new_params, new_state = updates[share.label](
                    share_grads, old_state, share_params, *applied
                )
                share.fill_in(new_leaves, new_params)
                new_states.append(new_state)
            joined_state = join_states(shares, new_states, is_transform=is_transform)
            return tree.unflatten(spec, new_leaves), joined_state

        return update

    pure_updates = {label: part.update for label, part in transforms.items()}
    inplace_updates = {
        label: update_in_place(part) for label, part in transforms.items()
    }
    update = route_updates(pure_updates)
    update_ = route_updates(inplace_updates)
    use_short_names(init, update, update_)
    result: TransformOrOptimizer = cls(init, update, update_)
    return result


class ShareCache:
    """Splits params by their labels, and remembers the shares of recent structures.

    So labels are computed once for params that agree in names, shapes and dtypes. Under a transform
    or a compiler they are computed each time.
    """

    def __init__(
        self, param_labels: Callable[[Params], Tree] | Tree, labels: Collection[str]
    ) -> None:
        self.param_labels = param_labels
        self.labels = labels
        self.recent: deque[tuple[Any, list[Share]]] = deque(maxlen=CACHE_SIZE)

    def find_shares(
        self, params: Params, leaves: list[Any], spec: tree.TreeSpec
    ) -> list[Share]:
        """Returns the shares of ``params``, whose leaves and structure the caller passes, too.

        Raises ValueError as ``make_shares`` does.
        """
        if not tree.is_plain_eager():
            return make_shares(self.param_labels, self.labels, params)
        formats = [(leaf.shape, leaf.dtype) for leaf in leaves]
        key = (spec, formats)
        # A copy: other threads may add to it meanwhile.
        for recent_key, shares in list(self.recent):
            if recent_key == key:
                return shares
        shares = make_shares(self.param_labels, self.labels, params)
        self.recent.appendleft((key, shares))
        return shares


def _find_class(transforms: Mapping[str, Transform | Optimizer]) -> Any:
    """Returns Transform if all are Transforms, Optimizer if all are Optimizers or there are none.

    Otherwise raises TypeError.
    """
    classes = {type(part) for part in transforms.values()}
    if classes == {Transform}:
        return Transform
    for label, part in transforms.items():
        check_optimizer(f"partition: {label!r} must be an Optimizer", part)
    return Optimizer


def make_shares(
    param_labels: Callable[[Params], Tree] | Tree,
    known_labels: Collection[str],
    params: Params,
) -> list[Share]:
    """Makes a share for each known label that a param has, in the order of the known labels.

    Raises ValueError for any other label, or if the tree of labels is no prefix of the params.
    """
    prefix = param_labels(params) if callable(param_labels) else param_labels
    labels = tree.broadcast_prefix(prefix, params)
    for position, label in enumerate(labels):
        if label not in known_labels:
            path = tree.paths(params, "params")[position]
            expected = ", ".join(repr(name) for name in known_labels)
            raise ValueError(
                f"partition labels {path} {label!r}, but its optimizers are {expected}"
            )
    leaves, spec = tree.flatten(params)
    shares = []
    for label in known_labels:
        positions = [index for index, other in enumerate(labels) if other == label]
        if positions:
            subtree = tree.subset(spec, leaves, set(positions))
            _, subtree_spec = tree.flatten(subtree)
            shares.append(Share(label, positions, subtree_spec))
    return shares


def join_states(
    shares: list[Share], states: list[OptState], *, is_transform: bool
) -> OptState:
    """Joins the states of all shares: to a dict by label, or to a tuple for Transforms.

    Some Transforms have a state without tensors, such as ``add_decayed_weights``.
    """
    if is_transform:
        return tuple(states)
    labels = [share.label for share in shares]
    return dict(zip(labels, states, strict=True))


def split_state(
    shares: list[Share], state: OptState, *, is_transform: bool
) -> list[OptState] | None:
    """Returns the state of each share; None if the joined state does not fit the shares.

    With ``is_transform``, a tuple fits if it has one state for each share. Otherwise a dict fits if
    its keys are the labels of the shares.
    """
    if is_transform:
        if isinstance(state, tuple) and len(state) == len(shares):
            return [*state]
        return None
    labels = [share.label for share in shares]
    if isinstance(state, dict) and state.keys() == set(labels):
        return [state[label] for label in labels]
    return None


def partition_by_mask(
    mask: Mask, selected: TransformOrOptimizer, others: TransformOrOptimizer
) -> TransformOrOptimizer:
    """Makes a ``partition`` by a mask: params at True get ``selected``, and all others ``others``.

    Their labels are "decay" and "rest". ``init`` and ``update`` raise ValueError unless the mask is
    a tree of bools, and a prefix of the params. A name, or a list, tuple or set of names,
    raises it here, or if a function returns it, in ``init`` and ``update``.
    """
    if not callable(mask):
        _check_no_names(mask)

    def param_labels(params: Params) -> Tree:
        prefix = mask(params) if callable(mask) else mask
        _check_no_names(prefix)
        try:
            flags = tree.broadcast_prefix(prefix, params)
        except ValueError as error:
            raise ValueError(
                f"mask= must be a tree of bools like the params, or a prefix of it: {error}"
            ) from error
        spec = tree.flatten(params)[1]
        if not all(isinstance(flag, bool) for flag in flags):
            raise ValueError(
                "the weight-decay mask must be a tree of bools like the params, or a prefix of it, "
                f"{tree.format_spec(spec)}, but it is {prefix}"
            )
        labels = ["decay" if flag else "rest" for flag in flags]
        return tree.unflatten(spec, labels)

    return partition({"decay": selected, "rest": others}, param_labels)


def _check_no_names(mask: Tree) -> None:
    """Raises ValueError if a mask is a name of a param, or a list, tuple or set of names."""
    names = [mask] if isinstance(mask, str) else mask
    if not isinstance(names, list | tuple | Set) or not names:
        return
    if all(isinstance(name, str) for name in names):
        raise ValueError(
            f"mask names params, {[*names][:3]}, but it must be a tree of bools like the params: "
            "pass mask=lambda params: {name: name in names for name in params}"
        )
