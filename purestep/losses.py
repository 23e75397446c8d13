"""Losses per token: never a mean, never a sum, so that they can be counted together."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

from purestep.tokens import IGNORE_INDEX
from purestep.tree import accumulation_dtype


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Each token's cross entropy, 0 where its label is ``ignore_index``; half precision is lifted to float32.

        ℓ = (1 − s) (z − xᵧ) + s (z − mean x) + z_loss · z²        z = log Σ exp x,  y the label,  s the smoothing

    Args:
        logits: x, of shape ``labels.shape + (classes,)``.
        labels: class numbers, or ``ignore_index``.
        ignore_index: the label that says there is no token. A ``weight_fn`` has to leave it out as well, or N
            still counts it: the default one knows of -100 alone.
        label_smoothing: how much of the target is spread evenly over all classes.
        z_loss: keeps log Σ exp x near 0, which keeps logits from drifting [PaLM, 2022].

    >>> cross_entropy(torch.zeros(1, 2, 4), torch.tensor([[3, -100]]))
    tensor([[1.3863, 0.0000]])
    """
    if logits.ndim == 0 or logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} against labels of shape {tuple(labels.shape)}: logits "
            "need the labels' shape and then one dimension of classes"
        )
    logits = logits.to(accumulation_dtype(logits.dtype))
    losses = functional.cross_entropy(
        rearrange(logits, "... classes -> (...) classes"),
        rearrange(labels, "... -> (...)"),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    ).reshape(labels.shape)
    if z_loss == 0:
        return losses
    z = torch.logsumexp(logits, -1)
    return losses + torch.where(labels != ignore_index, z_loss * z.square(), 0)
