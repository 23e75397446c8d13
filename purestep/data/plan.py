"""How many microbatches make an update."""

from typing import NamedTuple

from purestep.data.cut import divisors


class BatchPlan(NamedTuple):
    """An update of ``global_batch_size``, in microbatches of ``local_batch_size`` on each rank.

    Sizes count examples, or tokens if the plan was made from a token budget.

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
    of_examples = (
        ("global_batch_size", global_batch_size),
        ("local_batch_size", local_batch_size),
    )
    of_tokens = ("global_tokens", global_tokens), ("local_tokens", local_tokens)
    sizes = {
        name: size for name, size in (*of_examples, *of_tokens) if size is not None
    }
    if [*sizes] not in (
        [name for name, _ in pair] for pair in (of_examples, of_tokens)
    ):
        raise ValueError(
            "plan takes global_batch_size and local_batch_size, or global_tokens and local_tokens; "
            f"it was given {sorted(sizes) or 'neither'}"
        )
    for name, size in {**sizes, "axis_size": axis_size}.items():
        if size < 1:
            raise ValueError(f"plan: {name}={size} must be at least 1")
    (whole, total), (part, local) = sizes.items()
    together = local * axis_size
    steps, rest = divmod(total, together)
    if rest:
        near = [size for size in (steps * together, (steps + 1) * together) if size]
        ways = [f"{whole}={' or '.join(map(str, near))}"]
        if (
            total % axis_size == 0 and total <= 10**12
        ):  # beyond, its divisors take too long to find
            closest = sorted(
                divisors(total // axis_size), key=lambda d: abs(d - local)
            )[:2]
            ways.append(f"{part}={' or '.join(map(str, sorted(closest)))}")
        raise ValueError(
            f"plan: {whole}={total} is no multiple of {part} * axis_size = {local} * {axis_size} "
            f"= {together}. Nearest that work: {'; '.join(ways)}"
        )
    return BatchPlan(total, local, axis_size, steps)
