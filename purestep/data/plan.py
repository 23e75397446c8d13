"""Computes how many microbatches make an update."""

import math
from numbers import Integral
from typing import NamedTuple


class BatchPlan(NamedTuple):
    """Describes an update: microbatches of ``local_batch_size``, accumulated on each rank.

    Both batch sizes count examples, or tokens if the plan was made from a token budget.
    ``axis_size`` counts ranks.

    >>> plan(global_batch_size=64, local_batch_size=4, axis_size=2)
    BatchPlan(global_batch_size=64, local_batch_size=4, axis_size=2, accumulation_steps=8)
    """

    global_batch_size: int
    local_batch_size: int
    axis_size: int
    accumulation_steps: int


def plan(
    *,
    global_batch_size: int | None = None,
    local_batch_size: int | None = None,
    global_tokens: int | None = None,
    local_tokens: int | None = None,
    axis_size: int = 1,
) -> BatchPlan:
    """Computes how many microbatches each rank accumulates, for an update of this size.

        global_batch_size = local_batch_size · axis_size · accumulation_steps

    The ``BatchPlan`` has all four numbers; both batch sizes are in tokens if you pass a token
    budget. Raises ``ValueError`` with the nearest sizes that work, if no whole number solves this.
    A size below 1, and sizes that are not one of the two pairs, raise ``ValueError`` too. A float
    raises ``TypeError``.

    Args:
        global_batch_size: examples in one update, over all ranks.
        local_batch_size: examples in one microbatch of one rank, as many as fit.
        global_tokens, local_tokens: the same as a token budget, instead of the two above.
        axis_size: how many ranks share the update: ``axis.size``, not the world size.

    >>> plan(global_batch_size=64, local_batch_size=4, axis_size=2).accumulation_steps
    8
    >>> plan(global_tokens=524_288, local_tokens=16_384, axis_size=8).accumulation_steps
    4
    """
    arguments = {
        "global_batch_size": global_batch_size,
        "local_batch_size": local_batch_size,
        "global_tokens": global_tokens,
        "local_tokens": local_tokens,
    }
    sizes = {name: size for name, size in arguments.items() if size is not None}
    names = [*sizes]
    if names not in (
        ["global_batch_size", "local_batch_size"],
        ["global_tokens", "local_tokens"],
    ):
        raise ValueError(
            "plan takes global_batch_size and local_batch_size, or global_tokens and local_tokens; "
            f"it was given {sorted(sizes) or 'neither'}"
        )
    for name, size in {**sizes, "axis_size": axis_size}.items():
        if not isinstance(size, Integral):
            raise TypeError(f"plan: {name}={size!r} must be a whole number")
        if size < 1:
            raise ValueError(f"plan: {name}={size} must be at least 1")
    global_name, local_name = names
    global_size, local_size = sizes.values()
    step_size = local_size * axis_size
    accumulation_steps, remainder = divmod(global_size, step_size)
    if remainder:
        global_sizes, local_sizes = _suggest_sizes(global_size, local_size, axis_size)
        suggestions = [f"{global_name}={' or '.join(global_sizes)}"]
        if local_sizes:
            suggestions.append(f"{local_name}={' or '.join(local_sizes)}")
        raise ValueError(
            f"plan: {global_name}={global_size} is no multiple of {local_name} * axis_size = "
            f"{local_size} * {axis_size} = {step_size}. Nearest that work: "
            f"{'; '.join(suggestions)}"
        )
    return BatchPlan(global_size, local_size, axis_size, accumulation_steps)


def _suggest_sizes(
    global_size: int, local_size: int, axis_size: int
) -> tuple[list[str], list[str]]:
    """Returns the nearest global sizes for this local size, then local sizes for this global size.

    They are strings in ascending order. Each list has two at most. The second is empty if the
    global size is above 10¹², or no multiple of ``axis_size``.
    """
    step_size = local_size * axis_size
    steps = global_size // step_size
    global_sizes = [str(n * step_size) for n in (steps, steps + 1) if n]
    # Beyond 10¹², finding the divisors takes too long.
    if global_size % axis_size or global_size > 10**12:
        return global_sizes, []
    local_sizes = list_divisors(global_size // axis_size)
    nearest = sorted(local_sizes, key=lambda size: abs(size - local_size))[:2]
    return global_sizes, [str(size) for size in sorted(nearest)]


def list_divisors(number: int) -> list[int]:
    """Returns the divisors of a number, in ascending order; none for 0.

    >>> list_divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    large = [number // d for d in small]
    return sorted({*small, *large})
