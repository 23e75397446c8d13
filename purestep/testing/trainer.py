"""Declares what the laws see of a trainer: calls to start it, to update it and to look at it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from purestep.testing.problem import REGRESSION, Batch, Problem, Task

Group: TypeAlias = Sequence[Sequence[Batch]]
"""All data of one update: for each rank its microbatches."""


Weights: TypeAlias = Literal["mask", "whole", "any"]


class Capabilities(NamedTuple):
    """Declares what a trainer can do. The kit skips each law (a claim it tests) that asks for more.

    Args:
        ranks: up to how many ranks it runs on.
        uneven_ranks: whether ranks may hold different numbers of microbatches. In an update, all
            ranks may hold none, also where this is False.
        weights: the tokens' weights: 0 and 1 ("mask"), "whole" numbers, or "any" from 0 on.
        dtype: the dtype of its parameters, in which it computes: float64, float32, bfloat16 or
            float16.
        task: what it learns.
        momentum: whether its SGD can have momentum and weight decay.
        dropout: whether it can train a model that drops elements.
        skips_nonfinite: whether it leaves everything as it was where a gradient is not finite.
        plain_sgd: whether an update is the problem's SGD; False: that of AdamW, or with clipping.
        merges_microbatches: whether it makes one batch of its microbatches before it computes.
    """

    ranks: int = 1
    uneven_ranks: bool = True
    weights: Weights = "any"
    dtype: torch.dtype = torch.float64
    task: Task = REGRESSION
    momentum: bool = True
    dropout: bool = False
    skips_nonfinite: bool = False
    plain_sgd: bool = True
    merges_microbatches: bool = False

    @property
    def is_coarse(self) -> bool:
        """Returns True unless the dtype is float64 or float32.

        In a coarse dtype errors could hide in rounding. So a ``Linear`` and its batches get numbers
        that the dtype holds exactly. Learning rate, momentum and weight decay may round.
        """
        return self.dtype not in (torch.float64, torch.float32)

    @property
    def is_bounded(self) -> bool:
        """Returns True for plain SGD in float64 or float32: there, rounding has a bound.

        A mistake of the trainer changes results by more than that, also after several updates.
        """
        return self.plain_sgd and not self.is_coarse


class Observation(NamedTuple):
    """Holds what a rank sees after an update: its parameters by name, and what it may report.

    ``loss`` is the mean over the tokens of all ranks, ``grad_norm`` the norm of its gradient, and
    ``num_tokens`` the sum of all weights. ``averages`` are the parameters that ``evaluate`` takes,
    by name, where they are not ``params`` but such as a moving average of these.

    The kit fills in the rest: the loss in ``evaluation``, and what has ``changed`` of "inputs" and
    "global state".
    """

    params: Mapping[str, Tensor]
    loss: Tensor | float | None = None
    grad_norm: Tensor | float | None = None
    num_tokens: Tensor | float | None = None
    evaluation: Tensor | float | None = None
    changed: Any = None
    averages: Any = None


class Trainer(Protocol):
    """Trains a problem. An exception is a refusal, which is better than a wrong number."""

    @property
    def capabilities(self) -> Capabilities:
        """Declares what the trainer can do."""

    def start(self, problem: Problem, ranks: int) -> None:
        """Forgets all that was before, and begins on the ranks at the problem's parameters."""

    def update(self, group: Group) -> None:
        """Makes one update on the microbatches of all ranks.

        It changes neither these nor global state.
        """

    def observe(self) -> Sequence[Observation]:
        """Returns one observation for each rank: its params, and the last update's reports."""


@runtime_checkable
class Evaluating(Protocol):
    """Extends a trainer that can evaluate. The kit asks for it only where a group has tokens.

    The parameters of an evaluation are those of ``observe``: its ``averages`` if there are any.
    """

    def evaluate(self, group: Group) -> float:
        """Returns Σ wᵢ ℓᵢ / Σ wᵢ over the tokens of all ranks, and changes nothing."""


@runtime_checkable
class Resumable(Protocol):
    """Extends a trainer that can save its state, and load it after a fresh ``start``."""

    def save(self) -> Any:
        """Returns all that the trainer needs to go on, which later updates must not change."""

    def load(self, saved: Any) -> None:
        """Goes on from a state that ``save`` returned."""


@runtime_checkable
class Switchable(Protocol):
    """Extends a trainer that has settings, such as other kernels, whose results must agree."""

    @property
    def settings(self) -> Sequence[str]:
        """Returns the names of the settings."""

    def select_setting(self, setting: str) -> None:
        """Selects a setting, which holds from the next ``start`` on."""
