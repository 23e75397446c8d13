"""Dropout inside of a module, drawn from keys: a mode of torch that replaces what drops.

    call n of a dropout, counted from 0, drops by bits of fold_in(key, n)

The module is not changed: a function mode sees each call of torch's functions. A checkpoint, or
``remat``, draws the same numbers when it recomputes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from purestep import random, tree
from purestep.nn.attention import compute_attention, compute_multi_head
from purestep.random import KeyOrPackedKeys, PackedKeys, fold_in
from purestep.torch_private import checkpoint_frame

_ALPHA = (functional.alpha_dropout, functional.feature_alpha_dropout)
"""Those that keep the mean and the deviation of ``selu``."""
_SPATIAL = (functional.dropout1d, functional.dropout2d, functional.dropout3d)
_CHANNELS = (*_SPATIAL, functional.feature_alpha_dropout)
"""Those that drop whole channels."""
_DROPOUTS = (functional.dropout, functional.alpha_dropout, *_CHANNELS)

UNKEYED_HINT = (
    "set the rate of the layer that draws them to 0 (a recurrent layer with dropout, rrelu, "
    "layerdrop), change it, or call apply without key="
)
"""What to do about random numbers that do not come from keys."""


class KeyedDropout(TorchFunctionMode):
    """Makes dropouts of ``torch.nn.functional`` draw from keys while this mode is active.

    Each example has a key. The mode covers attention's dropout, too, but not ``torch.dropout``
    itself. Each call that draws folds its number into the keys, which counts from ``first_index``.
    A checkpoint draws the same numbers again. Keys may also be packed, one for each token.

    A tensor has its examples first, or all tokens with keys in its first dimension. Otherwise
    dropout raises ``ValueError``. ``torch.rand`` and ``bernoulli_`` draw one number for each
    example, and raise ``ValueError`` for other draws. With packed keys, they always raise it, and
    so does dropout that draws for channels.

    ``batch_second`` says that the module may take examples along its second dimension, as
    ``batch_first=False`` does. Then, with two examples or more, a tensor with two dimensions as
    long as the keys is refused, too. In a compiler's trace, a checkpoint raises ``ValueError``.
    Raises ``TypeError`` for ``keys`` that are no keys.

    >>> from purestep import random
    >>> keys = torch.stack([random.key(0), random.key(1)])
    >>> with KeyedDropout(keys):
    ...     output = functional.dropout(torch.ones(2, 3), 0.5)
    >>> output.equal(random.dropout(torch.ones(2, 3), 0.5, fold_in(keys, 0)))
    True
    """

    def __init__(
        self, keys: KeyOrPackedKeys, first_index: int = 0, batch_second: bool = False
    ) -> None:
        super().__init__()
        key_tensor: Any = keys.keys if isinstance(keys, PackedKeys) else keys
        if not isinstance(key_tensor, Tensor) or key_tensor.dtype != torch.int64:
            raise TypeError(
                "key= takes keys of ps.random, one for each example, as "
                f"ps.random.split(ps.random.key(0), rows), got {tree.format_leaf(key_tensor)}; "
                "pass a module's own argument of that name by position"
            )
        self._keys = keys
        self._next_index = first_index
        self._batch_second = batch_second
        self._last_frame: Any = None
        # (rows,) for keys of examples, (rows, length) for keys of tokens.
        self._keys_shape = key_tensor.shape
        self._batch_shape = key_tensor.shape
        if isinstance(keys, PackedKeys):
            self._batch_shape = key_tensor.shape[:-1]

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_dynamo_compiling():
            self._patch_checkpoint()
        elif args and isinstance(args[0], FunctionType | MethodType | torch.nn.Module):
            # In a trace, a checkpoint is an operation on a function, which is traced without this
            # mode: its dropout would draw from the global generator.
            raise ValueError(
                "a compiler draws without keys within a checkpoint: leave one of both"
            )
        if func in _DROPOUTS:
            return self._dropout(func, *args, **kwargs)
        if func is torch.rand:
            return self._rand(*args, **kwargs)
        if func is Tensor.bernoulli_:
            return self._bernoulli_(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return compute_attention(self._drop_elements, *args, **kwargs)
        if func is functional.multi_head_attention_forward:
            return compute_multi_head(self._drop_elements, args, kwargs)
        return func(*args, **kwargs)

    def _patch_checkpoint(self) -> None:
        """Makes the innermost checkpoint, if any, draw the same numbers when it recomputes.

        The backward pass calls the checkpoint's ``recompute_fn`` outside of this mode. So that is
        wrapped, once, in a new mode, which counts draws from the present number on. This happens at
        the checkpoint's first operation.

        Raises ``ValueError`` if the operation before was in another checkpoint, which has drawn and
        ended. It may lie inside this one: at which number this one began is then unknown.
        """
        last_frame = self._last_frame
        frame = checkpoint_frame()
        self._last_frame = frame
        if frame is None:
            return
        recompute_fn = frame.recompute_fn
        if getattr(recompute_fn, "func", None) is _call_with_keys:
            return
        # A checkpoint is seen at its first operation. If all inputs of torch 2.12's checkpoint
        # pass by keyword, an inner one may be seen, draw and end before the outer one is seen:
        #     checkpoint(lambda x: checkpoint(dropout, input=x).tanh(), x)
        # At which index the outer one has begun is then unknown.
        if getattr(last_frame, "forward_completed", None):
            _, index_of_last, *_ = last_frame.recompute_fn.args
            if index_of_last < self._next_index:
                raise ValueError("with key=, pass tensors to checkpoints by position")
        frame.recompute_fn = partial(
            _call_with_keys, self._keys, self._next_index, recompute_fn
        )

    def _next_keys(self) -> KeyOrPackedKeys:
        """Returns the mode's keys with the number of this draw folded in, and counts the draw.

        They are keys of examples, or ``PackedKeys`` of tokens. The first number is
        ``first_index``.
        """
        index = self._next_index
        self._next_index = index + 1
        return fold_in(self._keys, index)

    def _draw_mask(self, x: Tensor, p: float) -> Tensor:
        """Draws, by the next keys, a mask of the shape of ``x``: True with probability ``p``.

        Raises ``ValueError`` unless the first dimensions of ``x`` are clearly those of the
        examples, or the first one counts all tokens that have keys. With keys of tokens, it also
        does so for a shape that ``random.dropout`` does not take, once tokens are split into rows.
        """
        is_dropped = random.below_probability(p)
        num_dims = len(self._batch_shape)
        num_keys = self._keys_shape.numel()
        by_example = x
        if x.shape[:num_dims] != self._batch_shape and x.shape[:1] == (num_keys,):
            # The module has flattened rows and tokens, as OPT does in its feed-forward layers.
            by_example = x.unflatten(0, self._keys_shape)
        if by_example.shape[:num_dims] != self._batch_shape:
            raise self._not_first_error(x, "is")
        if self._may_be_second(by_example.shape):
            raise self._not_first_error(x, "may be")
        mask = random.draw_like(by_example, self._next_keys(), is_dropped)
        return mask.view(x.shape)

    def _may_be_second(self, shape: Sequence[int]) -> bool:
        """Returns whether a later dimension than the first may be that of the examples.

        That takes ``batch_second``, two examples or more, and a later dimension as long as there
        are examples. With ``batch_first=False`` and as many tokens as examples, shapes do not tell
        which is which. If positions come first, all tokens of a position would draw from the key
        of one example.
        """
        if not self._batch_second or not self._batch_shape:
            return False
        num_examples = self._batch_shape[0]
        return num_examples > 1 and num_examples in shape[1:]

    def _not_first_error(self, x: Tensor, verb: str) -> ValueError:
        """Returns the error for dropout on a tensor that does not have examples first.

        ``verb`` is "is", or "may be" where the shape does not tell.
        """
        return ValueError(
            f"dropout in the module drops {tree.format_leaf(x)}, whose first dimension "
            f"{verb} not that of the {tuple(self._batch_shape)} examples of key=: "
            "let it take examples first (batch_first=True), call it for one example under "
            "torch.vmap, or say which token is whose, by key=ps.random.token_keys("
            "keys[:, None], mask, positions), each of shape (rows, length)"
        )

    def _drop_elements(self, x: Tensor, p: float) -> Tensor:
        """Returns ``x`` with elements dropped one by one at rate ``p``, and the others rescaled."""
        return random.zero_and_rescale(x, self._draw_mask(x, p), p)

    def _dropout(
        self,
        func: Any,
        input: Tensor,
        p: float = 0.5,
        training: bool | None = None,
        inplace: bool = False,
    ) -> Tensor:
        """Computes ``func``, one of torch's dropouts, by the next keys, with its arguments.

        Returns the input itself if ``p`` is 0 or ``training`` is False; None is torch's default for
        ``func``. Writes the output to the input if ``inplace``. Raises ``ValueError`` for dropout
        of channels with keys of tokens, and for a ``p`` outside of 0 to 1. It also does so for an
        input whose first dimensions are not clearly those of the examples. With keys of tokens, the
        shape must be one that ``random.dropout`` takes, or ``(tokens,)`` or ``(tokens, features)``
        with all tokens in the first dimension.
        """
        if training is None:
            training = (
                func not in _ALPHA
            )  # Defaults of torch: True, and False for these.
        if p == 0 or not training:
            return input
        mask_like = input
        if func in _CHANNELS:
            if isinstance(self._keys, PackedKeys):
                # A channel covers all tokens of a row, of which each has its own key.
                raise ValueError(
                    f"{func.__name__} drops channels: pass keys of examples"
                )
            mask_like = input.new_empty(input.shape[: len(self._batch_shape) + 1])
        mask = self._draw_mask(mask_like, p)
        singletons = [1] * (input.ndim - mask.ndim)
        mask = mask.view(*mask.shape, *singletons)
        if func in _ALPHA:
            output = _alpha_dropout(input, mask, p)
        else:
            output = random.zero_and_rescale(input, mask, p)
        if inplace:
            return input.copy_(output)
        return output

    def _rand(self, *args: Any, **kwargs: Any) -> Tensor:
        """Computes ``torch.rand(*args, **kwargs)`` by the next keys, one number for each example.

        Other shapes, keys of tokens, ``out=`` and ``generator=`` raise ``ValueError``. Without
        ``device=``, the numbers are on the keys' device. transformers drops an example's paths by
        ``torch.rand((rows, 1, 1)) + keep_prob``.
        """
        if kwargs.get("out") is not None or kwargs.get("generator") is not None:
            raise _unkeyed_error("rand")
        size = args or kwargs.get("size", ())
        if args and not isinstance(args[0], int):  # torch.rand((2, 1)), not rand(2, 1).
            size = args[0]
        shape = self._shape_of_one_number("rand", size)
        keys: Any = self._next_keys()
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        numbers = random.uniform(keys, shape, dtype)
        return numbers.to(kwargs.get("device") or keys.device)

    def _bernoulli_(self, x: Tensor, p: Any = 0.5, **kwargs: Any) -> Tensor:
        """Writes to ``x``, and returns it: ``x.bernoulli_(p)`` with one number for each example.

        Draws by the next keys. Other shapes, keys of tokens, a tensor ``p`` and ``generator=``
        raise ``ValueError``. timm drops the paths of an example by
        ``x.new_empty((rows, 1, 1)).bernoulli_(keep_prob)``, and torchvision does in
        ``StochasticDepth``.
        """
        is_tensor = not isinstance(p, float | int)  # A tensor of probabilities.
        if is_tensor or kwargs.get("generator") is not None:
            raise _unkeyed_error("bernoulli_")
        shape = self._shape_of_one_number("bernoulli_", x.shape)
        keys: Any = self._next_keys()
        return x.copy_(random.bernoulli(keys, p, shape))

    def _shape_of_one_number(self, name: str, shape: Sequence[int]) -> Sequence[int]:
        """Returns the sizes after the examples' dimensions of a shape, which must be all ones.

        Raises ``ValueError`` where they are not, where the shape has no dimensions or does not
        begin with the examples, and for keys of tokens. ``name`` is that of torch's function, for
        the error. More numbers than one for each example are refused: ``torch.rand(rows, length)``
        may well be a draw by position, which would change with padding.
        """
        num_dims = len(self._batch_shape)
        rest = shape[num_dims:]
        if (
            isinstance(self._keys, PackedKeys)
            or not shape
            or tuple(shape[:num_dims]) != self._batch_shape
            or any(size != 1 for size in rest)
        ):
            raise _unkeyed_error(name)
        return rest


def _unkeyed_error(name: str) -> ValueError:
    """Returns the error for a function of torch that draws without keys."""
    return ValueError(
        f"{name} draws random numbers that no key reaches: {UNKEYED_HINT}"
    )


def _call_with_keys(
    keys: KeyOrPackedKeys,
    index: int,
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls a function under ``KeyedDropout(keys, index)``, and returns its output."""
    with KeyedDropout(keys, index):
        return function(*args, **kwargs)


def _alpha_dropout(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Returns ``x`` after dropout that keeps the mean and the deviation of ``selu``'s outputs.

    Elements where ``mask`` is True are dropped: they get ``selu``'s lower limit instead of 0
    [Klambauer et al., 2017]. With p = 1, the output is all 0.
    """
    if p == 1:  # The scale below would be infinite.
        return torch.zeros_like(x)
    limit = -1.7580993408473766  # minus the product of selu's two constants
    scale = ((1 - p) * (1 + p * limit**2)) ** -0.5
    output: Tensor = torch.where(mask, limit, x) * scale - scale * limit * p
    return output
