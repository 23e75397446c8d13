"""Tensors of a loss, one value for each unit."""

from torch import Tensor

from purestep.tree import accumulation_dtype


def paired(**tensors: Tensor) -> list[Tensor]:
    """The tensors in float32 or better; shapes that would be broadcast are refused.

    >>> import torch
    >>> paired(chosen=torch.ones(2), rejected=torch.ones(2, 1))
    Traceback (most recent call last):
    ...
    ValueError: rejected of shape (2, 1) against chosen of shape (2,): ... reshape one of them
    """
    (first, like), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != like.shape:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} against {first} of shape "
                f"{tuple(like.shape)}: they are paired one by one and never broadcast; reshape one "
                "of them"
            )
    return [each.to(accumulation_dtype(each.dtype)) for each in tensors.values()]
