"""Computes the weights of a group's tokens, and counts them.

A token is any unit of loss: a token, a sequence in DPO, a pixel, a row. Its weight depends on data
alone, so that all ranks know N = Σ wᵢ before any backward pass begins.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from purestep import tree
from purestep.stacked import Stacked
from purestep.torch_private import count_nonzero
from purestep.types import Microbatch, TokenCounts, WeightFn

IGNORE_INDEX = -100

MAX_EXACT_INT = 2**53
"""Up to here, float64 holds every integer; and a thousand such sums do not overflow int64."""

UNSIGNED_DTYPES = (torch.uint16, torch.uint32, torch.uint64)
"""Integer dtypes that few operations of torch support."""


class PreweightedMicrobatches(Sequence[Microbatch]):
    """Holds a group of microbatches with their weights, as ``prefetch`` makes it."""

    @abstractmethod
    def weights(self, weight_fn: WeightFn) -> Sequence[Tensor]:
        """Returns each microbatch's weights by ``weight_fn``, checked as ``compute_weights`` does.

        They may have been computed before. They may lie on the host, even if microbatches lie on a
        device.
        """


class WeightedMicrobatches(NamedTuple):
    """Holds microbatches, with the weights and counts that are computed before the loss runs.

    Weights that the loss returns, or that are computed as each microbatch runs, are None here.
    ``counts`` is None where the weights are not summed yet.
    """

    microbatches: Sequence[Microbatch]
    weights: Sequence[Tensor | None] | None
    counts: TokenCounts | None


def label_weights(microbatch: Microbatch) -> Tensor:
    """Returns the default weights: True for every label but ``-100``, PyTorch's ``ignore_index``.

    Count the same labels that the loss uses: shift them once, in the data. An unsigned label cannot
    be -100, so all of these count. Raises ``ValueError`` for a microbatch without ``"labels"``, and
    ``TypeError`` for labels that are no tensor.

    >>> label_weights({"labels": torch.tensor([[5, 7, -100]])})
    tensor([[ True,  True, False]])
    """
    # The usual type first: to ask an abstract class takes as long as a small operation.
    if not isinstance(microbatch, (dict, Mapping)) or "labels" not in microbatch:
        actual: object = type(microbatch).__name__
        if isinstance(microbatch, Mapping):
            actual = sorted(microbatch, key=str)
        elif isinstance(microbatch, list):
            actual = "list, as in a group within a group"
        raise ValueError(
            f"label_weights reads microbatch['labels'], but this microbatch is {actual}; "
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
    """Computes the weights of a group and their counts; both are None if ``weight_fn`` is None.

    With a ``weight_fn``, a sequence other than a list or tuple is read once, into a list. But
    ``PreweightedMicrobatches``, and a ``Stacked`` in a compiler's trace, stay as they are. Without
    a ``weight_fn``, every sequence does.

    Raises ``TypeError`` unless ``microbatches`` is a sequence, and for a ``NamedTuple``. Raises as
    ``compute_weights`` does.

    >>> with_weights([{"labels": torch.tensor([5, -100])}], label_weights).weights
    [tensor([ True, False])]
    """
    # Usual types first, here and below, as in ``label_weights``.
    is_sequence = isinstance(microbatches, (list, tuple, Sequence))
    if not is_sequence or hasattr(microbatches, "_fields"):
        raise TypeError(
            f"microbatches must be a sequence of microbatches, got {type(microbatches).__name__}: "
            "cut a stacked batch with ps.split(batch, k), wrap a single microbatch in a list, and "
            "take one group at a time of a loader: for microbatches in ps.group(loader, k)"
        )
    if weight_fn is None:
        return WeightedMicrobatches(microbatches, None, None)
    if torch.compiler.is_dynamo_compiling() and isinstance(microbatches, Stacked):
        stacked_weights = compute_stacked_weights(weight_fn, microbatches)
        counts = sum_stacked_weights(stacked_weights.batch)
        return WeightedMicrobatches(microbatches, stacked_weights, counts)
    weights: list[Tensor] = []
    if not isinstance(microbatches, (list, tuple)):
        if isinstance(microbatches, PreweightedMicrobatches):
            weights += microbatches.weights(weight_fn)
            return WeightedMicrobatches(microbatches, weights, sum_weights(weights))
        microbatches = [*microbatches]  # A second iteration might make others.
    try:
        for microbatch in microbatches:
            weights.append(compute_weights(weight_fn, microbatch))
    except Exception as error:
        note_single_batch(error, microbatches)
        raise
    return WeightedMicrobatches(microbatches, weights, sum_weights(weights))


def describe_microbatch(microbatch: Microbatch) -> str:
    """Describes a microbatch for an error: a mapping's keys, or a tensor's dtype and shape.

    A list or tuple is described by its length, and anything else by its type.

    >>> describe_microbatch({"x": 1}), describe_microbatch(torch.ones(2))
    ("a mapping with ['x']", 'a tensor, torch.float32 of shape (2,)')
    >>> describe_microbatch((torch.ones(2), 3)), describe_microbatch(4)
    ('a tuple of 2', 'of type int')
    """
    if isinstance(microbatch, Mapping):
        return f"a mapping with {[*microbatch]}"
    if isinstance(microbatch, Tensor):
        return f"a tensor, {tree.format_leaf(microbatch)}"
    if isinstance(microbatch, list | tuple):
        return f"a {type(microbatch).__name__} of {len(microbatch)}"
    return f"of type {type(microbatch).__name__}"


def note_single_batch(error: Exception, microbatches: Sequence[Microbatch]) -> None:
    """Adds a note to an error if the group looks like one batch, as ``(x, y)`` of a loader.

    It does if it is a list or tuple of tensors of one length, with different dtypes or numbers of
    dimensions.
    """
    if not isinstance(microbatches, list | tuple):
        return
    if not all(isinstance(x, Tensor) and x.ndim for x in microbatches):
        return
    lengths = {len(x) for x in microbatches}
    formats = {(x.dtype, x.ndim) for x in microbatches}
    if len(lengths) == 1 and len(formats) > 1:
        error.add_note(
            "microbatches looks like one batch, as (x, y) of a DataLoader: pass [batch], or one "
            "group at a time of ps.group(loader, k)"
        )


def compute_stacked_weights(weight_fn: WeightFn, microbatches: Stacked) -> Stacked:
    """Computes the checked weights of all microbatches at once, stacked, for a compiler.

    A loop over them would be compiled anew for each number of microbatches.

    >>> compute_stacked_weights(torch.sign, Stacked(torch.tensor([[2.0, 0.0]]))).batch
    tensor([[1., 0.]])
    """
    leaves, spec = tree.flatten(microbatches.batch)

    def weigh(*leaves: Tensor) -> Tensor:
        return compute_weights(weight_fn, tree.unflatten(spec, leaves))

    return Stacked(torch.vmap(weigh)(*leaves))


def count_tokens(
    microbatches: WeightedMicrobatches | Sequence[Microbatch],
    weight_fn: WeightFn = label_weights,
) -> TokenCounts:
    """Counts the tokens of a group on this rank, and the microbatches that have tokens.

    ``psum`` the counts for those of all ranks. N = Σ wᵢ is exact for bool and int weights, in
    int64. Float weights are summed in float64. ``WeightedMicrobatches`` keep the counts that they
    have, whatever the ``weight_fn``; without any, the counts are zeros.

    >>> group = [{"labels": torch.tensor([5, 7, -100])}, {"labels": torch.tensor([-100])}]
    >>> count_tokens(group)
    TokenCounts(num_tokens=tensor(2), num_microbatches=tensor(1))
    """
    group = microbatches
    if not isinstance(group, WeightedMicrobatches):
        group = with_weights(group, weight_fn)
    return group.counts or sum_weights(())


def compute_weights(weight_fn: WeightFn, microbatch: Microbatch) -> Tensor:
    """Computes the checked weights of a microbatch, in memory that no other code writes to.

    Raises as ``validate_weights`` does. An error of ``weight_fn`` passes, with a note.
    """
    try:
        weights = weight_fn(microbatch)
    except Exception as error:
        error.add_note(
            "raised in weight_fn, which is called as weight_fn(microbatch): this microbatch is "
            f"{describe_microbatch(microbatch)}"
        )
        raise
    if weight_fn is label_weights and type(weights) is Tensor:
        return weights  # New bools at each call.
    return validate_weights(weights).clone()


def sum_weights(weights: Sequence[Tensor]) -> TokenCounts:
    """Sums weights to the number of tokens, and counts the microbatches that have any.

    Each tensor holds the weights of one microbatch. Without any, both numbers are 0.

    >>> sum_weights([torch.tensor([0.5, 0.25]), torch.tensor([0.0])])
    TokenCounts(num_tokens=tensor(0.7500, dtype=torch.float64), num_microbatches=tensor(1))
    """
    tokens = []
    for weight in weights:
        if weight.dtype is torch.bool and weight.layout is torch.strided:
            tokens.append(count_nonzero(weight))  # It takes half the time of a sum.
        else:
            dtype = torch.float64 if weight.dtype.is_floating_point else torch.int64
            tokens.append(weight.sum(dtype=dtype))
    if not tokens:
        zero = torch.zeros((), dtype=torch.int64, device="cpu")
        return TokenCounts(zero, zero)
    if len(tokens) == 1:
        return TokenCounts(tokens[0], count_nonzero(tokens[0]))
    stacked = torch.stack(tokens)
    return TokenCounts(stacked.sum(), count_nonzero(stacked))


def sum_stacked_weights(weights: Tensor) -> TokenCounts:
    """Sums weights of shape ``(microbatches, ...)``, as ``sum_weights`` does.

    >>> sum_stacked_weights(torch.tensor([[0.5, 0.25], [0.0, 0.0]]))
    TokenCounts(num_tokens=tensor(0.7500, dtype=torch.float64), num_microbatches=tensor(1))
    """
    dtype = torch.float64 if weights.is_floating_point() else torch.int64
    tokens = rearrange(weights, "k ... -> k (...)").sum(1, dtype=dtype)
    return TokenCounts(tokens.sum(), count_nonzero(tokens))


def check_total(total: float) -> None:
    """Raises ``ValueError`` if N overflows: if it is negative, infinite or NaN.

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


def has_tokens(counts: TokenCounts) -> bool:
    """Returns whether a group has tokens; True if a transform or a compiler hides their number.

    Elsewhere it reads the number, and waits for a device. Under a ``vmap`` on the host, it is True
    if any group has tokens.

    >>> has_tokens(TokenCounts(torch.tensor(0), torch.tensor(0)))
    False
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    value: Tensor | None = counts.num_tokens
    if not tree.is_plain_eager():
        value = tree.concrete(counts.num_tokens)
    return value is None or bool((value > 0).any())


def validate_weights(weights: Tensor) -> Tensor:
    """Checks weights, and returns them detached; unsigned ones beyond 8 bits become int64.

    Raises ``TypeError`` unless they are a tensor that is not complex. Sparse and 8-bit
    floating-point weights raise torch's ``NotImplementedError``. Raises ``ValueError`` on the host
    for negative and non-finite values, and if integers sum to more than 2⁵³. Under a ``vmap``, that
    is the sum over its whole batch. On an accelerator and under ``torch.compile``, values go
    unchecked. So do those of subclasses of ``Tensor``, such as fake tensors and ``nn.Parameter``.

    >>> validate_weights(torch.tensor([2**53, 0])).sum() == 2**53
    tensor(True)
    """
    if not isinstance(weights, Tensor) or weights.is_complex():
        actual: object = type(weights).__name__
        if isinstance(weights, Tensor):
            actual = weights.dtype
        raise TypeError(
            f"weights must be a bool, int or float tensor, one per token; got {actual}: make it "
            "one with torch.as_tensor"
        )
    if weights.dtype in UNSIGNED_DTYPES:
        weights = weights.to(torch.int64)
    values = None if weights.dtype == torch.bool else tree.concrete(weights)
    if values is not None and values.numel():
        smallest, largest = values.aminmax()
        least = smallest.item()
        most = largest.item()
        if not (least >= 0 and math.isfinite(most)):
            is_valid = (values >= 0) & values.isfinite()
            first = values[~is_valid].flatten()[0]
            raise ValueError(
                f"weights must be finite and not negative, but one is {first.item()}: weight 0 "
                "takes a loss away, and its sign belongs into loss_fn"
            )
        # The sum takes time, so it is computed only if it may be too large.
        may_overflow = isinstance(most, int) and most * values.numel() > MAX_EXACT_INT
        # float64 rounds 2⁵³ + 1 to 2⁵³. The sum of int64 overflows only where it is far larger.
        sums = [values.double().sum(), values.sum()] if may_overflow else []
        if any(sum_ > MAX_EXACT_INT for sum_ in sums):
            raise ValueError(
                f"integer weights of one microbatch sum to more than {MAX_EXACT_INT=}, up to which "
                f"they are divided exactly; the largest is {most}: scale them down, the update "
                "does not depend on their scale"
            )
    if weights.is_floating_point():
        return weights.detach()
    return weights  # Autograd records nothing of bools and integers.
