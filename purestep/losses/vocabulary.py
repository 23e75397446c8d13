"""What a loss has to know of each token's logits, hidden · weightᵀ, which are never whole.

The vocabulary is walked through in chunks: of each, all tokens' logits are computed, used and dropped, and in the backward pass
computed again. Chunks of the vocabulary rather than of tokens, because a chunk's part of the weight's gradient is then
finished at once, summed over all tokens inside of one product and rounded once. What is added up over chunks, in float32
or better, is of the size of ``hidden``.

Four products where logits that are kept take three. That is the least for any cotangent: what flows back to the weight is
Σᵢ cᵢ (pᵢ − yᵢ) ⊗ hᵢ, so it needs the logits once more when cᵢ is known. The gradient of ``hidden`` could be had in the
forward pass, and would take as many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd import Function

from purestep.remat import remat, replaced
from purestep.tree import accumulation_dtype

Statistics: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Of each token: z = log Σ exp x, the logit of its label, and Σ x."""

ELEMENTS = {"cpu": 2**22}
"""How many logits there are at once: as many as stay in a host's caches. Other devices want longer products."""

LEAST = 256
"""Entries of the vocabulary at once, so that products are not all edge: hidden is hardly smaller than these logits."""


def statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    soft_cap: float | None,
    chunk: int | None,
) -> Statistics:
    """Of (tokens, features) against (vocabulary, features) and labels of (tokens,). A label outside of the vocabulary has no logit: 0.

    >>> hidden, weight = torch.zeros(1, 2), torch.ones(4, 2)
    >>> statistics(hidden, weight, None, torch.tensor([3]), None, chunk=3)
    (tensor([1.3863]), tensor([0.]), tensor([0.]))
    """
    if torch.compiler.is_dynamo_compiling():
        # Makes operations for the compiler on import, which only a compiler needs to pay for.
        from purestep.losses import operators

        compiled: Statistics = operators.statistics(hidden, weight, bias, labels, soft_cap, chunk)
        return compiled
    return recorded(False, hidden, weight, bias, labels, soft_cap, chunk)


def recorded(
    traced: bool,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    soft_cap: float | None,
    chunk: int | None,
) -> Statistics:
    """The same; ``traced``: while a compiler records operations, as one of these."""
    made: Statistics = _statistics(traced, soft_cap, chunk, hidden, weight, bias, labels)
    return made


def parts(vocabulary: int, like: Tensor, chunk: int | None) -> Iterator[tuple[int, int]]:
    """Where each chunk begins and how long it is, for as many tokens as ``like`` has rows.

    >>> list(parts(10, torch.ones(3, 2), chunk=4))
    [(0, 4), (4, 4), (8, 2)]
    """
    if chunk is None:
        chunk = max(LEAST, ELEMENTS.get(like.device.type, 2**26) // max(len(like), 1))
    for start in range(0, vocabulary, chunk):
        yield start, min(chunk, vocabulary - start)


# ------------------------------------------------------------------------------------------------- by hand, in reused memory


def values(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    soft_cap: float | None,
    chunk: int | None,
) -> Statistics:
    """``statistics``, of which nothing is recorded."""
    dtype = accumulation_dtype(hidden.dtype)
    most = hidden.new_full((len(hidden),), -math.inf, dtype=dtype)
    exponentials, picked, total = (torch.zeros_like(most) for _ in range(3))
    for start, size in parts(len(weight), hidden, chunk):
        x, _ = _logits(hidden, weight, bias, soft_cap, start, size, dtype)
        place, inside = _place(labels, start, size)
        picked += torch.where(inside, x.gather(-1, place).squeeze(-1), 0)
        total += x.sum(-1)
        highest = torch.maximum(most, x.amax(-1))
        shift = _finite(highest)
        exponentials *= (most - shift).exp_()
        exponentials += x.sub_(shift.unsqueeze(-1)).exp_().sum(-1)
        most = highest
        del x
    return _finite(most) + exponentials.log_(), picked, total


def gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    z: Tensor,
    cotangents: Sequence[Tensor],
    soft_cap: float | None,
    chunk: int | None,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """What the statistics' cotangents are to hidden, weight and bias, those of them that are wanted.

    A token whose cotangents are 0 may be anything, even NaN: exactly zero flows back.
    """
    dtype = accumulation_dtype(hidden.dtype)
    of_z, of_picked, of_total = (each.unsqueeze(-1) for each in cotangents)
    used = (of_z != 0) | (of_picked != 0) | (of_total != 0)
    hidden = torch.where(used, hidden, 0)
    z = torch.where(used, z.unsqueeze(-1), math.inf)
    to_hidden = hidden.new_zeros(hidden.shape, dtype=dtype)
    to_weight = weight.new_empty(weight.shape) if wanted[1] else None
    to_bias = bias.new_empty(bias.shape) if wanted[2] and bias is not None else None
    for start, size in parts(len(weight), hidden, chunk):
        x, slope = _logits(hidden, weight, bias, soft_cap, start, size, dtype)
        place, inside = _place(labels, start, size)
        x = x.sub_(z).exp_().mul_(of_z).add_(of_total)
        x.scatter_add_(-1, place, torch.where(inside.unsqueeze(-1), of_picked, 0))
        x = x if slope is None else x.mul_(slope)
        if to_bias is not None:
            to_bias[start : start + size] = x.sum(0)
        x = x.to(weight.dtype)
        if wanted[0]:
            to_hidden += x @ weight[start : start + size]
        if to_weight is not None:
            to_weight[start : start + size] = x.T @ hidden
        del x
    made = (to_hidden.to(hidden.dtype), to_weight, to_bias)
    return [each for each, needed in zip(made, wanted, strict=True) if needed and each is not None]


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    soft_cap: float | None,
    start: int,
    size: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Those of a chunk, to be written to, and what a soft cap leaves of their slope."""
    x = (hidden @ weight[start : start + size].T).to(dtype)
    if bias is not None:
        x += bias[start : start + size]
    if soft_cap is None:
        return x, None
    bent = x.div_(soft_cap).tanh_()
    slope = 1 - bent.square()
    return bent.mul_(soft_cap), slope


def _place(labels: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Each label's place in a chunk, of shape (tokens, 1), and whether it has one."""
    inside = (labels >= start) & (labels < start + size)
    return torch.where(inside, labels - start, 0).unsqueeze(-1), inside


def _finite(most: Tensor) -> Tensor:
    """What is taken off before exponentials: 0 where all logits are −∞, since −∞ − −∞ is NaN."""
    return torch.where(most == -math.inf, 0, most)


# --------------------------------------------------------------------- the same in plain operations, for all other derivatives


def _part(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    soft_cap: float | None,
    start: int,
) -> tuple[Tensor, ...]:
    """Of a chunk: the greatest logit, exponentials above it, the label's logit and the sum."""
    x = (hidden.to(weight.dtype) @ weight.T).to(hidden.dtype)
    x = x if bias is None else x + bias
    x = x if soft_cap is None else soft_cap * torch.tanh(x / soft_cap)
    most = x.detach().amax(-1)
    place, inside = _place(labels, start, len(weight))
    picked = torch.where(inside, x.gather(-1, place).squeeze(-1), 0)
    return most, (x - _finite(most).unsqueeze(-1)).exp().sum(-1), picked, x.sum(-1)


def definition(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    soft_cap: float | None,
    chunk: int | None,
) -> Statistics:
    """``statistics``, for whoever differentiates it in forward mode, where no logits are kept, or twice, where few are."""
    # What flows back from each chunk is added up in this dtype.
    hidden_sum = hidden.to(accumulation_dtype(hidden.dtype))
    made = [
        remat(_part)(
            hidden_sum, weight[start : start + size], None if bias is None else bias[start : start + size],
            labels, soft_cap, start,
        )
        for start, size in parts(len(weight), hidden, chunk)
    ]  # fmt: skip
    most, exponentials, picked, total = (torch.stack(each) for each in zip(*made, strict=True))
    shift = _finite(most.detach().amax(0))
    z = shift + (exponentials * (most - shift).exp()).sum(0).log()
    return z, picked.sum(0), total.sum(0)


# ---------------------------------------------------------------------------------------------------------------- autograd


class _Statistics(Function):
    """``values``, whose gradient is ``_Gradients``; with ``traced``, as one operation of a compiler's."""

    @staticmethod
    def forward(
        traced: bool,
        soft_cap: float | None,
        chunk: int | None,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
    ) -> Statistics:
        run = torch.ops.purestep.vocabulary_values if traced else values
        made: Statistics = run(hidden, weight, bias, labels, soft_cap, chunk)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.how, given = inputs[:3], inputs[3:]
        ctx.save_for_backward(*given, output[0])
        ctx.save_for_forward(*given, output[0])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        nothing = (None,) * len(ctx.needs_input_grad)
        wanted = ctx.needs_input_grad[3:6]
        if all(each is None for each in cotangents):
            return nothing
        # Wrappers of a transform that has ended are unwrapped by whatever operation comes first.
        given = [None if each is None else each.view_as(each) for each in ctx.saved_tensors]
        zeros = torch.zeros_like(ctx.saved_tensors[Z])
        seeds = [zeros if each is None else each for each in cotangents]
        grads = iter(_gradients(*ctx.how, wanted, *given, *seeds))
        return (*nothing[:3], *(next(grads) if needed else None for needed in wanted), None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        *given, _ = ctx.saved_tensors
        return _along(lambda *given: definition(*given, *ctx.how[1:]), given, tangents[3:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        how, (hidden, weight, bias, labels) = inputs[:3], inputs[3:]
        of_hidden, of_weight, of_bias, of_labels = in_dims[3:]
        if of_weight is not None or of_bias is not None:
            return _each(info, in_dims, _statistics, inputs)
        # All examples meet one weight, so that their tokens are those of one large example.
        flat = [
            rearrange(_first(each, dim, info.batch_size), "batch token ... -> (batch token) ...")
            for each, dim in ((hidden, of_hidden), (labels, of_labels))
        ]
        made = _statistics(*how, flat[0], weight, bias, flat[1])
        return tuple(each.unflatten(0, (info.batch_size, -1)) for each in made), (0,) * len(made)


class _Gradients(Function):
    """``gradients``, which have derivatives of their own: of ``definition``."""

    @staticmethod
    def forward(
        traced: bool,
        soft_cap: float | None,
        chunk: int | None,
        wanted: Sequence[bool],
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        z: Tensor,
        *cotangents: Tensor,
    ) -> tuple[Tensor, ...]:
        run: Callable[..., list[Tensor]] = (
            torch.ops.purestep.vocabulary_gradients if traced else gradients
        )
        given = (hidden, weight, bias, labels)
        return tuple(run(*given, z, list(cotangents), soft_cap, chunk, list(wanted)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (_, *ctx.how, ctx.wanted), given = inputs[:4], inputs[4:]
        ctx.save_for_backward(*given)
        ctx.save_for_forward(*given)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        given = [None if each is None else each.view_as(each) for each in ctx.saved_tensors]
        needed = ctx.needs_input_grad[4:]
        # z follows from what it is given beside.
        places = [place for place, each in enumerate(needed) if each and place != Z]

        def pulled(*chosen: Tensor) -> tuple[Tensor, ...]:
            return _pulled(replaced(given, places, chosen), ctx.wanted, *ctx.how)

        vjp: Callable[..., Any] = torch.func.vjp
        _, pull = vjp(pulled, *[given[place] for place in places])
        grads: list[Any] = replaced([None] * len(given), places, pull(cotangents))
        return (None,) * 4 + tuple(grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        tangents = tangents[4:]
        moving = [None if place == Z else each for place, each in enumerate(tangents)]
        return _along(
            lambda *given: _pulled(given, ctx.wanted, *ctx.how), ctx.saved_tensors, moving
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _each(info, in_dims, _gradients, inputs)


_statistics: Callable[..., Any] = _Statistics.apply
_gradients: Callable[..., Any] = _Gradients.apply

Z = 4
"""The place of z among what ``_Gradients`` is given."""


def _pulled(
    given: Sequence[Any], wanted: Sequence[bool], soft_cap: float | None, chunk: int | None
) -> tuple[Tensor, ...]:
    """``gradients``, by the definition."""
    *inputs, labels = given[:Z]
    places = [place for place, each in enumerate(wanted) if each]

    def of(*chosen: Tensor) -> Statistics:
        hidden, weight, bias = replaced(inputs, places, chosen)
        return definition(hidden, weight, bias, labels, soft_cap, chunk)

    vjp: Callable[..., Any] = torch.func.vjp
    _, pull = vjp(of, *[inputs[place] for place in places])
    grads: tuple[Tensor, ...] = pull(tuple(given[Z + 1 :]))
    return grads


def _along(
    function: Callable[..., tuple[Tensor, ...]],
    given: Sequence[Any],
    tangents: Sequence[Tensor | None],
) -> Any:
    """How the function moves where what it is given moves so."""
    places = [place for place, each in enumerate(tangents) if each is not None]
    jvp: Callable[..., Any] = torch.func.jvp
    _, moved = jvp(
        lambda *chosen: function(*replaced(given, places, chosen)),
        tuple(given[place] for place in places),
        tuple(tangents[place] for place in places),
    )
    return moved


def _each(info: Any, in_dims: Any, function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """The function of one example after the other, where each has a gradient or a weight as large as all logits of it."""

    def chosen(example: int) -> list[Any]:
        return [
            each if dim is None or not isinstance(each, Tensor) else each.select(dim, example)
            for each, dim in zip(inputs, in_dims, strict=True)
        ]

    made = [function(*chosen(example)) for example in range(info.batch_size)]
    columns = [*zip(*made, strict=True)]
    return tuple(torch.stack(each) for each in columns), (0,) * len(columns)


def _first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
