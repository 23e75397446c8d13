"""Microbatch to weights to count: the tokens of a group, and the weight of each.

A token is any unit of loss: a token, a sequence in DPO, a pixel, a row. Its weight depends on data
alone, so that all ranks know N = Σ wᵢ before any backward pass begins.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from purestep import tree
from purestep.torch_private import count_nonzero
from purestep.types import Microbatch, TokenCounts, WeightFn

IGNORE_INDEX = -100

MAX_EXACT_INT = 2**53
"""Up to here, float64 holds every integer; and a thousand such sums do not overflow int64."""

UNSIGNED_DTYPES = (torch.uint16, torch.uint32, torch.uint64)
"""Integers that torch stores but hardly computes with."""


class PreweightedMicrobatches(Sequence[Microbatch]):
    """A group that brings the weights of its microbatches, as ``prefetch`` does."""

    @abstractmethod
    def weights(self, weight_fn: WeightFn) -> Sequence[Tensor]:
        """The checked result of ``weight_fn`` for each microbatch, perhaps still on the host."""


class WeightedMicrobatches(NamedTuple):
    """Microbatches with the weights of their tokens, which are asked for once.

    ``weights`` and ``counts`` are None where the weights come with each microbatch's turn.
    """

    microbatches: Sequence[Microbatch]
    weights: Sequence[Tensor] | None
    counts: TokenCounts | None


def label_weights(microbatch: Microbatch) -> Tensor:
    """Returns the default weights: True for every label but ``-100``, PyTorch's ``ignore_index``.

    Count the same labels that the loss uses: shift them once, in the data. An unsigned label cannot
    be -100, so all of these count.

    >>> label_weights({"labels": torch.tensor([[5, 7, -100]])})
    tensor([[ True,  True, False]])
    """
    if not isinstance(microbatch, Mapping) or "labels" not in microbatch:
        found = (
            sorted(microbatch)
            if isinstance(microbatch, Mapping)
            else type(microbatch).__name__
        )
        raise ValueError(
            f"label_weights reads microbatch['labels'], but this microbatch is {found}; "
            "pass weight_fn=, a function from a microbatch to one weight per token"
        )
    labels = microbatch["labels"]
    if not isinstance(labels, Tensor):
        raise TypeError(
            f"microbatch['labels'] is a {type(labels).__name__}, not a tensor: make it one where "
            "the data is made, with torch.as_tensor(labels)"
        )
    if not labels.dtype.is_signed:
        # torch compares in the tensor's own dtype, where -100 would wrap around to 156.
        return torch.ones_like(labels, dtype=torch.bool)
    return labels != IGNORE_INDEX


def with_weights(
    microbatches: Sequence[Microbatch], weight_fn: WeightFn | None
) -> WeightedMicrobatches:
    """The group with its weights and their count; without both where the loss brings the weights.

    >>> with_weights([{"labels": torch.tensor([5, -100])}], label_weights).weights
    [tensor([ True, False])]
    """
    if not isinstance(microbatches, Sequence) or hasattr(microbatches, "_fields"):
        raise TypeError(
            f"microbatches must be a sequence of microbatches, got {type(microbatches).__name__}: "
            "cut a stacked batch with ps.split(batch, k), wrap a single microbatch in a list, and "
            "gather an iterator into one"
        )
    if weight_fn is None:
        return WeightedMicrobatches(microbatches, None, None)
    if isinstance(microbatches, PreweightedMicrobatches):
        weights = [*microbatches.weights(weight_fn)]
    else:
        if not isinstance(microbatches, list | tuple):
            microbatches = [*microbatches]  # A second iteration might make others.
        weights = []
        for microbatch in microbatches:
            weights.append(compute_weights(weight_fn, microbatch))
    return WeightedMicrobatches(microbatches, weights, sum_weights(weights))


def count_tokens(
    microbatches: WeightedMicrobatches | Sequence[Microbatch],
    weight_fn: WeightFn = label_weights,
) -> TokenCounts:
    """Counts the tokens and the microbatches of a group on this rank.

    ``psum`` the counts for those of all ranks. N = Σ wᵢ is exact for bool and int weights, in
    int64. Float weights are summed in float64.

    >>> group = [{"labels": torch.tensor([5, 7, -100])}, {"labels": torch.tensor([-100])}]
    >>> count_tokens(group)
    TokenCounts(num_tokens=tensor(2), num_microbatches=tensor(1))
    """
    group = (
        microbatches
        if isinstance(microbatches, WeightedMicrobatches)
        else with_weights(microbatches, weight_fn)
    )
    return group.counts or sum_weights(())


def compute_weights(weight_fn: WeightFn, microbatch: Microbatch) -> Tensor:
    """The checked weights of a microbatch, in memory that neither function nor loss writes to."""
    weights = weight_fn(microbatch)
    if weight_fn is label_weights and type(weights) is Tensor:
        return weights  # new bools each time
    return validate_weights(weights).clone()


def sum_weights(weights: Sequence[Tensor]) -> TokenCounts:
    """Both denominators of microbatches with these weights.

    >>> sum_weights([torch.tensor([0.5, 0.25]), torch.tensor([0.0])])
    TokenCounts(num_tokens=tensor(0.7500, dtype=torch.float64), num_microbatches=tensor(1))
    """
    tokens = []
    for each in weights:
        if each.dtype is torch.bool and each.layout is torch.strided:
            tokens.append(count_nonzero(each))  # in half the time of a sum
        else:
            dtype = torch.float64 if each.dtype.is_floating_point else torch.int64
            tokens.append(each.sum(dtype=dtype))
    if not tokens:
        zero = torch.zeros((), dtype=torch.int64, device="cpu")
        return TokenCounts(zero, zero)
    together = tokens[0] if len(tokens) == 1 else torch.stack(tokens)
    return TokenCounts(
        together.sum() if together.ndim else together, count_nonzero(together)
    )


def check_count(counted: TokenCounts) -> None:
    """Refuses an N that overflows, where the host can read it."""
    total = tree.concrete_scalar(counted.num_tokens)
    if total is not None and not 0 <= total < math.inf:
        check_total(total)


def check_total(total: float) -> None:
    """Refuses an N that overflows.

    >>> check_total(float("inf"))
    Traceback (most recent call last):
    ...
    ValueError: num_tokens, the sum of all weights, overflows: it comes out as inf, ...
    """
    if not 0 <= total < math.inf:
        raise ValueError(
            f"num_tokens, the sum of all weights, overflows: it comes out as {total}, and nothing "
            "was updated. Integers are summed in int64 and floats in float64: make the weights "
            "smaller, which changes nothing else"
        )


def has_tokens(counted: TokenCounts) -> bool:
    """Whether there are any; yes, where a transform or a compiler hides the number.

    >>> has_tokens(TokenCounts(torch.tensor(0), torch.tensor(0)))
    False
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    number = counted.num_tokens
    known = number if tree.is_plain_eager() else tree.concrete(number)
    return known is None or bool((known > 0).any())


def validate_weights(weights: Tensor) -> Tensor:
    """The weights as data, refused where they cannot be weights.

    Negative and non-finite values are refused on the host; on an accelerator, under
    ``torch.compile`` and under a dispatch mode they go unchecked.

    >>> validate_weights(torch.tensor([2**53, 0])).sum() == 2**53
    tensor(True)
    """
    if not isinstance(weights, Tensor) or weights.is_complex():
        found = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(
            f"weights must be a bool, int or float tensor, one per token; got {found}: make it one "
            "with torch.as_tensor"
        )
    if weights.dtype in UNSIGNED_DTYPES:
        weights = weights.to(torch.int64)
    values = None if weights.dtype == torch.bool else tree.concrete(weights)
    if values is not None and values.numel():
        least, most = (end.item() for end in values.aminmax())
        if not (least >= 0 and math.isfinite(most)):
            worst = values[~((values >= 0) & values.isfinite())].flatten()[0].item()
            raise ValueError(
                f"weights must be finite and not negative, but one is {worst}: weight 0 takes a "
                "loss away, and its sign belongs into loss_fn"
            )
        large = isinstance(most, int) and most * values.numel() > MAX_EXACT_INT
        if large and values.double().sum() > MAX_EXACT_INT:
            raise ValueError(
                "integer weights of one microbatch sum to more than "
                f"{MAX_EXACT_INT=}, up to which they "
                f"are divided exactly; the largest is {most}: scale them down, the update does not "
                "depend on their scale"
            )
    # Autograd records nothing of bools and integers.
    return weights.detach() if weights.is_floating_point() else weights
