"""Learning rates as functions of the step: tensor in, tensor out, so that they trace and batch."""

import itertools
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

Schedule: TypeAlias = Callable[[Tensor], Tensor]
"""``schedule(step) -> learning_rate``; ``step`` is a scalar int64 tensor that counts from 0."""

LearningRate: TypeAlias = float | Tensor | Schedule
"""A number, a scalar tensor (differentiated, or batched over an ensemble), or a schedule."""


def rate_at(learning_rate: LearningRate, step: Tensor) -> float | Tensor:
    """The learning rate of this step; that of a schedule in float64."""
    if not callable(learning_rate):
        return learning_rate
    rate: Any = learning_rate(step)
    return rate.to(torch.float64) if isinstance(rate, Tensor) else rate


def check_rate(learning_rate: object) -> None:
    """Refuses what is neither a number, nor a scalar tensor, nor a schedule."""
    if is_scheduler(learning_rate):
        raise TypeError(
            f"learning_rate is a scheduler of torch.optim, which {SCHEDULER_HINT}"
        )
    plain = callable(learning_rate) or isinstance(learning_rate, Real | Tensor)
    if isinstance(learning_rate, type) or not plain:
        raise TypeError(
            "learning_rate must be a number, a scalar tensor or a schedule, which is a function of "
            f"the step, got {type(learning_rate).__name__}"
        )


def is_scheduler(value: object) -> bool:
    """Whether this is a learning rate scheduler of torch, or the class of one."""
    kind = value if isinstance(value, type) else type(value)
    return issubclass(kind, torch.optim.lr_scheduler.LRScheduler)


SCHEDULER_HINT = (
    "writes into an optimizer object. Pass a schedule as the learning rate, a function of the "
    "step: ps.optim.adamw(ps.optim.linear_schedule(1e-3, 0.0, 1000)), "
    "or lambda step: 1e-3 * 0.9**step"
)


def linear_schedule(
    init_value: float, end_value: float, transition_steps: int
) -> Schedule:
    """From ``init_value`` to ``end_value`` in a straight line, then constant.

    >>> linear_schedule(0.0, 1.0, 4)(torch.tensor([0, 1, 4, 9])).tolist()
    [0.0, 0.25, 1.0, 1.0]
    """
    _check_steps("transition_steps", transition_steps)

    def schedule(step: Tensor) -> Tensor:
        return init_value + (end_value - init_value) * _progress(step, transition_steps)

    return schedule


def cosine_decay_schedule(
    init_value: float, decay_steps: int, alpha: float = 0.0
) -> Schedule:
    """From ``init_value`` to ``alpha * init_value`` along half a cosine, then constant.

    >>> cosine_decay_schedule(1.0, 2)(torch.tensor([0, 1, 2, 9])).tolist()
    [1.0, 0.5, 0.0, 0.0]
    """
    _check_steps("decay_steps", decay_steps)

    def schedule(step: Tensor) -> Tensor:
        cosine = (1 + torch.cos(math.pi * _progress(step, decay_steps))) / 2
        return init_value * ((1 - alpha) * cosine + alpha)

    return schedule


def warmup_cosine_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
) -> Schedule:
    """A line up to ``peak_value`` in ``warmup_steps``, then a cosine down to ``end_value``.

    As in optax, ``decay_steps`` is the length of the whole schedule, the warm-up included.

    >>> schedule = warmup_cosine_decay_schedule(0.0, 1.0, warmup_steps=1, decay_steps=3)
    >>> schedule(torch.tensor([0, 1, 2, 3])).tolist()
    [0.0, 1.0, 0.5, 0.0]
    """
    if not 0 < warmup_steps < decay_steps:
        raise ValueError(
            f"{decay_steps=} is the whole length and must be larger than {warmup_steps=}, which "
            "must be positive"
        )
    up = linear_schedule(init_value, peak_value, warmup_steps)
    down = cosine_decay_schedule(
        peak_value, decay_steps - warmup_steps, end_value / peak_value
    )
    return join_schedules([up, down], [warmup_steps])


def join_schedules(
    schedules: Sequence[Schedule], boundaries: Sequence[int]
) -> Schedule:
    """Each schedule until its boundary, the next one from there on, counting from 0 again.

    >>> halves = [lambda step: 1.0 * step, lambda step: 5.0 * step]
    >>> join_schedules(halves, [2])(torch.arange(4)).tolist()
    [0.0, 1.0, 0.0, 5.0]
    """
    if len(boundaries) != len(schedules) - 1:
        raise ValueError(
            f"{len(schedules)} schedules have {len(schedules) - 1} boundaries between them, "
            f"but {len(boundaries)} were given"
        )

    begins = [0, *boundaries]
    # The last step that each is asked for, also where it is not chosen: its value is finite there,
    # and so is its derivative, which a selection multiplies by zero.
    lasts = [max(0, end - begin - 1) for begin, end in itertools.pairwise(begins)]

    def schedule(step: Tensor) -> Tensor:
        rate: Tensor | None = None
        for one, begin, last in zip(schedules, begins, [*lasts, None], strict=True):
            own = one((step - begin).clamp(min=0, max=last))
            rate = own if rate is None else torch.where(step < begin, rate, own)
        return cast("Tensor", rate)

    return schedule


def _progress(step: Tensor, steps: int) -> Tensor:
    return (step.to(torch.float64) / steps).clamp(0, 1)


def _check_steps(name: str, steps: int) -> None:
    if steps <= 0:
        raise ValueError(f"{name}={steps} must be positive")
