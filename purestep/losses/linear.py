"""Computes losses of hidden states and a weight, without all of their product, the logits."""

import math

import torch
from einops import rearrange
from torch import Tensor

from purestep import tree
from purestep.autocast import autocast_dtype
from purestep.counts import IGNORE_INDEX
from purestep.losses.arguments import (
    check_label_smoothing,
    check_temperature,
    check_tensors,
    describe_labels_mismatch,
    labels_to_int64,
)
from purestep.losses.vocabulary import (
    Head,
    choose_chunk_size,
    combine_chunks,
    compute_logits,
    compute_statistics,
    shifted_exp,
    split_head,
)
from purestep.remat import remat
from purestep.tree import concrete


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
    chunk_size: int | None = None,
) -> Tensor:
    """Returns ``cross_entropy(hidden @ weight.T, labels)``, from one chunk of logits at a time.

    That is one loss for each label, and 0 where it is ignored. Raises ``ValueError`` for shapes and
    dtypes that do not fit together, and for ``label_smoothing``, ``soft_cap`` or ``chunk_size`` out
    of range. Float or complex labels raise ``TypeError``. The backward pass computes logits again.
    For 4,096 tokens of 128k classes this takes less than a fiftieth of the memory, and no more
    time (`benchmarks/speed/losses.py`).

    * **Gradients** are exact for any weights of the losses. A token without a label gets exactly
      zero gradient, even if its hidden state is NaN. So does a token of weight 0, except under
      transforms and compilers, and with ``create_graph=True``.
    * **Under transforms and compilers**, all logits may be alive.
    * **Half precision**: products have its dtype, as in ``hidden @ weight.T``. Exponentials, losses
      and sums are float32, and the weight's gradient is rounded once.

    Args:
        hidden: of shape ``labels.shape + (features,)``.
        weight: (classes, features), such as that of ``lm_head``, or of a tied embedding.
        labels: class numbers, or ``ignore_index``. Others raise ``ValueError``, or on a device
            or under a compiler, where the host cannot look, have NaN as loss and gradients.
        bias: (classes,), added to the logits.
        ignore_index: the label of positions that are no tokens, as in ``cross_entropy``.
        label_smoothing: how much of the target is spread evenly over all classes.
        z_loss: keeps log Σ exp x near 0.
        soft_cap: c, where logits are c · tanh(x / c), as in Gemma 2.
        chunk_size: how many classes' logits are alive at once. None: as many as fill 16 MiB in
            float32 on a host and 256 MiB on a device, but at least 256 classes. It changes sums by
            rounding.

    >>> hidden, weight = torch.zeros(1, 2, 8), torch.ones(4, 8)
    >>> linear_cross_entropy(hidden, weight, torch.tensor([[3, -100]]))
    tensor([[1.3863, 0.0000]])
    """
    check_tensors(hidden=hidden, weight=weight, labels=labels)
    _check_product(hidden, weight, labels.shape, "labels")
    num_classes = len(weight)
    if bias is not None and bias.shape != (num_classes,):
        raise ValueError(
            f"bias of shape {tuple(bias.shape)} against weight of shape {tuple(weight.shape)}: "
            f"bias needs one value for each class, so shape ({num_classes},)"
        )
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(
            f"soft_cap={soft_cap}: it divides logits, so take a finite one above 0, or None"
        )
    check_label_smoothing(label_smoothing)
    labels = labels_to_int64(labels)
    concrete_labels = concrete(labels)
    if concrete_labels is not None:
        _check_labels(concrete_labels, num_classes, ignore_index)
    is_token = labels != ignore_index
    hidden = _autocast(hidden)
    weight = _autocast(weight)
    # Replaced before it meets the weight, so that NaN at an ignored label reaches no derivative.
    hidden = torch.where(is_token.unsqueeze(-1), hidden, 0)
    rows = rearrange(hidden, "... features -> (...) features")
    head = Head(weight, bias, soft_cap)
    statistics = compute_statistics(rows, labels.reshape(-1), head, chunk_size)
    z = statistics.z
    losses = z - statistics.label_logit
    if label_smoothing:
        mean = statistics.total / num_classes
        losses = losses + label_smoothing * (statistics.label_logit - mean)
    if z_loss:
        losses = losses + z_loss * z.square()
    losses = losses.reshape(labels.shape)
    if concrete_labels is None:
        is_wrong = is_token & ((labels < 0) | (labels >= num_classes))
        # The product makes both the loss and its gradients NaN.
        losses = losses * torch.where(is_wrong, torch.nan, 1.0).to(losses.dtype)
    return torch.where(is_token, losses, 0)


def _check_labels(labels: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raises ``ValueError`` if a label is neither a class nor ``ignore_index``."""
    is_outside = (labels < 0) | (labels >= num_classes)
    wrong = labels[is_outside & (labels != ignore_index)]
    if wrong.numel():
        raise ValueError(
            f"a label is {int(wrong[0])}: weight has {num_classes} classes, so labels are from 0 "
            f"to {num_classes - 1}, or ignore_index={ignore_index}"
        )


def linear_kl_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> Tensor:
    """Returns ``kl_divergence(hidden @ weight.T, teacher_hidden @ teacher_weight.T)``, in chunks.

    That is one value for each token, of shape ``hidden.shape[:-1]``. Teacher tensors get gradients,
    too. Under transforms and compilers, and with ``create_graph=True``, the full logits of student
    and teacher may be in memory. Raises ``ValueError`` for shapes and dtypes that do not fit
    together, and for ``temperature`` or ``chunk_size`` out of range. Logits must be finite.

    Args:
        hidden: the student's, of shape tokens + (features,).
        weight: (classes, features).
        teacher_hidden: of shape tokens + (features of the teacher,).
        teacher_weight: (classes, features of the teacher).
        temperature: T, as in ``kl_divergence``.
        chunk_size: how many classes' logits are alive at once, as in ``linear_cross_entropy``.

    >>> student, teacher = torch.zeros(3, 8), torch.ones(3, 1)
    >>> linear_kl_divergence(student, torch.ones(2, 8), teacher, torch.tensor([[0.0], [1.0]]))
    tensor([0.1109, 0.1109, 0.1109])
    """
    check_tensors(hidden=hidden, weight=weight)
    check_tensors(teacher_hidden=teacher_hidden, teacher_weight=teacher_weight)
    _check_product(
        hidden, weight, teacher_hidden.shape[:-1], "teacher_hidden without its features"
    )
    _check_product(
        teacher_hidden,
        teacher_weight,
        hidden.shape[:-1],
        "hidden without its features",
        owner="teacher_",
    )
    if len(weight) != len(teacher_weight):
        raise ValueError(
            f"weight of shape {tuple(weight.shape)} against teacher_weight of shape "
            f"{tuple(teacher_weight.shape)}: student and teacher need the same classes"
        )
    check_temperature(temperature)
    rows = _as_summable_rows(_autocast(hidden))
    teacher_rows = _as_summable_rows(_autocast(teacher_hidden))
    head = Head(_autocast(weight))
    teacher_head = Head(_autocast(teacher_weight))
    size = choose_chunk_size(rows, head, chunk_size)
    heads = zip(split_head(head, size), split_head(teacher_head, size), strict=True)
    chunks = []
    for student, teacher in heads:
        chunks.append(
            remat(_compute_chunk_of_divergence)(
                rows, teacher_rows, student, teacher, temperature
            )
        )
    max_, exp_sum, teacher_max, teacher_exp_sum, gap_sum = (
        torch.stack(field) for field in zip(*chunks, strict=True)
    )
    z, _ = combine_chunks(max_, exp_sum)
    teacher_z, scale = combine_chunks(teacher_max, teacher_exp_sum)
    mean_gap = (gap_sum * scale).sum(0) / (teacher_exp_sum * scale).sum(0)
    losses = temperature**2 * (mean_gap + z - teacher_z)
    return losses.reshape(hidden.shape[:-1])


def _as_summable_rows(hidden: Tensor) -> Tensor:
    """Flattens hidden states to (tokens, features), in float32 or wider.

    In this dtype, autograd sums the gradients that come from all chunks.
    """
    rows = rearrange(hidden, "... features -> (...) features")
    return tree.widen(rows)


def _compute_chunk_of_divergence(
    hidden: Tensor,
    teacher_hidden: Tensor,
    head: Head,
    teacher_head: Head,
    temperature: float,
) -> tuple[Tensor, ...]:
    """Computes one chunk's parts of each token's KL divergence, each of shape (tokens,).

    Returns max x, Σ exp x, max x′, Σ exp x′ and Σ exp x′ · (x′ − x). Here x and x′ are the
    student's and the teacher's logits, divided by the temperature. The exponentials are of logits
    less the chunk's greatest one. Both maxima are detached.
    """
    x = compute_logits(hidden, head) / temperature
    teacher_x = compute_logits(teacher_hidden, teacher_head) / temperature
    max_, exp = shifted_exp(x)
    teacher_max, teacher_exp = shifted_exp(teacher_x)
    gap_sum = (teacher_exp * (teacher_x - x)).sum(-1)
    return max_, exp.sum(-1), teacher_max, teacher_exp.sum(-1), gap_sum


def _autocast(tensor: Tensor) -> Tensor:
    """Casts a tensor to autocast's dtype, as autocast does before a product.

    Returns it as it is if autocast is off, or if it is float64. The backward pass may run outside
    of autocast, and then computes the same product.
    """
    dtype = autocast_dtype(tensor.device.type)
    if tensor.dtype == torch.float64 or dtype is None:
        return tensor
    return tensor.to(dtype)


def _check_product(
    hidden: Tensor,
    weight: Tensor,
    tokens: torch.Size,
    tokens_name: str,
    *,
    owner: str = "",
) -> None:
    """Raises ``ValueError`` unless ``hidden @ weight.T`` has logits for tokens of this shape.

    Without autocast, both need one dtype. In the message, ``tokens_name`` says where the shape is
    from, and ``owner`` comes before the names of both tensors.
    """
    if hidden.ndim == 0 or hidden.shape[:-1] != tokens:
        hint = ""
        if tokens_name == "labels" and weight.ndim == 2:
            logits_shape = torch.Size([*hidden.shape[:-1], len(weight)])
            hint = describe_labels_mismatch(tokens, logits_shape)
        raise ValueError(
            f"{owner}hidden of shape {tuple(hidden.shape)} against {tokens_name} of shape "
            f"{tuple(tokens)}: {owner}hidden needs that shape and then one dimension of features"
            f"{hint}"
        )
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{owner}weight of shape {tuple(weight.shape)} against {owner}hidden of shape "
            f"{tuple(hidden.shape)}: {owner}weight needs shape (classes, {hidden.shape[-1]}), as "
            "torch.nn.Linear has it"
        )
    is_autocast = autocast_dtype(hidden.device.type) is not None
    if weight.dtype != hidden.dtype and not is_autocast:
        raise ValueError(
            f"{owner}hidden is {hidden.dtype} and {owner}weight is {weight.dtype}: their product "
            "needs one dtype, as in hidden.to(weight.dtype), or autocast"
        )
