"""Makes labels: the token that each position of a text is to predict."""

from typing import Never

import torch
from torch import Tensor

from purestep import tree
from purestep.counts import IGNORE_INDEX


def shift_labels(
    input_ids: Tensor,
    *unnamed_masks: Never,
    attention_mask: Tensor | None = None,
    answer_mask: Tensor | None = None,
) -> Tensor:
    """Makes the labels of a causal model: at each position the next token, and -100 at the end.

    Make labels once, in the data. They stay right however you cut the data, whereas a loss that
    shifts loses a token at each cut. Do not pass them as ``labels=`` to a model of transformers,
    which would shift them again: take its logits.

    Args:
        input_ids: one text or a batch: integers of shape ``(..., length)``.
        attention_mask: 0 at padding, left or right, in the shape of ``input_ids``. Padding predicts
            nothing, and is not predicted.
        answer_mask: 1 at tokens that the model is to learn, as those of a chat's answers, in the
            shape of ``input_ids``. The first token of an answer is predicted from what stands
            before it, so its label stands at the last token of the question.

    Returns:
        Labels, int64, in the shape of ``input_ids``.

    Raises ``TypeError`` for ids or masks that are not integers, and for a mask without its name.
    Masks may be bools, and an empty tensor may have any dtype. Raises ``ValueError`` for ids of no
    dimension, and for a mask of another shape.

    >>> shift_labels(torch.tensor([5, 6, 7]))
    tensor([   6,    7, -100])
    >>> ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    >>> shift_labels(ids, attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]))
    tensor([[   6,    7, -100],
            [   9, -100, -100]])
    >>> shift_labels(torch.tensor([1, 2, 8, 9]), answer_mask=torch.tensor([0, 0, 1, 1]))
    tensor([-100,    8,    9, -100])
    """
    if unnamed_masks:
        raise TypeError(
            "shift_labels: name the mask, as attention_mask= (0 at padding) or as answer_mask= (1 "
            "at tokens to learn): they keep different labels"
        )
    _check_integers("input_ids", input_ids, allow_bool=False)
    if input_ids.ndim == 0:
        raise ValueError(
            "shift_labels: input_ids is a single token, "
            f"{tree.format_leaf(input_ids)}: give the text"
        )
    length = input_ids.shape[-1]
    has_label = torch.arange(length, device=input_ids.device) < length - 1
    if attention_mask is not None:
        is_token = _read_mask("attention_mask", attention_mask, input_ids)
        has_label = has_label & is_token & is_token.roll(-1, -1)
    if answer_mask is not None:
        is_answer = _read_mask("answer_mask", answer_mask, input_ids)
        has_label = has_label & is_answer.roll(-1, -1)
    next_tokens = input_ids.to(torch.int64).roll(-1, -1)
    return torch.where(has_label, next_tokens, IGNORE_INDEX)


def _read_mask(name: str, mask: Tensor, input_ids: Tensor) -> Tensor:
    """Returns a mask as bools.

    Raises ``ValueError`` if it has another shape than the text. Raises ``TypeError`` unless it is a
    tensor of integers or bools, or an empty tensor.
    """
    _check_integers(name, mask, allow_bool=True)
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"shift_labels: {name} has the shape {tuple(mask.shape)}, but input_ids "
            f"{tuple(input_ids.shape)}: give one number for each token"
        )
    return mask.to(torch.bool)


def _check_integers(name: str, value: Tensor, *, allow_bool: bool) -> None:
    """Raises ``TypeError`` unless ``value`` is a tensor of integers, or an empty one of any dtype.

    With ``allow_bool``, bools pass too.
    """
    if isinstance(value, Tensor):
        is_inexact = value.is_floating_point() or value.is_complex()
        is_refused_bool = value.dtype == torch.bool and not allow_bool
        # An empty text may have any dtype: that of torch.tensor([]) is float32.
        if value.numel() == 0 or not (is_inexact or is_refused_bool):
            return
    raise TypeError(
        f"shift_labels: {name} is {tree.format_leaf(value)}, where a tensor of integers is needed: "
        "convert it where the data is made"
    )
