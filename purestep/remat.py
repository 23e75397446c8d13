"""Rematerialisation: a backward pass computes a function again, and keeps its arguments alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from purestep import tree
from purestep.torch_private import in_forward_mode, transformed

P = ParamSpec("P")
R = TypeVar("R")


def remat(fn: Callable[P, R]) -> Callable[P, R]:
    """``fn``, of which a backward pass keeps the arguments alone, and computes the rest again.

    A network of L equal blocks, each under ``remat``, holds L inputs and what one block computes,
    where it held what all blocks compute; it takes one more forward pass. Values and gradients are
    those of ``fn``. It is ``torch.utils.checkpoint`` of trees, without ``use_reentrant``:

    * An argument that is written to, by ``fn`` or before the backward pass, is refused. Of tensors
      that ``fn`` closes over, torch cannot tell: pass them as arguments.
    * Random numbers of torch's global generators are drawn again as they were, and those of keys.
      A ``torch.Generator`` among the arguments is refused.
    * Collectives in ``fn`` are called again in the backward pass, by all ranks alike.
    * ``torch.func.grad`` inside of ``fn`` is refused by torch: call ``remat`` inside of ``grad``,
      or ``torch.autograd.grad(..., create_graph=True)`` inside of ``remat``.
    * Under a transform of ``torch.func``, a compiler and derivatives in forward mode, it is ``fn``
      itself, and saves no memory.

    >>> def block(w, x):
    ...     return torch.tanh(x @ w)
    >>> def loss(ws, x):
    ...     for w in ws:
    ...         x = remat(block)(w, x)
    ...     return x.sum()
    >>> x = torch.zeros(1, 2, requires_grad=True)
    >>> torch.autograd.grad(loss([torch.eye(2), torch.eye(2)], x), x)
    (tensor([[1., 1.]]),)
    """

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        traced = torch.compiler.is_dynamo_compiling() or transformed() or in_forward_mode()
        if traced or not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        leaves, structure = tree.flatten((args, kwargs))
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            raise TypeError(
                f"{getattr(fn, '__qualname__', fn)} under ps.remat takes a torch.Generator, which "
                "would draw other numbers in the backward pass: pass a key of ps.random"
            )
        # Tensors in trees would neither be freed as the backward pass goes, nor checked for writes.
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = [None if isinstance(leaf, Tensor) else [leaf] for leaf in leaves]

        def again(*given: Tensor) -> R:
            left = iter(given)
            filled = [next(left) if other is None else other[0] for other in others]
            args, kwargs = tree.unflatten(structure, filled)
            return fn(*args, **kwargs)

        made: R = checkpoint(again, *tensors, use_reentrant=False)
        return made

    return run
