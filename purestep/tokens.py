"""Microbatch to weights to count: which tokens there are, and how much each of them weighs.

A token is any unit of loss: a token, a sequence in DPO, a pixel, a row. Its weight depends on data
alone, so that N = Σ wᵢ can be known, on all ranks, before any backward pass begins.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from purestep.torch_internals import is_wrapped
from purestep.tree import at_hand, brought, number_at_hand
from purestep.types import Count, Microbatch, WeightFn

IGNORE_INDEX = -100


EXACT = 2**53
"""Up to here, float64 holds every integer; and a thousand such sums do not overflow int64."""

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Integers that torch stores but hardly computes with."""


class WeighedGroup(Sequence[Microbatch]):
    """A group that brings the weights of its microbatches, as ``prefetch`` does."""

    @abstractmethod
    def weights(self, weight_fn: WeightFn) -> Sequence[Tensor]:
        """What ``weight_fn`` gives for each microbatch, checked; they may still be on the host."""


Weighed: TypeAlias = tuple[Microbatch, Tensor | None]
"""A microbatch with its tokens' weights, or with None where the loss brings them."""


class Group(NamedTuple):
    """What a rank holds: microbatches with their weights, in order, and how many they are.

    ``counted`` is their count, where it is known before they are used, and ``at_hand`` are those that need not be waited for.
    ``check(number, microbatch, leaves)`` refuses one that must not be used, when it comes.
    """

    weighed: Iterable[Weighed]
    length: int
    counted: Count | None
    at_hand: Sequence[Microbatch]
    check: Callable[[int, Microbatch, list[Any]], None] | None = None


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
    labels = microbatch["labels"]
    if not isinstance(labels, Tensor):
        raise TypeError(
            f"microbatch['labels'] is a {type(labels).__name__}, not a tensor: make it one where the data is "
            "made, with torch.as_tensor(labels)"
        )
    return labels != IGNORE_INDEX


def count(microbatches: Sequence[Microbatch], weight_fn: WeightFn = label_weights) -> Count:
    """Both denominators of a group on this rank: ``psum`` them for those of all ranks.

    N = Σ wᵢ is counted exactly for bool and int weights, in int64; for float weights in float64.

    >>> group = [{"labels": torch.tensor([5, 7, -100])}, {"labels": torch.tensor([-100])}]
    >>> count(group)
    Count(num_tokens=tensor(2), num_microbatches=tensor(1))
    """
    return count_of([tokens_of(each) for each in weigh(microbatches, weight_fn)])


def count_tokens(microbatches: Sequence[Microbatch], weight_fn: WeightFn = label_weights) -> Tensor:
    """N = Σ wᵢ alone, the first of ``count``.

    >>> count_tokens([{"labels": torch.tensor([5, 7, -100])}, {"labels": torch.tensor([2])}])
    tensor(3)
    """
    return count(microbatches, weight_fn).num_tokens


def held(microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
    """The group to iterate more than once: a sequence that makes its microbatches anew may make others."""
    return (
        microbatches if isinstance(microbatches, list | tuple | WeighedGroup) else [*microbatches]
    )


def weigh(microbatches: Sequence[Microbatch], weight_fn: WeightFn) -> Sequence[Tensor]:
    """The weights of each microbatch, asked for once: they are counted, and they multiply the losses."""
    if isinstance(microbatches, WeighedGroup):
        return microbatches.weights(weight_fn)
    return [_asked(weight_fn, microbatch) for microbatch in microbatches]


def _asked(weight_fn: WeightFn, microbatch: Microbatch) -> Tensor:
    """In memory of their own: a weight_fn may return the same buffer each time, and a loss may write to its microbatch."""
    weights = checked_weights(weight_fn(microbatch))
    # Those of label_weights are new each time.
    return weights if weight_fn is label_weights else weights.clone()


def weighed(
    microbatches: Sequence[Microbatch],
    weight_fn: WeightFn | None,
    known: Sequence[Tensor] | None = None,
) -> Iterator[Weighed]:
    """Each microbatch with its weights: those that are known already, else those of ``weight_fn``, asked now.

    Refused where the sequence yields more or fewer microbatches than there are known weights or, without those,
    than its length says.
    """
    if known is None and weight_fn is not None and isinstance(microbatches, WeighedGroup):
        known = microbatches.weights(weight_fn)
    expected = len(microbatches) if known is None else len(known)
    found = 0
    for found, microbatch in enumerate(microbatches, 1):
        if found > expected:
            break
        if known is not None:
            yield microbatch, known[found - 1]
        else:
            yield microbatch, None if weight_fn is None else _asked(weight_fn, microbatch)
    if found != expected:
        raise ValueError(
            f"microbatches is a {type(microbatches).__name__} of which {expected} microbatches were expected, but it "
            f"yields {'more' if found > expected else found}: its length, or an earlier iteration, says otherwise. "
            "Hand over a list"
        )


def grouped(
    microbatches: Sequence[Microbatch],
    weight_fn: WeightFn | None,
    counted_first: bool,
    device: torch.device,
) -> Group:
    """The group, each of whose weights is asked for once: now, where it is counted first, else with its microbatch."""
    weights: Sequence[Tensor] | None = None
    counted: Count | None = None
    if weight_fn is not None and counted_first:
        microbatches = held(microbatches)
        weights = weigh(microbatches, weight_fn)
        counted = count_of([tokens_of(each) for each in weights], device)
    number = len(microbatches if weights is None else weights)
    at_hand = microbatches if isinstance(microbatches, list | tuple) else ()
    return Group(weighed(microbatches, weight_fn, weights), number, counted, at_hand)


def tokens_of(weights: Tensor) -> Tensor:
    """The sum of a microbatch's weights."""
    if weights.dtype is torch.bool and type(weights) is Tensor and weights.layout is torch.strided:
        return torch.count_nonzero(weights)  # in half the time
    return weights.sum(dtype=torch.float64 if weights.dtype.is_floating_point else torch.int64)


def count_of(tokens: Sequence[Tensor], device: torch.device | None = None) -> Count:
    """Both denominators of microbatches with so many tokens each, on ``device`` (None: where the first of them are)."""
    if not tokens:
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return Count(zero, zero)
    device = device or tokens[0].device
    if len(tokens) == 1:
        here = total = tokens[0] if tokens[0].device == device else brought(tokens[0], device)
    else:
        # Where all are on one device, they are brought at once.
        alike = len({each.device for each in tokens}) == 1
        here = torch.stack([*tokens] if alike else [brought(each, device) for each in tokens])
        here = brought(here, device)
        total = here.sum()
    return Count(total, torch.count_nonzero(here))


def has_tokens(counted: Count) -> bool:
    """Whether there are any, as far as that can be told: yes, where a transform or a compiler hides it."""
    if torch.compiler.is_dynamo_compiling():
        return True
    number = number_at_hand(counted.num_tokens)
    if number is not None:
        return number > 0
    num_tokens = at_hand(counted.num_tokens)
    if num_tokens is None and not is_wrapped(counted.num_tokens):
        num_tokens = counted.num_tokens
    return num_tokens is None or bool((num_tokens > 0).any())


def checked_weights(weights: Tensor) -> Tensor:
    """The weights as data, refused where they cannot be weights.

    Negative and non-finite values are refused where that can be told without waiting for a device; on
    an accelerator, under ``torch.compile`` and under a dispatch mode they go unchecked.
    """
    if not isinstance(weights, Tensor) or weights.is_complex():
        found = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(
            f"weights must be a bool, int or float tensor, one per token; got {found}: make it one with "
            "torch.as_tensor"
        )
    if weights.dtype in UNSIGNED:
        weights = weights.to(torch.int64)
    values = None if weights.dtype == torch.bool else at_hand(weights)
    if values is not None and values.numel():
        least, most = (end.item() for end in values.aminmax())
        if not (least >= 0 and math.isfinite(most)):
            worst = values[~((values >= 0) & values.isfinite())].flatten()[0].item()
            raise ValueError(
                f"weights must be finite and not negative, but one is {worst}: a loss is taken away by "
                "weight 0, and its sign belongs into loss_fn"
            )
        if (
            isinstance(most, int)
            and most * values.numel() > EXACT
            and values.double().sum() > EXACT
        ):
            raise ValueError(
                f"integer weights of one microbatch sum to more than {EXACT=}, up to which they are divided "
                f"exactly; the largest is {most}: scale them down, the update does not depend on their scale"
            )
    # Autograd records nothing of bools and integers.
    return weights.detach() if weights.is_floating_point() else weights
