"""Operations on trees, leaf by leaf: dtypes of sums, comparisons, copies and selections."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from purestep.tree.norms import accumulation_dtype
from purestep.tree.spec import flatten, leaves, leaves_matching, map, paths, unflatten
from purestep.tree.tracing import can_write
from purestep.types import Tree

FLOAT_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
"""The dtypes in which floating point values may be added up."""


def detach(tree: Tree) -> Tree:
    """Detaches the tensors of a tree; other leaves stay as they are.

    >>> detach({"w": torch.ones(2, requires_grad=True), "name": "w"})
    {'w': tensor([1., 1.]), 'name': 'w'}
    """
    leaves, structure = flatten(tree)
    return unflatten(structure, detach_leaves(leaves))


def detach_leaves(leaves: Sequence[Any]) -> list[Any]:
    """``detach`` of a tree's leaves."""
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; only the host waits for it, where it could read it too early."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def format_leaf(leaf: Any) -> str:
    """A leaf's dtype and shape, for messages.

    >>> format_leaf(torch.ones(2, 3))
    'torch.float32 of shape (2, 3)'
    """
    if not isinstance(leaf, Tensor):
        return (
            repr(leaf) if isinstance(leaf, str) else f"{type(leaf).__name__}, no tensor"
        )
    return f"{leaf.dtype} of shape {tuple(leaf.shape)}"


def describe_mismatch(found: Tree, wanted: Tree, name: str) -> str | None:
    """Describes the first leaf in which ``found`` differs from ``wanted``; None if there is none.

    Floating-point dtypes that can hold sums count as equal.

    >>> describe_mismatch({"w": torch.ones(2)}, {"v": torch.ones(2)}, "params")
    "params['v'] is missing"
    >>> describe_mismatch({"w": torch.ones(2)}, {"w": torch.ones(3)}, "params")
    "params['w'] is torch.float32 of shape (2,), and torch.float32 of shape (3,) was expected"
    """
    ours = dict(zip(paths(found, name), leaves(found), strict=True))
    theirs = dict(zip(paths(wanted, name), leaves(wanted), strict=True))
    for path in theirs | ours:
        if path not in ours or path not in theirs:
            return f"{path} {'has no place' if path in ours else 'is missing'}"
        if _signature(ours[path]) != _signature(theirs[path]):
            expected = format_leaf(theirs[path])
            return f"{path} is {format_leaf(ours[path])}, and {expected} was expected"
    return (
        None
        if flatten(found)[1] == flatten(wanted)[1]
        else f"{name} has other containers"
    )


def _signature(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf)
    return leaf.shape, "a sum" if leaf.dtype in FLOAT_DTYPES else leaf.dtype


def zeros_like(tree: Tree) -> Tree:
    """Returns zeros, in the dtype in which each leaf is summed (``accumulation_dtype``).

    >>> zeros_like({"w": torch.ones(2, dtype=torch.bfloat16)})
    {'w': tensor([0., 0.])}
    """
    return map(
        lambda leaf: torch.zeros_like(leaf, dtype=accumulation_dtype(leaf.dtype)), tree
    )


def where(condition: Tensor, chosen: Tree, other: Tree) -> Tree:
    """Returns ``chosen`` if the scalar ``condition`` is True, else ``other``, in new tensors.

    >>> where(torch.tensor(False), {"w": torch.ones(2)}, {"w": torch.zeros(2)})
    {'w': tensor([0., 0.])}
    """

    def one(new: Tensor, old: Tensor) -> Tensor:
        # What has stayed may be on the host, and the condition on a device.
        return old.clone() if new is old else torch.where(condition, new, old)

    return _map_pairs(one, chosen, other)


def copy_(old: Tree, new: Tree, condition: Tensor | None) -> Tree:
    """Writes ``new`` over ``old``, in its buffers, if ``condition`` is True (None: always).

    If autograd or a transform follows the values, it returns new tensors instead.

    >>> old = {"w": torch.zeros(2)}
    >>> copy_(old, {"w": torch.ones(2)}, None)["w"] is old["w"], old
    (True, {'w': tensor([1., 1.])})
    """
    writes = can_write(old, new)

    def one(new: Tensor, old: Tensor) -> Tensor:
        # What has stayed needs no writing, wherever it is: flags on the host, under a condition on
        # a device.
        if new is old:
            return old
        value = new if condition is None else torch.where(condition, new, old)
        return old.copy_(value) if writes else value

    return _map_pairs(one, new, old)


def _map_pairs(one: Callable[[Tensor, Tensor], Tensor], new: Tree, old: Tree) -> Tree:
    """``one`` of corresponding leaves. State keeps its shapes and dtypes."""
    leaves, structure = flatten(old)
    pairs = [*zip(leaves_matching(structure, new), leaves, strict=True)]
    for at, (value, leaf) in enumerate(pairs):
        # Others belong to other parameters.
        if format_leaf(value) != format_leaf(leaf) or not isinstance(leaf, Tensor):
            raise ValueError(
                f"the optimizer turned {paths(old, '(params, opt_state)')[at]} from "
                f"{format_leaf(leaf)} "
                f"into {format_leaf(value)}: params and state keep their shapes and "
                "dtypes; was opt_state "
                "made by optimizer.init of these params?"
            )
    return unflatten(structure, [one(*pair) for pair in pairs])


def match_strides(leaf: Tensor, total: Tensor) -> Tensor:
    """Returns ``total`` with the strides of ``leaf``: kernels read both side by side."""
    if total.stride() == leaf.stride():
        return total
    return torch.empty_like(leaf, dtype=total.dtype).copy_(total)
