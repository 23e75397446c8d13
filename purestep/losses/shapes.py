"""What the losses refuse."""

from __future__ import annotations

from torch import Tensor


def check_same_shape(**tensors: Tensor) -> None:
    """Refuses tensors that would be broadcast: one loss for each unit needs one value for each.

    >>> import torch
    >>> check_same_shape(chosen=torch.ones(2), rejected=torch.ones(2, 1))
    Traceback (most recent call last):
    ...
    ValueError: rejected of shape (2, 1) against chosen of shape (2,): they are paired one by one and never broadcast; reshape one of them
    """
    (first, like), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != like.shape:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} against {first} of shape {tuple(like.shape)}: they are paired one "
                "by one and never broadcast; reshape one of them"
            )
