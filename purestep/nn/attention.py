"""torch's two functions of attention, with a dropout of the caller's on their weights."""

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Drop = Callable[[Tensor, float], Tensor]
"""Dropout of the weights of each head of each example, at a rate."""


def attention(
    drop: Drop,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention``: ``drop(softmax(q kᵀ / √d + mask)) v``.

    >>> x = torch.eye(2)[None]
    >>> attention(lambda weights, p: weights * 0, x, x, x, dropout_p=0.5)
    tensor([[[0., 0.],
             [0., 0.]]])
    """
    if dropout_p == 0:
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
        times = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(times, -3) for each in (key, value))
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).mT
    scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones_like(scores[:1], dtype=torch.bool).tril()
    if attn_mask is not None:
        closed = attn_mask.dtype == torch.bool
        scores = (
            scores.masked_fill(~attn_mask, -math.inf) if closed else scores + attn_mask
        )
    # A query that may attend to nothing gets zeros, as torch gives it.
    empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    return (drop(weights, dropout_p) @ value.to(wide)).to(query.dtype)


def multi_head(drop: Drop, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``multi_head_attention_forward``: torch's own code, in which what drops weights is ours."""
    heads = (dict(zip(func.__code__.co_varnames, args, strict=False)) | kwargs)[
        "num_heads"
    ]
    ours: dict[str, Any] = {
        "has_torch_function": lambda *_: False,
        # One matrix for each head of each example.
        "dropout": lambda x, p: drop(x.unflatten(0, (-1, heads)), p).view_as(x),
        "scaled_dot_product_attention": lambda *args: attention(drop, *args),
    }
    assert {*ours} <= {*func.__code__.co_names}, "of another torch: leave key= out"
    body = FunctionType(
        func.__code__, {**func.__globals__, **ours}, None, func.__defaults__
    )
    return body(*args, **kwargs)
