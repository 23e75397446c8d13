"""CUDA graphs of donated steps, and the compiler that a run can afford."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.entries import Run
from purestep import tree

EAGER_UPDATES = 3
"""Updates before the capture: a first one allocates, and tells cuBLAS its work space."""


class CapturedUpdate(NamedTuple):
    """A graph of one update, which writes to its state in place."""

    replay: Callable[[], None]
    state: list[Any]
    state_stays: bool
    """Whether the captured update returns the memory that it got, as replays need it."""
    updates: int
    """How many updates the state has gone through before the first replay."""


def capture_update(
    step: Any, params: Any, optimizer: Any, group: Sequence[Any], *, copy: bool = True
) -> CapturedUpdate:
    """Captures a donated step on some data."""
    state = [tree.map(torch.clone, params) if copy else params]
    state.append(optimizer.init(state[0]))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(EAGER_UPDATES):
            state = [*step(*state, group)[:2]]
    torch.cuda.current_stream().wait_stream(side)
    addresses = find_addresses(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        new = [*step(*state, group)[:2]]
    return CapturedUpdate(
        graph.replay, new, addresses == find_addresses(new), EAGER_UPDATES
    )


def find_addresses(state: Any) -> list[int]:
    """Returns where the tensors of a state are in memory."""
    return [leaf.data_ptr() for leaf in tree.flatten(state)[0]]


def choose_compiler(run: Run) -> Any:
    """Returns what ``compile=`` gets: True, or a compiler that makes no kernels, for tiny runs."""
    return partial(torch.compile, backend="aot_eager") if run.tiny else True


def compile_function(run: Run, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function by torch.compile, or by the compiler of tiny runs."""
    if run.tiny:
        return torch.compile(function, backend="aot_eager")
    return torch.compile(function)
