"""Who sees what is done with a tree's leaves: autograd, the transforms of ``torch.func``, a compiler.

Whoever would write into a buffer, or let the host read a value, asks here first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from purestep import torch_internals
from purestep.tree.structure import flatten, is_empty, leaves_of, plain, unflatten
from purestep.types import Tree


def eager(*trees: Tree) -> bool:
    """Whether neither a compiler nor a transform sees what is done with these leaves."""
    # Not ``is_compiling``, which is true of every thread while one of them compiles.
    return not torch.compiler.is_dynamo_compiling() and untransformed(*trees)


def untransformed(*trees: Tree) -> bool:
    """Whether nobody differentiates or batches what is done with these leaves.

    Only then may a buffer be written to, or a kernel be used that no transform knows.

    >>> untransformed({"w": torch.ones(2)}), untransformed(torch.ones(2, requires_grad=True))
    (True, False)
    """
    if torch_internals.transformed() or torch_internals.in_forward_mode():
        return False
    return not (trees and requires_grad(trees))


def differentiated(leaves: Sequence[Any]) -> bool:
    """Whether derivatives of what is computed from these leaves may be asked for: a ``vmap`` alone asks for none."""
    if torch_internals.in_forward_mode():
        return True
    if torch.compiler.is_dynamo_compiling():
        # A compiler cannot ask which transforms there are, nor look below them.
        return torch_internals.transformed() or any_requires_grad(leaves)
    if torch_internals.transforms_differentiate():
        return True
    return any_requires_grad([below_transforms(leaf) for leaf in leaves])


def below_transforms(leaf: Any) -> Any:
    """The leaf below all wrappers of ``torch.func``."""
    while isinstance(leaf, Tensor) and torch_internals.is_wrapped(leaf):
        leaf = torch_internals.unwrapped(leaf)
    return leaf


def requires_grad(tree: Tree) -> bool:
    """Whether autograd follows any of these leaves, those in mappings that optree takes for a leaf included.

    >>> requires_grad([torch.ones(2), torch.ones(2, requires_grad=True)])
    True
    """
    return any_requires_grad(leaves_of(tree))


def any_requires_grad(leaves: Sequence[Any]) -> bool:
    """``requires_grad`` of a tree's leaves."""
    if are_tensors(leaves):
        return True in [leaf.requires_grad for leaf in leaves]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                return True
        elif isinstance(leaf, Mapping) and requires_grad(plain(leaf)):
            return True
    return False


_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def are_tensors(leaves: Sequence[Any]) -> bool:
    """Whether all of them are, and of no class that makes its own attributes."""
    return _PLAIN.issuperset(map(type, leaves))


def same(seen: Tree, given: Tree) -> bool:
    """Whether these are one and the same tree, through which reverse mode may look: not a piece of it, or a copy."""
    if seen is given or torch.compiler.is_dynamo_compiling():
        return seen is given
    seen_leaves, structure = flatten(seen)
    leaves, other = flatten(given)
    return structure == other and all(
        _below_gradients(one) is two for one, two in zip(seen_leaves, leaves, strict=True)
    )


def _below_gradients(leaf: Any) -> Any:
    """The leaf as it was before functorch began to differentiate."""
    while isinstance(leaf, Tensor) and torch_internals.is_differentiated(leaf):
        leaf = torch_internals.unwrapped(leaf)
    return leaf


def known_to_compilers(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """Leaves that ``torch.func`` differentiates, as views where a compiler traces.

    It does not see that such a leaf itself requires grad, and would leave out the ``backward`` of a
    ``torch.autograd.Function`` of it (pytorch/pytorch#193279).
    """
    if not torch.compiler.is_dynamo_compiling():
        return leaves
    return [leaf.view_as(leaf) for leaf in leaves]


def detached(tree: Tree) -> Tree:
    """The same tensors, of which nothing is recorded; other leaves as they are.

    >>> detached({"w": torch.ones(2, requires_grad=True), "name": "w"})
    {'w': tensor([1., 1.]), 'name': 'w'}
    """
    if is_empty(tree):
        return tree
    leaves, structure = flatten(tree)
    return unflatten(structure, cut_off(leaves))


def cut_off(leaves: Sequence[Any]) -> list[Any]:
    """``detached`` of a tree's leaves."""
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
