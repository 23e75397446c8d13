"""Microbatch to weights to count: which tokens there are, and how much each of them weighs.

A token is any unit of loss: a token, a sequence in DPO, a pixel, a row. Its weight depends on data
alone, so that N = Σ wᵢ can be known, on all ranks, before any backward pass begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from purestep.tree import accumulation_dtype
from purestep.types import Microbatch, WeightFn

IGNORE_INDEX = -100


class Count(NamedTuple):
    """What an update divides by: N = Σ wᵢ, and the number of microbatches with any tokens."""

    num_tokens: Tensor
    num_microbatches: Tensor


def label_weights(microbatch: Microbatch) -> Tensor:
    """The default weights: 1 for every label but ``-100``, PyTorch's ``ignore_index``.

    Count the very labels that the loss uses: where the model's labels are shifted against its inputs,
    shift them once, in the data, before either sees them.

    >>> label_weights({"labels": torch.tensor([[5, 7, -100]])})
    tensor([[ True,  True, False]])
    """
    if not isinstance(microbatch, Mapping) or "labels" not in microbatch:
        found = sorted(microbatch) if isinstance(microbatch, Mapping) else type(microbatch).__name__
        raise ValueError(
            f"label_weights reads microbatch['labels'], but this microbatch is {found}; "
            "pass weight_fn=, a function from a microbatch to one weight per token"
        )
    labels: Tensor = microbatch["labels"]
    return labels != IGNORE_INDEX


def count_tokens(microbatches: Sequence[Microbatch], weight_fn: WeightFn = label_weights) -> Tensor:
    """N = Σ wᵢ over a group of microbatches on this rank: ``psum`` it for the global count.

    bool and int weights are counted exactly, in int64; float weights in float64.

    >>> group = [{"labels": torch.tensor([5, 7, -100])}, {"labels": torch.tensor([2])}]
    >>> count_tokens(group)
    tensor(3)
    """
    return count(microbatches, weight_fn).num_tokens


def count(
    microbatches: Sequence[Microbatch], weight_fn: WeightFn, device: torch.device | None = None
) -> Count:
    """Both denominators of this rank's group, on ``device``.

    A group that is on its way to the device (``prefetch``) brings its count from the host.
    """
    if hasattr(microbatches, "counted"):
        counted = microbatches.counted(weight_fn)
        return Count(*(value.to(device, non_blocking=True) for value in counted))
    total = no_count(device)
    for microbatch in microbatches:
        here = count_weights(checked_weights(weight_fn(microbatch)))
        total = Count(*(sum_ + new.to(sum_.device) for sum_, new in zip(total, here, strict=True)))
    return total


def no_count(device: torch.device | None) -> Count:
    """The denominators of no microbatch at all."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return Count(zero, zero)


def count_weights(weights: Tensor) -> Count:
    """Both denominators of one microbatch."""
    dtype = accumulation_dtype(weights.dtype)
    num_tokens = weights.sum(dtype=torch.float64 if dtype.is_floating_point else dtype)
    return Count(num_tokens, (num_tokens > 0).to(torch.int64))


def checked_weights(weights: Tensor) -> Tensor:
    """The weights as data, refused where they cannot be weights.

    Negative and non-finite values are refused where that can be told without waiting for a device; on
    an accelerator, under ``torch.compile`` and under a dispatch mode they go unchecked.
    """
    if not isinstance(weights, Tensor) or weights.is_complex():
        found = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(f"weights must be a bool, int or float tensor, one per token; got {found}")
    values = None if weights.dtype == torch.bool else _values_at_hand(weights)
    if values is not None and not bool(((values >= 0) & values.isfinite()).all()):
        worst = values[~((values >= 0) & values.isfinite())].flatten()[0].item()
        raise ValueError(
            f"weights must be finite and not negative, but one is {worst}: a loss is taken away by "
            "weight 0, and its sign belongs into loss_fn"
        )
    return weights.detach()


def _values_at_hand(tensor: Tensor) -> Tensor | None:
    """The plain CPU tensor below any functorch wrappers; None where reading it would wait or trace."""
    if torch.compiler.is_dynamo_compiling() or is_in_torch_dispatch_mode():
        return None
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor if type(tensor) is Tensor and tensor.device.type == "cpu" else None
