"""Losses of logits: one for each token."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from purestep.counts import IGNORE_INDEX
from purestep.losses.shapes import paired
from purestep.tree import accumulation_dtype


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Returns each token's cross entropy, in float32 or wider, and 0 where the label is ignored.

        ℓ = (1 − s) (z − xᵧ) + s (z − mean x) + z_loss · z²

    with z = log Σ exp x, y the label and s the smoothing.

    Args:
        logits: x, of shape ``labels.shape + (classes,)``.
        labels: class numbers, or ``ignore_index``.
        ignore_index: the label of positions that are no tokens. If it is not -100, pass a
            ``weight_fn`` that leaves it out too: the default one counts it.
        label_smoothing: how much of the target is spread evenly over all classes.
        z_loss: keeps log Σ exp x near 0, which keeps logits from drifting [PaLM, 2022].

    >>> cross_entropy(torch.zeros(1, 2, 4), torch.tensor([[3, -100]]))
    tensor([[1.3863, 0.0000]])
    """
    if logits.ndim == 0 or logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} against labels of shape {tuple(labels.shape)}: "
            "logits need the labels' shape and then one dimension of classes"
        )
    logits = logits.to(accumulation_dtype(logits.dtype))
    labels = as_labels(labels)
    rows, targets = logits, labels
    if (
        labels.ndim != 1
    ):  # A reshape is a node of the graph, which a small network feels.
        rows, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    how: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    losses = functional.cross_entropy(rows, targets, reduction="none", **how)
    losses = losses if labels.ndim == 1 else losses.reshape(labels.shape)
    if z_loss == 0:
        return losses
    z = torch.logsumexp(logits, -1)
    return losses + torch.where(labels != ignore_index, z_loss * z.square(), 0)


def as_labels(labels: Tensor) -> Tensor:
    """Returns labels in int64; refuses floats, which would be truncated."""
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(
            f"labels are {labels.dtype}, but they are class numbers: pass labels.long() if these "
            "are whole numbers; for probabilities take ps.losses.kl_divergence"
        )
    return labels.to(torch.int64)  # In uint8, ignore_index would wrap around to 156.


def kl_divergence(
    logits: Tensor, teacher_logits: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """Returns each token's KL(teacher ‖ student), for distillation, in float32 or wider.

        ℓ = T² Σ q (log q − log p)        p = softmax(x / T),  q = softmax(x′ / T)

    T² keeps the size of gradients at all temperatures [Hinton, 2015]. A class whose teacher logit
    is −∞ adds nothing. Nothing is detached. In a step, teacher params that the loss closes over are
    constants.

    Args:
        logits: x, the student's, of shape tokens + (classes,).
        teacher_logits: x′, of the same shape.
        temperature: T. Above 1, the teacher's small probabilities count for more.

    >>> kl_divergence(torch.zeros(2, 4), torch.tensor([[0.0, 0.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0]]))
    tensor([0.0000, 1.3826])
    """
    if logits.ndim == 0:
        raise ValueError(
            "logits of shape () have no classes, which are their last dimension"
        )
    check_temperature(temperature)
    both = paired(logits=logits, teacher_logits=teacher_logits)
    log_p, log_q = ((x / temperature).log_softmax(-1) for x in both)
    q = log_q.exp()
    # Selected before it is multiplied: where q is 0, log q has no number.
    return temperature**2 * (q * torch.where(q > 0, log_q - log_p, 0)).sum(-1)


def check_temperature(temperature: float) -> None:
    """Refuses one that is not positive."""
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"temperature={temperature}: it divides logits, so take one above 0"
        )
