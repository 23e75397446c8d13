"""Who follows what is done with tensors: autograd, a transform of ``torch.func``, a compiler.

Code that writes into a buffer, or reads a value on the host, asks here first.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from purestep import torch_private
from purestep.tree.opaque import tensors_in
from purestep.tree.spec import flatten, leaves_of
from purestep.types import Tree


def eager(*trees: Tree) -> bool:
    """Whether neither a compiler, nor a transform, nor autograd sees what is done with these.

    Only then may a buffer be written to, or a kernel be used that no transform knows.

    >>> eager({"w": torch.ones(2)}), eager(torch.ones(2, requires_grad=True))
    (True, False)
    """
    # Not ``is_compiling``, which is true of every thread while one of them compiles.
    traced = torch.compiler.is_dynamo_compiling() or torch_private.transformed()
    if traced or torch_private.forward_level() >= 0:
        return False
    return not (trees and any_requires_grad(flatten(trees)[0]))


def untransformed(*trees: Tree) -> bool:
    """Whether neither a transform nor autograd sees what is done with these; a compiler may."""
    if torch_private.transformed() or torch_private.forward_level() >= 0:
        return False
    return not (trees and any_requires_grad(flatten(trees)[0]))


def differentiated(leaves: Sequence[Any]) -> bool:
    """Whether anybody may ask for derivatives of these leaves: a ``vmap`` alone does not."""
    if torch_private.forward_level() >= 0:
        return True
    if torch.compiler.is_dynamo_compiling():
        # A compiler cannot ask which transforms there are, nor look below them.
        return torch_private.transformed() or any_requires_grad(leaves)
    if torch_private.transforms_differentiate():
        return True
    return any_requires_grad([below_transforms(leaf) for leaf in leaves])


def below_transforms(leaf: Any) -> Any:
    """The leaf below all wrappers of ``torch.func``."""
    return torch.func.debug_unwrap(leaf) if isinstance(leaf, Tensor) else leaf


def requires_grad(tree: Tree) -> bool:
    """Returns whether autograd follows any leaf, also in mappings that are leaves.

    >>> requires_grad([torch.ones(2), torch.ones(2, requires_grad=True)])
    True
    """
    return any_requires_grad(leaves_of(tree))


def any_requires_grad(leaves: Sequence[Any]) -> bool:
    """``requires_grad`` of a tree's leaves."""
    for leaf in leaves:
        if type(leaf) is Tensor or isinstance(leaf, Tensor):
            if leaf.requires_grad:
                return True
            continue
        has_fields = isinstance(leaf, Mapping) or hasattr(leaf, "__dataclass_fields__")
        if has_fields and any_requires_grad([*tensors_in(leaf)]):
            return True
    return False


def known_to_compilers(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """Leaves that ``torch.func`` differentiates, as views where a compiler traces.

    It does not see that such a leaf itself requires grad. A ``torch.autograd.Function`` of it would
    lose its ``backward`` (pytorch/pytorch#193279).
    """
    if not torch.compiler.is_dynamo_compiling():
        return leaves
    return [leaf.view_as(leaf) for leaf in leaves]


def at_hand(tensor: Tensor) -> Tensor | None:
    """The values below all wrappers of ``torch.func``; None where the host cannot read them.

    >>> torch.vmap(lambda x: x + at_hand(x).sum())(torch.tensor([1.0, 2.0]))
    tensor([4., 5.])
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    tensor = torch.func.debug_unwrap(tensor)
    return tensor if type(tensor) is Tensor and tensor.is_cpu else None


def number_at_hand(tensor: Tensor) -> float | None:
    """The value of a scalar; None where the host cannot read it, or a ``vmap`` has several."""
    known = at_hand(tensor)
    return None if known is None or known.ndim else known.item()
