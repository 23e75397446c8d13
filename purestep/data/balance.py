"""Assigns examples to ranks, so that no rank waits long for another."""

import heapq
import math
from collections.abc import Callable, Collection, Sequence

from purestep import tree
from purestep.data.examples import Example, mask_per_example_leaves, measure_length


def balance(
    examples: Sequence[Example],
    ranks: int,
    *,
    cost: Callable[[Example], float] | None = None,
    per_example: Collection[str] = (),
) -> list[list[Example]]:
    """Deals examples out to ranks, so that the slowest rank has little more than the mean.

    Each example, the costliest first, goes to the rank with the least cost so far [Graham, 1969].
    The slowest rank then costs at most 4/3 of that in the best assignment. Its cost exceeds the
    mean by at most the cost of one example. The same examples give the same result on every rank.

    Args:
        examples: trees of tensors. The first dimension of a leaf is the length, or it has no
            dimension.
        ranks: how many ranks there are, at least 1.
        cost: the cost of an example, finite and at least 0. None: its length. Attention is
            quadratic in it.
        per_example: names of leaves without a length, as in ``pack``. Not read with ``cost``.

    Returns:
        The examples of each rank, in their original order.

    Raises ``ValueError`` if ``ranks`` is below 1, or if a cost is negative or not finite. Without
    ``cost``, an example raises it too if its leaves differ in length, or if none has one. Without
    ``cost``, so does a name in ``per_example`` that no leaf has.

    >>> import torch
    >>> parts = balance([torch.ones(n) for n in (5, 4, 3, 3, 1)], 2)
    >>> [[len(example) for example in part] for part in parts]
    [[5, 3], [4, 3, 1]]
    """
    costs = []
    for i, example in enumerate(examples):
        if cost is not None:
            costs.append(float(cost(example)))
            continue
        dicts = tree.mappings_to_dicts(example)
        mask = mask_per_example_leaves(dicts, per_example)
        costs.append(float(measure_length(dicts, f"examples[{i}]", mask)))
    assignment = balance_indices(costs, ranks)
    return [[examples[i] for i in indices] for indices in assignment]


def balance_indices(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Assigns examples to ranks by their costs alone, as ``balance`` does: returns their indices.

    Among ranks of equal cost so far, the next example goes to the one with the fewest examples. The
    indices of each rank ascend. Raises ``ValueError`` if a cost is negative or not finite, or if
    ``ranks`` is below 1.

    >>> balance_indices([5, 4, 3, 3, 1], 2)
    [[0, 3], [1, 2, 4]]
    >>> balance_indices([0, 0, 0, 0], 2)
    [[0, 2], [1, 3]]
    """
    if ranks < 1:
        raise ValueError(f"balance: {ranks=} must be at least 1")
    for i, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise ValueError(
                f"balance: examples[{i}] costs {cost}: it must be finite and >= 0"
            )
    # A heap, since it is sorted. Numbers of examples spread those that cost nothing.
    loads = [(0.0, 0, rank) for rank in range(ranks)]
    assignment: list[list[int]] = [[] for _ in range(ranks)]
    costliest_first = sorted(range(len(costs)), key=lambda i: -costs[i])
    for i in costliest_first:
        load, num_examples, rank = loads[0]
        heapq.heapreplace(loads, (load + costs[i], num_examples + 1, rank))
        assignment[rank].append(i)
    return [sorted(indices) for indices in assignment]
