"""A small network, where launches are nearly all that an update costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

import purestep as ps
from benchmarks.gpu import measure, models
from benchmarks.gpu.entries import Run
from benchmarks.gpu.graphs import capture_update, choose_compiler, compile_function
from benchmarks.gpu.models import Batch, count_rows
from purestep import optim, tree

WIDTHS = [64, 256, 256, 256, 10]
TINY_WIDTHS = [16, 16, 8]
ROWS = 64
MOST_IN_A_GRAPH = 4
"""Microbatches in one graph of the compiler, which takes longer for each."""
CLIPPED = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
SECONDS_TO_COMPILE = 45
"""A section that is not prepared in its time is ended, so it begins nothing late."""
SECONDS_TO_MEASURE = 2


class Way(NamedTuple):
    """A way to update, for a number of microbatches."""

    microbatches: int
    name: str
    make: Callable[[], Callable[[], object]]


def run_mlp(run: Run) -> None:
    """Compiles everything beside other sections, and measures it in its turn."""
    prepared = []
    for way in make_ways(run):
        path = (f"K={way.microbatches}", way.name)
        if run.has_time(SECONDS_TO_COMPILE, *path):
            with run.attempt(*path):
                prepared.append((way, prepare(run, path, way)))
    run.wait_for_turn()
    for way, update in prepared:
        path = (f"K={way.microbatches}", way.name)
        if run.has_time(SECONDS_TO_MEASURE, *path):
            with run.attempt(*path):
                run.add(*path, **measure.time_calls(run, update, seconds=0.15))
                if way.microbatches == 1:
                    run.add(*path, profile=measure.count_launches(run, update))


def prepare(run: Run, path: tuple[str, ...], way: Way) -> Callable[[], object]:
    """Makes an update and takes a few."""
    begin = time.perf_counter()
    update = way.make()
    for _ in range(4):
        update()
    measure.synchronise(run)
    run.add(*path, first_seconds=round(time.perf_counter() - begin, 2))
    return update


def make_ways(run: Run) -> list[Way]:
    """Returns the cheapest first, and CUDA graphs last: one that fails may break the context."""
    numbers = (1, 2) if run.tiny else (1, 4, 16)
    trainings = [Training(run, number) for number in numbers]
    ways: list[Way] = []
    for method in ("ways", "compiled_steps", "graphs"):
        for number, training in zip(numbers, trainings, strict=True):
            makers = getattr(training, method)()
            ways += [Way(number, name, make) for name, make in makers.items()]
    return ways


class Training:
    """The network, and groups of so many microbatches."""

    def __init__(self, run: Run, number: int) -> None:
        self.run = run
        self.widths = TINY_WIDTHS if run.tiny else WIDTHS
        self.group = models.make_regression([ROWS] * number, self.widths, run.device)
        self.params, self.apply = ps.from_module(
            models.build_mlp(self.widths, run.device)
        )

    def loss(self, params: Any, batch: Batch) -> Any:
        """Returns the loss of each row."""
        return ps.losses.mse(self.apply(params, batch["x"]), batch["y"])

    def ways(self) -> dict[str, Callable[[], Callable[[], object]]]:
        """Returns the loop by hand, and steps of which one microbatch is compiled at most."""
        compiler = choose_compiler(self.run)
        return {
            "by hand": partial(self.make_loop, compiled=False),
            "purestep": self.make_step,
            "purestep, donate": partial(self.make_step, donate=True),
            "by hand, compiled": partial(self.make_loop, compiled=True),
            "purestep, donate, compile=True": partial(
                self.make_step, donate=True, compile=compiler
            ),
        }

    def compiled_steps(self) -> dict[str, Callable[[], Callable[[], object]]]:
        """Returns steps that are one graph of the compiler, which holds each microbatch."""
        if len(self.group) > MOST_IN_A_GRAPH:
            return {}
        return {
            "ps.compile(step), donate": partial(self.make_compiled_step, donate=True)
        }

    def graphs(self) -> dict[str, Callable[[], Callable[[], object]]]:
        """Returns CUDA graphs: by hand, and by the compiler."""
        if not self.run.is_cuda:
            return {}
        ways: dict[str, Any] = {"purestep, donate, CUDA graph": self.make_graph}
        if len(self.group) == 1:
            ways["ps.compile(step, reduce-overhead)"] = partial(
                self.make_compiled_step, mode="reduce-overhead"
            )
        return ways

    def make_loop(self, *, compiled: bool) -> Callable[[], object]:
        """Returns an update by hand."""
        model = models.build_mlp(self.widths, self.run.device)
        forward = compile_function(self.run, model) if compiled else model
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-3, fused=self.run.is_cuda
        )

        def update() -> None:
            number = torch.stack(
                [count_rows(batch).sum() for batch in self.group]
            ).sum()
            for batch in self.group:
                losses = functional.mse_loss(
                    forward(batch["x"]), batch["y"], reduction="none"
                )
                (losses.mean(-1).sum() / number).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return update

    def make_update(self, step: Any) -> Callable[[], object]:
        """Returns an update by a step."""
        params = tree.map(torch.clone, self.params)
        state = [params, CLIPPED.init(params)]

        def update() -> None:
            state[:] = step(state[0], state[1], self.group)[:2]

        return update

    def make_step(self, **settings: Any) -> Callable[[], object]:
        """Returns an update by purestep."""
        settings = {"weight_fn": count_rows, **settings}
        return self.make_update(ps.make_update_step(self.loss, CLIPPED, **settings))

    def make_compiled_step(
        self, *, donate: bool = False, mode: str | None = None
    ) -> Callable[[], object]:
        """Returns an update by a step that is one graph of the compiler."""
        step = ps.make_update_step(
            self.loss, CLIPPED, weight_fn=count_rows, donate=donate
        )
        settings: dict[str, Any] = {"fullgraph": True}
        if mode is not None:
            settings["mode"] = mode
        if self.run.tiny:
            settings["backend"] = "aot_eager"
        compiled = ps.compile(step, **settings)
        if mode is None:
            return self.make_update(compiled)

        def marked(*arguments: Any) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            # The next call overwrites what a CUDA graph returns.
            return tree.map(torch.clone, tuple(compiled(*arguments)[:2]))

        return self.make_update(marked)

    def make_graph(self) -> Callable[[], object]:
        """Returns the replay of a CUDA graph."""
        step = ps.make_update_step(
            self.loss, CLIPPED, weight_fn=count_rows, donate=True
        )
        return capture_update(step, self.params, CLIPPED, self.group).replay
