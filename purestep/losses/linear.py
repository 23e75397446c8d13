"""Losses of hidden states and a matrix, whose product, the logits, is never whole."""

import torch
from einops import rearrange
from torch import Tensor

from purestep.counts import IGNORE_INDEX
from purestep.losses.logits import as_labels, check_temperature
from purestep.losses.vocabulary import (
    Head,
    chunk_size,
    combine_chunks,
    logits_of,
    shifted_exp,
    split_head,
    statistics,
)
from purestep.remat import remat
from purestep.tree import accumulation_dtype, concrete


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Returns ``cross_entropy(hidden @ weight.T, labels)``, from one chunk of logits at a time.

    The backward pass computes logits again. For 4,096 tokens of 128k classes this takes less than a
    fiftieth of the memory, and no more time (`benchmarks/losses.py`).

    * **Gradients** are exact for any weights of the losses. A token without a label gets exactly
      zero gradient, even if its hidden state is NaN. Outside of transforms, so does a token of
      weight 0.
    * **Under transforms and compilers**, all logits are alive.
    * **Half precision**: products have its dtype, as in ``hidden @ weight.T``. Exponentials, losses
      and sums are float32, and the weight's gradient is rounded once.

    Args:
        hidden: of shape ``labels.shape + (features,)``.
        weight: (classes, features), such as that of ``lm_head``, or of a tied embedding.
        labels: class numbers, or ``ignore_index``. Others are refused. On a device or under a
            compiler, where the host cannot look, their loss and gradients are NaN.
        bias: (classes,), added to the logits.
        ignore_index: the label of positions that are no tokens, as in ``cross_entropy``.
        label_smoothing: how much of the target is spread evenly over all classes.
        z_loss: keeps log Σ exp x near 0.
        soft_cap: c, where logits are c · tanh(x / c), as in Gemma 2.
        chunk: how many classes' logits are alive at once. None: as many as fill 16 MiB on a host,
            or 256. It changes sums by rounding.

    >>> hidden, weight = torch.zeros(1, 2, 8), torch.ones(4, 8)
    >>> linear_cross_entropy(hidden, weight, torch.tensor([[3, -100]]))
    tensor([[1.3863, 0.0000]])
    """
    _check(hidden, weight, labels.shape, "labels")
    classes = len(weight)
    if bias is not None and bias.shape != (classes,):
        raise ValueError(
            f"bias of shape {tuple(bias.shape)} against weight of shape {tuple(weight.shape)}: "
            f"bias needs one value for each class, so shape ({classes},)"
        )
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(
            f"soft_cap={soft_cap}: it divides logits, so take one above 0, or None"
        )
    labels = as_labels(labels)
    known = concrete(labels)
    if known is not None:
        wrong = known[((known < 0) | (known >= classes)) & (known != ignore_index)]
        if wrong.numel():
            raise ValueError(
                f"a label is {int(wrong[0])}: weight has {classes} classes, so labels are from 0 "
                f"to {classes - 1}, or ignore_index={ignore_index}"
            )
    present = labels != ignore_index
    hidden, weight = _autocast(hidden), _autocast(weight)
    # Taken away before it meets the weight, so that it is finite in every derivative.
    hidden = torch.where(present.unsqueeze(-1), hidden, 0)
    rows = rearrange(hidden, "... features -> (...) features")
    head = Head(weight, bias, soft_cap)
    z, picked, total = statistics(rows, labels.reshape(-1), head, chunk)
    losses = z - picked
    if label_smoothing:
        losses = losses + label_smoothing * (picked - total / classes)
    if z_loss:
        losses = losses + z_loss * z.square()
    losses = losses.reshape(labels.shape)
    if known is None:
        # Where the host cannot look, a wrong label makes its loss and its gradients NaN.
        wrong = present & ((labels < 0) | (labels >= classes))
        losses = losses * torch.where(wrong, torch.nan, 1.0).to(losses.dtype)
    return torch.where(present, losses, 0)


def linear_kl_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> Tensor:
    """Returns ``kl_divergence(hidden @ weight.T, teacher_hidden @ teacher_weight.T)``, in chunks.

    The full logits of student and teacher are never in memory.

    Args:
        hidden: the student's, of shape tokens + (features,).
        weight: (classes, features).
        teacher_hidden: of shape tokens + (features of the teacher,).
        teacher_weight: (classes, features of the teacher).
        temperature: T, as in ``kl_divergence``.
        chunk: how many classes' logits are alive at once, as in ``linear_cross_entropy``.

    >>> student, teacher = torch.zeros(3, 8), torch.ones(3, 1)
    >>> linear_kl_divergence(student, torch.ones(2, 8), teacher, torch.tensor([[0.0], [1.0]]))
    tensor([0.1109, 0.1109, 0.1109])
    """
    _check(
        hidden, weight, teacher_hidden.shape[:-1], "teacher_hidden without its features"
    )
    _check(
        teacher_hidden, teacher_weight, hidden.shape[:-1], "hidden without its features"
    )
    if len(weight) != len(teacher_weight):
        raise ValueError(
            f"weight of shape {tuple(weight.shape)} against teacher_weight of shape "
            f"{tuple(teacher_weight.shape)}: student and teacher need the same classes"
        )
    check_temperature(temperature)
    hidden, weight, teacher_hidden, teacher_weight = (
        _autocast(each) for each in (hidden, weight, teacher_hidden, teacher_weight)
    )
    # What flows back from each chunk is added up in these dtypes.
    flat, teacher_flat = (
        rearrange(each, "... features -> (...) features").to(
            accumulation_dtype(each.dtype)
        )
        for each in (hidden, teacher_hidden)
    )
    head, teacher = Head(weight), Head(teacher_weight)
    size = chunk_size(flat, head, chunk)
    pairs = zip(split_head(head, size), split_head(teacher, size), strict=True)
    made = [
        remat(_divergence)(flat, teacher_flat, *pair, temperature) for pair in pairs
    ]
    most, exponentials, teacher_most, teacher_exponentials, gaps = (
        torch.stack(each) for each in zip(*made, strict=True)
    )
    z, _ = combine_chunks(most, exponentials)
    teacher_z, scale = combine_chunks(teacher_most, teacher_exponentials)
    gap = (gaps * scale).sum(0) / (teacher_exponentials * scale).sum(0)
    return temperature**2 * (gap + z - teacher_z).reshape(hidden.shape[:-1])


def _divergence(
    hidden: Tensor,
    teacher_hidden: Tensor,
    head: Head,
    teacher_head: Head,
    temperature: float,
) -> tuple[Tensor, ...]:
    """The greatest logits and the exponentials above, of both; Σ exp x′ · (x′ − x)."""
    x = logits_of(hidden, head) / temperature
    teacher = logits_of(teacher_hidden, teacher_head) / temperature
    most, exponentials = shifted_exp(x)
    teacher_most, weights = shifted_exp(teacher)
    gaps = weights * (teacher - x)
    return most, exponentials.sum(-1), teacher_most, weights.sum(-1), gaps.sum(-1)


def _autocast(tensor: Tensor) -> Tensor:
    """The tensor as autocast hands it to a product, so that the backward pass has the same."""
    kind = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def _check(hidden: Tensor, weight: Tensor, tokens: torch.Size, whose: str) -> None:
    if hidden.ndim == 0 or hidden.shape[:-1] != tokens:
        raise ValueError(
            f"hidden of shape {tuple(hidden.shape)} against {whose} of shape {tuple(tokens)}: "
            "hidden needs that shape and then one dimension of features"
        )
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight of shape {tuple(weight.shape)} against hidden of shape {tuple(hidden.shape)}: "
            f"weight needs shape (classes, {hidden.shape[-1]}), as torch.nn.Linear has it"
        )
    if weight.dtype != hidden.dtype and not torch.is_autocast_enabled(
        hidden.device.type
    ):
        raise ValueError(
            f"hidden is {hidden.dtype} and weight is {weight.dtype}: their product needs one "
            "dtype, as in hidden.to(weight.dtype), or autocast"
        )
