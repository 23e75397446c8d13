"""A group of microbatches of equal shapes, stacked in one tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from purestep import tree
from purestep.torch_private import let_length_vary
from purestep.types import Microbatch, Tree


class Stacked(Sequence[Microbatch]):
    """Holds a group of microbatches in one tree; dimension 0 of each leaf counts them.

    It is a sequence of microbatches, whose leaves are views. Where ``ps.compile`` compiles a whole
    step, one graph serves every number of them from two on: it contains one microbatch, in a loop.
    Each shape of microbatch has a graph, so pad to few lengths. Raises ``ValueError`` unless there
    are leaves, all of them tensors with the same length of dimension 0.

    Attributes:
        batch: the tree.

    >>> group = Stacked({"labels": torch.tensor([[5, 7], [3, -100]])})
    >>> len(group), group[1]
    (2, {'labels': tensor([   3, -100])})
    """

    def __init__(self, batch: Tree) -> None:
        leaves = tree.leaves(batch)
        if not leaves:
            raise ValueError(f"Stacked: {batch!r} has no tensors, so no microbatches")
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == len(leaves[0]):
                continue
            path = tree.paths(batch, "batch")[index]
            raise ValueError(
                f"Stacked: {path} is {tree.format_leaf(leaf)}, but dimension 0 of each leaf counts "
                "the microbatches, and is the same in all: stack them with ps.stack"
            )
        self.batch = batch

    def __len__(self) -> int:
        return len(tree.leaves(self.batch)[0])

    def __getitem__(self, index: Any) -> Any:
        """Returns one microbatch, made of views; for a slice, a ``Stacked`` of its microbatches.

        Raises ``ValueError`` for a slice with a negative step, as a tensor does.
        """
        selected = tree.map(lambda leaf: leaf[index], self.batch)
        return Stacked(selected) if isinstance(index, slice) else selected

    def __iter__(self) -> Iterator[Microbatch]:
        for index in range(len(self)):
            yield self[index]

    def let_length_vary(self) -> None:
        """Tells the compiler that one graph is to serve any number of microbatches, from two on.

        It marks the leaves: dimension 0 may vary, and the others may not. A single microbatch has
        another graph. Without marks, the compiler makes one graph for the first number, and another
        one for later numbers. Once it has seen two shapes, it also lets these vary, at which
        dropout fails in the body of a loop.
        """
        for leaf in tree.leaves(self.batch):
            let_length_vary(leaf)


def stack(microbatches: Sequence[Microbatch]) -> Stacked:
    """Stacks microbatches of equal shapes to one tree, which is a sequence of them.

    The step takes it like the list. Compiled as a whole by ``ps.compile``, it contains one
    microbatch, in a loop, and the same graph runs groups of two, sixteen or more. Where a transform
    or autograd follows the step, it is unrolled.

    Raises ``ValueError`` where structures, dtypes or shapes differ: pad such microbatches to one
    shape, or pass the list itself. Raises it also without microbatches, or for a leaf that is no
    tensor. Raises ``TypeError`` for a mapping, which is one microbatch. A ``Stacked`` is returned
    as it is.

    >>> group = stack([{"labels": torch.tensor([5, 7])}, {"labels": torch.tensor([3, -100])}])
    >>> group.batch
    {'labels': tensor([[   5,    7],
            [   3, -100]])}
    """
    if not microbatches:
        raise ValueError("stack: no microbatches; a group without any is an empty list")
    if isinstance(microbatches, Stacked):
        return microbatches
    if isinstance(microbatches, Mapping):
        raise TypeError(
            f"stack: got one microbatch with {list(microbatches)[:5]}: pass a sequence of them, as "
            "ps.split(batch, k) makes"
        )
    batches = [tree.mappings_to_dicts(microbatch) for microbatch in microbatches]
    _check_alike(batches)
    return Stacked(tree.map(lambda *leaves: torch.stack(leaves), *batches))


def _check_alike(batches: Sequence[Tree]) -> None:
    """Raises ValueError unless leaves are tensors, and batches agree in structure, shape, dtype."""
    first_leaves, first_spec = tree.flatten(batches[0])
    for number, batch in enumerate(batches):
        leaves, spec = tree.flatten(batch)
        if not tree.is_same_spec(spec, first_spec):
            raise ValueError(
                f"stack: microbatches[{number}] is {tree.format_spec(spec)}, and microbatches[0] "
                f"{tree.format_spec(first_spec)}: give all of them the same fields"
            )
        for index, leaf in enumerate(leaves):
            expected = tree.format_leaf(first_leaves[index])
            actual = tree.format_leaf(leaf)
            is_tensor = isinstance(leaf, Tensor)
            if is_tensor and actual == expected:
                continue
            path = tree.paths(batch, f"microbatches[{number}]")[index]
            if not is_tensor:
                raise ValueError(
                    f"stack: {path} is {actual}: stacked leaves are tensors. Make it a tensor, "
                    "register a class of containers with optree, or pass the list"
                )
            raise ValueError(
                f"stack: {path} is {actual}, and that of microbatches[0] {expected}: stacked "
                "leaves are tensors of one dtype and shape. Pad them, or pass the list"
            )
