"""Dropout inside of a module, drawn from keys: a mode of torch's that answers for each function that draws.

The n-th of them in a call draws from ``fold_in(key, n)``. What is computed again, by a checkpoint or by ``remat``, draws the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from purestep import tree
from purestep.random import Keys, TokenKeys, drawn_for, fold_in, limit_of, scaled
from purestep.torch_internals import (
    checkpoint_frame,
    function_modes,
    in_reentrant_checkpoint,
    may_draw,
    operations,
    traced_number,
)


@contextmanager
def keyed(keys: Keys, count: int = 0) -> Iterator[None]:
    """Within it, dropout in training mode draws from the keys, from the ``count``-th on; what else would draw is refused.

    >>> from purestep import random
    >>> keys = torch.stack([random.key(0), random.key(1)])
    >>> with keyed(keys):
    ...     made = functional.dropout(torch.ones(2, 3), 0.5)
    >>> made.equal(random.dropout(torch.ones(2, 3), 0.5, fold_in(keys, 0)))
    True
    """
    with _Keyed(keys, count):
        yield


def again() -> Callable[[], AbstractContextManager[object]]:
    """What makes a context in which all is drawn once more that is drawn from now on."""
    for mode in function_modes()[::-1]:
        if isinstance(mode, _Keyed):
            return mode.again()
    return nullcontext


class _Keyed(TorchFunctionMode):
    def __init__(self, keys: Keys, count: int) -> None:
        super().__init__()
        self._keys, self._count = keys, count
        self._places: list[Keys] = []
        self._first = count
        self._recorded = torch.is_grad_enabled()
        # No region that a compiler traces may write to what is there before it: the compiler itself counts.
        self._call = None
        if torch.compiler.is_dynamo_compiling():
            (number,) = traced_number("calls")
            self._call = f"call {number}"

    def again(self) -> Callable[[], AbstractContextManager[object]]:
        keys, count = self._keys, self._count
        return lambda: _Keyed(keys, count)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            if args and isinstance(args[0], FunctionType | MethodType | torch.nn.Module):
                # A region, to a compiler, which traces it when the function is called here, without this mode.
                args = (self._within(args[0]), *args[1:])
        else:
            self._follow()
        if func in _DROPOUTS:
            return self._dropout(func, *args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return self._attention(func, *args, **kwargs)
        if func is functional.multi_head_attention_forward:
            return self._heads(func, *args, **kwargs)
        if _draws(func, args, kwargs):
            raise ValueError(
                f"{func.__name__} draws random numbers that no key reaches, in a module that was given key=: change what calls it (a layer with "
                "dropout that is no call of torch.nn.functional.dropout, rrelu, layerdrop), set it to 0, or call without key="
            )
        return func(*args, **kwargs)

    def _within(self, region: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return region(*args, **kwargs)

        return run

    def _follow(self) -> None:
        """Lets a checkpoint that has begun draw the same once more when it computes again, without this mode."""
        frame = checkpoint_frame()
        if frame is not None and not isinstance(frame.recompute_fn, _Replay):
            frame.recompute_fn = _Replay(frame.recompute_fn, self.again())

    def _next(self) -> Keys:
        """The keys of the next place. Those of many places are made at once, which takes as long as those of one."""
        if torch.compiler.is_dynamo_compiling():
            # What is made in one of the compiler's regions is not there in the next.
            return fold_in(self._keys, self._traced_place())
        if self._count - self._first == len(self._places):
            keys = self._keys.keys if isinstance(self._keys, TokenKeys) else self._keys
            places = torch.arange(self._count, self._count + _AT_ONCE, device=keys.device)
            made = fold_in(keys[..., None], places).unbind(-1)
            self._places += [
                TokenKeys(each, self._keys.positions) if isinstance(self._keys, TokenKeys) else each
                for each in made
            ]
        self._count += 1
        return self._places[self._count - self._first - 1]

    def _traced_place(self) -> int:
        if self._call is None:
            self._count += 1
            return self._count - 1
        place: tuple[int] = traced_number(self._call)
        return self._first + place[0]

    def _dropped(self, x: Tensor, p: float, what: str) -> Tensor:
        """Which elements are dropped, at the next place."""
        if (
            self._recorded
            and not torch.compiler.is_dynamo_compiling()
            and not torch.is_grad_enabled()
            and in_reentrant_checkpoint()
        ):
            raise ValueError(
                "a reentrant checkpoint would draw different numbers when it computes again: use_reentrant=False"
            )
        keys, limit = self._next(), limit_of(p)
        _check_batch(x, keys, what)
        return drawn_for(x, keys, lambda word: word < limit)

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
        of_channels, fill, writes = _DROPOUTS[func]
        if not (training if train is None else train) or p == 0:
            return func(input, p, training if train is None else train)
        shaped = input
        if of_channels:
            if isinstance(self._keys, TokenKeys):
                raise ValueError(f"{func.__name__} drops channels, which are no tokens: {_ROWS}")
            batch = self._keys.ndim
            shaped = input.new_empty(input.shape[: batch + 1])
        dropped = self._dropped(shaped, p, func.__name__)
        if of_channels:
            dropped = dropped.view(*dropped.shape, *[1] * (input.ndim - dropped.ndim))
        made = scaled(input, dropped, p) if fill is None else _alpha(input, dropped, p, fill)
        return input.copy_(made) if inplace or writes else made

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
            plain: Tensor = func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)  # fmt: skip
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
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        if given["dropout_p"] == 0 or not given.get("training", True):
            return func(*args, **kwargs)
        heads = given["num_heads"]

        def dropout(x: Tensor, p: float) -> Tensor:
            # One matrix for each head of each example.
            pairs = x.view(-1, heads, *x.shape[1:])
            return scaled(pairs, self._dropped(pairs, p, "dropout"), p).view_as(x)

        def attention(*args: Any, **kwargs: Any) -> Tensor:
            return self._attention(None, *args, **kwargs)

        ours: dict[str, Any] = {
            "has_torch_function": lambda *_: False,
            "dropout": dropout,
            "scaled_dot_product_attention": attention,
        }
        code = func.__code__
        if not {*ours} <= {*code.co_names}:
            raise ValueError(
                "multi_head_attention_forward of this torch drops elements where no key reaches: "
                "set the dropout of nn.MultiheadAttention to 0, or call without key="
            )
        body = FunctionType(code, {**func.__globals__, **ours}, None, func.__defaults__)
        body.__kwdefaults__ = func.__kwdefaults__
        return body(*args, **kwargs)


class _Replay:
    """A function that computes again, within the context of its first time."""

    def __init__(self, run: Callable[..., Any], again: Callable[[], AbstractContextManager[object]]) -> None:  # fmt: skip
        self._run, self._again = run, again

    def __call__(self, *args: Any) -> Any:
        with self._again():
            return self._run(*args)


def _check_batch(x: Tensor, keys: Keys, what: str) -> None:
    shape = keys.keys.shape[:-1] if isinstance(keys, TokenKeys) else keys.shape
    if x.shape[: len(shape)] != shape:
        raise ValueError(
            f"{what} in the module is given {tree.kind(x)}, whose first dimension is not that of the {tuple(shape)} examples of key=: "
            f"{_ROWS}"
        )


def _alpha(x: Tensor, dropped: Tensor, p: float, fill: float) -> Tensor:
    """Dropout that keeps the mean and the deviation of what ``selu`` gives."""
    if p == 1:
        return torch.zeros_like(x)
    scale = ((1 - p) * (1 + p * fill**2)) ** -0.5
    made: Tensor = torch.where(dropped, fill, x) * scale - scale * fill * p
    return made


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this call draws random numbers."""
    if func in _DRAWING:
        return True
    if func in _RECURRENT:
        # The only float is the share to drop, and whether it trains comes next.
        places = [place for place, each in enumerate(args) if isinstance(each, float)]
        return bool(places and args[places[0]] > 0 and args[places[0] + 1])
    if func in _LEAKY:
        given = dict(zip(("input", "lower", "upper", "training"), args, strict=False)) | kwargs
        return bool(given.get("training", False))
    if func in _POOLING:
        return kwargs.get("_random_samples") is None
    # Of a kernel that torch knows nothing of.
    rate = kwargs.get("dropout_p")
    if isinstance(rate, float) and rate > 0:
        return True
    return any(may_draw(operation, args, kwargs) for operation in operations(func))


_ROWS = (
    "one key for each example needs the examples along the first dimension of what is dropped: let the module take them first "
    "(batch_first=True), or call it for one example with key= without a dimension, under torch.vmap"
)

_AT_ONCE = 16

_ALPHA = -1.7580993408473766
"""What ``selu`` falls to: minus the product of its two constants."""

_HOLDERS = (torch, Tensor, functional, torch.nn.init)


def _named(*names: str) -> frozenset[Any]:
    """The functions of torch's with these names, wherever they stand."""
    return frozenset(
        getattr(holder, name) for holder in _HOLDERS for name in names if hasattr(holder, name)
    )


_DROPOUTS: dict[Any, tuple[bool, float | None, bool]] = {
    func: kind
    for names, kind in {
        ("dropout",): (False, None, False),
        ("dropout_",): (False, None, True),
        ("alpha_dropout",): (False, _ALPHA, False),
        ("alpha_dropout_",): (False, _ALPHA, True),
        ("feature_dropout", "dropout1d", "dropout2d", "dropout3d"): (True, None, False),
        ("feature_dropout_",): (True, None, True),
        ("feature_alpha_dropout",): (True, _ALPHA, False),
        ("feature_alpha_dropout_",): (True, _ALPHA, True),
    }.items()
    for func in _named(*names)
}
"""Whether channels are dropped, what stands there then (None: 0), and whether it writes to its argument."""

_ARGUMENTS = [
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v",
    "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training",
]  # fmt: skip

_RECURRENT = _named("lstm", "gru", "rnn_tanh", "rnn_relu")
_LEAKY = _named("rrelu", "rrelu_")
_POOLING = _named(
    "fractional_max_pool2d", "fractional_max_pool2d_with_indices",
    "fractional_max_pool3d", "fractional_max_pool3d_with_indices",
)  # fmt: skip
_DRAWING = _named(
    "bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_", "geometric_", "gumbel_softmax", "kaiming_uniform_",
    "log_normal_", "miopen_rnn", "multinomial", "native_dropout", "normal", "normal_", "poisson", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "random_", "randperm", "uniform_",
)  # fmt: skip


def known(func: Any) -> bool:
    """Whether a function of torch's is one that draws: by key, or refused.

    >>> known(torch.rand), known(torch.add)
    (True, False)
    """
    return func in _DROPOUTS or func in _DRAWING | _RECURRENT | _LEAKY | _POOLING
