"""Computes losses of logits, one for each token."""

import torch
from torch import Tensor
from torch.nn import functional

from purestep import tree
from purestep.counts import IGNORE_INDEX
from purestep.losses.arguments import (
    check_temperature,
    check_tensors,
    describe_labels_mismatch,
    labels_to_int64,
    promote_same_shape,
)


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

    with z = log Σ exp x, y the label and s the smoothing. The result has the labels' shape. Raises
    ``ValueError`` for other shapes. Raises ``TypeError`` for float or complex labels, and for
    arguments that are no tensors.

    Args:
        logits: x, of shape ``labels.shape + (classes,)``, before any softmax.
        labels: class numbers, or ``ignore_index``. Others raise torch's ``IndexError`` on the host,
            or under ``vmap`` its ``RuntimeError``.
        ignore_index: the label of positions that are no tokens. If it is not -100, pass a
            ``weight_fn`` that leaves it out too: the default one counts it.
        label_smoothing: how much of the target is spread evenly over all classes.
        z_loss: keeps log Σ exp x near 0, which keeps logits from drifting [PaLM, 2022].

    >>> cross_entropy(torch.zeros(1, 2, 4), torch.tensor([[3, -100]]))
    tensor([[1.3863, 0.0000]])
    """
    check_tensors(logits=logits, labels=labels)
    if logits.ndim == 0 or logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} against labels of shape {tuple(labels.shape)}: "
            "logits need the labels' shape and then one dimension of classes"
            f"{describe_labels_mismatch(labels.shape, logits.shape)}"
        )
    logits = tree.widen(logits)
    labels = labels_to_int64(labels)
    rows = logits
    targets = labels
    # A reshape is a node of the graph, which a small network feels.
    if labels.ndim != 1:
        rows = logits.reshape(-1, logits.shape[-1])
        targets = labels.reshape(-1)
    losses = functional.cross_entropy(
        rows,
        targets,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    if labels.ndim != 1:
        losses = losses.reshape(labels.shape)
    if z_loss == 0:
        return losses
    z = torch.logsumexp(logits, -1)
    return losses + torch.where(labels != ignore_index, z_loss * z.square(), 0)


def kl_divergence(
    logits: Tensor, teacher_logits: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """Returns each token's KL(teacher ‖ student), for distillation, in float32 or wider.

        ℓ = T² Σ q (log q − log p)        p = softmax(x / T),  q = softmax(x′ / T)

    T² keeps the size of gradients at all temperatures [Hinton, 2015]. A class whose teacher logit
    is −∞ adds nothing. Nothing is detached. In a step, teacher params that the loss closes over are
    constants. Raises ``ValueError`` for different shapes, for logits without dimensions, and unless
    T is positive and finite.

    Args:
        logits: x, the student's, of shape tokens + (classes,).
        teacher_logits: x′, of the same shape.
        temperature: T. Above 1, the teacher's small probabilities count for more.

    >>> kl_divergence(torch.zeros(2, 4), torch.tensor([[0.0, 0.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0]]))
    tensor([0.0000, 1.3826])
    """
    check_tensors(logits=logits, teacher_logits=teacher_logits)
    if logits.ndim == 0:
        raise ValueError(
            "logits of shape () have no classes, which are their last dimension"
        )
    check_temperature(temperature)
    logits, teacher_logits = promote_same_shape(
        logits=logits, teacher_logits=teacher_logits
    )
    log_p = (logits / temperature).log_softmax(-1)
    log_q = (teacher_logits / temperature).log_softmax(-1)
    q = log_q.exp()
    # Where q is 0, log q − log p is infinite or NaN, and so would be its product with 0.
    log_ratio = torch.where(q > 0, log_q - log_p, 0)
    return temperature**2 * (q * log_ratio).sum(-1)
