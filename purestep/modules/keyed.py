"""Dropout inside of a module, drawn from keys: a mode of torch's that answers for what drops.

    the n-th place of a call drops by bits of fold_in(key, n)

A checkpoint, or ``remat``, that computes again draws the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from purestep import tree
from purestep.random import (
    Keys,
    TokenKeys,
    bernoulli,
    drawn_for,
    fold_in,
    limit_of,
    scaled,
    uniform,
)
from purestep.torch_internals import (
    checkpoint_frame,
    function_modes,
    in_reentrant_checkpoint,
    traced_number,
)


def again() -> Callable[[], AbstractContextManager[object]]:
    """A function that makes a context in which all is drawn again that is drawn from now on."""
    for mode in function_modes()[::-1]:
        if isinstance(mode, Keyed):
            return mode.again()
    return nullcontext


class Keyed(TorchFunctionMode):
    """Within it, dropout draws from the keys, from the ``count``-th place on.

    ``doubtful``: another dimension than the first was as long as there are examples, unless the
    keys are ``trusted`` to be those of the first.

    >>> from purestep import random
    >>> keys = torch.stack([random.key(0), random.key(1)])
    >>> with Keyed(keys):
    ...     made = functional.dropout(torch.ones(2, 3), 0.5)
    >>> made.equal(random.dropout(torch.ones(2, 3), 0.5, fold_in(keys, 0)))
    True
    """

    def __init__(self, keys: Keys, count: int = 0, trusted: bool = False) -> None:
        super().__init__()
        self.keys, self._first, self._count, self._trusted = keys, count, count, trusted
        self._shape = keys.keys.shape[:-1] if isinstance(keys, TokenKeys) else keys.shape
        self._places: list[Keys] = []
        self._recorded = torch.is_grad_enabled()
        self.doubtful = False
        # A compiler's regions cannot write to what is there before them: the compiler counts.
        self._call = None
        if torch.compiler.is_dynamo_compiling():
            (number,) = traced_number("calls")
            self._call = f"call {number}"

    def again(self) -> Callable[[], AbstractContextManager[object]]:
        """Contexts that draw from the same place on."""
        keys, count = self.keys, self._count
        return lambda: Keyed(keys, count, trusted=True)

    def with_one_more(self, leaf: Any) -> Any:
        """A tensor that has an entry for each example, with the last one twice."""
        there = isinstance(leaf, Tensor) and leaf.shape[:1] == self._shape[:1]
        return torch.cat([leaf, leaf[-1:]]) if there else leaf

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._call is None:
            self._follow()
        elif args and isinstance(args[0], FunctionType | MethodType | torch.nn.Module):
            # A region, which a compiler traces without this mode.
            args = (self._within(args[0]), *args[1:])
        if func in _DROPOUTS:
            return self._dropout(func, *args, **kwargs)
        if func is torch.rand or func is Tensor.bernoulli_:
            drawn = self._one_each(func is not torch.rand, args, kwargs)
            if drawn is not None:
                return drawn
        if func is functional.scaled_dot_product_attention:
            return self._attention(func, *args, **kwargs)
        if func is functional.multi_head_attention_forward:
            return self._heads(func, *args, **kwargs)
        if self._call is not None and _draws(func, args, kwargs):
            raise ValueError(f"{func.__name__} draws random numbers that no key reaches: {NOISE}")
        return func(*args, **kwargs)

    def _within(self, region: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return region(*args, **kwargs)

        return run

    def _follow(self) -> None:
        """Lets a checkpoint that has begun draw the same when it computes again."""
        frame = checkpoint_frame()
        if frame is not None and not isinstance(frame.recompute_fn, _Replay):
            frame.recompute_fn = _Replay(frame.recompute_fn, self.again())

    def _next(self) -> Keys:
        """The keys of the next place. Those of many are made at once, in the time of one."""
        if self._recorded and not torch.is_grad_enabled() and self._call is None:
            if in_reentrant_checkpoint():
                raise ValueError(
                    "a reentrant checkpoint would draw different numbers when it computes again: "
                    "pass use_reentrant=False"
                )
        if self._call is not None:
            (place,) = traced_number(self._call)
            return fold_in(self.keys, self._first + place)
        if not self._places:
            keys = self.keys.keys if isinstance(self.keys, TokenKeys) else self.keys
            numbers = torch.arange(self._count, self._count + 16, device=keys.device)
            made = fold_in(keys[..., None], numbers).unbind(-1)
            if isinstance(self.keys, TokenKeys):
                self._places += [TokenKeys(each, self.keys.positions) for each in made]
            else:
                self._places += made
        self._count += 1
        return self._places.pop(0)

    def _dropped(self, x: Tensor, p: float, what: str) -> Tensor:
        """Which elements are dropped, at the next place."""
        shape, limit = self._shape, limit_of(p)
        tokens = self.keys.keys.shape if isinstance(self.keys, TokenKeys) else shape
        pairs = x
        if x.shape[: len(shape)] != shape and x.shape[:1] == (tokens.numel(),):
            pairs = x.unflatten(0, tokens)
        if pairs.shape[: len(shape)] != shape:
            flat = (
                tokens == shape
                and len(shape) == 1
                and x.ndim
                and x.shape[0] % max(1, shape[0]) == 0
            )
            raise ValueError(
                f"{what} in the module drops {tree.kind(x)}, whose first dimension is not that of "
                f"the {tuple(shape)} examples of key=: {_TOKENS if flat else _ROWS}"
            )
        if not self._trusted and shape and shape[0] in pairs.shape[1:]:
            if self._call is not None:
                raise ValueError(DOUBT)
            self.doubtful = True
        dropped = drawn_for(pairs, self._next(), lambda word: word < limit)
        return dropped.view(x.shape) if pairs is not x else dropped

    def _one_each(self, writes: bool, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """One number for each example, as DropPath and StochasticDepth draw it; else None."""
        first = args[0] if args else kwargs.get("size", ())
        shape = (*first.shape,) if writes else args if isinstance(first, int) else (*first,)
        p, rows = (*args[1:], kwargs.get("p", 0.5))[0] if writes else 0.5, len(self._shape)
        alone = shape and shape[:rows] == (*self._shape,) and {*shape[rows:]} <= {1}
        if not alone or isinstance(self.keys, TokenKeys) or not isinstance(p, float | int):
            return None
        keys = self._next()
        assert isinstance(keys, Tensor)
        if writes:
            made: Tensor = first.copy_(bernoulli(keys, p, shape[rows:]))
            return made
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return uniform(keys, shape[rows:], dtype).to(kwargs.get("device") or keys.device)

    def _dropout(
        self,
        func: Any,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        *,
        train: bool | None = None,
    ) -> Any:
        training = training if train is None else train
        if not training or p == 0:
            return func(input, p, training)
        shaped = input
        if func in _CHANNELS:
            if isinstance(self.keys, TokenKeys):
                raise ValueError(f"{func.__name__} drops channels, which are no tokens: {_ROWS}")
            shaped = input.new_empty(input.shape[: len(self._shape) + 1])
        dropped = self._dropped(shaped, p, func.__name__)
        dropped = dropped.view(*dropped.shape, *[1] * (input.ndim - dropped.ndim))
        made = _alpha(input, dropped, p) if func in _ALPHA else scaled(input, dropped, p)
        return input.copy_(made) if inplace or func in _IN_PLACE else made

    def _attention(
        self,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p == 0:
            plain: Tensor = func(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return plain
        wide = torch.promote_types(query.dtype, torch.float32)
        if enable_gqa:
            times = query.shape[-3] // key.shape[-3]
            key, value = (each.repeat_interleave(times, -3) for each in (key, value))
        scores = query.to(wide) @ key.to(wide).transpose(-2, -1)
        scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        # A query that may attend to nothing gets zeros, as torch gives it.
        empty = (scores == -math.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
        dropped = self._dropped(weights, dropout_p, "scaled_dot_product_attention")
        return (scaled(weights, dropped, dropout_p) @ value.to(wide)).to(query.dtype)

    def _heads(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """torch's own function, in which what drops elements is ours."""
        given = dict(zip(func.__code__.co_varnames, args, strict=False)) | kwargs
        if given["dropout_p"] == 0 or not given.get("training", True):
            return func(*args, **kwargs)
        heads = given["num_heads"]

        def dropout(x: Tensor, p: float) -> Tensor:
            # One matrix for each head of each example.
            pairs = x.view(-1, heads, *x.shape[1:])
            return scaled(pairs, self._dropped(pairs, p, "dropout"), p).view_as(x)

        ours: dict[str, Any] = {
            "has_torch_function": lambda *_: False,
            "dropout": dropout,
            "scaled_dot_product_attention": lambda *args: self._attention(None, *args),
        }
        if not {*ours} <= {*func.__code__.co_names}:
            raise ValueError(
                "multi_head_attention_forward of this torch drops elements where no key reaches: "
                "set the dropout of nn.MultiheadAttention to 0, or call without key="
            )
        body = FunctionType(func.__code__, {**func.__globals__, **ours}, None, func.__defaults__)
        body.__kwdefaults__ = func.__kwdefaults__
        return body(*args, **kwargs)


class _Replay:
    """A function that computes again, within the context of its first time."""

    def __init__(
        self, run: Callable[..., Any], again: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._run, self._again = run, again

    def __call__(self, *args: Any) -> Any:
        with self._again():
            return self._run(*args)


def _alpha(x: Tensor, dropped: Tensor, p: float) -> Tensor:
    """Dropout that keeps the mean and the deviation of what ``selu`` gives."""
    if p == 1:
        return torch.zeros_like(x)
    fill = -1.7580993408473766  # minus the product of selu's two constants
    scale = ((1 - p) * (1 + p * fill**2)) ** -0.5
    made: Tensor = torch.where(dropped, fill, x) * scale - scale * fill * p
    return made


def _named(names: str) -> frozenset[Any]:
    """The functions of torch's with these names, wherever they stand."""
    return frozenset(
        getattr(holder, name)
        for holder in (torch, Tensor, functional)
        for name in names.split()
        if hasattr(holder, name)
    )


_ALPHA = _named("alpha_dropout alpha_dropout_ feature_alpha_dropout feature_alpha_dropout_")
_CHANNELS = _named(
    "feature_dropout feature_dropout_ feature_alpha_dropout feature_alpha_dropout_ "
    "dropout1d dropout2d dropout3d"
)
_IN_PLACE = _named("dropout_ alpha_dropout_ feature_dropout_ feature_alpha_dropout_")
_DROPOUTS = _named("dropout") | _ALPHA | _CHANNELS | _IN_PLACE
_RECURRENT = _named("lstm gru rnn_tanh rnn_relu")
_LEAKY = _named("rrelu rrelu_")
_POOLING = _named(
    "fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d "
    "fractional_max_pool3d_with_indices"
)
_DRAWING = _named(
    "bernoulli bernoulli_ binomial cauchy_ exponential_ geometric_ gumbel_softmax log_normal_ "
    "miopen_rnn multinomial native_dropout normal normal_ poisson rand rand_like randint randint_like randn "
    "randn_like random_ randperm uniform_"
)
KNOWN = _DROPOUTS | _RECURRENT | _LEAKY | _POOLING | _DRAWING
"""What draws by key, or is refused where it is traced; elsewhere each operation is asked."""


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a traced call draws random numbers."""
    if func in _RECURRENT:
        # The only float is the share to drop, and whether it trains comes next.
        rates = [place for place, each in enumerate(args) if isinstance(each, float)]
        return bool(rates and args[rates[0]] > 0 and args[rates[0] + 1])
    if func in _LEAKY:
        return bool(kwargs.get("training", args[3:4] == (True,)))
    return func in _DRAWING or (func in _POOLING and kwargs.get("_random_samples") is None)


_ROWS = (
    "let the module take examples first (batch_first=True), or call it for one example with key= "
    "without a dimension, under torch.vmap"
)
DOUBT = (
    "another dimension is as long as there are keys of examples, and the module may drop along that "
    f"one: {_ROWS}; or, where it does take them first, call apply without a compiler and with "
    "another number of examples first"
)
_TOKENS = (
    "it drops tokens of all examples in one dimension. Say which tokens are whose: "
    "key=ps.random.token_keys(keys[:, None], mask, positions), each of shape (rows, length)"
)
NOISE = (
    "change the layer that draws them (a recurrent layer with dropout, rrelu, layerdrop), set its "
    "rate to 0, or call apply without key="
)
