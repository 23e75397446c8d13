"""A trainer, as the laws see it: a black box to start, to update and to look at."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from purestep.testing.problem import REGRESSION, Batch, Problem, Task

Group: TypeAlias = Sequence[Sequence[Batch]]
"""What one update is made of: for each rank its microbatches."""


class Abilities(NamedTuple):
    """What a trainer can be asked. A law that asks for more is not put to it.

    Args:
        ranks: up to how many ranks it runs on.
        uneven: whether ranks may hold different numbers of microbatches, or none.
        weights: the tokens' weights: 0 and 1 ("mask"), "whole" numbers, or "any" from 0 on.
        dtype: in which it computes.
        task: what it is given to learn.
        momentum: whether its SGD can have momentum and weight decay.
        dropout: whether it can train a model that drops elements.
        skips: whether it leaves everything as it was where a gradient is not finite.
        sgd: whether an update is the problem's SGD; False: that of AdamW, or with clipping.
        joins: whether it makes one batch of its microbatches before it computes.
    """

    ranks: int = 1
    uneven: bool = True
    weights: Literal["mask", "whole", "any"] = "any"
    dtype: torch.dtype = torch.float64
    task: Task = REGRESSION
    momentum: bool = True
    dropout: bool = False
    skips: bool = False
    sgd: bool = True
    joins: bool = False


class Observation(NamedTuple):
    """What a rank can see after an update: its parameters by name, and what it may report.

    ``loss`` is the mean over the tokens of all ranks, ``grad_norm`` the norm of its gradient, and
    ``num_tokens`` the sum of all weights. The kit fills in the rest: the loss in ``evaluation``,
    and what has ``changed`` of "inputs" and "global state".
    """

    params: Mapping[str, Tensor]
    loss: Tensor | float | None = None
    grad_norm: Tensor | float | None = None
    num_tokens: Tensor | float | None = None
    evaluation: Tensor | float | None = None
    changed: Any = None


class Trainer(Protocol):
    """The calls of a trainer. An exception is a refusal, not as bad as a wrong number."""

    @property
    def abilities(self) -> Abilities:
        """What it can be asked."""

    def start(self, problem: Problem, ranks: int) -> None:
        """Forgets all that was before, and begins at the problem's own parameters."""

    def update(self, group: Group) -> None:
        """One update, on what each rank holds."""

    def observe(self) -> Sequence[Observation]:
        """What each rank sees now."""


@runtime_checkable
class Evaluating(Protocol):
    """A trainer that also evaluates."""

    def evaluate(self, group: Group) -> float:
        """The mean loss over all tokens."""


@runtime_checkable
class Resumable(Protocol):
    """A trainer whose state can be kept, and put back after a fresh ``start``."""

    def save(self) -> Any:
        """All that it needs to go on."""

    def load(self, saved: Any) -> None:
        """Goes on from there."""


@runtime_checkable
class Switchable(Protocol):
    """A trainer with several ways to do one thing, which must agree."""

    @property
    def settings(self) -> Sequence[str]:
        """Their names."""

    def use(self, setting: str) -> None:
        """From the next ``start`` on, this one."""
