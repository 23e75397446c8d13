"""Dropout inside of a module, drawn from keys: a mode of torch's that answers for what drops.

    the n-th place of a call drops by bits of fold_in(key, n)

A checkpoint, or ``remat``, that computes again draws the same.
"""

from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from purestep import random, tree
from purestep.nn.attention import attention, multi_head
from purestep.random import Keys, PackedKeys, fold_in
from purestep.torch_private import checkpoint_frame


class KeyedDropout(TorchFunctionMode):
    """Within it, dropout draws from the keys, from the ``count``-th place on.

    ``second``: the module may take examples along another dimension than the first, so that one of
    equal length is refused.

    >>> from purestep import random
    >>> keys = torch.stack([random.key(0), random.key(1)])
    >>> with KeyedDropout(keys):
    ...     made = functional.dropout(torch.ones(2, 3), 0.5)
    >>> made.equal(random.dropout(torch.ones(2, 3), 0.5, fold_in(keys, 0)))
    True
    """

    def __init__(self, keys: Keys, count: int = 0, second: bool = False) -> None:
        super().__init__()
        own = keys.keys if isinstance(keys, PackedKeys) else keys
        if not isinstance(own, Tensor) or own.dtype != torch.int64:
            raise TypeError(
                "key= takes keys of ps.random, tensors of dtype int64, got "
                f"{tree.format_leaf(own)}: pass "
                "a module's own argument of that name by position"
            )
        self._keys, self._count, self._second = keys, count, second
        self._frame: Any = None
        self._tokens, self._shape = own.shape, own.shape[: own.ndim - (own is not keys)]

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_dynamo_compiling():
            self._follow()
        elif args and isinstance(args[0], FunctionType | MethodType | torch.nn.Module):
            raise ValueError(
                "a compiler draws without keys within a checkpoint: leave one of both"
            )
        if func in _DROPOUTS:
            return self._dropout(func, *args, **kwargs)
        if func is torch.rand or func is Tensor.bernoulli_:
            return self._one_each(func, args, kwargs)
        if func is functional.scaled_dot_product_attention:
            return attention(self._drop, *args, **kwargs)
        if func is functional.multi_head_attention_forward:
            return multi_head(self._drop, func, args, kwargs)
        return func(*args, **kwargs)

    def _follow(self) -> None:
        """Lets a checkpoint that has begun draw the same when it computes again."""
        last, frame = self._frame, checkpoint_frame()
        self._frame = frame
        if (
            frame is not None
            and getattr(frame.recompute_fn, "func", None) is not _within
        ):
            # It may have begun before the last one, which has drawn.
            if (
                getattr(last, "forward_completed", None)
                and last.recompute_fn.args[1] < self._count
            ):
                raise ValueError("with key=, pass tensors to checkpoints by position")
            # Its function is called without this mode.
            frame.recompute_fn = partial(
                _within, self._keys, self._count, frame.recompute_fn
            )

    def _next(self) -> Keys:
        """The keys of the next place."""
        self._count += 1
        return fold_in(self._keys, self._count - 1)

    def _dropped(self, x: Tensor, p: float) -> Tensor:
        """Which elements are dropped, at the next place."""
        rows, words, pairs = self._shape, random.below(p), x
        if x.shape[: len(rows)] != rows and x.shape[:1] == (self._tokens.numel(),):
            pairs = x.unflatten(0, self._tokens)
        other = pairs.shape[: len(rows)] != rows
        if other or (
            self._second and rows[:1] != (1,) and {*rows[:1]} & {*pairs.shape[1:]}
        ):
            raise ValueError(
                f"dropout in the module drops {tree.format_leaf(x)}, whose first dimension "
                f"{'is' if other else 'may be'} not that of the {tuple(rows)} examples of key=: "
                "let it take examples first (batch_first=True), call it for one example under "
                "torch.vmap, or say which token is whose, by key=ps.random.token_keys("
                "keys[:, None], mask, positions), each of shape (rows, length)"
            )
        return random.drawn_for(pairs, self._next(), words).view(x.shape)

    def _drop(self, x: Tensor, p: float) -> Tensor:
        return random.scaled(x, self._dropped(x, p), p)

    def _one_each(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """One number for each example, as DropPath and StochasticDepth draw it, and no others."""
        writes = func is not torch.rand
        first, *others = args or [kwargs.get("size", ())]
        shape = first.shape if writes else args if isinstance(first, int) else first
        p, rows = (
            [*others, kwargs.get("p", 0.5)][0] if writes else 0.5,
            len(self._shape),
        )
        alone = shape and (*shape[:rows],) == self._shape and {*shape[rows:]} <= {1}
        if (
            not alone
            or isinstance(self._keys, PackedKeys)
            or not isinstance(p, float | int)
        ):
            raise ValueError(
                f"{func.__name__} draws random numbers that no key reaches: {NOISE}"
            )
        keys: Any = self._next()
        if writes:
            made: Tensor = first.copy_(random.bernoulli(keys, p, shape[rows:]))
            return made
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return random.uniform(keys, shape[rows:], dtype).to(
            kwargs.get("device") or keys.device
        )

    def _dropout(
        self,
        func: Any,
        input: Tensor,
        p: float = 0.5,
        training: Any = None,
        inplace: bool = False,
    ) -> Tensor:
        if p == 0 or not (func not in _ALPHA if training is None else training):
            return input
        shaped = input
        if func in _CHANNELS:
            if isinstance(self._keys, PackedKeys):
                raise ValueError(
                    f"{func.__name__} drops channels: pass keys of examples"
                )
            shaped = input.new_empty(input.shape[: len(self._shape) + 1])
        dropped = self._dropped(shaped, p)
        dropped = dropped.view(*dropped.shape, *[1] * (input.ndim - dropped.ndim))
        made = (
            _alpha(input, dropped, p)
            if func in _ALPHA
            else random.scaled(input, dropped, p)
        )
        return input.copy_(made) if inplace else made


def _within(
    keys: Keys, count: int, run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with KeyedDropout(keys, count):
        return run(*args, **kwargs)


def _alpha(x: Tensor, dropped: Tensor, p: float) -> Tensor:
    """Dropout that keeps the mean and the deviation of what ``selu`` gives."""
    if p == 1:
        return torch.zeros_like(x)
    fill = -1.7580993408473766  # minus the product of selu's two constants
    scale = ((1 - p) * (1 + p * fill**2)) ** -0.5
    made: Tensor = torch.where(dropped, fill, x) * scale - scale * fill * p
    return made


_ALPHA = (functional.alpha_dropout, functional.feature_alpha_dropout)
_SPATIAL = (functional.dropout1d, functional.dropout2d, functional.dropout3d)
_CHANNELS = (*_SPATIAL, functional.feature_alpha_dropout)
_DROPOUTS = (functional.dropout, functional.alpha_dropout, *_CHANNELS)
NOISE = (
    "set the rate of the layer that draws them to 0 (a recurrent layer with dropout, rrelu, "
    "layerdrop), change it, or call apply without key="
)
