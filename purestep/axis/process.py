"""What axes have in common whose ranks run programs of their own: processes, or threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.axis.primitives import ProcessGroup, apply_op
from purestep.types import Tree

Wait: TypeAlias = Callable[[], Tensor]
"""Waits for what was launched, as long as the axis itself allows, and returns it."""

BUCKET_BYTES = 25 * 2**20


class ProcessAxis(ABC):
    """Ranks that run programs of their own, and may therefore disagree.

    They meet in ``where`` for one law on one plain tensor each, which lies on ``device``.
    """

    is_multi_program = True
    shares_backward_thread = False
    """Whether ranks are threads: the backward passes on an accelerator all run in one thread."""
    size: int
    device: torch.device

    def __init__(self, bucket_bytes: int) -> None:
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise ValueError(
                f"{bucket_bytes=} must be a whole number of bytes, such as {BUCKET_BYTES}"
            )
        self.bucket_bytes = bucket_bytes

    @property
    @abstractmethod
    def where(self) -> ProcessGroup:
        """Where the ranks meet."""

    @property
    @abstractmethod
    def meetings(self) -> int | None:
        """How many collectives of the ranks have begun; None where the backend does not count."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Which rank this is."""

    @property
    def global_ranks(self) -> frozenset[int]:
        """The ranks it joins, this one included, numbered as in its world; empty if unknown."""
        return frozenset()

    @property
    def index(self) -> Tensor:
        """The same as a scalar tensor."""
        return torch.tensor(self.rank)

    @property
    def on_host(self) -> bool:
        """Whether what the ranks exchange can be read without waiting for a device."""
        return self.device.type == "cpu"

    @property
    def meets_on_host(self) -> bool:
        """Whether the ranks can exchange tensors of the host, whatever their device."""
        return self.on_host

    def apply(self, law: str, x: Tensor) -> Tensor:
        """The law over the ranks, with its transpose, under any transform."""
        if tree.is_plain_eager(x):
            return self.where.meet(law, x)  # without the record of a transpose
        return apply_op(x, None, law, self.where)

    def apply_tree(self, law: str, x: Tree) -> Tree:
        """Runs psum or pvary on every leaf; small leaves of one dtype are summed together."""
        leaves, spec = tree.flatten(x)
        if not tree.is_plain_eager(leaves):
            return tree.map(partial(self.apply, law), x)
        if law != "psum":
            return x
        if not self.on_host and any(leaf.is_cpu for leaf in leaves):
            # A group of a device's backend has no collectives for the host.
            on_device = tree.map(lambda leaf: tree.to_device(leaf, self.device), x)
            total = self.apply_tree(law, on_device)
            return tree.map(lambda here, leaf: here.to(leaf.device), total, x)
        return tree.unflatten(spec, self._sum_leaves(leaves))

    def _sum_leaves(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Sums leaves over the ranks in vectors of at most ``bucket_bytes``, or of one leaf."""
        totals = []
        for leaf in leaves:
            totals.append(leaf.to_dense() if leaf.is_sparse else leaf.clone())
        launched = []
        for indices in _split_by_dtype(leaves, self.bucket_bytes):
            flat = torch.cat([totals[index].reshape(-1) for index in indices])
            launched.append((indices, flat, self.launch(flat)))
        for indices, flat, wait in launched:
            wait()
            parts = flat.split([leaves[index].numel() for index in indices])
            for index, part in zip(indices, parts, strict=True):
                totals[index].copy_(part.view(leaves[index].shape))
        return totals

    @abstractmethod
    def launch(self, x: Tensor, law: str = "psum") -> Wait:
        """Starts a law on contiguous memory, which holds a psum itself after the wait."""

    @abstractmethod
    def across(self, inner: ProcessAxis) -> ProcessAxis:
        """The axis over those of its ranks that hold the same piece over ``inner``, its part."""

    def gather_object(self, value: Any) -> list[Any]:
        """All ranks' values, in order of rank, to explain an error."""
        raise NotImplementedError(f"{self} has no gather_object")


def _split_by_dtype(leaves: Sequence[Tensor], max_bytes: int) -> Iterator[list[int]]:
    """Yields the positions of leaves that share dtype and device, up to ``max_bytes`` of them."""
    open_parts: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    num_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    for index, leaf in enumerate(leaves):
        key = (leaf.dtype, leaf.device)
        if leaf.numel() == 0:  # Backends take no empty tensors.
            continue
        if key in open_parts and num_bytes[key] + leaf.nbytes > max_bytes:
            yield open_parts.pop(key)
        if key not in open_parts:
            open_parts[key] = []
            num_bytes[key] = 0
        open_parts[key].append(index)
        num_bytes[key] += leaf.nbytes
    yield from open_parts.values()
