"""Operations on trees, leaf by leaf: comparisons, copies and selections."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from purestep.tree.norms import accumulation_dtype
from purestep.tree.spec import flatten, leaves, leaves_matching, map, paths, unflatten
from purestep.tree.tracing import can_write
from purestep.types import Tree

FLOAT_DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
]
"""Floating point dtypes of params, and of sums."""


def detach(tree: Tree) -> Tree:
    """Returns a tree with its tensors detached, in the same memory; other leaves stay as they are.

    >>> detach({"w": torch.ones(2, requires_grad=True), "name": "w"})
    {'w': tensor([1., 1.]), 'name': 'w'}
    """
    leaves, spec = flatten(tree)
    return unflatten(spec, detach_leaves(leaves))


def detach_leaves(leaves: Sequence[Any]) -> list[Any]:
    """Returns leaves with their tensors detached; others stay as they are."""
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on a device: itself if it is there, else a copy.

    The host waits for copies to the CPU, which it could read too early. It does not wait for
    others, unless torch has to, as CUDA may for memory that is not pinned.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


def format_leaf(leaf: Any) -> str:
    """Formats a leaf for messages: a tensor's dtype and shape, a string in quotes, else the type.

    >>> format_leaf(torch.ones(2, 3)), format_leaf(3)
    ('torch.float32 of shape (2, 3)', 'int, no tensor')
    """
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} of shape {tuple(leaf.shape)}"
    if isinstance(leaf, str):
        return repr(leaf)
    return f"{type(leaf).__name__}, no tensor"


def describe_mismatch(actual: Tree, expected: Tree, name: str) -> str | None:
    """Describes the first difference of a tree from the expected one; None if there is none.

    Leaves may be missing or superfluous, or differ in shape, dtype or, if no tensors, in type.
    Containers may differ. Values are not compared. In every leaf, float64, float32, bfloat16 and
    float16 count as one dtype. ``name`` stands for the tree in the text.

    >>> describe_mismatch({"w": torch.ones(2)}, {"v": torch.ones(2)}, "params")
    "params['v'] is missing"
    >>> describe_mismatch({"w": torch.ones(2)}, {"w": torch.ones(3)}, "params")
    "params['w'] is torch.float32 of shape (2,), and torch.float32 of shape (3,) was expected"
    """
    actual_leaves = _leaves_by_path(actual, name)
    expected_leaves = _leaves_by_path(expected, name)
    for path in expected_leaves | actual_leaves:
        if path not in actual_leaves:
            return f"{path} is missing"
        if path not in expected_leaves:
            return f"{path} has no place"
        leaf = actual_leaves[path]
        other = expected_leaves[path]
        if _signature(leaf) != _signature(other):
            return (
                f"{path} is {format_leaf(leaf)}, and {format_leaf(other)} was expected"
            )
    _, spec = flatten(actual)
    _, expected_spec = flatten(expected)
    if spec != expected_spec:
        return f"{name} has other containers"
    return None


def _leaves_by_path(tree: Tree, name: str) -> dict[str, Any]:
    names = paths(tree, name)
    return dict(zip(names, leaves(tree), strict=True))


def _signature(leaf: Any) -> Any:
    """Returns what two leaves must share: the shape and dtype, or the type of other leaves.

    All ``FLOAT_DTYPES`` count as one dtype.
    """
    if not isinstance(leaf, Tensor):
        return type(leaf)
    if leaf.dtype in FLOAT_DTYPES:
        return leaf.shape, "a sum"
    return leaf.shape, leaf.dtype


def zeros_like(tree: Tree) -> Tree:
    """Returns a tree of zeros, in the dtype in which each leaf is summed (``accumulation_dtype``).

    >>> zeros_like({"w": torch.ones(2, dtype=torch.bfloat16)})
    {'w': tensor([0., 0.])}
    """

    def make_zeros(leaf: Tensor) -> Tensor:
        dtype = accumulation_dtype(leaf.dtype)
        return torch.zeros_like(leaf, dtype=dtype)

    return map(make_zeros, tree)


def where(condition: Tensor, chosen: Tree, other: Tree) -> Tree:
    """Returns ``chosen`` if the scalar ``condition`` is True, else ``other``, in new tensors.

    Raises ValueError unless both have the same containers, shapes and dtypes.

    >>> where(torch.tensor(False), {"w": torch.ones(2)}, {"w": torch.zeros(2)})
    {'w': tensor([0., 0.])}
    """

    def select(new: Tensor, old: Tensor) -> Tensor:
        if new is old:  # It may be on the host, and the condition on a device.
            return old.clone()
        return torch.where(condition, new, old)

    return _map_pairs(select, chosen, other)


def copy_(old: Tree, new: Tree, condition: Tensor | None) -> Tree:
    """Writes ``new`` over ``old``, in its buffers, if ``condition`` is True (None: always).

    Returns the tree of these buffers. Leaves are written one by one, so a leaf of ``new`` must not
    share memory with another leaf of ``old``. If any leaf requires grad, also under
    ``torch.no_grad()``, or a transform or forward mode is active, ``old`` stays as it is. The
    result then holds leaves of ``new`` without a condition, else new tensors. A leaf that both
    trees share is returned itself. Raises ValueError unless both have the same containers, shapes
    and dtypes.

    >>> old = {"w": torch.zeros(2)}
    >>> copy_(old, {"w": torch.ones(2)}, None)["w"] is old["w"], old
    (True, {'w': tensor([1., 1.])})
    """
    in_place = can_write(old, new)

    def copy_leaf(new: Tensor, old: Tensor) -> Tensor:
        # What has not changed needs no copy, wherever it is: flags lie on the host, where the
        # condition may lie on a device.
        if new is old:
            return old
        value = new
        if condition is not None:
            value = torch.where(condition, new, old)
        if in_place:
            return old.copy_(value)
        return value

    return _map_pairs(copy_leaf, new, old)


def _map_pairs(fn: Callable[[Tensor, Tensor], Tensor], new: Tree, old: Tree) -> Tree:
    """Returns a tree of ``fn(new_leaf, old_leaf)`` of corresponding leaves.

    Before the first call it raises ValueError unless both trees have the same containers, and
    tensors of the same shapes and dtypes.
    """
    old_leaves, spec = flatten(old)
    new_leaves = leaves_matching(spec, new)
    # All pairs are compared before ``fn`` writes to the first one.
    for index, old_leaf in enumerate(old_leaves):
        signature = format_leaf(new_leaves[index])
        old_signature = format_leaf(old_leaf)
        # Other signatures belong to other params.
        if signature != old_signature or not isinstance(old_leaf, Tensor):
            path = paths(old, "(params, opt_state)")[index]
            raise ValueError(
                f"the optimizer turned {path} from {old_signature} into {signature}: params and "
                "state keep their shapes and dtypes. Let init return what update returns, and make "
                "opt_state by optimizer.init of these params"
            )
    results = []
    for new_leaf, old_leaf in zip(new_leaves, old_leaves, strict=True):
        results.append(fn(new_leaf, old_leaf))
    return unflatten(spec, results)


def match_strides(leaf: Tensor, total: Tensor) -> Tensor:
    """Returns ``total``, or a copy of it in the memory order of ``leaf`` if their strides differ.

    Both have the same shape, and kernels read them side by side. The copy has the strides of
    ``leaf`` if that is dense, and is dense in any case. It keeps the dtype of ``total``.
    """
    if total.stride() == leaf.stride():
        return total
    strided = torch.empty_like(leaf, dtype=total.dtype)
    return strided.copy_(total)
