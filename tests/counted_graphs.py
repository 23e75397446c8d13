"""A small step in exact arithmetic, and a compiler that counts its graphs."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import purestep as ps
from purestep import tree
from purestep.types import UpdateStep


class Compilations:
    """A backend that runs graphs as they are. It keeps their code, and whether a size may vary."""

    def __init__(self) -> None:
        self.graphs: list[str] = []
        self.varying: list[bool] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs.append(graph.code)
        self.varying.append(any(isinstance(each, torch.SymInt) for each in inputs))
        return graph.forward


def loss_fn(params: Any, m: Any) -> Tensor:
    hidden = functional.linear(m["x"], params["w"].mT, params["v"]).relu()
    return (hidden @ params["v"] - m["y"]).square()


def weight_fn(m: Any) -> Tensor:
    return m["y"] > -4


def batch(rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Small integers, so that sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (rows, length, 3), generator=generator).double()
    return {
        "x": x,
        "y": torch.randint(-8, 5, (rows, length), generator=generator).double(),
    }


def start() -> dict[str, Tensor]:
    v, w = (
        torch.tensor([1.0, -2.0]),
        torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, -1.0]]),
    )
    return {"v": v.double(), "w": w.double()}


def run(step: UpdateStep, optimizer: ps.optim.Optimizer, groups: list[Any]) -> Any:
    """A state after one step on each group, and all counts."""
    params, opt_state, counts = start(), optimizer.init(start()), []
    for group in groups:
        params, opt_state, metrics = step(params, opt_state, group)
        counts.append((metrics.num_tokens, metrics.num_microbatches, metrics.applied))
    return (params, opt_state), counts


def make(
    optimizer: ps.optim.Optimizer, loss: Any = loss_fn, **settings: Any
) -> UpdateStep:
    return ps.make_update_step(loss, optimizer, weight_fn=weight_fn, **settings)


def compiled(
    optimizer: ps.optim.Optimizer, **settings: Any
) -> tuple[UpdateStep, Compilations]:
    """A compiled step, and what was compiled for it."""
    backend = Compilations()
    return make(
        optimizer, compile=partial(torch.compile, backend=backend), **settings
    ), backend


def assert_close(ours: Any, theirs: Any) -> None:
    """The gradients are exact: what differs are dozens of roundings in few optimizer steps."""
    roundings = 100 * torch.finfo(torch.float64).eps
    for leaves in zip(tree.leaves(ours), tree.leaves(theirs), strict=True):
        a, b = map(Tensor.double, leaves)
        assert ((a - b).abs() <= roundings * (1 + b.abs())).all()


PLAIN = ps.optim.chain(ps.optim.scale_by_adam(), ps.optim.descend(0.125))
AOT = partial(ps.compile, backend="aot_eager")
"""A compiler that makes graphs, backward passes too, and runs them as they are."""
GROUPS = [*([batch(2, 4, seed) for seed in range(number)] for number in (1, 4, 16)), []]
