"""How many microbatches make an update."""

from __future__ import annotations

from typing import NamedTuple

from purestep.batching.cut import divisors


class BatchPlan(NamedTuple):
    """An update of ``global_batch_size`` in microbatches of ``local_batch_size`` on each of ``axis_size`` ranks.

    The sizes count examples, or tokens where the plan was made from a token budget.

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
    """How many microbatches each rank accumulates, so that the update has the size you asked for.

        global_batch_size = local_batch_size · axis_size · accumulation_steps

    Args:
        global_batch_size: examples in one update, on all ranks.
        local_batch_size: examples in one microbatch of one rank: as many as fit.
        global_tokens, local_tokens: the same as a token budget, instead of the two above.
        axis_size: how many ranks share the update: ``axis.size``, not the world's.

    >>> plan(global_batch_size=64, local_batch_size=4, axis_size=2).accumulation_steps
    8
    >>> plan(global_tokens=524_288, local_tokens=16_384, axis_size=8).accumulation_steps
    4
    """
    examples = {"global_batch_size": global_batch_size, "local_batch_size": local_batch_size}
    budget = {"global_tokens": global_tokens, "local_tokens": local_tokens}
    given = [
        {name: value for name, value in sizes.items() if value is not None}
        for sizes in (examples, budget)
    ]
    if sorted(map(len, given)) != [0, 2]:
        raise ValueError(
            "plan takes global_batch_size and local_batch_size, or global_tokens and local_tokens; "
            f"it was given {sorted({**given[0], **given[1]}) or 'neither'}"
        )
    sizes = given[0] or given[1]
    for name, value in {**sizes, "axis_size": axis_size}.items():
        if value < 1:
            raise ValueError(f"plan: {name}={value} must be at least 1")
    (global_name, total), (local_name, local) = sizes.items()
    together = local * axis_size
    if total % together:
        raise ValueError(
            f"plan: {global_name}={total} is no multiple of {local_name} * axis_size = "
            f"{local} * {axis_size} = {together}. "
            + _nearest(global_name, local_name, total, local, axis_size)
        )
    return BatchPlan(total, local, axis_size, total // together)


def _nearest(global_name: str, local_name: str, total: int, local: int, axis_size: int) -> str:
    together = local * axis_size
    below, above = total // together * together, -(-total // together) * together
    ways = [f"{global_name}={' or '.join(str(n) for n in (below, above) if n)}"]
    if total % axis_size == 0 and total <= 10**12:  # beyond, its divisors take too long to find
        closest = sorted(sorted(divisors(total // axis_size), key=lambda d: abs(d - local))[:2])
        ways.append(f"{local_name}={' or '.join(map(str, closest))}")
    return "Nearest that work: " + "; ".join(ways)
