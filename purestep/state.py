"""State as a flat dict of tensors by name: what leaves a program, and comes back into one."""

from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor

from purestep import tree as trees
from purestep.tree.shard import Shard, ShardSpec
from purestep.types import Tree

NamedLeaf: TypeAlias = Tensor | Shard
"""What has a name where the state of all ranks is one: a tensor, or this rank's piece of one."""

SHOWN = 8
"""How many differences a message lists; it counts the others."""

_PLAIN = {Tensor, torch.nn.Parameter}
_STABLE = {type(None), str, bytes, bool, int, float, torch.dtype}


def state_dict(tree: Tree) -> dict[str, Tensor]:
    """Returns the tensors of a tree in a flat dict, named as Python reaches them.

    Any format can save it: ``torch.save`` with ``torch.load(weights_only=True)``, safetensors,
    ``torch.distributed.checkpoint``. The tensors are detached and contiguous, and no two share
    memory. A leaf that is already so is not copied: a donated step then writes to this dict's
    tensors too. Others are copied, such as views.

    Containers, and empty ones such as None and ``()``, leave no trace. A leaf that is not a tensor
    is refused: write a step count as ``torch.tensor(3)``. A dict key is refused if its ``repr`` may
    change, or is that of another key.

    >>> state_dict({"layers": [torch.tensor(1.0), None], "a.b": {0: torch.tensor(2)}})
    {"tree['a.b'][0]": tensor(2), "tree['layers'][0]": tensor(1.)}
    """
    flat: dict[str, Tensor] = {}
    taken: set[torch.UntypedStorage] = set()
    for name, leaf in _tensors(tree).items():
        own = leaf.is_contiguous() and leaf.untyped_storage().nbytes() == leaf.nbytes
        if not own or leaf.untyped_storage() in taken:
            leaf = leaf.clone(memory_format=torch.contiguous_format)
        taken.add(leaf.untyped_storage())
        flat[name] = leaf
    return flat


def load_state_dict(like: Tree, flat: Mapping[str, Tensor]) -> Tree:
    """Rebuilds the tree of a ``state_dict``, in the containers and on the devices of ``like``.

    The tensors are new and share no memory with ``flat`` or ``like``. They have the memory order of
    ``like``. Names, shapes and dtypes must equal those of ``like``: nothing is cast or broadcast.
    No gradient flows through.

    >>> like = {"w": torch.zeros(2), "step": torch.tensor(0)}
    >>> load_state_dict(like, {"tree['w']": torch.ones(2), "tree['step']": torch.tensor(3)})
    {'w': tensor([1., 1.]), 'step': tensor(3)}
    >>> load_state_dict(like, {"tree['w']": torch.ones(2, 1), "tree['v']": torch.tensor(3)})
    Traceback (most recent call last):
    ...
    ValueError: flat does not fit like: build like as the saved tree was
      tree['step'] is missing; like has torch.int64 of shape ()
      tree['v'] is torch.int64 of shape (); like has no such leaf
      tree['w'] is torch.float32 of shape (2, 1); like has torch.float32 of shape (2,)
    """
    wanted = _tensors(like)
    check_fit(
        {name: trees.format_leaf(tensor) for name, tensor in flat.items()},
        wanted,
        "flat",
    )
    fresh = [
        local_tensor(empty_like(w)).copy_(flat[name].detach())
        for name, w in wanted.items()
    ]
    return trees.unflatten(trees.flatten(like)[1], fresh)


def named_leaves(tree: Tree) -> dict[str, NamedLeaf]:
    """The tensors by name, where ranks are one: a ``Shard`` has the name of the whole tensor."""
    named = _named(tree, within=Shard)
    places = trees.shard_specs(trees.flatten(tree)[1]) or [None] * len(named)
    pairs = zip(named, places, strict=True)
    return {name: _slot(name, leaf, place) for (name, leaf), place in pairs}


def _slot(name: str, leaf: Any, place: ShardSpec | None) -> NamedLeaf:
    """A tensor, or the piece of one at this place; anything else is refused by its name."""
    tensor = _plain(name, leaf)
    if place is None or tensor.ndim != len(place.shape):  # such as an optimizer's count
        return tensor
    place.check(f"{name}.local", tensor)
    return Shard(tensor, *place)


def local_tensor(slot: NamedLeaf) -> Tensor:
    """What this rank holds of it."""
    return slot.local if isinstance(slot, Shard) else slot


def assign_leaf(slot: NamedLeaf, tensor: Tensor) -> NamedLeaf:
    """The slot with this tensor in it."""
    return Shard(tensor, *slot.spec) if isinstance(slot, Shard) else tensor


def format_named_leaf(slot: NamedLeaf) -> str:
    """The dtype and shape of a tensor; of a piece, the shape of the whole."""
    return f"{local_tensor(slot).dtype} of shape {tuple(slot.shape)}"


def check_fit(
    found: Mapping[str, str], wanted: Mapping[str, NamedLeaf], what: str
) -> None:
    """Refuses kinds ``found`` by name that are not those of the tensors ``wanted``."""
    expected = {name: format_named_leaf(slot) for name, slot in wanted.items()}
    differences = [
        f"{name} is {found.get(name, 'missing')}; like has {expected.get(name, 'no such leaf')}"
        for name in sorted(found.keys() | expected.keys(), key=str)
        if found.get(name) != expected.get(name)
    ]
    if differences:
        more = [f"and {len(differences) - SHOWN:,} more"] * (len(differences) > SHOWN)
        lines = "\n  ".join([*differences[:SHOWN], *more])
        raise ValueError(
            f"{what} does not fit like: build like as the saved tree was\n  {lines}"
        )


def empty_like(slot: NamedLeaf) -> NamedLeaf:
    """Fresh memory for a leaf, in its memory order: in another, a product may round differently."""
    return assign_leaf(slot, torch.empty_like(local_tensor(slot), requires_grad=False))


def _tensors(tree: Tree) -> dict[str, Tensor]:
    return {name: _plain(name, leaf) for name, leaf in _named(tree)}


def _named(tree: Tree, within: type | None = None) -> list[tuple[str, Any]]:
    """The leaves by name, in their order; ``within`` is a node that names do not mention."""
    names = []
    for path in optree.tree_accessors(tree, namespace=trees.NAMESPACE):
        names.append(
            optree.PyTreeAccessor(e for e in path if e.type is not within).codify(
                "tree"
            )
        )
        for key in path.path:
            if not _is_stable(key):
                raise ValueError(
                    f"{names[-1]} has no name that stays: its key is of type {type(key).__name__}; "
                    "make it a str, an int, a tuple of these, or an Enum of these"
                )
    if len({*names}) < len(names):
        raise ValueError(
            f"{max(names, key=names.count)} is the name of two leaves: give them keys that print "
            "differently; a class that is registered with optree returns such keys as entries"
        )
    return [*zip(names, trees.flatten(tree)[0], strict=True)]


def _is_stable(key: Any) -> bool:
    """Whether a key prints the same in every process: no addresses, no order of a set."""
    if isinstance(key, tuple):
        return all(map(_is_stable, key))
    # Not of a subclass, which may print what it likes.
    return _is_stable(key.value) if isinstance(key, Enum) else type(key) in _STABLE


def _plain(name: str, leaf: Any) -> Tensor:
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"{name} is {trees.format_leaf(leaf)}: state is tensors alone; make it one, as in "
            "torch.tensor(3), or leave it out"
        )
    if type(leaf) not in _PLAIN or leaf.layout is not torch.strided or leaf.is_meta:
        raise TypeError(
            f"{name} is of class {type(leaf).__name__}, layout {leaf.layout}, on {leaf.device}: "
            "state is plain tensors that hold values; make it one, as by .to_dense(), "
            ".full_tensor() or torch.empty_like(device=...)"
        )
    return leaf.detach().resolve_conj().resolve_neg()
