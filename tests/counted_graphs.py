"""Provides a small step in exact arithmetic, and a compiler that counts its graphs."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import purestep as ps
from purestep import tree
from purestep.types import UpdateStep


class CountingBackend:
    """Runs graphs as they are; records their code, and whether a size may vary."""

    def __init__(self) -> None:
        self.graphs: list[str] = []
        self.varying: list[bool] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        has_symbolic_size = any(isinstance(x, torch.SymInt) for x in inputs)
        self.graphs.append(graph.code)
        self.varying.append(has_symbolic_size)
        return graph.forward


def loss_fn(params: Any, m: Any) -> Tensor:
    v = params["v"]
    hidden = functional.linear(m["x"], params["w"].mT, v)
    outputs = hidden.relu() @ v
    return (outputs - m["y"]).square()


def weight_fn(m: Any) -> Tensor:
    return m["y"] > -4


def make_batch(rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Draws small integers, so that sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (rows, length, 3), generator=generator)
    y = torch.randint(-8, 5, (rows, length), generator=generator)
    return {"x": x.double(), "y": y.double()}


def make_group(num_microbatches: int) -> list[dict[str, Tensor]]:
    return [make_batch(2, 4, seed) for seed in range(num_microbatches)]


def initial_params() -> dict[str, Tensor]:
    """Returns fresh params, small integers in float64."""
    v = torch.tensor([1.0, -2.0])
    w = torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, -1.0]])
    return {"v": v.double(), "w": w.double()}


def run_steps(
    step: UpdateStep, optimizer: ps.optim.Optimizer, groups: list[Any]
) -> Any:
    """Takes one step on each group; returns the last state, and the counts of all."""
    params = initial_params()
    opt_state = optimizer.init(params)
    counts = []
    for group in groups:
        params, opt_state, metrics = step(params, opt_state, group)
        counts.append((metrics.num_tokens, metrics.num_microbatches, metrics.applied))
    return (params, opt_state), counts


def make_step(
    optimizer: ps.optim.Optimizer, loss: Any = loss_fn, **settings: Any
) -> UpdateStep:
    return ps.make_update_step(loss, optimizer, weight_fn=weight_fn, **settings)


def compile_step(
    optimizer: ps.optim.Optimizer, **settings: Any
) -> tuple[UpdateStep, CountingBackend]:
    """Makes a compiled step; returns it with what records its compilations."""
    backend = CountingBackend()
    compiler = partial(torch.compile, backend=backend)
    step = make_step(optimizer, compile=compiler, **settings)
    return step, backend


def assert_close(ours: Any, theirs: Any) -> None:
    """Compares trees up to the rounding of a few optimizer steps; gradients are exact."""
    roundings = 100 * torch.finfo(torch.float64).eps
    pairs = zip(tree.leaves(ours), tree.leaves(theirs), strict=True)
    for one, other in pairs:
        a = one.double()
        b = other.double()
        bound = roundings * (1 + b.abs())
        assert ((a - b).abs() <= bound).all()


ADAM = ps.optim.chain(ps.optim.scale_by_adam(), ps.optim.sgd(0.125))
AOT = partial(ps.compile, backend="aot_eager")
"""A compiler that makes graphs, backward passes too, and runs them as they are."""
GROUPS = [make_group(1), make_group(4), make_group(16), []]
