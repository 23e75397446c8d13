"""Returns whether autograd, a transform of ``torch.func`` or a compiler follows tensors.

Code that writes into a buffer, or reads a value on the host, asks here first.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from purestep import torch_private
from purestep.tree.opaque import is_dataclass_object, tensors_in
from purestep.tree.spec import flatten, leaves
from purestep.types import Tree


def is_plain_eager(*trees: Tree) -> bool:
    """Returns whether no compiler, transform or autograd sees what is done with these trees.

    Only then may code call a kernel that no transform knows. To write to a buffer, ``can_write`` is
    enough, which a compiler's trace leaves True. ``is_plain_eager`` is False if any leaf requires
    grad, also under ``torch.no_grad()``. Without trees, only compilers, transforms and forward-mode
    derivatives count.

    >>> is_plain_eager({"w": torch.ones(2)}), is_plain_eager(torch.ones(2, requires_grad=True))
    (True, False)
    """
    # Not ``is_compiling``, which is true of every thread while one of them compiles.
    if torch.compiler.is_dynamo_compiling() or torch_private.has_transforms():
        return False
    if torch_private.forward_level() >= 0:
        return False
    return not (trees and leaves_require_grad(flatten(trees)[0]))


def can_write(*trees: Tree) -> bool:
    """Returns whether no transform or autograd sees what is done with these trees.

    It is ``is_plain_eager``, except that a compiler may trace.
    """
    if torch_private.has_transforms() or torch_private.forward_level() >= 0:
        return False
    return not (trees and leaves_require_grad(flatten(trees)[0]))


def may_be_differentiated(leaves: Sequence[Any]) -> bool:
    """Returns whether autograd or a transform other than ``vmap`` may differentiate leaves.

    While a compiler traces, any transform counts, a ``vmap`` too.
    """
    if torch_private.forward_level() >= 0:
        return True
    if torch.compiler.is_dynamo_compiling():
        # A compiler cannot ask which transforms there are, nor look below them.
        return torch_private.has_transforms() or leaves_require_grad(leaves)
    if torch_private.transforms_differentiate():
        return True
    return leaves_require_grad([unwrap_functorch(leaf) for leaf in leaves])


def unwrap_functorch(leaf: Any) -> Any:
    """Returns a tensor below all wrappers of ``torch.func``; other leaves as they are."""
    if isinstance(leaf, Tensor):
        return torch.func.debug_unwrap(leaf)
    return leaf


def any_requires_grad(tree: Tree) -> bool:
    """Returns whether any leaf requires grad, or a tensor inside a leaf: a mapping or dataclass.

    >>> any_requires_grad([torch.ones(2), torch.ones(2, requires_grad=True)])
    True
    """
    return leaves_require_grad(leaves(tree))


def leaves_require_grad(leaves: Sequence[Any]) -> bool:
    """Returns whether any leaf requires grad, or a tensor inside a leaf: a mapping or dataclass."""
    for leaf in leaves:
        if type(leaf) is Tensor or isinstance(leaf, Tensor):
            if leaf.requires_grad:
                return True
            continue
        if isinstance(leaf, (int, float)):  # Such as a learning rate, at each step.
            continue
        is_opaque = isinstance(leaf, Mapping) or is_dataclass_object(leaf)
        if is_opaque and leaves_require_grad([*tensors_in(leaf)]):
            return True
    return False


def views_for_dynamo(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns views of the leaves in a compiler's trace; elsewhere ``leaves`` itself.

    Dynamo does not see that a leaf which ``torch.func`` differentiates requires grad. A
    ``torch.autograd.Function`` of it would lose its ``backward`` (pytorch/pytorch#193279).
    """
    if not torch.compiler.is_dynamo_compiling():
        return leaves
    return [leaf.view_as(leaf) for leaf in leaves]


def concrete(tensor: Tensor) -> Tensor | None:
    """Returns the values below all wrappers of ``torch.func``; None if the host has none to read.

    It has none in a trace, for a tensor on a device, or for a subclass of ``Tensor``.

    >>> torch.vmap(lambda x: x + concrete(x).sum())(torch.tensor([1.0, 2.0]))
    tensor([4., 5.])
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    tensor = torch.func.debug_unwrap(tensor)
    if type(tensor) is Tensor and tensor.is_cpu:
        return tensor
    return None


def concrete_scalar(tensor: Tensor) -> float | None:
    """Returns the value of a scalar tensor as a Python number; None if the host cannot read it.

    Also returns None if there are several values, as of a scalar in a ``vmap``.
    """
    value = concrete(tensor)
    if value is None or value.ndim > 0:
        return None
    return value.item()
