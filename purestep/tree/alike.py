"""Trees that are alike: of one structure, and leaf by leaf of one shape and dtype.

``difference`` names the first leaf that is not alike, ``zeros_like`` makes a tree to sum in, and
``select`` and ``overwrite`` keep one of two trees, as a condition decides.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from purestep.tree.leaves import accumulation_dtype, requires_grad, untransformed
from purestep.tree.structure import check_same, flatten, leaves_of, map, paths, unflatten
from purestep.types import Tree

SUM_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
"""The dtypes in which floating point values may be added up."""


def kind(leaf: Any) -> str:
    """A leaf's dtype and shape, for messages.

    >>> kind(torch.ones(2, 3))
    'torch.float32 of shape (2, 3)'
    """
    if not isinstance(leaf, Tensor):
        return repr(leaf) if isinstance(leaf, str) else f"{type(leaf).__name__}, no tensor"
    return f"{leaf.dtype} of shape {tuple(leaf.shape)}"


def difference(found: Tree, wanted: Tree, name: str) -> str | None:
    """The first leaf in which ``found`` is not like ``wanted``; None where all are alike.

    Floating point dtypes that sums can be kept in are alike.

    >>> difference({"w": torch.ones(2)}, {"v": torch.ones(2)}, "params")
    "params['w'] stands where params['v'] was expected"
    >>> difference({"w": torch.ones(2)}, {"w": torch.ones(3)}, "params")
    "params['w'] is torch.float32 of shape (2,), and torch.float32 of shape (3,) was expected"
    """
    ours, theirs = paths(found, name), paths(wanted, name)
    for mine, other in itertools.zip_longest(ours, theirs):
        if mine != other:
            if mine in {None, *theirs}:
                return f"{other} is missing"
            if other in {None, *ours}:
                return f"{mine} has no place"
            return f"{mine} stands where {other} was expected"
    for path, mine, other in zip(ours, leaves_of(found), leaves_of(wanted), strict=True):
        if _form(mine) != _form(other):
            return f"{path} is {kind(mine)}, and {kind(other)} was expected"
    return None if flatten(found)[1] == flatten(wanted)[1] else f"{name} has other containers"


def _form(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf)
    return leaf.shape, "a sum" if leaf.dtype in SUM_DTYPES else leaf.dtype


def zeros_like(tree: Tree) -> Tree:
    """Zeros in the dtype in which values of each leaf are summed (``accumulation_dtype``).

    >>> zeros_like({"w": torch.ones(2, dtype=torch.bfloat16)})
    {'w': tensor([0., 0.])}
    """
    return map(lambda leaf: torch.zeros_like(leaf, dtype=accumulation_dtype(leaf.dtype)), tree)


def select(condition: Tensor, chosen: Tree, other: Tree) -> Tree:
    """``chosen`` where the scalar ``condition`` holds, else ``other``: fresh tensors, no product.

    It lets go of ``chosen`` leaf by leaf, so that one leaf is alive twice, not the tree.

    >>> select(torch.tensor(False), {"w": torch.ones(2)}, {"w": torch.zeros(2)})
    {'w': tensor([0., 0.])}
    """
    chosen_leaves, structure = flatten(chosen)
    del chosen
    other_leaves, other_structure = flatten(other)
    check_same(structure, other_structure)
    selected = []
    for position, leaf in reversed(list(enumerate(other_leaves))):
        new = chosen_leaves.pop()
        _check_alike(new, leaf, other, position)
        # What has stayed may be on the host, and the condition on a device.
        selected.append(leaf.clone() if new is leaf else torch.where(condition, new, leaf))
        del new
    return unflatten(structure, selected[::-1])


def overwrite(old: Tree, new: Tree, condition: Tensor | None) -> Tree:
    """``new`` written over ``old``, in its buffers, where ``condition`` holds (None: always).

    Where autograd records the values, or a transform follows them, fresh tensors come back.

    >>> old = {"w": torch.zeros(2)}
    >>> overwrite(old, {"w": torch.ones(2)}, None)["w"] is old["w"], old
    (True, {'w': tensor([1., 1.])})
    """
    if torch.compiler.is_dynamo_compiling():
        writes = not requires_grad((old, new))
    else:
        writes = untransformed(old, new)
    new_leaves, structure = flatten(new)
    del new
    old_leaves, old_structure = flatten(old)
    check_same(structure, old_structure)
    written = []
    for position, leaf in reversed(list(enumerate(old_leaves))):
        value = new_leaves.pop()
        _check_alike(value, leaf, old, position)
        # What has stayed needs no writing, wherever it is: flags on the host, under a condition on
        # a device.
        if value is not leaf:
            if condition is not None:
                value = torch.where(condition, value, leaf)
            value = leaf.copy_(value) if writes else value
        written.append(value)
        del value
    return unflatten(structure, written[::-1])


def _check_alike(new: Any, old: Any, tree: Tree, position: int) -> None:
    """State keeps its shapes and dtypes: other ones belong to other parameters."""
    if kind(new) != kind(old) or not isinstance(old, Tensor):
        name = paths(tree, "(params, opt_state)")[position]
        raise ValueError(
            f"the optimizer turned {name} from {kind(old)} into {kind(new)}: params and state keep "
            "their shapes and dtypes; was opt_state made by optimizer.init of these params?"
        )
