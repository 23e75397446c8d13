"""Who follows what is done with tensors: autograd, a transform of ``torch.func``, a compiler.

Code that writes into a buffer, or reads a value on the host, asks here first.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from purestep import torch_private
from purestep.tree.opaque import tensors_in
from purestep.tree.spec import flatten, leaves
from purestep.types import Tree


def is_plain_eager(*trees: Tree) -> bool:
    """Whether neither a compiler, nor a transform, nor autograd sees what is done with these.

    Only then may a buffer be written to, or a kernel be used that no transform knows.

    >>> is_plain_eager({"w": torch.ones(2)}), is_plain_eager(torch.ones(2, requires_grad=True))
    (True, False)
    """
    # Not ``is_compiling``, which is true of every thread while one of them compiles.
    traced = torch.compiler.is_dynamo_compiling() or torch_private.transformed()
    if traced or torch_private.forward_level() >= 0:
        return False
    return not (trees and leaves_require_grad(flatten(trees)[0]))


def can_write(*trees: Tree) -> bool:
    """Whether neither a transform nor autograd sees what is done with these; a compiler may."""
    if torch_private.transformed() or torch_private.forward_level() >= 0:
        return False
    return not (trees and leaves_require_grad(flatten(trees)[0]))


def may_be_differentiated(leaves: Sequence[Any]) -> bool:
    """Whether anybody may ask for derivatives of these leaves: a ``vmap`` alone does not."""
    if torch_private.forward_level() >= 0:
        return True
    if torch.compiler.is_dynamo_compiling():
        # A compiler cannot ask which transforms there are, nor look below them.
        return torch_private.transformed() or leaves_require_grad(leaves)
    if torch_private.transforms_differentiate():
        return True
    return leaves_require_grad([unwrap_functorch(leaf) for leaf in leaves])


def unwrap_functorch(leaf: Any) -> Any:
    """The leaf below all wrappers of ``torch.func``."""
    return torch.func.debug_unwrap(leaf) if isinstance(leaf, Tensor) else leaf


def any_requires_grad(tree: Tree) -> bool:
    """Returns whether autograd follows any leaf, also in mappings that are leaves.

    >>> leaves_require_grad([torch.ones(2), torch.ones(2, requires_grad=True)])
    True
    """
    return leaves_require_grad(leaves(tree))


def leaves_require_grad(leaves: Sequence[Any]) -> bool:
    """``any_requires_grad`` of a tree's leaves."""
    for leaf in leaves:
        if type(leaf) is Tensor or isinstance(leaf, Tensor):
            if leaf.requires_grad:
                return True
            continue
        has_fields = isinstance(leaf, Mapping) or hasattr(leaf, "__dataclass_fields__")
        if has_fields and leaves_require_grad([*tensors_in(leaf)]):
            return True
    return False


def views_for_dynamo(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """Leaves that ``torch.func`` differentiates, as views where a compiler traces.

    It does not see that such a leaf itself requires grad. A ``torch.autograd.Function`` of it would
    lose its ``backward`` (pytorch/pytorch#193279).
    """
    if not torch.compiler.is_dynamo_compiling():
        return leaves
    return [leaf.view_as(leaf) for leaf in leaves]


def concrete(tensor: Tensor) -> Tensor | None:
    """The values below all wrappers of ``torch.func``; None where the host cannot read them.

    >>> torch.vmap(lambda x: x + concrete(x).sum())(torch.tensor([1.0, 2.0]))
    tensor([4., 5.])
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    tensor = torch.func.debug_unwrap(tensor)
    return tensor if type(tensor) is Tensor and tensor.is_cpu else None


def concrete_scalar(tensor: Tensor) -> float | None:
    """The value of a scalar; None where the host cannot read it, or a ``vmap`` has several."""
    known = concrete(tensor)
    return None if known is None or known.ndim else known.item()
