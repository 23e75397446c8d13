"""Converts trees to flat dicts of tensors by name, in which state leaves a program and returns."""

from collections.abc import Collection, Mapping
from enum import Enum, Flag
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor

from purestep import tree as trees
from purestep.tree.shard import Shard, ShardSpec
from purestep.types import Tree
from purestep.validation import DONATED, reused_donation_error

NamedLeaf: TypeAlias = Tensor | Shard
"""A tensor, or a ``Shard`` under the name of the full tensor, which is the same on all ranks."""

NamedLeaves: TypeAlias = dict[str, NamedLeaf]

MAX_DIFFERENCES = 8
"""How many differences an error lists; it counts the others."""

_TENSOR_CLASSES = {Tensor, torch.nn.Parameter}
_STABLE_KEY_CLASSES = {type(None), str, bytes, bool, int, float, torch.dtype}
_ENUM_REPRS: tuple[Any, ...] = (
    Enum.__repr__,
    Flag.__repr__,
    int.__repr__,
    str.__repr__,
)


def state_dict(tree: Tree) -> dict[str, Tensor]:
    """Returns the tensors of a tree in a flat dict, named by their paths, with the keys' ``repr``.

    Of a ``Shard``, it has this rank's part, whose name ends in ``.local``.

    Any format can save it: ``torch.save`` with ``torch.load(weights_only=True)``, safetensors,
    ``torch.distributed.checkpoint``. The tensors are detached and contiguous, and each fills a
    storage that no other one has. A leaf that is already so is not copied: a donated step then
    writes to this dict's tensors too. Others are copied, such as a view of a part of a tensor.

    Containers, and empty ones such as None and ``()``, leave no trace. A leaf that is not a
    plain dense tensor with values raises ``TypeError``: write a step count as ``torch.tensor(3)``.
    A dict key raises ``ValueError`` if its ``repr`` may change, or is that of another key. So does
    a leaf that is marked as donated: an eager step marks the first leaf of donated params and
    state.

    >>> state_dict({"layers": [torch.tensor(1.0), None], "a.b": {0: torch.tensor(2)}})
    {"tree['a.b'][0]": tensor(2), "tree['layers'][0]": tensor(1.)}
    """
    flat: dict[str, Tensor] = {}
    storages: set[torch.UntypedStorage] = set()
    for name, leaf in _named_tensors(tree).items():
        storage = leaf.untyped_storage()
        fills_storage = leaf.is_contiguous() and storage.nbytes() == leaf.nbytes
        if not fills_storage or storage in storages:
            leaf = leaf.clone(memory_format=torch.contiguous_format)
        storages.add(leaf.untyped_storage())
        flat[name] = leaf
    return flat


def load_state_dict(like: Tree, flat: Mapping[str, Tensor]) -> Tree:
    """Rebuilds the tree of a ``state_dict``, in the containers and on the devices of ``like``.

    The tensors are new and share no memory with ``flat`` or ``like``. They have the memory order of
    ``like``. Raises ``ValueError`` unless names, shapes and dtypes equal those of ``like``: nothing
    is cast or broadcast. ``like`` must be a tree that ``state_dict`` takes. No gradient flows
    through.

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
    expected = _named_tensors(like)
    formatted = {name: trees.format_leaf(tensor) for name, tensor in flat.items()}
    check_fit(formatted, expected, "flat")
    loaded = []
    for name, tensor in expected.items():
        empty = torch.empty_like(tensor, requires_grad=False)
        loaded.append(empty.copy_(flat[name].detach()))
    _, spec = trees.flatten(like)
    return trees.unflatten(spec, loaded)


def named_leaves(tree: Tree) -> NamedLeaves:
    """Returns detached tensors and ``Shard`` nodes by name; names have no ``.local``.

    A ``Shard`` has the full tensor's name. Raises TypeError for other leaves. Raises ValueError for
    keys without a stable ``repr``, two leaves of one name, parts of a wrong shape, and leaves that
    are marked as donated.
    """
    leaves = _pair_with_names(tree, hidden_type=Shard)
    _, spec = trees.flatten(tree)
    shard_specs = trees.shard_specs(spec) or [None] * len(leaves)
    by_name = {}
    for (name, leaf), shard_spec in zip(leaves, shard_specs, strict=True):
        by_name[name] = _make_named_leaf(name, leaf, shard_spec)
    return by_name


def _make_named_leaf(name: str, leaf: Any, shard_spec: ShardSpec | None) -> NamedLeaf:
    """Detaches a plain tensor, and wraps it in ``Shard`` again if it is this rank's part of one.

    A tensor is no part if ``shard_spec`` is None or has another number of dimensions. Raises
    TypeError for anything but a plain tensor. Raises ValueError for a part of a wrong shape, and
    for a leaf that is marked as donated.
    """
    tensor = _detach_plain(name, leaf)
    # An optimizer's step count, in the state of a sharded parameter, is not sharded.
    if shard_spec is None or tensor.ndim != len(shard_spec.shape):
        return tensor
    shard_spec.check(f"{name}.local", tensor)
    return shard_spec.wrap(tensor)


def local_tensor(leaf: NamedLeaf) -> Tensor:
    """Returns the tensor itself, or this rank's part of a ``Shard``."""
    (local,) = trees.leaves(leaf)
    tensor: Tensor = local
    return tensor


def replace_local(leaf: NamedLeaf, tensor: Tensor) -> NamedLeaf:
    """Returns ``tensor``, the part of this rank, in a ``Shard`` like ``leaf`` if that is one."""
    _, spec = trees.flatten(leaf)
    replaced: NamedLeaf = trees.unflatten(spec, [tensor])
    return replaced


def format_named_leaf(leaf: NamedLeaf) -> str:
    """Formats the dtype and shape of a tensor, or of the full tensor of a ``Shard``."""
    return f"{local_tensor(leaf).dtype} of shape {tuple(leaf.shape)}"


def check_fit(
    actual: Mapping[str, str], expected: Mapping[str, NamedLeaf], source: str
) -> None:
    """Raises ValueError unless the saved leaves have the names, dtypes and shapes of ``expected``.

    The error lists the first differences.

    Args:
        actual: the leaves of the source, formatted as by ``format_named_leaf``.
        expected: the leaves of ``like``.
        source: what the error calls the source, such as the path of a file.
    """
    formatted = {name: format_named_leaf(leaf) for name, leaf in expected.items()}
    differences = []
    for name in sorted(actual.keys() | formatted.keys(), key=str):
        in_source = actual.get(name, "missing")
        in_like = formatted.get(name, "no such leaf")
        if in_source != in_like:
            differences.append(f"{name} is {in_source}; like has {in_like}")
    if not differences:
        return
    lines = differences[:MAX_DIFFERENCES]
    num_more = len(differences) - MAX_DIFFERENCES
    if num_more > 0:
        lines.append(f"and {num_more:,} more")
    text = "\n  ".join(lines)
    raise ValueError(
        f"{source} does not fit like: build like as the saved tree was\n  {text}"
    )


def empty_like(leaf: NamedLeaf) -> NamedLeaf:
    """Returns a leaf like this one, in new memory without values, which requires no grad.

    It has the memory order of the leaf: in another, products round differently.
    """
    empty = torch.empty_like(local_tensor(leaf), requires_grad=False)
    return replace_local(leaf, empty)


def _named_tensors(tree: Tree) -> dict[str, Tensor]:
    """Returns the tensors of a tree by name, detached, and raises TypeError for other leaves.

    Raises ValueError as ``named_leaves`` does for keys, names and donated leaves.
    """
    return {name: _detach_plain(name, leaf) for name, leaf in _pair_with_names(tree)}


def _pair_with_names(
    tree: Tree, hidden_type: type | None = None
) -> list[tuple[str, Any]]:
    """Pairs each leaf with its name, in the order of ``tree.flatten``.

    Raises ValueError for a key without a stable ``repr``, and for two leaves of one name.

    Args:
        tree: the tree.
        hidden_type: a class of nodes that names leave out.
    """
    names = []
    for accessor in optree.tree_accessors(tree, namespace=trees.NAMESPACE):
        entries = [entry for entry in accessor if entry.type is not hidden_type]
        name = optree.PyTreeAccessor(entries).codify("tree")
        names.append(name)
        for key in accessor.path:
            if not _has_stable_repr(key):
                raise ValueError(
                    f"{name} has no name that stays: its key is of type {type(key).__name__}; "
                    "make it a str, an int, a tuple of these, or an Enum of these"
                )
    _check_unique(names)
    leaves, _ = trees.flatten(tree)
    return [*zip(names, leaves, strict=True)]


def _check_unique(names: Collection[str]) -> None:
    """Raises ValueError if two of the names are equal."""
    seen = set()
    for name in names:
        if name in seen:
            raise ValueError(
                f"{name} is the name of two leaves: give them keys that print differently; a class "
                "that is registered with optree returns such keys as entries"
            )
        seen.add(name)


def _has_stable_repr(key: Any) -> bool:
    """Returns whether a key is of a class known to print the same in each process.

    Such a key has no address and no order of a set. Tuples and named tuples count by their items,
    and members of an ``Enum`` by their value, unless it prints them otherwise. A key of any other
    class counts as unstable.
    """
    cls = type(key)
    is_named = isinstance(key, tuple) and hasattr(cls, "_fields")
    if cls in (tuple, torch.Size) or is_named:
        return all(_has_stable_repr(item) for item in key)
    if isinstance(key, Enum):
        return cls.__repr__ in _ENUM_REPRS and _has_stable_repr(key.value)
    return type(key) in _STABLE_KEY_CLASSES  # A subclass may print anything.


def _detach_plain(name: str, leaf: Any) -> Tensor:
    """Returns a leaf, detached, with conjugation and negation resolved.

    Raises TypeError unless it is a plain dense tensor with values, and ValueError if it is marked
    as donated.
    """
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"{name} is {trees.format_leaf(leaf)}: state is tensors alone; make it one, as in "
            "torch.tensor(3), or leave it out"
        )
    if DONATED in leaf.__dict__:
        raise reused_donation_error(name)
    is_plain = type(leaf) in _TENSOR_CLASSES and leaf.layout is torch.strided
    if not is_plain or leaf.is_meta or leaf.is_nested or leaf.is_quantized:
        raise TypeError(
            f"{name} is of class {type(leaf).__name__}, layout {leaf.layout}, on {leaf.device}: "
            "state is plain tensors that hold values; make it one, as by .to_dense(), "
            ".full_tensor() or torch.empty_like(device=...)"
        )
    return leaf.detach().resolve_conj().resolve_neg()
