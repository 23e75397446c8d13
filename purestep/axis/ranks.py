"""What axes have in common whose ranks run programs of their own: processes, or threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.axis.buckets import Buckets, laid_out_like
from purestep.axis.laws import Where, collective
from purestep.axis.local import OneProgram
from purestep.axis.protocol import Gather
from purestep.axis.session import OwnPrograms
from purestep.types import Tree

Wait: TypeAlias = Callable[[], Tensor]
"""Waits for what was launched, as long as the axis itself allows, and returns it."""

BUCKET_BYTES = 25 * 2**20


class Ranks(ABC):
    """Ranks that run programs of their own, and may therefore disagree.

    They meet in ``where`` for one law on one plain tensor each, which lies on ``device``.
    """

    own_programs = True
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
    def where(self) -> Where:
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
    def members(self) -> frozenset[int]:
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
        if tree.eager(x):
            return self.where.meet(law, x)  # without the record of a transpose
        return collective(x, None, law, self.where)

    def apply_tree(self, law: str, x: Tree) -> Tree:
        """psum or pvary of every leaf: sums in buckets for each dtype."""
        leaves, structure = tree.flatten(x)
        if not tree.eager(leaves):
            return tree.map(partial(self.apply, law), x)
        if law != "psum" or not leaves:
            return x
        if not self.on_host and any(leaf.is_cpu for leaf in leaves):
            # A group of a device's backend has no collectives for the host.
            total = self.apply_tree(
                law, tree.map(lambda leaf: tree.brought(leaf, self.device), x)
            )
            return tree.map(lambda here, leaf: here.to(leaf.device), total, x)
        buckets = Buckets(
            self, dict(enumerate(leaves)), [leaf.dtype for leaf in leaves]
        )
        return tree.unflatten(
            structure, [*map(laid_out_like, leaves, buckets.finish(leaves))]
        )

    @abstractmethod
    def launch(self, x: Tensor, law: str = "psum") -> Wait:
        """Starts a law on contiguous memory, which holds a psum itself after the wait."""

    @abstractmethod
    def across(self, inner: Ranks) -> Ranks:
        """The axis over those of its ranks that hold the same piece over ``inner``, its part."""

    def gather_object(self, value: Any) -> list[Any]:
        """All ranks' values, in order of rank, to explain an error."""
        raise NotImplementedError(f"{self} has no gather_object")

    def session(
        self, gather: Gather, settings: Mapping[str, str]
    ) -> OneProgram | OwnPrograms:
        """A session of messages and buckets; while a compiler traces, of ``psum``."""
        if torch.compiler.is_dynamo_compiling():
            return OneProgram(self, gather)
        return OwnPrograms(self, gather, settings)
