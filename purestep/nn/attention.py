"""torch's two attention functions, with another dropout for the attention weights.

torch's fused kernels drop weights inside the kernel, by the global generator. Here the weights
exist as a tensor, so that a dropout that draws from keys can be applied to them.
"""

import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from purestep.autocast import without_autocast

DropoutFn = Callable[[Tensor, float], Tensor]
"""Drops elements of attention weights, of shape ``(examples, heads, L, S)``, at a rate."""


def compute_attention(
    dropout: DropoutFn,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Computes ``scaled_dot_product_attention`` with a dropout function for its weights.

        dropout(softmax(q kᵀ / √d + mask)) v

    With ``dropout_p=0``, torch's kernels run, and ``dropout`` is not called. Otherwise, it gets the
    weights, in float32 or wider, and ``dropout_p``. The result has the dtype of ``query``, also
    under autocast. As in torch, a query that may attend to nothing gets zeros.

    Raises ``ValueError`` for what torch refuses: ``attn_mask`` beside ``is_causal``, a mask of
    integers, and, with ``enable_gqa``, heads of keys or values that do not divide the queries'.

    The other arguments are torch's, in torch's order, since modules pass some by position.

    >>> x = torch.eye(2)
    >>> compute_attention(lambda weights, p: weights * 0, x, x, x, dropout_p=0.5)
    tensor([[0., 0.],
            [0., 0.]])
    >>> keep_all = lambda weights, p: weights
    >>> compute_attention(keep_all, x, x, x, dropout_p=0.5, is_causal=True)
    tensor([[1.0000, 0.0000],
            [0.3302, 0.6698]])
    """
    if dropout_p == 0:  # Nothing is drawn, so torch's fused kernels may run.
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            0.0,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if enable_gqa:
        key = _repeat_heads("key", key, query.shape[-3])
        value = _repeat_heads("value", value, query.shape[-3])
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    if is_causal:
        if attn_mask is not None:
            raise ValueError(
                "attention takes attn_mask or is_causal=True, not both: leave one of them out"
            )
        num_queries = query.shape[-2]
        num_keys = key.shape[-2]
        # Of two dimensions, since under vmap the module may have no others.
        attn_mask = query.new_ones(num_queries, num_keys, dtype=torch.bool).tril()
    # Softmax in bfloat16 has two or three digits: fused kernels compute it in float32, too.
    wide_dtype = torch.promote_types(query.dtype, torch.float32)
    with without_autocast(query.device.type):
        scores = query.to(wide_dtype) @ key.to(wide_dtype).mT
        scores = scores * scale
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                scores = scores.masked_fill(~attn_mask, -math.inf)
            elif not attn_mask.is_floating_point():
                raise ValueError(
                    f"attn_mask is {attn_mask.dtype}: pass attn_mask.bool(), True where a query "
                    "attends, or floats that are added to the scores"
                )
            else:
                scores = scores + attn_mask.to(wide_dtype)
        # softmax of a row of -inf is NaN. As in torch, a query that may attend to nothing gets
        # zeros.
        is_empty = (scores == -math.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(is_empty, 0).softmax(-1).masked_fill(is_empty, 0)
        output = dropout(weights, dropout_p) @ value.to(wide_dtype)
    return output.to(query.dtype)


def _repeat_heads(name: str, heads: Tensor, num_queries: int) -> Tensor:
    """Repeats the heads of keys or values, so that there is one for each head of the queries.

    Raises ``ValueError`` if their number does not divide ``num_queries``; ``name`` is for the text.
    """
    num_heads = heads.shape[-3]
    if num_queries % num_heads != 0:
        raise ValueError(
            f"enable_gqa=True with {num_queries} heads of query and {num_heads} heads of {name}: "
            f"the heads of query must be a multiple of those of {name}"
        )
    return heads.repeat_interleave(num_queries // num_heads, -3)


class CarriedDropout:
    """Stands for the rate in torch's code, and carries a dropout function to where torch drops.

    torch's ``multi_head_attention_forward`` compares the rate with 0, and passes it to its dropout
    or attention. ``drop_by_example`` and ``attend``, which replace these, apply ``dropout`` at
    ``rate``. ``num_heads`` splits the first dimension of weights into examples and heads.
    """

    def __init__(self, dropout: DropoutFn, rate: float, num_heads: int) -> None:
        self.dropout = dropout
        self.rate = rate
        self.num_heads = num_heads

    def __gt__(self, other: float) -> bool:
        return self.rate > other


def compute_multi_head(
    dropout: DropoutFn, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Computes torch's ``multi_head_attention_forward(*args, **kwargs)`` with another dropout.

    Returns torch's pair: the output, and the weights or None. ``dropout`` gets weights of shape
    (examples, heads, queries, keys), and the rate. It is not called where torch drops nothing.
    Raises ``AssertionError`` if this torch's code is not what ``multi_head_copy`` expects.
    """
    copy = multi_head_copy()
    arguments = {**dict(zip(copy.parameters, args, strict=False)), **kwargs}
    rate = CarriedDropout(dropout, arguments["dropout_p"], arguments["num_heads"])
    arguments["dropout_p"] = rate
    return copy.function(**arguments)


class MultiHeadCopy(NamedTuple):
    """Holds a copy of torch's ``multi_head_attention_forward``, and the names of its parameters."""

    function: Callable[..., Any]
    parameters: tuple[str, ...]


_COPIES: list[MultiHeadCopy] = []
"""The one copy, once it is made. Not by ``functools.cache``, into which a compiler traces."""


def multi_head_copy() -> MultiHeadCopy:
    """Returns a copy of ``multi_head_attention_forward`` that takes a ``CarriedDropout`` as rate.

    torch's function is hundreds of lines of projections, masks and checks. So the copy runs its
    code, with three of its global names replaced. The first call makes the copy, and later ones
    return it. A compiler cannot trace the first one: ``prepare_multi_head`` runs before.

    Raises ``AssertionError`` if the code of this torch lacks one of these names.
    """
    if not _COPIES:
        func: Any = functional.multi_head_attention_forward
        replacements: dict[str, Any] = {
            # If an outer mode is active, torch's code would hand the whole call to that mode, which
            # runs it without these replacements.
            "has_torch_function": lambda *_: False,
            "dropout": drop_by_example,
            "scaled_dot_product_attention": attend,
        }
        names = func.__code__.co_names
        # A torch that calls them by other names would drop by the global generator, without a word.
        assert all(name in names for name in replacements), (
            "of another torch: leave key= out"
        )
        namespace = {**func.__globals__, **replacements}
        function = FunctionType(func.__code__, namespace, None, func.__defaults__)
        parameters = tuple(inspect.signature(func).parameters)
        _COPIES.append(MultiHeadCopy(function, parameters))
    return _COPIES[0]


def prepare_multi_head() -> None:
    """Makes the copy of ``multi_head_copy`` in advance; does nothing where it would raise."""
    with suppress(AssertionError):
        multi_head_copy()


def drop_by_example(weights: Tensor, p: CarriedDropout) -> Tensor:
    """Applies the dropout of ``p`` to attention weights of shape (examples · heads, queries, keys).

    The dropout gets them as (examples, heads, queries, keys). Random keys, one for each example,
    need a dimension of the examples alone. The result has the shape of ``weights``.
    """
    by_example = weights.unflatten(0, (-1, p.num_heads))
    return p.dropout(by_example, p.rate).view_as(weights)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: Any,
    is_causal: bool,
) -> Tensor:
    """Computes ``compute_attention`` by the dropout and the rate of a ``CarriedDropout``.

    For a number ``dropout_p``, which is 0 where torch drops nothing, torch's attention runs.
    """
    if not isinstance(dropout_p, CarriedDropout):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal
        )
    return compute_attention(
        dropout_p.dropout, query, key, value, attn_mask, dropout_p.rate, is_causal
    )
