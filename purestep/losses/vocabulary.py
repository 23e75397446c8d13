"""Statistics of each token's logits, hidden · weightᵀ, which are never whole.

The vocabulary comes in chunks: of each, all tokens' logits are computed, used and dropped, and in
the backward pass computed again. A chunk's part of the weight's gradient is then finished at once,
summed over all tokens inside of one product. Four products, where logits that are kept take three:
the gradient of any cotangent c, Σᵢ cᵢ (pᵢ − yᵢ) ⊗ hᵢ, needs the logits when c is known.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from purestep import tree
from purestep.remat import remat

AT_ONCE = {"cpu": 2**22}
"""How many logits there are at once: what stays in a host's caches. Other devices take 2²⁶."""

LEAST = 256
"""Classes in a chunk, at least: hidden is hardly smaller than these logits."""


class Head(NamedTuple):
    """The last layer: weight (classes, features), bias (classes,), and c of c · tanh(x / c)."""

    weight: Tensor
    bias: Tensor | None = None
    soft_cap: float | None = None


class Statistics(NamedTuple):
    """Of each token: z = log Σ exp x, the logit of its label, and Σ x."""

    z: Tensor
    picked: Tensor
    total: Tensor


def statistics(
    hidden: Tensor, labels: Tensor, head: Head, chunk: int | None
) -> Statistics:
    """Of hidden states (tokens, features). A label that is no class has a logit of 0.

    >>> hidden, head = torch.zeros(1, 2), Head(torch.ones(4, 2))
    >>> statistics(hidden, torch.tensor([3]), head, chunk=3)
    Statistics(z=tensor([1.3863]), picked=tensor([0.]), total=tensor([0.]))
    """
    size = chunk_size(hidden, head, chunk)
    if not tree.is_plain_eager():
        return by_chunks(hidden, labels, head, size)
    return Statistics(
        *_apply(labels, head.soft_cap, size, hidden, head.weight, head.bias)
    )


def chunk_size(hidden: Tensor, head: Head, chunk: int | None) -> int:
    """How many classes' logits there are at once: all, for a compiler, which would copy a loop.

    >>> chunk_size(torch.ones(4096, 2), Head(torch.ones(131072, 2)), None)
    1024
    """
    if chunk is not None and chunk < 1:
        raise ValueError(
            f"chunk={chunk}: it counts classes, so take 1 or more, or None"
        )
    if torch.compiler.is_dynamo_compiling():
        return len(head.weight)
    return chunk or max(
        LEAST, AT_ONCE.get(hidden.device.type, 2**26) // max(len(hidden), 1)
    )


def split_head(head: Head, size: int) -> list[Head]:
    """The head, ``size`` classes at a time.

    >>> [len(piece.weight) for piece in split_head(Head(torch.ones(5, 2)), 2)]
    [2, 2, 1]
    """
    weights = head.weight.split(size)
    biases = [None] * len(weights) if head.bias is None else head.bias.split(size)
    return [Head(*each, head.soft_cap) for each in zip(weights, biases, strict=True)]


def logits_of(hidden: Tensor, head: Head) -> Tensor:
    """A product in the dtype of the weight, and all that follows in that of hidden."""
    x = (hidden.to(head.weight.dtype) @ head.weight.T).to(hidden.dtype)
    x = x if head.bias is None else x + head.bias
    return x if head.soft_cap is None else head.soft_cap * torch.tanh(x / head.soft_cap)


def by_chunks(hidden: Tensor, labels: Tensor, head: Head, size: int) -> Statistics:
    """``statistics``, each chunk under ``remat``, with all derivatives by autograd."""
    # What flows back from each chunk is added up in this dtype.
    hidden = hidden.to(tree.accumulation_dtype(hidden.dtype))
    made = [
        remat(_chunk)(hidden, labels - number * size, piece)
        for number, piece in enumerate(split_head(head, size))
    ]
    most, exponentials, picked, total = (
        torch.stack(each) for each in zip(*made, strict=True)
    )
    return Statistics(
        combine_chunks(most, exponentials)[0], picked.sum(0), total.sum(0)
    )


def _chunk(hidden: Tensor, labels: Tensor, head: Head) -> tuple[Tensor, ...]:
    """The greatest logit, the exponentials above it, the label's logit, and the sum."""
    x = logits_of(hidden, head)
    place, inside = _place(labels, head.weight)
    picked = torch.where(inside, x.gather(-1, place), 0).squeeze(-1)
    most, exponentials = shifted_exp(x)
    return most, exponentials.sum(-1), picked, x.sum(-1)


def _place(labels: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Each label's place in a chunk, of shape (tokens, 1), and whether it has one."""
    labels = labels.unsqueeze(-1)
    inside = (labels >= 0) & (labels < len(classes))
    return torch.where(inside, labels, 0), inside


def shifted_exp(x: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest of each row, a constant, and the exponentials of the row less it.

    >>> shifted_exp(torch.zeros(1, 2))
    (tensor([0.]), tensor([[1., 1.]]))
    """
    most = x.detach().amax(-1)
    return most, (x - _finite(most).unsqueeze(-1)).exp()


def combine_chunks(most: Tensor, exponentials: Tensor) -> tuple[Tensor, Tensor]:
    """log Σ exp of all chunks, and what each one's exponentials are multiplied by.

    >>> combine_chunks(torch.zeros(2, 1), torch.ones(2, 1))
    (tensor([0.6931]), tensor([[1.],
            [1.]]))
    """
    shift = _finite(most.amax(0))
    scale = (most - shift).exp()
    return shift + (exponentials * scale).sum(0).log(), scale


def _finite(most: Tensor) -> Tensor:
    """0 where all logits are −∞, since −∞ − −∞ is no number."""
    return torch.where(most == -math.inf, 0, most)


class _Statistics(Function):
    """``by_chunks`` where nothing is transformed, with a first derivative that holds one chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        labels: Tensor,
        soft_cap: float | None,
        size: int,
        hidden: Tensor,
        *params: Any,
    ) -> tuple[Tensor, ...]:
        weight, bias = params
        made = by_chunks(hidden, labels, Head(weight, bias, soft_cap), size)
        ctx.soft_cap, ctx.size = soft_cap, size
        ctx.save_for_backward(labels, made.z, hidden, weight, bias)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        labels, z, *operands = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        if not torch.is_grad_enabled():
            grads = _gradients(
                ctx.soft_cap, ctx.size, labels, z, operands, needed, cotangents
            )
            return None, None, None, *grads
        # A second derivative is asked for.
        hidden, weight, bias = operands
        made = by_chunks(hidden, labels, Head(weight, bias, ctx.soft_cap), ctx.size)
        wanted = [each for each, need in zip(operands, needed, strict=True) if need]
        found = iter(torch.autograd.grad(made, wanted, cotangents, create_graph=True))
        return None, None, None, *(next(found) if need else None for need in needed)


def _gradients(
    soft_cap: float | None,
    size: int,
    labels: Tensor,
    z: Tensor,
    operands: Sequence[Any],
    needed: Sequence[bool],
    cotangents: Sequence[Tensor],
) -> list[Tensor | None]:
    """Those of hidden, weight and bias. A token without a cotangent may even be NaN."""
    of_z, of_picked, of_total = (each.unsqueeze(-1) for each in cotangents)
    used = (of_z != 0) | (of_picked != 0) | (of_total != 0)
    z = torch.where(used, z.unsqueeze(-1), math.inf)
    hidden, *params = operands
    rows = torch.where(used, hidden, 0).to(z.dtype).requires_grad_(needed[0])
    pairs = [*zip(params, needed[1:], strict=True)]
    grads = [torch.empty_like(each) if need else None for each, need in pairs]
    for start in range(0, len(params[0]), size):
        span = slice(start, start + size)
        own: list[Any] = [
            None if each is None else each[span].detach().requires_grad_(need)
            for each, need in pairs
        ]
        with torch.enable_grad():
            x = logits_of(rows, Head(own[0], own[1], soft_cap))
        place, inside = _place(labels - start, own[0])
        to_x = x.detach().sub(z).exp_().mul_(of_z).add_(of_total)
        to_x.scatter_add_(-1, place, torch.where(inside, of_picked, 0))
        torch.autograd.backward(x, to_x)
        for grad, each in zip(grads, own, strict=True):
            if grad is not None:
                grad[span] = each.grad
    return [None if rows.grad is None else rows.grad.to(hidden.dtype), *grads]


_apply: Callable[..., tuple[Tensor, ...]] = _Statistics.apply
