"""torch's two attention functions, with another dropout for the attention weights.

torch's fused kernels drop weights inside the kernel, by the global generator. Here the weights
exist as a tensor, so that a dropout that draws from keys can be applied to them.
"""

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

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

    With ``dropout_p=0``, torch's kernels run, and ``dropout`` is not called. Otherwise, weights are
    computed in float32 or wider. As in torch, a query that may attend to nothing gets zeros.

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
        queries_per_key = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(queries_per_key, -3)
        value = value.repeat_interleave(queries_per_key, -3)
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    # Softmax in bfloat16 has two or three digits: fused kernels compute it in float32, too.
    wide_dtype = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide_dtype) @ key.to(wide_dtype).mT
    scores = scores * scale
    if is_causal:
        if attn_mask is not None:
            raise ValueError(
                "attention takes attn_mask or is_causal=True, not both: leave one of them out"
            )
        num_queries, num_keys = scores.shape[-2:]
        # Of two dimensions, since under vmap the module may have no others.
        attn_mask = scores.new_ones(num_queries, num_keys, dtype=torch.bool).tril()
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        else:
            scores = scores + attn_mask
    # softmax of a row of -inf is NaN. As in torch, a query that may attend to nothing gets zeros.
    is_empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(is_empty, 0).softmax(-1).masked_fill(is_empty, 0)
    output = dropout(weights, dropout_p) @ value.to(wide_dtype)
    return output.to(query.dtype)


def compute_multi_head(
    dropout: DropoutFn, func: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Computes ``func``, torch's ``multi_head_attention_forward``, with ``dropout`` for weights.

    ``dropout`` gets weights of shape (examples, heads, queries, keys). torch's function is hundreds
    of lines of projections, masks and checks. So its code runs, with three of its global names
    replaced. Raises ``AssertionError`` if the code of this torch lacks one of these names.
    """
    arguments = dict(zip(func.__code__.co_varnames, args, strict=False)) | kwargs
    num_heads = arguments["num_heads"]

    def drop_by_example(weights: Tensor, p: float) -> Tensor:
        # torch's first dimension counts examples and heads: keys need one for the examples alone.
        by_example = weights.unflatten(0, (-1, num_heads))
        return dropout(by_example, p).view_as(weights)

    def attend(*args: Any) -> Tensor:
        return compute_attention(dropout, *args)

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
    return function(*args, **kwargs)
