"""The base class of axes whose ranks run programs of their own: processes, or threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.axis.primitives import ProcessGroup, apply_op
from purestep.types import Tree

Wait: TypeAlias = Callable[[], Tensor]
"""Waits for a collective that was launched, and returns its result."""

BUCKET_BYTES = 25 * 2**20
"""The default of ``bucket_bytes``, as in ``DistributedDataParallel``."""


class Launch(NamedTuple):
    """Describes a gather or scatter of shards, which a rank launches or is about to launch."""

    unit: str
    """The unit whose params it gathers; empty for others, and for gradients."""
    axis: ProcessAxis
    op: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        unit = f" for {self.unit}" if self.unit else ""
        return f"{self.op}{unit} of {self.dtype} of shape {tuple(self.shape)}"


class GatherLog(NamedTuple):
    """Holds what a rank gathers and scatters in an update, in order."""

    names: list[str]
    """The units whose params were gathered."""
    current: list[str]
    """The units that gather now, the innermost last."""
    launches: list[Launch]
    listeners: list[Callable[[Launch], None]]
    """Called with each launch before it runs."""


class ProcessAxis(ABC):
    """Runs collectives over ranks that each run their own program, and may therefore disagree.

    Collectives run in the process group ``process_group``, on one plain tensor of each rank on
    ``device``.
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
        # By ranks, since ThreadAxis has several.
        self._gather_logs: dict[Any, GatherLog] = {}

    @property
    @abstractmethod
    def process_group(self) -> ProcessGroup:
        """Returns the ranks as a ``ProcessGroup``, which runs collectives on plain tensors."""

    @property
    @abstractmethod
    def num_collectives(self) -> int | None:
        """Counts the collectives that have begun; None if the backend does not count."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Returns the position of this rank on the axis, from 0 to size - 1."""

    @property
    def global_ranks(self) -> frozenset[int]:
        """Returns the empty set, which stands for unknown ranks.

        A subclass that knows them returns their ranks in the world, this one included.
        """
        return frozenset()

    def start_gather_log(self, log: GatherLog) -> None:
        """Starts to note in ``log`` what this rank gathers and scatters; ends an earlier log."""
        self._gather_logs[self.rank, self.global_ranks] = log

    def begin_gather(self, name: str) -> None:
        """Notes in the log, if any, that this rank gathers the params of the unit ``name``.

        Launches get this name until ``end_gather``.
        """
        log = self._gather_logs.get((self.rank, self.global_ranks))
        if log is not None:
            log.names.append(name)
            log.current.append(name)

    def end_gather(self) -> None:
        """Ends the last ``begin_gather``, so that later launches no longer get its name.

        They get the name of the unit around it that still gathers, or none. Without a log, it does
        nothing.
        """
        log = self._gather_logs.get((self.rank, self.global_ranks))
        if log is not None:
            log.current.pop()

    def log_launch(self, op: str, x: Tensor) -> None:
        """Notes in the log, if any, that this rank is about to run ``op`` on ``x``.

        ``op`` gathers or scatters shards. Calls the log's listeners, which may raise. It launches
        nothing.
        """
        log = self._gather_logs.get((self.rank, self.global_ranks))
        if log is not None:
            unit = "".join(log.current[-1:])
            launch = Launch(unit, self, op, x.shape, x.dtype, x.device)
            log.launches.append(launch)
            for listener in log.listeners:
                listener(launch)

    def stop_gather_log(self) -> None:
        """Stops the log of this rank's gathers and scatters, if one has started."""
        self._gather_logs.pop((self.rank, self.global_ranks), None)

    @property
    def index(self) -> Tensor:
        """Returns the index of this rank, as a scalar tensor on the host."""
        return torch.tensor(self.rank, device="cpu")

    @property
    def on_host(self) -> bool:
        """Returns whether the ranks compute on the host, so that no read waits for a device."""
        return self.device.type == "cpu"

    @property
    def has_host_backend(self) -> bool:
        """Returns whether collectives can run on the host; by default, only if the ranks do."""
        return self.on_host

    def apply(self, op: str, x: Tensor) -> Tensor:
        """Runs ``op``, as of ``Axis.apply``, on one tensor, and returns the result of this rank.

        It also runs under autograd, transforms of ``torch.func`` and a compiler, which get its
        derivatives.
        """
        if tree.is_plain_eager(x):
            return self.process_group.run(op, x)  # Without a node in the graph.
        return apply_op(x, None, op, self.process_group)

    def apply_tree(self, op: str, x: Tree) -> Tree:
        """Runs psum or pvary on every leaf; psum sums small leaves of one dtype together.

        The sums are new tensors on the devices of the leaves, and pvary returns the tree itself.
        Under a transform, a compiler or autograd, each of the two runs on each leaf alone. Then
        pvary returns a new tree, too.
        """
        leaves, spec = tree.flatten(x)
        if not tree.is_plain_eager(leaves):
            return tree.map(lambda leaf: self.apply(op, leaf), x)
        if op != "psum":
            return x
        if not self.on_host and any(leaf.is_cpu for leaf in leaves):
            # A device's backend has no collectives for the host.
            on_device = [tree.to_device(leaf, self.device) for leaf in leaves]
            totals = self._sum_leaves(on_device)
            for index, leaf in enumerate(leaves):
                totals[index] = totals[index].to(leaf.device)
        else:
            totals = self._sum_leaves(leaves)
        return tree.unflatten(spec, totals)

    def _sum_leaves(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Sums leaves over the ranks, in vectors of at most ``bucket_bytes`` or of one leaf.

        Returns new tensors; they may be views of one vector. The sum of a dense leaf has the
        strides of the leaf. The sums of other leaves are dense: of sparse ones, and of those with
        gaps or expanded dimensions. Autograd does not see the sums.
        """
        leaves = [leaf.to_dense() if leaf.is_sparse else leaf for leaf in leaves]
        totals = [
            torch.empty_like(leaf) if not leaf.numel() else leaf for leaf in leaves
        ]
        launched = []
        for indices in _split_by_dtype(leaves, self.bucket_bytes):
            flat = torch.cat([leaves[index].reshape(-1) for index in indices])
            launched.append((indices, flat, self.launch(flat)))
        for indices, flat, wait in launched:
            wait()
            parts = flat.split([leaves[index].numel() for index in indices])
            for index, part in zip(indices, parts, strict=True):
                # Views: a copy of each would take the memory of the tree once more.
                total = part.view(leaves[index].shape)
                totals[index] = tree.match_strides(leaves[index], total)
        return totals

    @abstractmethod
    def launch(self, x: Tensor, op: str = "psum") -> Wait:
        """Launches a collective on contiguous memory, and returns a function that waits for it.

        ``op`` is "psum", "all_gather" or "psum_scatter". The function returns the result: ``x``
        itself, overwritten, after a psum. The result of another op is new memory, whose shape
        depends on the class of the axis. ``launch`` notes nothing in the log: ``log_launch``
        does.
        """

    @abstractmethod
    def complement(self, inner: ProcessAxis) -> ProcessAxis:
        """Returns the axis over some of these ranks: those with this rank's index along ``inner``.

        ``inner`` is a subaxis of this axis. All ranks call it together.
        """

    def gather_object(self, value: Any) -> list[Any]:
        """Gathers a value of each rank, to explain an error; each rank gets all, in order of rank.

        Raises ``NotImplementedError`` unless the class of the axis implements it.
        """
        raise NotImplementedError(f"{self} has no gather_object")


def _split_by_dtype(leaves: Sequence[Tensor], max_bytes: int) -> Iterator[list[int]]:
    """Yields the positions of leaves to sum together: all of one dtype and device.

    Together they have at most ``max_bytes``, or are a single leaf. Empty leaves are left out.

    >>> leaves = [torch.ones(2), torch.ones(0), torch.ones(2), torch.ones(1)]
    >>> [*_split_by_dtype(leaves, max_bytes=16)]
    [[0, 2], [3]]
    """
    open_parts: dict[Any, list[int]] = {}
    num_bytes: dict[Any, int] = {}
    for index, leaf in enumerate(leaves):
        if leaf.numel() == 0:  # Backends take no empty tensors.
            continue
        key = (leaf.dtype, leaf.device)
        if key in open_parts and num_bytes[key] + leaf.nbytes > max_bytes:
            yield open_parts.pop(key)
        if key not in open_parts:
            open_parts[key] = []
            num_bytes[key] = 0
        open_parts[key].append(index)
        num_bytes[key] += leaf.nbytes
    yield from open_parts.values()
