"""Checks the arguments that several losses share."""

import math

import torch
from torch import Tensor


def check_tensors(**tensors: object) -> None:
    """Raises ``TypeError`` for an argument that is no tensor, such as a model's output.

    >>> check_tensors(logits=[0.0, 1.0])
    Traceback (most recent call last):
    ...
    TypeError: logits must be a tensor, got list
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            field = "last_hidden_state" if "hidden" in name else "logits"
            hint = f": take its .{field}" if hasattr(tensor, field) else ""
            raise TypeError(
                f"{name} must be a tensor, got {type(tensor).__name__}{hint}"
            )


def promote_same_shape(**tensors: Tensor) -> list[Tensor]:
    """Returns the tensors in float32 or wider; raises ``ValueError`` unless they have one shape.

    A floating-point tensor keeps its dtype unless float32 is wider. Integers and bools get the
    dtype to which float32 and all these tensors promote. Raises ``TypeError`` for what is no
    tensor. Broadcasting would pair values of different units.

    >>> import torch
    >>> promote_same_shape(chosen=torch.ones(2), rejected=torch.ones(2, 1))
    Traceback (most recent call last):
    ...
    ValueError: rejected of shape (2, 1) against chosen of shape (2,): ... reshape one of them
    """
    check_tensors(**tensors)
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} against {first_name} of shape "
                f"{tuple(first.shape)}: they are paired one by one and never broadcast; reshape "
                "one of them"
            )
    widest = torch.float32
    for tensor in tensors.values():
        widest = torch.promote_types(widest, tensor.dtype)
    promoted = []
    for tensor in tensors.values():
        dtype = widest
        if tensor.is_floating_point() or tensor.is_complex():
            dtype = torch.promote_types(tensor.dtype, torch.float32)
        promoted.append(tensor.to(dtype))
    return promoted


def labels_to_int64(labels: Tensor) -> Tensor:
    """Returns labels in int64; raises ``TypeError`` for float or complex labels."""
    if labels.dtype == torch.int64:
        return labels
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(
            f"labels are {labels.dtype}, but they are class numbers: pass labels.long() if these "
            "are whole numbers; for probabilities take ps.losses.kl_divergence(logits, "
            "labels.log())"
        )
    return labels.to(torch.int64)  # In uint8, ignore_index would wrap around to 156.


def describe_labels_mismatch(labels: torch.Size, logits: torch.Size) -> str:
    """Returns the end of the message that labels do not have the shape ``logits[:-1]``.

    It names the likely mistake and its remedy, and is empty if the shapes show none.

    >>> describe_labels_mismatch(torch.Size([4, 1]), torch.Size([4, 3]))
    '. Labels have one dimension too many: take labels.squeeze(-1)'
    """
    if labels == logits and len(labels) == 1:
        return (
            ". Here is one logit per token: for two classes, take torch's "
            'binary_cross_entropy_with_logits, with reduction="none"'
        )
    if labels == logits:
        return (
            ". Labels are class numbers: of one-hot labels take labels.argmax(-1); for "
            "probabilities take ps.losses.kl_divergence(logits, labels.log())"
        )
    if labels == (*logits[:-1], 1):
        return ". Labels have one dimension too many: take labels.squeeze(-1)"
    return ""


def check_temperature(temperature: float) -> None:
    """Raises ``ValueError`` unless a temperature is positive and finite."""
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"temperature={temperature}: it divides logits, so take one above 0"
        )


def check_label_smoothing(label_smoothing: float) -> None:
    """Raises ``ValueError`` unless a smoothing is a share: from 0 to 1."""
    if not 0 <= label_smoothing <= 1:
        raise ValueError(
            f"label_smoothing={label_smoothing}: it is a share of the target, so take one from 0 "
            "to 1"
        )
