"""Rematerializes activations: the backward pass computes a function again from its arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from purestep import tree
from purestep.torch_private import forward_level, has_transforms, run_checkpoint

P = ParamSpec("P")
R = TypeVar("R")


def remat(fn: Callable[P, R]) -> Callable[P, R]:
    """Wraps ``fn`` to recompute its activations in the backward pass (activation checkpointing).

    Only the arguments of ``fn`` stay in memory. If each of L equal blocks is wrapped, L inputs and
    one block's activations are alive, for one more forward pass. Values and gradients are those of
    ``fn``. ``remat`` is ``torch.utils.checkpoint`` of trees, with ``use_reentrant=False``:

    * Where the backward pass computes ``fn`` again, it refuses an argument that ``fn`` or later
      code has written to. It cannot see writes to tensors that ``fn`` closes over: pass them as
      arguments. Nor does it see writes to tensors inside a leaf, as in a ``UserDict`` or a
      dataclass.
    * torch's global generators, those of the host and of the arguments' device, and keys give the
      same random numbers again. A ``torch.Generator`` among the leaves of the arguments raises
      ``TypeError``.
    * All ranks call the collectives in ``fn`` again, in the backward pass. Those after the last
      tensor that the backward pass needs are left out.
    * torch refuses ``torch.func.grad`` inside ``fn``. Call ``remat`` inside ``grad``, or
      ``torch.autograd.grad(..., create_graph=True)`` inside ``remat``.
    * Under a transform of ``torch.func``, in forward mode, under a compiler and without grad mode,
      it is ``fn`` itself, and saves no memory.

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
        is_traced = (
            torch.compiler.is_dynamo_compiling()
            or has_transforms()
            or forward_level() >= 0
        )
        if is_traced or not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        leaves, spec = tree.flatten((args, kwargs))
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            raise TypeError(
                f"{getattr(fn, '__qualname__', fn)} under ps.remat takes a torch.Generator, which "
                "would draw other numbers in the backward pass: pass a key of ps.random"
            )
        # Passed one by one: torch neither frees tensors in trees as the backward pass goes, nor
        # checks them for writes.
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

        def call_with(*tensors: Tensor) -> R:
            remaining = iter(tensors)
            merged = []
            for from_tensors, other in zip(is_tensor, others, strict=True):
                merged.append(next(remaining) if from_tensors else other)
            args, kwargs = tree.unflatten(spec, merged)
            return fn(*args, **kwargs)

        result: R = run_checkpoint(call_with, *tensors)
        return result

    return run
