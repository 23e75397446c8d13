"""What each token of a text is to predict."""

from __future__ import annotations

import torch
from torch import Tensor

from purestep.weights import IGNORE_INDEX


def shift_labels(input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """The labels of a causal model: at each position the next token, and -100 where there is none.

    Made once, in the data, they stay right however the data are cut: shifted in a loss, a row would lose a
    token wherever it is cut or joined. Models that shift labels themselves (those of transformers, given
    ``labels=``) must not be given these; take their logits.

    Args:
        input_ids: one text, or a batch of them: integers of ``(..., length)``.
        attention_mask: 0 where there is padding, on either side; of the shape of ``input_ids``. Padding is not
            predicted, and predicts nothing.

    Returns:
        Labels, int64, of the shape of ``input_ids``.

    >>> shift_labels(torch.tensor([5, 6, 7]))
    tensor([   6,    7, -100])
    >>> shift_labels(torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]]))
    tensor([[   6,    7, -100],
            [   9, -100, -100]])
    """
    _check("input_ids", input_ids, "token ids", bools=False)
    if input_ids.ndim == 0:
        raise ValueError(
            f"shift_labels: input_ids is a single token, {input_ids.dtype} of shape (): give the whole text, "
            "(..., length)"
        )
    length = input_ids.shape[-1]
    counted = torch.arange(length, device=input_ids.device) < length - 1
    if attention_mask is not None:
        _check("attention_mask", attention_mask, "1 for a token, 0 for padding", bools=True)
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"shift_labels: attention_mask has the shape {tuple(attention_mask.shape)}, but input_ids "
                f"{tuple(input_ids.shape)}: give the mask of padding, one number for each token"
            )
        real = attention_mask.to(torch.bool)
        counted = counted & real & real.roll(-1, -1)
    return torch.where(counted, input_ids.to(torch.int64).roll(-1, -1), IGNORE_INDEX)


def _check(name: str, value: Tensor, what: str, *, bools: bool) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"shift_labels: {name} is a {type(value).__name__}, not a tensor: make it one with "
            f"torch.as_tensor({name})"
        )
    inexact = value.is_floating_point() or value.is_complex()
    # An empty text says nothing: torch.tensor([]) is float32.
    if value.numel() and (inexact or (value.dtype == torch.bool and not bools)):
        raise TypeError(
            f"shift_labels: {name} is {value.dtype}, where integers are needed ({what}): convert it where the "
            "data is made"
        )
