"""Computes statistics of each token's logits, hidden · weightᵀ, from one chunk at a time.

The vocabulary is cut into chunks. All tokens' logits of a chunk are computed, used and dropped, and
computed again in the backward pass. There, a chunk's part of the weight's gradient is one product,
which sums over all tokens, so it is final at once.

This takes four products, where logits in memory take three: the gradient for a cotangent c,
Σᵢ cᵢ (pᵢ − yᵢ) ⊗ hᵢ, needs the logits at a time when c is known.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from purestep import tree
from purestep.remat import remat

MAX_LOGITS = {"cpu": 2**22}
"""How many logits a chunk has: what stays in a host's caches. Other devices take 2²⁶."""

MIN_CLASSES = 256
"""How many classes a chunk has at least: hidden is hardly smaller than these logits."""


class Head(NamedTuple):
    """Holds the last layer of a model, which computes logits of hidden states.

    Attributes:
        weight: of shape (classes, features).
        bias: of shape (classes,), or None.
        soft_cap: c, where logits are c · tanh(x / c); None: no cap.
    """

    weight: Tensor
    bias: Tensor | None = None
    soft_cap: float | None = None


class LogitStatistics(NamedTuple):
    """Holds, for each token, what its loss needs of the logits x of all classes.

    Attributes:
        z: log Σ exp x.
        label_logit: the logit of the token's label; 0 if the label is no class.
        total: Σ x.
    """

    z: Tensor
    label_logit: Tensor
    total: Tensor


def compute_statistics(
    hidden: Tensor, labels: Tensor, head: Head, chunk_size: int | None
) -> LogitStatistics:
    """Computes each token's ``LogitStatistics`` from hidden states of shape (tokens, features).

    Labels are of shape (tokens,), and so is each result. Logits are those of one chunk of classes
    at a time, as ``choose_chunk_size`` says. A label that is no class has a logit of 0.

    >>> hidden, head = torch.zeros(1, 2), Head(torch.ones(4, 2))
    >>> compute_statistics(hidden, torch.tensor([3]), head, chunk_size=3)
    LogitStatistics(z=tensor([1.3863]), label_logit=tensor([0.]), total=tensor([0.]))
    """
    size = choose_chunk_size(hidden, head, chunk_size)
    if not tree.is_plain_eager():
        return compute_by_chunks(hidden, labels, head, size)
    fields = _apply_statistics(
        labels, head.soft_cap, size, hidden, head.weight, head.bias
    )
    return LogitStatistics(*fields)


def choose_chunk_size(hidden: Tensor, head: Head, chunk_size: int | None) -> int:
    """Returns how many classes a chunk has: ``chunk_size``, or by default what fits ``MAX_LOGITS``.

    The default is the device's ``MAX_LOGITS`` divided by the number of rows of ``hidden``, and at
    least ``MIN_CLASSES``. Under a compiler, which would unroll the loop, one chunk has all classes,
    whatever ``chunk_size`` is. Raises ``ValueError`` if ``chunk_size`` is below 1.

    >>> choose_chunk_size(torch.ones(4096, 2), Head(torch.ones(131072, 2)), None)
    1024
    """
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(
            f"{chunk_size=}: it counts classes, so take 1 or more, or None"
        )
    if torch.compiler.is_dynamo_compiling():
        return len(head.weight)
    if chunk_size is not None:
        return chunk_size
    num_tokens = max(len(hidden), 1)
    max_logits = MAX_LOGITS.get(hidden.device.type, 2**26)
    return max(MIN_CLASSES, max_logits // num_tokens)


def split_head(head: Head, size: int) -> list[Head]:
    """Splits a head into views of ``size`` classes each; the last one may have fewer.

    >>> [len(chunk.weight) for chunk in split_head(Head(torch.ones(5, 2)), 2)]
    [2, 2, 1]
    """
    weights = head.weight.split(size)
    if head.bias is None:
        return [Head(weight, None, head.soft_cap) for weight in weights]
    biases = head.bias.split(size)
    return [
        Head(weight, bias, head.soft_cap)
        for weight, bias in zip(weights, biases, strict=True)
    ]


def compute_logits(hidden: Tensor, head: Head) -> Tensor:
    """Returns logits (..., classes), with bias and soft cap; the product has the weight's dtype.

    All that follows the product is in the dtype of ``hidden``, or in that of the bias if it is
    wider. So is the result.
    """
    x = (hidden.to(head.weight.dtype) @ head.weight.T).to(hidden.dtype)
    if head.bias is not None:
        x = x + head.bias
    if head.soft_cap is not None:
        x = head.soft_cap * torch.tanh(x / head.soft_cap)
    return x


def compute_by_chunks(
    hidden: Tensor, labels: Tensor, head: Head, size: int
) -> LogitStatistics:
    """Returns the same as ``compute_statistics``, with each chunk of ``size`` classes in ``remat``.

    Autograd and transforms can take all derivatives. Sums have the accumulation dtype of
    ``hidden``, or the dtype of the bias if it is wider.
    """
    # In this dtype autograd adds up the gradients that come from all chunks.
    hidden = tree.widen(hidden)
    chunks = []
    for i, chunk in enumerate(split_head(head, size)):
        chunks.append(remat(_compute_chunk)(hidden, labels - i * size, chunk))
    max_, exp_sum, label_logit, total = (
        torch.stack(field) for field in zip(*chunks, strict=True)
    )
    z, _ = combine_chunks(max_, exp_sum)
    return LogitStatistics(z, label_logit.sum(0), total.sum(0))


def _compute_chunk(hidden: Tensor, labels: Tensor, head: Head) -> tuple[Tensor, ...]:
    """Returns, for each token in one chunk: the greatest logit, Σ exp, the label's logit, and Σ x.

    The greatest logit is detached, and subtracted before exp. The labels count from the chunk's
    first class. The logit of a label outside is 0.
    """
    x = compute_logits(hidden, head)
    index, is_inside = _index_in_chunk(labels, len(head.weight))
    label_logit = torch.where(is_inside, x.gather(-1, index), 0).squeeze(-1)
    max_, exp = shifted_exp(x)
    return max_, exp.sum(-1), label_logit, x.sum(-1)


def _index_in_chunk(labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Returns labels as indices into a chunk, and whether they lie in it; the others have index 0.

    The labels count from the chunk's first class. Both results are of shape (tokens, 1).
    """
    labels = labels.unsqueeze(-1)
    is_inside = (labels >= 0) & (labels < num_classes)
    return torch.where(is_inside, labels, 0), is_inside


def shifted_exp(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each row's maximum, detached, and exp(x − maximum).

    In a row that is all −∞, the exponentials are 0.

    >>> shifted_exp(torch.zeros(1, 2))
    (tensor([0.]), tensor([[1., 1.]]))
    """
    max_ = x.detach().amax(-1)
    return max_, (x - _zero_if_minus_inf(max_).unsqueeze(-1)).exp()


def combine_chunks(max_: Tensor, exp_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Combines the chunks' maxima and sums of shifted exponentials, both (chunks, tokens).

    Returns log Σ exp over all chunks, (tokens,), and the factors that bring the chunks' sums to one
    shift, (chunks, tokens).

    >>> combine_chunks(torch.zeros(2, 1), torch.ones(2, 1))
    (tensor([0.6931]), tensor([[1.],
            [1.]]))
    """
    shift = _zero_if_minus_inf(max_.amax(0))
    scale = (max_ - shift).exp()
    return shift + (exp_sum * scale).sum(0).log(), scale


def _zero_if_minus_inf(max_: Tensor) -> Tensor:
    """Returns maxima with 0 in place of −∞: shifted by these, logits have no −∞ − −∞ = NaN."""
    return torch.where(max_ == -math.inf, 0, max_)


class _Statistics(Function):
    """Computes ``compute_by_chunks`` in plain eager mode.

    The backward pass holds one chunk's logits at a time. With ``create_graph=True``, autograd
    computes the gradients instead, and they have a graph.
    """

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
        head = Head(weight, bias, soft_cap)
        statistics = compute_by_chunks(hidden, labels, head, size)
        ctx.soft_cap = soft_cap
        ctx.size = size
        ctx.save_for_backward(labels, statistics.z, hidden, weight, bias)
        return tuple(statistics)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            grads = _differentiable_grads(ctx, cotangents)
        else:
            grads = _chunked_grads(ctx, cotangents)
        return None, None, None, *grads


def _differentiable_grads(
    ctx: Any, cotangents: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """Computes the gradients of hidden, weight and bias with a graph, for a second derivative.

    Each is None if its input needs none. The cotangents are those of ``LogitStatistics``, and
    ``ctx`` is that of ``_Statistics``, after its ``forward``.
    """
    labels, _, hidden, weight, bias = ctx.saved_tensors
    head = Head(weight, bias, ctx.soft_cap)
    statistics = compute_by_chunks(hidden, labels, head, ctx.size)
    is_needed = ctx.needs_input_grad[3:]
    operands = zip((hidden, weight, bias), is_needed, strict=True)
    inputs = [operand for operand, needs_grad in operands if needs_grad]
    grads = iter(torch.autograd.grad(statistics, inputs, cotangents, create_graph=True))
    return [next(grads) if needs_grad else None for needs_grad in is_needed]


def _chunked_grads(ctx: Any, cotangents: tuple[Tensor, ...]) -> list[Tensor | None]:
    """Computes the gradients of hidden, weight and bias from one chunk of logits at a time.

    Each is None if its input needs none. A token whose cotangents are 0 gets exactly zero gradient,
    even if its hidden state is NaN. For this, a NaN as the cotangent of z counts as 0 where the two
    others are 0. The cotangents are those of ``LogitStatistics``, and ``ctx`` is that of
    ``_Statistics``, after its ``forward``.
    """
    labels, z, hidden, weight, bias = ctx.saved_tensors
    needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[3:]
    z_grad, label_grad, total_grad = (grad.unsqueeze(-1) for grad in cotangents)
    # A token whose cotangents are 0 gets a zero gradient, even if its hidden state is NaN:
    # its row is 0, and exp(x − ∞) is 0. The cotangent of z is NaN there if a loss squares z.
    is_used = (z_grad.abs() > 0) | (label_grad != 0) | (total_grad != 0)
    z_grad = torch.where(is_used, z_grad, 0)
    z = torch.where(is_used, z.unsqueeze(-1), math.inf)
    rows = torch.where(is_used, hidden, 0).to(z.dtype).requires_grad_(needs_hidden)
    weight_grad = torch.empty_like(weight) if needs_weight else None
    bias_grad = torch.empty_like(bias) if needs_bias else None
    for start in range(0, len(weight), ctx.size):
        classes = slice(start, start + ctx.size)
        chunk_weight = weight[classes].detach().requires_grad_(needs_weight)
        chunk_bias = None
        if bias is not None:
            chunk_bias = bias[classes].detach().requires_grad_(needs_bias)
        head = Head(chunk_weight, chunk_bias, ctx.soft_cap)
        with torch.enable_grad():
            x = compute_logits(rows, head)
        index, is_inside = _index_in_chunk(labels - start, len(chunk_weight))
        x_grad = x.detach().sub(z).exp_().mul_(z_grad).add_(total_grad)
        x_grad.scatter_add_(-1, index, torch.where(is_inside, label_grad, 0))
        torch.autograd.backward(x, x_grad)
        if weight_grad is not None:
            weight_grad[classes] = chunk_weight.grad
        if bias_grad is not None and chunk_bias is not None:
            bias_grad[classes] = chunk_bias.grad
    hidden_grad = None if rows.grad is None else rows.grad.to(hidden.dtype)
    return [hidden_grad, weight_grad, bias_grad]


_apply_statistics: Callable[..., tuple[Tensor, ...]] = _Statistics.apply
