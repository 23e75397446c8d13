"""State as a flat dict of tensors, by name: what leaves a program, and comes back into one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor

from purestep import tree as trees
from purestep.torch_internals import storage_of
from purestep.tree.shard import Shard, is_shard
from purestep.types import Tree

Slot: TypeAlias = Tensor | Shard
"""What has a name of its own where all ranks' state is one: a tensor, or this rank's piece of one."""

_PLAIN = {Tensor, torch.nn.Parameter}

SHOWN = 8
"""How many differences a message lists; it counts the others."""


def state_dict(tree: Tree) -> dict[str, Tensor]:
    """The tensors of a tree, each by the name under which Python reaches it: ``tree['layers'][0].weight``.

    Any format takes this: ``torch.save`` with ``torch.load(weights_only=True)``, safetensors,
    ``torch.distributed.checkpoint``. The tensors are detached and contiguous, and no two share
    memory. Those that lie so already are the tree's own, not copies: a donated step writes to them,
    and so does whoever loads into this dict. Others (views, one tensor for two leaves, columns one
    after the other) are copied.

    Containers are not part of it, nor is what is empty: None, ``()``. Refused are leaves that are
    no tensors (a step count is ``torch.tensor(3)``), and keys whose ``repr`` may be different
    tomorrow, or the same for two leaves.

    >>> state_dict({"layers": [torch.tensor(1.0), None], "a.b": {0: torch.tensor(2)}})
    {"tree['a.b'][0]": tensor(2), "tree['layers'][0]": tensor(1.)}
    """
    flat: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, leaf in named(tree).items():
        storage = leaf.untyped_storage()
        if not leaf.is_contiguous() or storage.nbytes() != leaf.nbytes:
            leaf = leaf.clone(memory_format=torch.contiguous_format)
        elif storage_of(leaf) in taken:
            leaf = leaf.clone()
        taken.add(storage_of(leaf))
        flat[name] = leaf
    return flat


def load_state_dict(like: Tree, flat: Mapping[str, Tensor]) -> Tree:
    """The tree whose ``state_dict`` this is; in containers, on devices and in the memory order of ``like``.

    The tensors are fresh: nothing that is done to them reaches ``flat`` or ``like``. Names, shapes
    and dtypes must be those of ``like``, to which nothing is cast or broadcast. Derivatives do not
    pass.

    >>> like = {"w": torch.zeros(2), "step": torch.tensor(0)}
    >>> load_state_dict(like, {"tree['w']": torch.ones(2), "tree['step']": torch.tensor(3)})
    {'w': tensor([1., 1.]), 'step': tensor(3)}
    >>> load_state_dict(like, {"tree['w']": torch.ones(2, 1), "tree['v']": torch.tensor(3)})
    Traceback (most recent call last):
    ...
    ValueError: flat does not fit like:
      tree['step'] is missing
      tree['v'] has no place
      tree['w'] is torch.float32 of shape (2, 1), and torch.float32 of shape (2,) was expected
    """
    wanted = named(like)
    check_fit({name: trees.kind(tensor) for name, tensor in flat.items()}, wanted, "flat")
    fresh = [empty_like(leaf).copy_(flat[name].detach()) for name, leaf in wanted.items()]
    return trees.unflatten(trees.flatten(like)[1], fresh)


def named(tree: Tree) -> dict[str, Tensor]:
    """The tree's own tensors by name, in the order of its leaves: all of them plain, none of them recorded."""
    return {name: _plain(name, leaf) for name, leaf in _named(tree, None)}


def slots(tree: Tree) -> dict[str, Slot]:
    """The same, but that a ``Shard`` stands for the tensor that it is a piece of, under the name of that."""
    return {name: slot(name, node) for name, node in _named(tree, is_shard)}


def slot(name: str, node: Any) -> Slot:
    """A tensor, or a piece, that may be saved; anything else is refused by its name."""
    if not is_shard(node):
        return _plain(name, node)
    piece, place = _plain(f"{name}.piece", node.piece), node.place
    place.check(f"{name}.piece", piece)
    return Shard(piece, *place)


def _named(tree: Tree, is_leaf: Callable[[Any], bool] | None) -> list[tuple[str, Any]]:
    accessors = optree.tree_accessors(tree, is_leaf, namespace=trees.NAMESPACE)
    names = [accessor.codify("tree") for accessor in accessors]
    for accessor, name in zip(accessors, names, strict=True):
        for key in accessor.path:
            if not _is_stable(key):
                raise ValueError(
                    f"{name} has no name that stays: its key is of type {type(key).__name__}; make it a str, an int, "
                    "an Enum, or a tuple of these"
                )
    repeated = [name for name, times in Counter(names).items() if times > 1]
    if repeated:
        raise ValueError(
            f"{repeated[0]} is the name of two leaves: give them keys that print differently; a class of your own that is "
            "registered with optree returns them as entries"
        )
    return list(zip(names, trees.flatten(tree, is_leaf)[0], strict=True))


_STABLE = {type(None), str, bytes, bool, int, float, torch.dtype}


def _is_stable(key: Any) -> bool:
    """Whether a key prints the same in every process: no addresses, no order of a set."""
    if isinstance(key, tuple):
        return all(map(_is_stable, key))
    # Not of a subclass, which may print what it likes.
    return isinstance(key, Enum) or type(key) in _STABLE


def _plain(name: str, leaf: Any) -> Tensor:
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"{name} is {trees.kind(leaf)}: state is tensors alone; make it one, as in torch.tensor(3), or leave it out"
        )
    if type(leaf) not in _PLAIN or leaf.layout is not torch.strided or leaf.is_meta:
        raise TypeError(
            f"{name} is of class {type(leaf).__name__}, layout {leaf.layout}, on {leaf.device}: state is plain tensors "
            "with values of their own; make it one, as by .to_dense(), .full_tensor() or torch.empty_like(device=...)"
        )
    return leaf.detach().resolve_conj().resolve_neg()


def kind(slot: Slot) -> str:
    """What a tensor is, or what the whole is of a piece."""
    return (
        f"{slot.piece.dtype} of shape {slot.shape}" if isinstance(slot, Shard) else trees.kind(slot)
    )


def check_fit(found: Mapping[str, str], wanted: Mapping[str, Slot], what: str) -> None:
    """Refuses what was ``found``, a kind by name, unless it is that of the tensors ``wanted``; names every difference."""
    differences = list(_differences(found, {name: kind(slot) for name, slot in wanted.items()}))
    if differences:
        shown = "".join(f"\n  {difference}" for difference in differences[:SHOWN])
        hidden = len(differences) - SHOWN
        more = f"\n  and {hidden:,} more" if hidden > 0 else ""
        raise ValueError(f"{what} does not fit like:{shown}{more}")


def _differences(found: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(found.keys() | wanted.keys(), key=str):
        if name not in found:
            yield f"{name} is missing"
        elif name not in wanted:
            yield f"{name} has no place"
        elif found[name] != wanted[name]:
            yield f"{name} is {found[name]}, and {wanted[name]} was expected"


def empty_like(slot: Slot) -> Any:
    """Fresh memory for a leaf like this one, in the same order: in a different one, a product may round differently."""
    if isinstance(slot, Shard):
        return Shard(empty_like(slot.piece), *slot.place)
    return torch.empty_like(slot, requires_grad=False)
