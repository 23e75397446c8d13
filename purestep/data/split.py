"""Splits a batch into microbatches, and merges them again."""

from collections.abc import Sequence

import torch
from einops import rearrange

from purestep import tree
from purestep.data.examples import check_same_fields, measure_length
from purestep.data.plan import list_divisors
from purestep.types import Microbatch, Tree


def split(batch: Tree, k: int) -> list[Microbatch]:
    """Cuts a batch into ``k`` microbatches of equal size, along the first dimension of its leaves.

    The microbatches are views, in trees whose mappings are dicts where optree takes them for
    leaves. Raises ``ValueError`` if ``k`` is less than 1 or does not divide that dimension, or if
    leaves differ in it or lack it.

    >>> split({"x": torch.arange(6)}, k=2)
    [{'x': tensor([0, 1, 2])}, {'x': tensor([3, 4, 5])}]
    """
    batch = tree.mappings_to_dicts(batch)
    leaves, spec = tree.flatten(batch)
    length = measure_length(batch, "batch")
    if k < 1 or length % k:
        divisors = ", ".join(str(divisor) for divisor in list_divisors(length))
        raise ValueError(
            f"split: a batch of {length} cannot be cut into {k=} equal microbatches; {length} is "
            f"divisible by {divisors or 'any number but 0'}"
        )
    stacked = [rearrange(leaf, "(k b) ... -> k b ...", k=k) for leaf in leaves]
    return [tree.unflatten(spec, [leaf[i] for leaf in stacked]) for i in range(k)]


def merge(microbatches: Sequence[Microbatch]) -> Tree:
    """Joins microbatches into the batch that ``split`` cut: its exact inverse.

    It joins leaves along their first dimension. The leaves are new, and mappings that optree takes
    for leaves become dicts. Raises ``ValueError`` without microbatches, or if they differ in
    fields, dtypes or row shapes. The first dimension must have the same size in all leaves of all
    microbatches; else it raises ``ValueError``, too.

    >>> merge([{"x": torch.arange(2)}, {"x": torch.arange(2, 4)}])
    {'x': tensor([0, 1, 2, 3])}
    """
    if not microbatches:
        raise ValueError("merge: no microbatches, so no batch to put together")
    by_name = {
        f"microbatches[{i}]": tree.mappings_to_dicts(microbatch)
        for i, microbatch in enumerate(microbatches)
    }
    check_same_fields(by_name)
    lengths = [measure_length(microbatch, name) for name, microbatch in by_name.items()]
    if len({*lengths}) != 1:
        raise ValueError(
            f"merge: microbatches of one batch have one length, these have {lengths}"
        )
    return tree.map(lambda *leaves: torch.cat(leaves), *by_name.values())
