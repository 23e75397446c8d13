"""Computes learning rates from the step: tensor in, tensor out, so that they trace and batch."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

Schedule: TypeAlias = Callable[[Tensor], Tensor]
"""``schedule(step) -> learning_rate``; ``step`` is a scalar int64 tensor.

It counts updates from 0, each over a whole group: neither microbatches nor batches of a loader.
"""

PlottedSchedule: TypeAlias = Callable[[Tensor | float], Tensor]
"""A schedule that also takes a number, as ``[schedule(i) for i in range(100)]`` does to plot it."""

LearningRate: TypeAlias = float | Tensor | Schedule
"""A number, a scalar tensor (differentiated, or batched over an ensemble), or a schedule."""


def evaluate_rate(learning_rate: LearningRate, step: Tensor) -> float | Tensor:
    """Returns the learning rate of this step.

    A schedule is called with the step, and its result cast to float64 if it is a tensor. Raises
    ``TypeError`` unless that is a number or a scalar tensor. Numbers and tensors are returned as
    they are.
    """
    if not callable(learning_rate):
        return learning_rate
    rate: Any = learning_rate(step)
    if isinstance(rate, Tensor):
        # More numbers would be broadcast along the last dimension of each param.
        if rate.ndim == 0:
            return rate.to(torch.float64)
        actual = f"a tensor of shape {tuple(rate.shape)}"
    elif _is_number(rate):
        return cast("float", rate)
    else:
        actual = type(rate).__name__
    raise TypeError(f"a schedule must return a number or a scalar tensor, got {actual}")


def _is_number(rate: Any) -> bool:
    """Returns whether this is a number, also one of a trace, or an array without dimensions."""
    is_plain = isinstance(rate, Real | torch.SymFloat | torch.SymInt)
    # In a trace, a NumPy scalar is an array.
    return is_plain or getattr(rate, "ndim", None) == 0


def check_rate(learning_rate: object) -> None:
    """Raises TypeError unless this is a number, a scalar tensor, or a function of the step.

    Classes and torch's schedulers raise, too. So do modules, mappings, and the iterators and lists
    of parameters that ``torch.optim`` takes. A scalar parameter is a tensor, and passes.
    """
    if is_scheduler(learning_rate):
        raise TypeError(
            f"learning_rate is a scheduler of torch.optim, which {SCHEDULER_HINT}"
        )
    if holds_parameters(learning_rate):
        raise TypeError(f"an optimizer {PARAMETERS_HINT}")
    is_class = isinstance(learning_rate, type)
    is_number = isinstance(learning_rate, Real)
    actual = type(learning_rate).__name__
    if isinstance(learning_rate, Tensor):
        # More numbers would be broadcast along the last dimension of each param.
        is_number = learning_rate.ndim == 0
        actual = f"a tensor of shape {tuple(learning_rate.shape)}"
    if is_class or not (is_number or callable(learning_rate)):
        raise TypeError(
            "learning_rate must be a number, a scalar tensor or a schedule, which is a function of "
            f"the step, got {actual}"
        )


def check_hyperparams(**hyperparams: object) -> None:
    """Raises ValueError for a number below 0 or NaN, TypeError unless it is a number or a tensor.

    Tensors pass whatever their values are, and so do functions of the step.

    >>> check_hyperparams(eps=-1e-8)
    Traceback (most recent call last):
    ...
    ValueError: eps=-1e-08 must not be negative
    """
    for name, value in hyperparams.items():
        if isinstance(value, Tensor) or callable(value):
            continue
        if not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, got {type(value).__name__}")
        number = float(value)
        # NaN alone. A compiler traces this, of a number that varies, and not ``math.isnan``.
        if number != number:
            raise ValueError(f"{name}={value} is no number, such as 0.1")
        if number < 0:
            hint = ""
            if name == "learning_rate":
                hint = (
                    ": the optimizer subtracts, so optax's scale(-lr) is sgd(lr); to maximize, "
                    "negate the loss"
                )
            raise ValueError(f"{name}={value} must not be negative{hint}")


def check_adam_decays(**decays: object) -> None:
    """Raises as ``check_hyperparams``, and ValueError for a number from 1 on.

    Adam divides a mean by 1 less a power of its decay: at step t, the t-th.
    """
    check_hyperparams(**decays)
    for name, value in decays.items():
        if isinstance(value, Real) and float(value) >= 1:
            raise ValueError(f"{name}={value} must be below 1, such as 0.9")


def holds_parameters(value: object) -> bool:
    """Returns whether this is a module, a mapping, or the parameters that ``torch.optim`` takes.

    The parameters are an iterator that is no function, or a list or tuple. Of that, only the first
    item is looked at: a parameter, a pair with its name, or a group.

    >>> holds_parameters(torch.nn.Linear(1, 1).parameters()), holds_parameters(0.1)
    (True, False)
    """
    if isinstance(value, torch.nn.Module | Mapping):
        return True
    if isinstance(value, Iterator):
        return not callable(value)
    first = value[0] if isinstance(value, list | tuple) and value else None
    return isinstance(first, torch.nn.Parameter | dict | tuple)


def is_scheduler(value: object) -> bool:
    """Returns whether this is a learning rate scheduler of torch, or the class of one."""
    cls = value if isinstance(value, type) else type(value)
    return issubclass(cls, torch.optim.lr_scheduler.LRScheduler)


SCHEDULER_HINT = (
    "writes into an optimizer object. Pass a schedule as the learning rate, a function of the "
    "step: ps.optim.adamw(ps.optim.linear_schedule(1e-3, 0.0, 1000)), "
    "or lambda step: 1e-3 * 0.9**step"
)


PARAMETERS_HINT = (
    "takes no parameters: write optimizer = ps.optim.adamw(1e-3), and pass the params to "
    "optimizer.init(params)"
)


def linear_schedule(
    init_value: float, end_value: float, transition_steps: int
) -> PlottedSchedule:
    """Moves from ``init_value`` to ``end_value`` in a straight line, then stays constant.

    The line takes ``transition_steps`` updates. Raises ``ValueError`` for a number that is not
    positive, or neither whole nor infinite. The schedule returns float64.

    >>> linear_schedule(0.0, 1.0, 4)(torch.tensor([0, 1, 4, 9])).tolist()
    [0.0, 0.25, 1.0, 1.0]
    """
    _check_steps("transition_steps", transition_steps)

    def schedule(step: Tensor | float) -> Tensor:
        progress = _progress(step, transition_steps)
        return init_value + (end_value - init_value) * progress

    return schedule


def cosine_decay_schedule(
    init_value: float, decay_steps: int, alpha: float = 0.0
) -> PlottedSchedule:
    """Moves from ``init_value`` to ``alpha * init_value`` along half a cosine, then stays constant.

    The cosine takes ``decay_steps`` updates. Raises ``ValueError`` for a number that is not
    positive, or neither whole nor infinite. The schedule returns float64.

    >>> cosine_decay_schedule(1.0, 2)(torch.tensor([0, 1, 2, 9])).tolist()
    [1.0, 0.5, 0.0, 0.0]
    """
    _check_steps("decay_steps", decay_steps)

    def schedule(step: Tensor | float) -> Tensor:
        progress = _progress(step, decay_steps)
        cosine = (1 + torch.cos(math.pi * progress)) / 2
        return init_value * ((1 - alpha) * cosine + alpha)

    return schedule


def warmup_cosine_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
) -> PlottedSchedule:
    """Rises to ``peak_value`` in ``warmup_steps``, then falls to ``end_value`` along a cosine.

    It starts at ``init_value``, in a straight line, and stays at ``end_value``. As in optax,
    ``decay_steps`` is the length of the whole schedule, the warm-up included. Both count updates.
    If ``peak_value`` is 0, it ends at 0, whatever ``end_value`` is. Raises ``ValueError`` unless
    0 < ``warmup_steps`` < ``decay_steps``, and if one of these two is neither whole nor infinite.

    >>> schedule = warmup_cosine_decay_schedule(0.0, 1.0, warmup_steps=1, decay_steps=3)
    >>> schedule(torch.tensor([0, 1, 2, 3])).tolist()
    [0.0, 1.0, 0.5, 0.0]
    """
    _check_whole("warmup_steps", warmup_steps)
    _check_whole("decay_steps", decay_steps)
    if not 0 < warmup_steps < decay_steps:
        raise ValueError(
            f"{decay_steps=} is the whole length and must be larger than {warmup_steps=}, which "
            "must be positive; without a warmup, take cosine_decay_schedule"
        )
    warmup = linear_schedule(init_value, peak_value, warmup_steps)
    alpha = end_value / peak_value if peak_value else 0.0
    decay = cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha)
    return join_schedules([warmup, decay], [warmup_steps])


def join_schedules(
    schedules: Sequence[Schedule], boundaries: Sequence[int]
) -> PlottedSchedule:
    """Runs each schedule until its boundary, then the next one, which counts from 0 again.

    The next one starts at the step of the boundary. All schedules are called at every step, but
    with steps of their intervals only. Raises ``ValueError`` unless there is one boundary between
    each two schedules, and boundaries increase from above 0. It also does so for a boundary that is
    a number, and neither whole nor infinite.

    >>> halves = [lambda step: 1.0 * step, lambda step: 5.0 * step]
    >>> join_schedules(halves, [2])(torch.arange(4)).tolist()
    [0.0, 1.0, 0.0, 5.0]
    """
    num_boundaries = len(schedules) - 1
    if len(boundaries) != num_boundaries:
        raise ValueError(
            f"{len(schedules)} schedules have {num_boundaries} boundaries between them, "
            f"but {len(boundaries)} were given"
        )

    boundaries = [_as_whole("boundary", boundary) for boundary in boundaries]
    starts = [0, *boundaries]
    if any(end <= start for start, end in itertools.pairwise(starts)):
        raise ValueError(
            f"join_schedules: boundaries={[*boundaries]} must increase, from above 0"
        )
    # Each schedule computes a rate at every step, also where another one is selected. The rate and
    # its derivative must be finite there, because a selection multiplies the derivative by zero. So
    # no schedule sees a step outside of its interval.
    last_steps: list[int | None] = []
    for start, end in itertools.pairwise(starts):
        last_steps.append(end - start - 1)
    last_steps.append(None)

    def schedule(step: Tensor | float) -> Tensor:
        step = _as_tensor(step)
        local_step = step.clamp(min=0, max=last_steps[0])
        rate = schedules[0](local_step)
        for number, start in enumerate(boundaries, 1):
            local_step = (step - start).clamp(min=0, max=last_steps[number])
            next_rate = schedules[number](local_step)
            rate = torch.where(step < start, rate, next_rate)
        return rate

    return schedule


def _progress(step: Tensor | float, num_steps: int) -> Tensor:
    """Returns ``step / num_steps`` in float64, or the nearer of 0 and 1 beyond these."""
    return (_as_tensor(step).to(torch.float64) / num_steps).clamp(0, 1)


def _as_tensor(step: Tensor | float) -> Tensor:
    """Returns the step as a tensor."""
    return step if isinstance(step, Tensor) else torch.tensor(step)


def _check_steps(name: str, steps: int) -> None:
    """Raises ValueError unless the number of steps is positive, and as ``_check_whole`` does."""
    _check_whole(name, steps)
    if steps <= 0:
        raise ValueError(f"{name}={steps} must be positive")


def _as_whole(name: str, steps: Any) -> Any:
    """Returns a number as an int, so that integer steps stay integers; a tensor as it is.

    Numbers beyond the last int64 become that. Raises as ``_check_whole`` does.
    """
    _check_whole(name, steps)
    if isinstance(steps, Tensor | int):
        return steps
    last = torch.iinfo(torch.int64).max
    return last if steps >= last else int(steps)


def _check_whole(name: str, steps: Tensor | float) -> None:
    """Raises ValueError for a number that is not whole; positive infinity and tensors pass."""
    # An int first: a compiler would make a constant of it. Infinity is a boundary that never comes.
    if isinstance(steps, Tensor | int) or steps == math.inf:
        return
    if float(steps).is_integer():
        return
    hint = f"pass round({steps})"
    if 0 < steps < 1:
        hint = f"of a ratio, pass round({steps} * num_updates)"
    raise ValueError(
        f"{name}={steps} counts updates, so it must be a whole number: {hint}"
    )
