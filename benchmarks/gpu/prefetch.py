"""Large microbatches from the host: do copies overlap with the step?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import purestep as ps
from benchmarks.gpu import measure
from benchmarks.gpu.entries import Run
from benchmarks.gpu.models import Batch
from purestep import optim, tree

Group = list[Batch]
SGD = optim.sgd(1e-6)


class Sizes(NamedTuple):
    """How large microbatches are, and how many updates are timed."""

    rows: int
    width: int
    microbatches: int
    updates: int


LARGE = Sizes(8192, 4096, 2, 8)
TINY = Sizes(8, 16, 2, 4)


def run_prefetch(run: Run) -> None:
    """Times updates whose data comes to the device in several ways."""
    sizes = TINY if run.tiny else LARGE
    bench = Bench(run, sizes)
    mib = sizes.microbatches * sizes.rows * sizes.width * 4 / 2**20
    run.add(mib_per_update=round(mib, 3))
    for name, make_groups in bench.ways().items():
        if run.has_time(5, "ways", name):
            with run.attempt("ways", name):
                bench.time_updates(make_groups())
                seconds = min(bench.time_updates(make_groups()) for _ in range(2))
                run.add("ways", name, ms=measure.to_ms(seconds, sizes.updates))


def count_inputs(batch: Batch) -> Tensor:
    """Weighs every row equally."""
    return torch.ones(len(batch["x"]), dtype=torch.bool, device=batch["x"].device)


def compute_loss(params: Any, batch: Batch) -> Tensor:
    """Returns a loss of two large products."""
    return (torch.tanh(batch["x"] @ params["w"]) @ params["v"]).square().mean(-1)


class Bench:
    """Groups of data on the host, and a step that takes about as long as their copies."""

    def __init__(self, run: Run, sizes: Sizes) -> None:
        self.run = run
        self.sizes = sizes
        square = (sizes.width, sizes.width)
        self.params = {
            name: torch.randn(square, device=run.device) for name in ("w", "v")
        }
        self.on_host = [self.make_group() for _ in range(2)]
        self.step: Any = ps.make_update_step(
            compute_loss, SGD, weight_fn=count_inputs, donate=True
        )

    def make_group(self) -> Group:
        """Returns random microbatches."""
        shape = (self.sizes.rows, self.sizes.width)
        return [{"x": torch.rand(shape)} for _ in range(self.sizes.microbatches)]

    def repeat(self, groups: list[Group]) -> Iterable[Group]:
        """Returns as many groups as there are updates."""
        return (
            groups[position % len(groups)] for position in range(self.sizes.updates)
        )

    def ways(self) -> dict[str, Callable[[], Iterable[Any]]]:
        """Returns how data can come to the device."""
        host, pinned = self.on_host, [self.pin(group) for group in self.on_host]
        on_device = [self.copy(group) for group in host]
        fetch = partial(ps.prefetch, device=self.run.device, weight_fn=count_inputs)
        return {
            "on the device": lambda: self.repeat(on_device),
            "prefetch": lambda: fetch(self.repeat(host)),
            "prefetch of pinned data": lambda: fetch(self.repeat(pinned)),
            "prefetch, depth=1": lambda: fetch(self.repeat(host), depth=1),
            "copied by hand": lambda: map(self.copy, self.repeat(host)),
            "copied by hand, pinned": lambda: map(self.copy_later, self.repeat(pinned)),
        }

    def pin(self, group: Group) -> Group:
        """Returns copies in memory that a card reads by itself."""
        if not self.run.is_cuda:
            return group
        return [{"x": batch["x"].pin_memory()} for batch in group]

    def copy(self, group: Group) -> Group:
        """Copies a group to the device, for which the host waits."""
        return [{"x": batch["x"].to(self.run.device)} for batch in group]

    def copy_later(self, group: Group) -> Group:
        """Copies a group in the stream of the step."""
        return [
            {"x": batch["x"].to(self.run.device, non_blocking=True)} for batch in group
        ]

    def time_updates(self, groups: Iterable[Any]) -> float:
        """Returns the seconds of an update on each group."""
        params = tree.map(torch.clone, self.params)
        state: list[Any] = [params, SGD.init(params)]
        measure.synchronise(self.run)
        begin = time.perf_counter()
        for group in groups:
            state[:] = self.step(*state, group)[:2]
        measure.synchronise(self.run)
        return time.perf_counter() - begin
