"""What a compiler must not look into: imported by the compiler itself, when it gets there.

A loop over chunks would be as many copies of its body in the graph, and nearly all of its time are products, which compiling
leaves as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, library

from purestep.losses import vocabulary
from purestep.losses.vocabulary import Statistics
from purestep.tree import accumulation_dtype

_operators = library.Library("purestep", "FRAGMENT")
_operators.define(
    "vocabulary_values(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, float? soft_cap, int? chunk) "
    "-> (Tensor, Tensor, Tensor)"
)
_operators.define(
    "vocabulary_gradients(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor z, Tensor[] cotangents, "
    "float? soft_cap, int? chunk, bool[] wanted) -> Tensor[]"
)
_operators.impl("vocabulary_values", vocabulary.values, "CompositeExplicitAutograd")
_operators.impl("vocabulary_gradients", vocabulary.gradients, "CompositeExplicitAutograd")


def _like_values(hidden: Tensor, *_: object) -> Statistics:
    dtype = accumulation_dtype(hidden.dtype)
    like = [hidden.new_empty(hidden.shape[:1], dtype=dtype) for _ in range(3)]
    return like[0], like[1], like[2]


def _like_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *others: object
) -> list[Tensor]:
    wanted = others[-1]
    assert isinstance(wanted, Sequence)
    pairs = zip((hidden, weight, bias), wanted, strict=True)
    return [each.new_empty(each.shape) for each, needed in pairs if needed and each is not None]


_operators.impl("vocabulary_values", _like_values, "Meta")
_operators.impl("vocabulary_gradients", _like_gradients, "Meta")


def _recorded(*given: Any) -> Statistics:
    return vocabulary.recorded(True, *given)


statistics: Callable[..., Statistics] = torch.compiler.allow_in_graph(_recorded)
"""``vocabulary.statistics`` as one operation, and its gradients as one."""
